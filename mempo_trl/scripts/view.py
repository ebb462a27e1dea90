"""`mempo view`: one HTML page of the rollouts of a training, an evaluation or a file."""

import argparse
from dataclasses import dataclass, field

from mempo_trl.scripts.recipes import RecipeParser
from mempo_trl.viewer.page import write_report


@dataclass
class ViewArguments:
    """
    The page.

    Args:
        output_file (`str`, *optional*):
            The page. By default `view.html` in the folder, or the name of the JSONL file with `.html`.
        max_rollouts (`int`, *optional*, defaults to `10000`):
            Of more rollouts, so many are shown, evenly spread over the files; the page says so.
    """

    output_file: str | None = field(
        default=None,
        metadata={"help": "The page. By default view.html in the folder, or FILE.html beside FILE.jsonl."},
    )
    max_rollouts: int = field(
        default=10_000,
        metadata={"help": "Of more rollouts, so many are shown, evenly spread over the files; the page says so."},
    )


def main(args: ViewArguments, positional: argparse.Namespace) -> None:
    """Write the page and say where it is."""
    report = write_report(positional.path, args.output_file, args.max_rollouts)
    shown = f"{report.num_rollouts:,} rollouts"
    if report.num_rollouts + report.num_broken + report.num_replaced < report.num_found:
        shown = f"{report.num_rollouts:,} of {report.num_found:,} rollouts"
    if report.num_broken:
        shown += f" ({report.num_broken:,} lines that are no JSON left out)"
    print(f"{shown} in {report.path} ({report.num_bytes / 1e6:.1f} MB). Open it in a browser.")


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    parser = RecipeParser((ViewArguments,), prog=prog)
    parser.add_argument(
        "path", help="A training output folder, an evaluation folder, or a JSONL file of rollouts.", metavar="PATH"
    )
    return parser


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
