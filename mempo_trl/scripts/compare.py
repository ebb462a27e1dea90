"""`mempo compare`: evaluations of the same questions side by side."""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mempo_trl.evaluation.comparison import (
    EXPLANATION,
    HEADER,
    compare,
    condition_warnings,
    markdown,
    read_evaluation,
    table_rows,
)
from mempo_trl.scripts.recipes import RecipeParser


@dataclass
class CompareArguments:
    """
    What to compare.

    Args:
        evaluations (`list[str]`):
            Folders of finished evaluations, or their `evaluation.json`. All are compared with the first.
        output_dir (`str`, *optional*):
            Folder for `comparison.json` and `comparison.md`.
        normalizer (`str`, *optional*):
            Normaliser of exact match and F1, `"squad"` or `"words"`; that of the first evaluation if not given.
        common_questions (`bool`, *optional*, defaults to `False`):
            Compare the questions that both have, instead of refusing where one has more.
        max_examples (`int`, *optional*, defaults to `5`):
            Examples of wins and of losses in the files.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap and of the permutation test.
    """

    evaluations: list[str] = field(
        metadata={"help": "Folders of finished evaluations, or their evaluation.json. The first is the reference."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Folder for comparison.json and comparison.md."})
    normalizer: str | None = field(
        default=None,
        metadata={"help": "Normaliser of exact match and F1; that of the first if not given.", "choices": ["squad", "words"]},
    )  # fmt: skip
    common_questions: bool = field(
        default=False, metadata={"help": "Compare what both have, instead of refusing where one has more."}
    )
    max_examples: int = field(default=5, metadata={"help": "Examples of wins and of losses in the files."})
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap and of the permutation test."})


def main(args: CompareArguments) -> dict:
    """Compare, print the tables and write the files."""
    evaluations = {path: read_evaluation(path) for path in args.evaluations}
    comparison = compare(evaluations, args.normalizer, args.common_questions, args.seed, args.max_examples)
    console = Console(markup=False, highlight=False, emoji=False)
    for name, entry in comparison["comparisons"].items():
        count = entry["results"]["all"]["num_questions"]
        title = (
            f"second: {name}\nfirst: {comparison['first']}\n{count} questions, normaliser: {comparison['normalizer']}"
        )
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for column in ("", *HEADER[1:5], "p", "saving %"):
            table.add_column(column, justify="left" if column in ("", "figure") else "right")
        for group, figure, first, second, difference, ends, p, saving, saving_ends in table_rows(entry["results"]):
            if "without" not in figure:  # 80 columns hold the shorter names; the files have all
                cells = (f"{difference}\n{ends}", p, f"{saving}\n{saving_ends}")
                table.add_row(group, figure, first, second, *cells)
        console.print(table)
        mcnemar = entry["results"]["all"]["mcnemar"]
        if mcnemar is not None:
            print(f"Right only in the second: {mcnemar['wins']}, only in the first: {mcnemar['losses']}; "
                  f"McNemar's exact test p = {mcnemar['p']:.2g}.")  # fmt: skip
    print(EXPLANATION)
    for line in condition_warnings(comparison):
        print(f"Warning: {line}")
    if args.output_dir is not None:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(comparison, indent=2, ensure_ascii=False) + "\n"
        (folder / "comparison.json").write_text(text, encoding="utf-8")
        (folder / "comparison.md").write_text(markdown(comparison), encoding="utf-8")
    return comparison


class CompareParser(RecipeParser):
    """Takes the evaluations as they come first on the command line: `mempo compare A B`."""

    def parse_args_and_config(self, args=None, **kwargs):
        args = list(sys.argv[1:] if args is None else args)
        if args and not args[0].startswith("-"):
            args.insert(0, "--evaluations")
        return super().parse_args_and_config(args, **kwargs)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return CompareParser((CompareArguments,), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
