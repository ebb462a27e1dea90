"""Means, intervals and differences of the arms of a study, and its tables."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from learning_results import mean_or_none
from memory_content import COLUMNS, DEFINITIONS
from reporting import write_report
from scipy.stats import t as student_t

from mempo_trl.evaluation.comparison import sign_flip_test
from mempo_trl.monitoring import OUTCOMES


if TYPE_CHECKING:
    from learning import Suite


MAX_TURN = 10
"""Last turn in the tables; `learning.json` has all."""


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
            What [`~learning_results.read_results`] gave.
        suite ([`Suite`]):
            The study.

    Returns:
        `dict`: Per regime and arm, `values` by name of the figure ([`mean_interval`]), `differences` from the reference
        ([`compare_arms`]), and how many runs `reached` each level; a run that doesn't counts with all its steps.
    """
    summary: dict[str, dict[str, dict]] = {}
    for regime in dict.fromkeys(result["regime"] for result in results):
        runs: dict[str, dict[int, dict]] = {}
        for result in results:
            if result["regime"] == regime:
                runs.setdefault(result["arm"], {})[result["seed"]] = result
        figures = {arm: _by_figure(by_seed, suite) for arm, by_seed in runs.items()}
        reference = figures.get(suite.reference, {})
        summary[regime] = {}
        for arm, columns in figures.items():
            differences = {name: compare_arms(column, reference.get(name, {})) for name, column in columns.items()}
            summary[regime][arm] = {
                "values": {name: mean_interval(list(column.values())) for name, column in columns.items()},
                "differences": {
                    name: row for name, row in differences.items() if row is not None and arm != suite.reference
                },
                "reached": {
                    str(level): sum(
                        steps_to(run["training"], level, suite.window) is not None for run in runs[arm].values()
                    )
                    for level in suite.levels
                },
            }
    return summary


def _by_figure(by_seed: dict[int, dict], suite: "Suite") -> dict[str, dict[int, float]]:
    """Per figure its value by seed, where it is defined."""
    columns: dict[str, dict[int, float]] = {}
    for seed, result in by_seed.items():
        for name, value in run_figures(result, suite).items():
            if value is not None:
                columns.setdefault(name, {})[seed] = value
    return columns


def run_figures(result: dict, suite: "Suite") -> dict[str, float | None]:
    """The figures of a run that are averaged over seeds, under flat names."""
    training, tenth = result["training"], max(1, len(result["training"]) // 10)
    row: dict[str, float | None] = {"area": result["area"]}
    for level in suite.levels:
        steps = steps_to(training, level, suite.window)
        row[f"steps to {level}"] = len(training) if steps is None else steps
    seconds = next(value for name, value in result["seconds"].items() if name.endswith("/train"))
    row["seconds of a step"] = seconds / len(training)
    for name, steps in (("first tenth", training[:tenth]), ("last tenth", training[-tenth:])):
        for key in ("exact_match", "memory_reward", "memory_tokens", "groups_without_spread"):
            row[f"training, {name}: {key}"] = mean_or_none(step[key] for step in steps)
    # Points are told by their order: regimes have different numbers of steps.
    for name, point in zip(point_names(len(result["held_out"])), result["held_out"].values(), strict=True):
        for key, value in point.items():
            if key == "memories":
                row |= {f"held out {name}: {part}": value[part] for part in ("content", "kept", "guess")}
                row[f"held out {name}: lost"] = value["of_found"]["lost"]
            elif isinstance(value, dict):
                row |= {f"held out {name}: {key} {part}": number for part, number in value.items()}
            else:
                row[f"held out {name}: {key}"] = value
    for name, memories in result["memories"].items():
        for turn, figures in memories.get("by_turn", {}).items():
            row |= {f"training, {name}, turn {turn}: {key}": value for key, value in figures.items()}
        for column, kinds in memories["correlations"].items():
            row |= {f"training, {name}: R_M and {column}, {kind}": entry["mean"] for kind, entry in kinds.items()}
    return row


def point_names(count: int) -> list[str]:
    """Names of the evaluations of a run: the share of the training that is done."""
    return [f"{k}/{count - 1}" for k in range(count)]


def value_text(entry: dict, name: str, digits: int = 3) -> str:
    """A mean with its interval, from what [`summarize_results`] has of an arm."""
    return _text(entry["values"].get(name), digits)


def difference_text(entry: dict, name: str, digits: int = 3) -> str:
    """A difference from the reference with its interval and p-value."""
    row = entry["differences"].get(name)
    return "" if row is None else f"{_text(row, digits, '+')}, p {row['p_sign_flip']:.2g}"


def _text(row: dict | None, digits: int, sign: str = "") -> str:
    if row is None:
        return ""
    ends = [f"{end:{sign}.{digits}f}" for end in row["ci95"] or []]
    return f"{row['mean']:{sign}.{digits}f}" + (f" ({' to '.join(ends)})" if ends else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def table_texts(summary: dict[str, dict[str, dict]], suite: "Suite") -> str:
    """
    The tables of a study in Markdown.

    Args:
        summary (`dict`):
            What [`summarize_results`] made.
        suite ([`Suite`]):
            The study.
    """
    lines = []
    for regime, arms in summary.items():
        lines += [f"## {regime}", "", *_learning(arms, suite), *_levels(arms, suite)]
        lines += [*_points(arms, suite), *_by_turn(arms), *_correlations(arms)]
    return "\n".join(lines)


def _learning(arms: dict[str, dict], suite: "Suite") -> list[str]:
    start, end = f"held out 0/{suite.evaluations}", f"held out {suite.evaluations}/{suite.evaluations}"
    of = suite.reference
    header = ("arm", "seeds", "training", f"training − {of}", "start", "end", f"end − {of}")
    header = (*header, "kept, start", "kept, end", f"kept − {of}", "s per step")
    rows = [
        [
            arm,
            str(entry["values"]["area"]["n"]),
            value_text(entry, "area"),
            difference_text(entry, "area"),
            value_text(entry, f"{start}: exact_match"),
            value_text(entry, f"{end}: exact_match"),
            difference_text(entry, f"{end}: exact_match"),
            value_text(entry, f"{start}: kept", 2),
            value_text(entry, f"{end}: kept", 2),
            difference_text(entry, f"{end}: kept", 2),
            value_text(entry, "seconds of a step", 1),
        ]
        for arm, entry in arms.items()
    ]
    text = (
        "Exact match: mean over the training (area under the curve), and of held-out questions at its start and end. "
        "Kept: share of the facts found before that held-out memories hold."
    )
    return [text, "", *_table(header, rows)]


def _levels(arms: dict[str, dict], suite: "Suite") -> list[str]:
    header, rows = ["arm"], [[arm] for arm in arms]
    for level in suite.levels:
        header += [f"{level} (runs)", f"{level} − {suite.reference}"]
        for row, entry in zip(rows, arms.values(), strict=True):
            steps = f"steps to {level}"
            reached = f"{entry['reached'][str(level)]}/{entry['values'][steps]['n']}"
            row += [f"{value_text(entry, steps, 0)} ({reached})", difference_text(entry, steps, 0)]
    text = (
        f"Training: steps until the mean exact match of {suite.window} steps reaches a level. A run that never does counts "
        "with all its steps."
    )
    return [text, "", *_table(header, rows)]


def _points(arms: dict[str, dict], suite: "Suite") -> list[str]:
    digits = {"memory_tokens": 1, "tokens_total": 0, "tokens_peak": 0}
    names = {"exact_match": "EM", "f1": "F1", "p_mem": "P_mem", "p_full": "P_full", "memory_reward": "R_M"}
    names |= {name: name.replace("_", " ") for name in (*digits, "content", "kept", "lost", "guess")}
    names |= {f"outcomes {outcome}": outcome for outcome in OUTCOMES}
    rows = [
        [arm, point, *(value_text(entry, f"held out {point}: {name}", digits.get(name, 3)) for name in names)]
        for arm, entry in arms.items()
        for point in point_names(suite.evaluations + 1)
    ]
    return ["Held out, by point of the training.", "", *_table(["arm", "point", *names.values()], rows)]


def _by_turn(arms: dict[str, dict]) -> list[str]:
    rows = []
    for arm, entry in arms.items():
        for where in ("first tenth", "last tenth"):
            for key in ("kept", "memory_tokens", "memory_reward"):
                names = [f"training, {where}, turn {turn}: {key}" for turn in range(2, MAX_TURN + 1)]
                cells = [f"{entry['values'][name]['mean']:.3g}" if name in entry["values"] else "" for name in names]
                if any(cells):
                    rows.append([arm, where, key.replace("_", " "), *cells])
    text = (
        f"Training: what memories of the turns 2 to {MAX_TURN} are like in the first and the last tenth of the steps, means "
        "over seeds. `kept` is the share of the facts found before that the memory holds; the memory reward is the arm's "
        "own."
    )
    return [text, "", *_table(["arm", "steps", "", *map(str, range(2, MAX_TURN + 1))], rows)] if rows else []


def _correlations(arms: dict[str, dict]) -> list[str]:
    rows = []
    for arm, entry in arms.items():
        for where in ("first tenth", "all"):
            cells = []
            for column in COLUMNS:
                kinds = ("within_groups",) if column == "turn" else ("within_groups", "within_turns")
                names = [f"training, {where}: R_M and {column}, {kind}" for kind in kinds]
                cells.append(" / ".join(value_text(entry, name, 2) for name in names))
            if any(cell.strip(" /") for cell in cells):
                rows.append([arm, where, *cells])
    if not rows:
        return []
    text = (
        "Training: Spearman's correlation of the arm's own R_M with what the memories hold, the outcome, the turn and the "
        "length; within groups / within one turn of a group."
    )
    return [text, "", *_table(["arm", "steps", *(column.replace("_", " ") for column in COLUMNS)], rows)]


def write_results(folder: Path, results: Sequence[dict], suite: "Suite", settings: dict) -> str:
    """Write `results.jsonl`, `tables.md` and `learning.json`; return the tables."""
    summary = summarize_results(results, suite)
    tables = table_texts(summary, suite)
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results), encoding="utf-8")
    (folder / "tables.md").write_text(tables, encoding="utf-8")
    names = ("regime", "arm", "seed", "cold_start", "area", "commits")
    rows = [{name: result[name] for name in names} for result in results]
    write_report(folder / "learning.json", settings, rows, definitions=DEFINITIONS, suite=vars(suite), summary=summary)
    return tables
