"""Figures of the runs of a study, and tables with intervals over seeds."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from memory_content import DEFINITIONS, correlations, describe_memories, memory_table, memory_tokens
from reporting import write_report
from scipy.stats import t as student_t
from tasks import Task

from mempo_trl.data import village as village_module
from mempo_trl.data.village import Village
from mempo_trl.evaluation.comparison import sign_flip_test
from mempo_trl.evaluation.metrics import rollout_figures
from mempo_trl.monitoring import OUTCOMES
from mempo_trl.runner import read_records


if TYPE_CHECKING:
    from learning import Suite


@dataclass(frozen=True)
class Run:
    """One arm with one seed: its tasks, the evaluations by the number of steps after which they are made."""

    regime: str
    arm: str
    seed: int
    cold_start: int
    folder: Path
    village: Task
    train: Task
    evaluations: dict[int, Task]

    @property
    def tasks(self) -> list[Task]:
        """All that has to be finished for its figures."""
        return [self.village, self.train, *self.evaluations.values()]


def rollouts_figures(records: Sequence[dict]) -> dict[str, Any]:
    """
    Figures of the rollouts of a training step or of an evaluation.

    Args:
        records (`Sequence[dict]`):
            Rollouts as on disk.

    Returns:
        `dict[str, Any]`: Means over rollouts; of `p_mem`, `p_full` and `memory_reward` over the memories that have one, of
        `memory_tokens` over all memories; shares of outcomes; exact match by number of objectives; and the share of the
        groups (the rollouts of one question) whose rewards are all equal. `None` where there is nothing to take it of.
    """
    rows = [rollout_figures(record) for record in records]
    turns = [turn for record in records for turn in record["turns"]]
    scored = [turn for turn in turns if turn["R_M"] is not None]
    by_objectives: dict[str, list[float]] = {}
    rewards: dict[str, list[float | None]] = {}
    for record, row in zip(records, rows, strict=True):
        by_objectives.setdefault(str(len(record["golden_answers"])), []).append(row["exact_match_squad"])
        rewards.setdefault(record["id"], []).append(record["reward"])
    groups = [group for group in rewards.values() if len(group) > 1]
    names = {"exact_match": "exact_match_squad", "f1": "f1_squad", "format_ok_frac": "format_ok"}
    names |= {name: name for name in ("tokens_total", "tokens_peak", "turns", "searches")}
    return {
        **{name: _mean(row[key] for row in rows) for name, key in names.items()},
        **{name: _mean(turn[key] for turn in scored) for name, key in _PROBABILITIES.items()},
        "memory_tokens": _mean(map(memory_tokens, turns)),
        "outcomes": {
            outcome: sum(record["outcome"] == outcome for record in records) / len(records) for outcome in OUTCOMES
        },
        "exact_match_by_objectives": {k: _mean(by_objectives[k]) for k in sorted(by_objectives, key=int)},
        "groups_without_spread": _mean(len(set(group)) == 1 for group in groups),
    }


_PROBABILITIES = {"p_mem": "P_mem", "p_full": "P_full", "memory_reward": "R_M"}


def _mean(values) -> float | None:
    values = [float(value) for value in values if value is not None]
    return statistics.fmean(values) if values else None


def training_rollouts(folder: Path) -> dict[int, list[dict]]:
    """The rollouts of a training by the number of steps that were done when they were sampled."""
    steps: dict[int, list[dict]] = {}
    for path in sorted((folder / "rollouts").glob("train-*.jsonl")):
        for record in read_records(path):
            steps.setdefault(record["step"], []).append(record)
    return steps


def evaluated_rollouts(folder: Path) -> list[dict]:
    """The rollouts of an evaluation, with the probabilities of its probe in their turns."""
    records = read_records(folder / "rollouts.jsonl")
    probe = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
    scored = {(row["id"], row["sample"]): row["turns"] for row in probe["probabilities"]["rollouts"]}
    for record in records:
        for turn, values in zip(record["turns"], scored.get((record["id"], record["sample"]), []), strict=False):
            turn.update(values)
    return records


def make_result(run: Run) -> dict[str, Any]:
    """
    All figures of a finished run.

    Returns:
        `dict[str, Any]`: `training`, a row per step; `area`, its mean exact match; `held_out`, figures by steps done;
        `memories`, what memories hold in the first and last tenth of the training and in each evaluation, and the
        correlations over the whole training; with the commands, commits and seconds.
    """
    arguments = run.village.command[run.village.command.index("--config") :]
    (world,) = village_module.make_parser().parse_args_and_config(list(arguments))
    village = Village.generate(world.seed, world.num_people)
    steps = training_rollouts(run.train.folder)
    training = [{"step": step, **rollouts_figures(records)} for step, records in sorted(steps.items())]
    tenth = max(1, len(steps) // 10)
    order = sorted(steps)

    def sampled(chosen: list[int]) -> list[dict]:
        return [record for step in chosen for record in steps[step]]

    held_out, memories = {}, {}
    memories["training, first tenth"] = describe_memories(sampled(order[:tenth]), village)
    memories["training, last tenth"] = describe_memories(sampled(order[-tenth:]), village)
    memories["training"] = {"correlations": correlations(memory_table(sampled(order), village))}
    for step, task in run.evaluations.items():
        records = evaluated_rollouts(task.folder)
        held_out[str(step)] = rollouts_figures(records)
        memories[f"held out, {step} steps"] = describe_memories(records, village)
    done = {task.name: task.read_done() for task in run.tasks}
    return {
        "regime": run.regime,
        "arm": run.arm,
        "seed": run.seed,
        "cold_start": run.cold_start,
        "area": statistics.fmean(row["exact_match"] for row in training),
        "seconds": {name: entry["seconds"] for name, entry in done.items()},
        "commits": sorted({str(entry["commit"]) for entry in done.values()}),
        "commands": {task.name: list(task.command) for task in run.tasks},
        "made_from": {name: entry["finished"] for name, entry in done.items()},
        "training": training,
        "held_out": held_out,
        "memories": memories,
    }


def read_results(runs: Sequence[Run], suite: "Suite", task: Task | None = None) -> list[dict]:
    """
    The figures of the runs that are finished, from `result.json` where it is there.

    Args:
        runs (`Sequence[Run]`):
            Runs of a study.
        suite ([`Suite`]):
            The study.
        task ([`Task`], *optional*):
            Look only at the runs that it is a part of.
    """
    results = []
    for run in runs:
        if task is not None and task not in run.tasks:
            continue
        done = {task.name: task.read_done() for task in run.tasks}
        if None in done.values():
            continue
        path = run.folder / "result.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if result.get("made_from") != {name: entry["finished"] for name, entry in done.items()}:
            result = make_result(run)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(result) + "\n", encoding="utf-8")
            part.replace(path)
        results.append(result)
    return results


def steps_to(training: Sequence[dict], level: float, window: int) -> int | None:
    """
    Steps after which the training has reached a level.

    Args:
        training (`Sequence[dict]`):
            A row per step with its `step` (the steps done before) and `exact_match`.
        level (`float`):
            The exact match to be reached by the mean of the last `window` steps.
        window (`int`):
            Steps that are averaged.

    Returns:
        `int` or `None`: Steps done when the last rollouts of that mean were sampled; `None` if it is never reached.
    """
    values = [row["exact_match"] for row in training]
    for end in range(window, len(values) + 1):
        if statistics.fmean(values[end - window : end]) >= level - 1e-12:
            return training[end - 1]["step"]
    return None


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean with Student's 95% interval (`None` for fewer than two values) and the number of values."""
    values = np.asarray(values, dtype=float)
    interval = None
    if len(values) > 1:
        half = float(student_t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
        interval = [float(values.mean()) - half, float(values.mean()) + half]
    return {"mean": float(values.mean()), "ci95": interval, "n": len(values)}


def compare_arms(arm: dict[int, float], reference: dict[int, float]) -> dict[str, Any] | None:
    """
    Difference of an arm from the reference, in pairs with the same seed.

    Args:
        arm (`dict[int, float]`), reference (`dict[int, float]`):
            Value by seed.

    Returns:
        `dict` or `None`: As [`mean_interval`] gives it, with the exact `p_sign_flip`; `None` without a common seed.
    """
    seeds = sorted(arm.keys() & reference.keys())
    if not seeds:
        return None
    differences = np.array([arm[seed] - reference[seed] for seed in seeds])
    return {**mean_interval(differences), "p_sign_flip": sign_flip_test(differences)}


def summarize_results(results: Sequence[dict], suite: "Suite") -> dict[str, dict[str, dict]]:
    """
    Means over seeds, by regime and arm.

    Args:
        results (`Sequence[dict]`):
            What [`read_results`] gave.
        suite ([`Suite`]):
            The study.

    Returns:
        `dict`: Per regime and arm, `values` by name of the figure ([`mean_interval`]) and `differences` from the
        reference ([`compare_arms`]). A level that a run doesn't reach counts with the steps of the training; `reached`
        says how many runs did.
    """
    summary: dict[str, dict[str, dict]] = {}
    for regime in dict.fromkeys(result["regime"] for result in results):
        arms: dict[str, dict[int, dict]] = {}
        for result in results:
            if result["regime"] == regime:
                arms.setdefault(result["arm"], {})[result["seed"]] = scalars(result, suite)
        reference = arms.get(suite.reference, {})
        summary[regime] = {}
        for arm, by_seed in arms.items():
            names = dict.fromkeys(name for row in by_seed.values() for name in row)
            values, differences = {}, {}
            for name in names:
                column = {seed: row[name] for seed, row in by_seed.items() if row.get(name) is not None}
                if not column:
                    continue
                values[name] = mean_interval(list(column.values()))
                others = {seed: row[name] for seed, row in reference.items() if row.get(name) is not None}
                if arm != suite.reference and (difference := compare_arms(column, others)):
                    differences[name] = difference
            runs = [result for result in results if (result["regime"], result["arm"]) == (regime, arm)]
            reached = {
                str(level): sum(steps_to(run["training"], level, suite.window) is not None for run in runs)
                for level in suite.levels
            }
            summary[regime][arm] = {"values": values, "differences": differences, "reached": reached}
    return summary


def scalars(result: dict, suite: "Suite") -> dict[str, float | None]:
    """The figures of a run that are averaged over seeds, under flat names."""
    training, tenth = result["training"], max(1, len(result["training"]) // 10)
    row: dict[str, float | None] = {"area": result["area"]}
    for level in suite.levels:
        steps = steps_to(training, level, suite.window)
        row[f"steps to {level}"] = len(training) if steps is None else steps
    row["seconds of a step"] = next(v for k, v in result["seconds"].items() if k.endswith("/train")) / len(training)
    for name, rows in (("first tenth", training[:tenth]), ("last tenth", training[-tenth:])):
        for key in ("exact_match", "memory_reward", "groups_without_spread"):
            row[f"training, {name}: {key}"] = _mean(step[key] for step in rows)
    points = list(result["held_out"].values())
    for name, figures in zip(_points(len(points)), points, strict=True):
        for key, value in figures.items():
            for part, number in value.items() if isinstance(value, dict) else [("", value)]:
                row[f"{name}: {key}{part and f' {part}'}"] = number
    for name, memories in zip(_points(len(points)), list(result["memories"].values())[3:], strict=True):
        row[f"{name}: content"], row[f"{name}: kept"] = memories["content"], memories["kept"]
        row[f"{name}: lost"] = memories["of_found"]["lost"]
        row[f"{name}: guess"] = memories["guess"]
    for where in ("training, first tenth", "training"):
        for column, kinds in result["memories"][where]["correlations"].items():
            for kind, entry in kinds.items():
                row[f"{where}: correlation with {column}, {kind}"] = entry["mean"]
    return row


def _points(count: int) -> list[str]:
    """Names of the evaluations: those of arms and regimes with other numbers of steps belong together."""
    return [f"{k}/{count - 1}" for k in range(count)]


def _text(entry: dict | None, digits: int = 3, sign: str = "") -> str:
    """A mean with its interval."""
    if entry is None:
        return ""
    ends = (
        ""
        if entry["ci95"] is None
        else " ({})".format(" to ".join(f"{end:{sign}.{digits}f}" for end in entry["ci95"]))
    )
    return f"{entry['mean']:{sign}.{digits}f}{ends}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def table_texts(results: Sequence[dict], suite: "Suite") -> str:
    """
    The tables of a study in Markdown.

    Args:
        results (`Sequence[dict]`):
            What [`read_results`] gave.
        suite ([`Suite`]):
            The study.
    """
    summary = summarize_results(results, suite)
    last = _points(suite.evaluations + 1)[-1]
    lines = []
    for regime, arms in summary.items():
        lines += [f"## {regime}", ""]

        def rows(cells: Callable[[dict], list[str]], arms: dict[str, dict] = arms) -> list[list[str]]:
            return [[arm, *cells(entry)] for arm, entry in arms.items()]

        def text(name: str, digits: int = 3) -> Callable[[dict], str]:
            return lambda entry: _text(entry["values"].get(name), digits)

        def difference(name: str, digits: int = 3) -> Callable[[dict], str]:
            def cell(entry: dict) -> str:
                row = entry["differences"].get(name)
                return "" if row is None else f"{_text(row, digits, '+')}, p {row['p_sign_flip']:.2g}"

            return cell

        ref = suite.reference
        columns: dict[str, Callable[[dict], str]] = {
            "seeds": lambda entry: str(entry["values"]["area"]["n"]),
            "area": text("area"),
            f"area − {ref}": difference("area"),
            "held out at the start": text(f"0/{suite.evaluations}: exact_match"),
            "held out at the end": text(f"{last}: exact_match"),
            f"end − {ref}": difference(f"{last}: exact_match"),
            "s per step": text("seconds of a step", 1),
        }
        lines += ["Exact match: area under the training curve, and of held-out questions.", ""]
        lines += _table(["arm", *columns], rows(lambda entry, c=columns: [cell(entry) for cell in c.values()]))

        columns = {}
        for level in suite.levels:
            name = f"steps to {level}"
            columns[f"to {level} (runs)"] = lambda entry, name=name, level=str(level): (
                f"{_text(entry['values'][name], 0)} ({entry['reached'][level]}/{entry['values'][name]['n']})"
            )
            columns[f"− {ref} ({level})"] = difference(name, 0)
        lines += [f"Training: steps until the mean exact match of {suite.window} steps reaches a level (a run that never "
                  "does counts with all its steps).", ""]  # fmt: skip
        lines += _table(["arm", *columns], rows(lambda entry, c=columns: [cell(entry) for cell in c.values()]))

        lines += ["Held out, by point of the training.", ""]
        header = ("arm", "point", "EM", "F1", "P_mem", "P_full", "R_M", "memory tokens", "tokens total", "tokens peak",
                  "content", "kept", "lost", "guess", *OUTCOMES)  # fmt: skip
        body = []
        for arm, entry in arms.items():
            for point in _points(suite.evaluations + 1):
                digits = {"memory_tokens": 1, "tokens_total": 0, "tokens_peak": 0}
                keys = (
                    "exact_match",
                    "f1",
                    "p_mem",
                    "p_full",
                    "memory_reward",
                    *digits,
                    "content",
                    "kept",
                    "lost",
                    "guess",
                )
                keys += tuple(f"outcomes {outcome}" for outcome in OUTCOMES)
                body.append([arm, point, *(text(f"{point}: {key}", digits.get(key, 3))(entry) for key in keys)])
        lines += _table(header, body)

        lines += ["Training: Spearman's correlation of the arm's own R_M with what memories hold (`content`, `kept`, "
                  "`change`), the outcome, the turn and the length; within groups / within one turn of a group.", ""]  # fmt: skip
        body = []
        for arm, entry in arms.items():
            for where in ("training, first tenth", "training"):
                cells = []
                for column in ("content", "kept", "change", "exact_match", "turn", "memory_tokens"):
                    pair = [
                        _text(entry["values"].get(f"{where}: correlation with {column}, {kind}"), 2)
                        for kind in ("within_groups", "within_turns")
                    ]
                    cells.append(" / ".join(pair if column != "turn" else pair[:1]))
                if any(cell.strip(" /") for cell in cells):
                    body.append([arm, where.removeprefix("training, ").replace("training", "all"), *cells])
        header = ("arm", "steps", "content", "kept", "change", "exact match", "turn", "memory tokens")
        lines += _table(header, body) if body else ["No arm has a memory reward.", ""]
    return "\n".join(lines)


def write_results(folder: Path, results: Sequence[dict], suite: "Suite", settings: dict) -> None:
    """Write `results.jsonl`, `tables.md` and `learning.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results), encoding="utf-8")
    (folder / "tables.md").write_text(table_texts(results, suite), encoding="utf-8")
    rows = [
        {"regime": r["regime"], "arm": r["arm"], "seed": r["seed"], "area": r["area"], "commits": r["commits"]}
        for r in results
    ]
    summary = summarize_results(results, suite)
    write_report(folder / "learning.json", settings, rows, definitions=DEFINITIONS, suite=vars(suite), summary=summary)
