"""Figures of the runs of a study, from their rollouts."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_content import correlations, describe_memories, memory_table, memory_tokens
from tasks import Task

from mempo_trl.data import village as village_module
from mempo_trl.data.village import Village
from mempo_trl.evaluation.metrics import rollout_figures
from mempo_trl.monitoring import OUTCOMES
from mempo_trl.runner import read_records


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
        **{name: mean_or_none(row[key] for row in rows) for name, key in names.items()},
        **{name: mean_or_none(turn[key] for turn in scored) for name, key in _PROBABILITIES.items()},
        "memory_tokens": mean_or_none(map(memory_tokens, turns)),
        "outcomes": {
            outcome: sum(record["outcome"] == outcome for record in records) / len(records) for outcome in OUTCOMES
        },
        "exact_match_by_objectives": {k: mean_or_none(by_objectives[k]) for k in sorted(by_objectives, key=int)},
        "groups_without_spread": mean_or_none(len(set(group)) == 1 for group in groups),
    }


_PROBABILITIES = {"p_mem": "P_mem", "p_full": "P_full", "memory_reward": "R_M"}


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are defined; `None` if there are none."""
    values = [float(value) for value in values if value is not None]
    return statistics.fmean(values) if values else None


def training_rollouts(folder: Path) -> dict[int, list[dict]]:
    """The rollouts of a training by the number of steps that were done when they were sampled."""
    steps: dict[int, list[dict]] = {}
    for path in sorted((folder / "rollouts").glob("train-*.jsonl")):
        with open(path, encoding="utf-8") as file:
            for record in map(json.loads, file):
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
        `dict[str, Any]`: `training`, a row per step; `area`, its mean exact match; `held_out`, figures by steps done, with
        what the `memories` hold; `memories` of the training, in its first and last tenth, and the correlations over
        all of it; with the commands, commits and seconds.
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

    memories = {
        "first tenth": describe_memories(sampled(order[:tenth]), village),
        "last tenth": describe_memories(sampled(order[-tenth:]), village),
        "all": {"correlations": correlations(memory_table(sampled(order), village))},
    }
    held_out = {}
    for step, task in run.evaluations.items():
        records = evaluated_rollouts(task.folder)
        held_out[str(step)] = {**rollouts_figures(records), "memories": describe_memories(records, village)}
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


def read_results(runs: Sequence[Run], task: Task | None = None) -> list[dict]:
    """
    The figures of the runs that are finished, from `result.json` where it is there.

    Args:
        runs (`Sequence[Run]`):
            Runs of a study.
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
