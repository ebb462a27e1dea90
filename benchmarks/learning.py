"""
Does the memory reward help: arms trained from the same cold start, with as many rollouts each, over several seeds.

    python benchmarks/learning.py --suite quick --dry_run
    python benchmarks/learning.py --suite quick
    python benchmarks/learning.py --suite full --regimes noisy --arms grpo paper
    python benchmarks/learning.py --suite full --report_only

A suite is a YAML file, `benchmarks/learning/<name>.yaml` or a path: regimes (which village, which cold start, how long a
training) and arms (what is trained), both as changes to recipes. Or it is `part_of` another suite, some of its `regimes`,
`arms` and `seeds`: the runs are then the same runs, in the folder of the whole. Nothing else decides what is run: `--dry_run` prints
every command, and each can be repeated by hand with `OMP_NUM_THREADS=1`. The commands run `--jobs` at a time, with one
thread each. An interrupted study goes on with the same command: what is finished is not run again, and what was
interrupted starts anew. A run that failed says so, the others go on, and the same command tries it again.

Per regime and cold start: the village, the cold start, its evaluation on held-out questions. Per arm and seed: the
training, and the evaluations of its checkpoints on the same held-out questions. The seed decides the order of the
training questions and the samples; runs with the same seed share both the order and the cold start, so arms are compared
in pairs. Cold start k belongs to the seeds k, k + n, … of n: with as many cold starts as seeds the intervals hold for
villages and cold starts of this kind, with a single one they hold for this one alone.

Two sources of figures, which tables name. *Training*: what was sampled for each step, from the rollout dumps; it costs
nothing, has a value for every step, and gives the learning curve, its area (the mean exact match of all rollouts of the
training) and the steps to a level (the first step at which the mean of the last `window` steps reaches it; the number of
steps where that never happens). *Held out*: `mempo evaluate --probe_memory` at several points of the training, for every
arm with the same definition of P_mem, P_full and R_M (against the history, over all answer tokens, without filter),
whatever the arm was trained with. Intervals are Student's t over seeds, those of differences over pairs of seeds.

In the output folder (that of a part in a folder of its name within): `results.jsonl` (a line per arm and seed),
`tables.md`, `learning.json`; in the folder of each run `result.json`, which is made again from the dumps if it is deleted. A run of 100 steps leaves about 40 MB of dumps.
"""

import argparse
import os
import shlex
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from learning_results import Run, read_results
from learning_tables import write_results
from tasks import Task, only_study, run_tasks

from mempo_trl.scripts.recipes import read_recipe


REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "village": ("-m", "mempo_trl.data.village"),
    "sft": ("-m", "mempo_trl.cli", "sft"),
    "train": ("-m", "mempo_trl.cli", "train"),
    "evaluate": ("-m", "mempo_trl.cli", "evaluate"),
}
"""What the sections of a suite are arguments of."""

KEYS = {
    "the suite": {"recipes", "settings", "seeds", "cold_starts", "evaluations", "window", "levels", "reference", "regimes", "arms"},
    "a regime": {"arms", "seconds", "test_village", "world", "start", *SCRIPTS},
    "an arm": {"seeds", "sft", "train", "evaluate"},
    "a part": {"part_of", "seeds", "regimes", "arms"},
}  # fmt: skip


@dataclass
class Suite:
    """
    A study, as its YAML file says.

    Args:
        recipes (`dict[str, str]`):
            Recipe of each script in `SCRIPTS`, relative to the repository.
        seeds (`list[int]`):
            Seeds of every arm that has none of its own.
        cold_starts (`int`):
            Different villages with a cold start each, per regime.
        evaluations (`int`):
            Held-out evaluations: after each of so many equal parts of the training, besides that of the cold start.
        window (`int`):
            Steps that are averaged where a level is looked for.
        levels (`list[float]`):
            Exact matches to which the steps are counted.
        reference (`str`):
            The arm that others are compared with.
        regimes (`dict[str, dict]`):
            Per regime its changes to the recipes by script; `test_village`, changes of the village for the held-out
            questions; `world`, another regime whose villages, cold starts and evaluation it shares, so that only the
            training differs; `start`, another regime whose cold starts its own ones start from, among the same people;
            `arms`, if not all of them; `seconds` of a core that a `cold_start`, the `startup` of a training, a
            `step` and an `evaluation` take, for the estimate.
        arms (`dict[str, dict]`):
            Per arm its changes to the recipes of `sft` (it then has a cold start of its own), `train` and `evaluate`, and
            its `seeds`, if others.
        settings (`dict[str, dict]`, *optional*):
            Changes to the recipes in all regimes.
        part_of (`str`, *optional*):
            The suite whose runs these are, if it is a part of another one.
    """

    recipes: dict[str, str]
    seeds: list[int]
    cold_starts: int
    evaluations: int
    window: int
    levels: list[float]
    reference: str
    regimes: dict[str, dict]
    arms: dict[str, dict]
    settings: dict[str, dict] = field(default_factory=dict)
    part_of: str | None = None

    @classmethod
    def read(cls, path: Path) -> "Suite":
        """Read and check a suite."""
        values = read_recipe(str(path))
        if "part_of" in values:
            if values.keys() != KEYS["a part"]:
                raise ValueError(f"{path}: a part of a suite has {sorted(KEYS['a part'])}, not {sorted(values)}.")
            return cls.read(find_suite(values["part_of"])).select(**values)
        tables = [("the suite", {"": values}), ("a regime", values.get("regimes")), ("an arm", values.get("arms"))]
        for what, entries in tables:
            for name, entry in (entries or {}).items():
                if unknown := set(entry or {}) - KEYS[what]:
                    where = " ".join(filter(None, (what, repr(name) if name else "")))
                    raise ValueError(f"{path}: {where} has {sorted(unknown)}; known are {sorted(KEYS[what])}.")
        if missing := KEYS["the suite"] - {"settings"} - set(values):
            raise ValueError(f"{path}: the suite lacks {sorted(missing)}.")
        if missing := set(SCRIPTS) - set(values["recipes"]):
            raise ValueError(f"{path}: `recipes` lacks {sorted(missing)}.")
        for kind in ("regimes", "arms"):
            values[kind] = {name: entry or {} for name, entry in values[kind].items()}
        suite = cls(**values)
        for name, regime in suite.regimes.items():
            for key, without in (("world", {"world"}), ("start", {"world", "start"})):
                other = suite.regimes.get(regime.get(key))
                if key in regime and (other is None or without & set(other)):
                    raise ValueError(
                        f"{path}: the {key} of the regime {name!r} is {regime[key]!r}; expected a regime with its own."
                    )
            if "world" in regime and (own := {"village", "sft", "evaluate", "test_village", "start"} & set(regime)):
                raise ValueError(f"{path}: the regime {name!r} has {sorted(own)} and the world of another.")
        named = {suite.reference, *(arm for regime in suite.regimes.values() for arm in regime.get("arms", []))}
        if unknown := named - set(suite.arms):
            raise ValueError(f"{path}: there is no arm {sorted(unknown)}; the arms are {sorted(suite.arms)}.")
        for name, value in (("cold_starts", suite.cold_starts), ("evaluations", suite.evaluations)):
            if value < 1:
                raise ValueError(f"{path}: `{name}` is {value}, expected at least 1.")
        return suite

    def select(self, part_of: str, regimes: list[str], arms: list[str], seeds: list[int]) -> "Suite":
        """Some of the runs of this suite."""
        for what, chosen, known in (
            ("regime", regimes, self.regimes),
            ("arm", arms, self.arms),
            ("seed", seeds, self.seeds),
        ):
            if unknown := set(chosen) - set(known):
                raise ValueError(f"the suite {part_of!r} has no {what} {sorted(unknown)}; it has {sorted(known)}.")
        needed = {self.regimes[name].get(key, name) for name in regimes for key in ("world", "start")}
        if missing := needed - set(regimes):
            raise ValueError(f"the regimes {sorted(regimes)} start from {sorted(missing)}; choose them too.")
        return replace(
            self,
            part_of=part_of,
            regimes={
                name: {**regime, "arms": [arm for arm in regime.get("arms", self.arms) if arm in arms]}
                for name, regime in self.regimes.items()
                if name in regimes
            },
            arms={
                name: {**arm, "seeds": [seed for seed in arm.get("seeds", self.seeds) if seed in seeds]}
                for name, arm in self.arms.items()
                if name in arms
            },
        )

    def arguments(self, script: str, regime: str, arm: str | None = None) -> dict[str, Any]:
        """The changes to a recipe: those of the suite, of the regime and of the arm, the later ones winning."""
        of_arm = {} if arm is None else self.arms[arm].get(script) or {}
        return {**self.settings.get(script, {}), **(self.regimes[regime].get(script) or {}), **of_arm}

    def seconds(self, regime: str) -> dict[str, float]:
        """What the parts of a run take in a regime; 0 where the suite does not say."""
        parts = dict.fromkeys(("cold_start", "startup", "step", "evaluation"), 0.0)
        return parts | (self.regimes[regime].get("seconds") or {})

    def recipe(self, script: str) -> Path:
        """The recipe of a script."""
        return Path(self.recipes[script])


def to_words(arguments: dict[str, Any]) -> list[str]:
    """Arguments of a command line."""
    words = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(value, dict | None) for value in values):
            raise ValueError(f"`{name}` is {value!r}, which no command line can say; use a number, a text or a list.")
        words += [f"--{name}", *(str(value).lower() if isinstance(value, bool) else str(value) for value in values)]
    return words


class Plan:
    """
    The tasks and runs of a suite.

    Args:
        suite ([`Suite`]):
            What is to be done.
        folder (`Path`):
            Where everything goes.
        regimes (`list[str]`, *optional*), arms (`list[str]`, *optional*), only_seeds (`list[int]`, *optional*):
            Only these.
    """

    def __init__(
        self,
        suite: Suite,
        folder: Path,
        regimes: list[str] | None = None,
        arms: list[str] | None = None,
        only_seeds: list[int] | None = None,
    ):
        self.suite, self.folder = suite, folder
        self.tasks: dict[str, Task] = {}
        self.runs: list[Run] = []
        seeds = sorted({seed for arm in suite.arms.values() for seed in arm.get("seeds", suite.seeds)})
        chosen = (("regime", regimes, suite.regimes), ("arm", arms, suite.arms), ("seed", only_seeds, seeds))
        for kind, given, known in chosen:
            if unknown := set(given or []) - set(known):
                raise ValueError(f"there is no {kind} {sorted(unknown)}; the {kind}s are {sorted(known)}.")
        # All arms of a seed before the next seed: what a study that is stopped early has, can be compared.
        for seed in seeds if only_seeds is None else sorted(only_seeds):
            for regime, settings in suite.regimes.items():
                for arm in settings.get("arms", suite.arms):
                    wanted = (regimes is None or regime in regimes) and (arms is None or arm in arms)
                    if wanted and seed in suite.arms[arm].get("seeds", suite.seeds):
                        self._add_run(regime, arm, seed)

    def seconds(self, tasks: list[Task] | None = None) -> float:
        """Seconds of CPU time that tasks will probably take: those that are not finished, if none are given."""
        tasks = [task for task in self.tasks.values() if task.read_done() is None] if tasks is None else tasks
        return sum(task.seconds for task in tasks)

    def _add(
        self, script: str, folder: Path, arguments: dict[str, Any], needs: tuple[Task, ...], seconds: float
    ) -> Task:
        name = folder.relative_to(self.folder).as_posix()
        if name not in self.tasks:
            recipe = self.suite.recipe(script)
            words = to_words({"config": str(recipe), **arguments, "output_dir": str(folder)})
            self.tasks[name] = Task(name, folder, (*SCRIPTS[script], *words), needs, (recipe,), seconds)
        return self.tasks[name]

    def _add_village(self, regime: str, k: int) -> Task:
        """The village of a regime with its world of its own: people, facts, questions, scripted rollouts."""
        arguments = {**self.suite.arguments("village", regime), "seed": k}
        return self._add("village", self.folder / "worlds" / regime / str(k) / "village", arguments, (), 10.0)

    def _add_cold_start(self, regime: str, arm: str, k: int) -> Task:
        """The cold start of such a regime, from an untrained model or from that of another regime."""
        suite, village = self.suite, self._add_village(regime, k)
        start = suite.regimes[regime].get("start")
        before = village if start is None else self._add_cold_start(start, arm, k)
        arguments = {
            "num_cpu_threads_per_process": 1,
            **suite.arguments("sft", regime, arm),
            "model_name_or_path": str(village.folder / "model" if start is None else before.folder),
            "rollouts": str(village.folder / "rollouts.jsonl"),
            "seed": k,
        }
        folder = village.folder.parent / f"cold_start{self._own(arm, 'sft')}"
        needs = (village,) if start is None else (village, before)
        return self._add("sft", folder, arguments, needs, suite.seconds(regime)["cold_start"])

    def _own(self, arm: str, *scripts: str) -> str:
        """End of the name of a folder: an arm whose cold start differs from the regime's has one of its own."""
        return f"_{arm}" if any(self.suite.arms[arm].get(script) for script in scripts) else ""

    def _add_run(self, regime: str, arm: str, seed: int) -> None:
        suite = self.suite
        index = suite.seeds.index(seed) if seed in suite.seeds else seed
        k = index % suite.cold_starts
        home = suite.regimes[regime].get("world", regime)
        seconds = suite.seconds(regime)
        village = questions = self._add_village(home, k)
        world = village.folder.parent
        if of_test := suite.regimes[home].get("test_village"):
            # The same people and facts; only the test split of this one is used.
            of_test = {"num_train": 1, "num_rollouts": 1, "num_practice_villages": 1, **of_test}
            of_test = {**suite.arguments("village", home), "seed": k, **of_test}
            questions = self._add("village", world / "test_village", of_test, (), 10.0)
        cold_start = self._add_cold_start(home, arm, k)

        def evaluate(model: Path, folder: Path, made_by: Task) -> Task:
            arguments = {
                **suite.arguments("evaluate", home, arm),
                "model_name_or_path": str(model),
                "dataset_name": str(questions.folder / "test.jsonl"),
                "corpus_path": str(village.folder / "corpus.jsonl"),
                "probe_memory": True,
            }
            return self._add("evaluate", folder, arguments, (made_by, questions), seconds["evaluation"])

        start = evaluate(cold_start.folder, world / f"evaluation{self._own(arm, 'sft', 'evaluate')}", cold_start)
        of_train = suite.arguments("train", regime, arm)
        steps = of_train.get("max_steps", read_recipe(str(suite.recipe("train"))).get("max_steps", 0))
        if steps < 1 or steps % suite.evaluations:
            raise ValueError(
                f"regime {regime!r} has `max_steps` {steps}, which can't be cut into {suite.evaluations} equal parts with "
                "an evaluation after each."
            )
        folder = self.folder / "runs" / regime / arm / f"seed_{seed}"
        of_train = {
            "num_cpu_threads_per_process": 1,
            **of_train,
            "model_name_or_path": str(cold_start.folder),
            "dataset_name": str(village.folder / "train.jsonl"),
            "corpus_path": str(village.folder / "corpus.jsonl"),
            "save_strategy": "steps",
            "save_steps": steps // suite.evaluations,
            "save_only_model": True,
            "seed": seed,
        }
        train = self._add(
            "train", folder / "train", of_train, (cold_start,), seconds["startup"] + steps * seconds["step"]
        )
        evaluations = {0: start}
        for step in range(steps // suite.evaluations, steps + 1, steps // suite.evaluations):
            model = train.folder / f"checkpoint-{step}"
            evaluations[step] = evaluate(model, folder / f"evaluation_{step}", train)
        self.runs.append(Run(regime, arm, seed, k, folder, village, train, evaluations))


def find_suite(name: str) -> Path:
    """The file of a suite that is given by name or path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else REPOSITORY / "benchmarks" / "learning" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(path.stem for path in (REPOSITORY / "benchmarks" / "learning").glob("*.yaml"))
        raise ValueError(f"there is no suite {str(path)!r}; give one of {known}, or the path of a YAML file.")
    return path


def print_plan(plan: Plan, jobs: int) -> None:
    """What is to be done, and for how long."""
    left = [task for task in plan.tasks.values() if task.read_done() is None]
    minutes = plan.seconds(left) / 60
    print(
        f"{len(plan.runs)} runs in {len(plan.tasks)} tasks, {len(left)} of them not finished: about {_time(minutes)} of one "
        f"core, {_time(minutes / jobs)} with {jobs} at a time. The seconds are those that the suite states."
    )


def _time(minutes: float) -> str:
    return f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"


def make_results(plan: Plan, task: Task) -> None:
    """Make the results of the runs that a task was the last of. They are wanted at the end, where an error is one."""
    try:
        read_results(plan.runs, task)
    except Exception:
        traceback.print_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="quick", help="name of a suite, or a YAML file")
    parser.add_argument("--output_dir", help="out/learning/<suite> if not given, with the suite that a part is of")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="commands at a time, one thread each")
    parser.add_argument("--regimes", nargs="+", help="only these")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and the estimate")
    parser.add_argument("--report_only", action="store_true", help="tables of what is finished, also while it runs")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, expected at least 1")
    if Path.cwd() != REPOSITORY:
        parser.error(f"run it in {str(REPOSITORY)!r}: the commands name recipes and modules from there")
    with ExitStack() as stack:
        try:
            path = find_suite(args.suite)
            suite = Suite.read(path)
            folder = Path(args.output_dir or f"out/learning/{suite.part_of or path.stem}")
            plan = Plan(suite, folder, args.regimes, args.arms, args.seeds)
            if args.dry_run:
                for task in plan.tasks.values():
                    state = "" if task.read_done() is None else "  # finished"
                    print(f"OMP_NUM_THREADS=1 python {shlex.join(task.command)}{state}")
            print_plan(plan, args.jobs)
            if args.dry_run:
                return 0
            lock = None if args.report_only else stack.enter_context(only_study(folder))
        except ValueError as error:
            parser.error(str(error))
        failed = []
        if lock is not None:
            # As Ctrl-C does: the commands are ended, too.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            failed = run_tasks(list(plan.tasks.values()), args.jobs, lock, lambda task: make_results(plan, task))
    results = read_results(plan.runs)
    if results:
        reports = folder / path.stem if suite.part_of else folder
        reports.mkdir(exist_ok=True)
        print(write_results(reports, results, suite, vars(args) | {"suite": str(path)}))
        print(f"{len(results)} of {len(plan.runs)} runs are finished. Figures: {reports}/results.jsonl, tables.md")
    if failed:
        print(f"{len(failed)} tasks failed: {', '.join(task.name for task in failed)}. The same command tries again.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
