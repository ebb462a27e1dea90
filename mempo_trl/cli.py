"""The `mempo` command. Each subcommand is a script in `mempo_trl.scripts`."""

import importlib
import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from .scripts.arguments import check_launch_arguments


LAUNCHED = {"train": "Train an agent with MemPO.", "sft": "Cold start by supervised fine-tuning on rollouts."}
"""Subcommands that run under `accelerate launch`; its arguments and `--accelerate_config` are passed on."""

PLAIN = {
    "evaluate": "Exact match, F1 and token cost of an agent over questions.",
    "compare": "Differences between evaluations of the same questions, with intervals and tests.",
    "data": "Read questions of any known data set, clean and compose them.",
    "collect": "Cold-start rollouts from a teacher, from the model itself, or from gold passages.",
    "index": "Build a BM25, dense or hybrid index of a corpus.",
    "serve": "A search server over a corpus or an index.",
    "view": "One HTML page of the rollouts of a training or an evaluation.",
}
"""Subcommands that run in this process."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = LAUNCHED | PLAIN
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: mempo COMMAND [--config FILE.yaml] [--accelerate_config NAME] [arguments]\n")
        print("\n".join(f"  {name:<10} {text}" for name, text in commands.items()))
        print("\n`mempo COMMAND --help` lists the arguments of a command.")
        return 0
    name, arguments = argv[0], argv[1:]
    if name not in commands:
        print(f"mempo: there is no command {name!r}; the commands are {', '.join(commands)}.", file=sys.stderr)
        return 2
    script = importlib.import_module(f"mempo_trl.scripts.{name}")
    parser = script.make_parser(prog=f"mempo {name}")
    if name in PLAIN:
        script.main(*parser.parse_args_and_config(arguments))
        return 0
    # What the script's parser does not know is for `accelerate launch`. The configuration itself is built by the
    # launched processes: a batch size that is right for all of them together would be refused here.
    parser.parse_args_into_dataclasses = lambda args, **kwargs: parser.parse_known_args(args)
    *_, from_config, from_command_line = parser.parse_args_and_config(
        arguments, return_remaining_strings=True, separate_remaining_strings=True
    )
    try:
        check_launch_arguments(from_config + from_command_line)
        launch_arguments = resolve_accelerate_config_argument(from_config + from_command_line)
    except ValueError as error:
        parser.error(str(error))
    script_arguments = _without(arguments, from_command_line)
    launched = launch_command_parser().parse_args(
        [*launch_arguments, "--module", f"mempo_trl.scripts.{name}", *script_arguments]
    )
    try:
        launch_command(launched)
    except subprocess.CalledProcessError as error:  # what went wrong stands in the output of the process already
        return error.returncode
    return 0


def _without(arguments: list[str], removed: list[str]) -> list[str]:
    """`arguments` without the ordered subsequence `removed`."""
    rest = list(removed)
    kept = []
    for argument in arguments:
        if rest and argument == rest[0]:
            rest.pop(0)
        else:
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.exit(main())
