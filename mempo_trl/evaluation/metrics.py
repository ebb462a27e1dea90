"""Figures of rollouts on disk: how good, how expensive, and how sure one can be of either."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..monitoring import OUTCOMES
from ..rewards import NORMALIZERS, score_answer
from ..runner import FAILED, row_id


TOKENS_COUNTED = {
    "tokens_total_mean": "prompt and completion of every turn, system prompt and question included",
    "tokens_total_without_prefix_mean": "as tokens_total_mean, without system prompt and question, which every turn's "
    "prompt starts with",
    "tokens_peak_mean": "prompt and completion of the longest turn, system prompt and question included",
    "tokens_peak_without_prefix_mean": "as tokens_peak_mean, without system prompt and question",
    "tokens_generated_mean": "completions of all turns",
    "failures": "rollouts that failed count as wrong and malformed; they are left out of tokens, turns and searches",
}
"""What the token figures of [`summarize`] count, in words for a report."""

_SCORES = {
    f"{key}_{normalizer}": (metric, normalizer)
    for key, metric in (("exact_match", "em"), ("f1", "f1"))
    for normalizer in NORMALIZERS
}
COSTS = (
    "tokens_total",
    "tokens_total_without_prefix",
    "tokens_peak",
    "tokens_peak_without_prefix",
    "tokens_generated",
    "turns",
    "searches",
)


def rollout_figures(record: dict) -> dict[str, float | None]:
    """
    Figures of one rollout.

    Args:
        record (`dict`):
            What [`~mempo_trl.monitoring.rollout_record`] made. It needs golden answers.

    Returns:
        `dict[str, float | None]`: `exact_match_<normaliser>` and `f1_<normaliser>`, means over objectives;
        `format_ok`; and the costs, which are `None` for a rollout that failed.

    Raises:
        ValueError: If the rollout has no golden answers.
    """
    if not record.get("golden_answers"):
        raise ValueError(
            f"The rollout of {record['question']!r} has no `golden_answers`, so nothing can be said about its answer."
        )
    failed = record["outcome"] == FAILED
    answer = None if failed else record.get("answer")
    figures: dict[str, float | None] = {}
    for key, (metric, normalizer) in _SCORES.items():
        scores = score_answer(answer, record["golden_answers"], metric, normalizer)
        figures[key] = sum(scores) / len(scores)
    figures["format_ok"] = float(not failed and record["well_formed"])
    if failed:
        return figures | dict.fromkeys(COSTS)
    turns = record["turns"]
    # The prompt of the first turn is the prefix, so that files without `prefix_tokens` can be counted as well.
    prefix = record.get("prefix_tokens")
    prefix = turns[0]["prompt_tokens"] if prefix is None else prefix
    lengths = [turn["prompt_tokens"] + turn["completion_tokens"] for turn in turns]
    costs = {
        "tokens_total": sum(lengths),
        "tokens_total_without_prefix": sum(lengths) - len(lengths) * prefix,
        "tokens_peak": max(lengths),
        "tokens_peak_without_prefix": max(lengths) - prefix,
        "tokens_generated": sum(turn["completion_tokens"] for turn in turns),
        "turns": len(turns),
        "searches": sum(turn["outcome"] == "tool_call" and turn["response"] is not None for turn in turns),
    }
    return figures | {name: float(value) for name, value in costs.items()}


def bootstrap_sums(columns: np.ndarray, seed: int = 0, resamples: int = 2000) -> np.ndarray:
    """
    Sums over bootstrap resamples of the rows: as many rows as there are, drawn with replacement.

    Args:
        columns (`np.ndarray`):
            One row per question. # (Q, F)
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws; the same one gives the same draws for equally many questions.
        resamples (`int`, *optional*, defaults to `2000`):
            Number of resamples.

    Returns:
        `np.ndarray`: # (R, F)
    """
    rng, rows = np.random.default_rng(seed), len(columns)
    chunk = max(1, 2_000_000 // rows)  # bounds the memory
    sums = []
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        drawn = rng.integers(rows, size=(size, rows)) + np.arange(size)[:, None] * rows
        weights = np.bincount(drawn.ravel(), minlength=size * rows).reshape(size, rows)
        sums.append(weights @ columns)
    return np.concatenate(sums)


def interval(values: np.ndarray, level: float = 0.95) -> np.ndarray:
    """Percentile interval of resampled values over the first axis; NaN where none is defined. # (R, F) -> (2, F)"""
    tails = [50 * (1 - level), 50 * (1 + level)]
    ends = np.full((2, values.shape[1]), np.nan)
    defined = ~np.isnan(values).all(axis=0)
    ends[:, defined] = np.nanpercentile(values[:, defined], tails, axis=0)
    return ends


def divide(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Quotients, NaN where the divisor is 0."""
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=np.asarray(counts) > 0)


def sum_by(index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums of the rows of `values` with the same `index`. # (N,), (N, F) -> (index.max() + 1, F)"""
    sums = np.zeros((index.max() + 1, values.shape[1]))
    np.add.at(sums, index, values)
    return sums


def summarize(records: Sequence[dict], normalizer: str = "squad", seed: int = 0) -> dict[str, Any]:
    """
    Figures of an evaluation. Every rollout counts, whatever its outcome; one that failed is wrong.

    Args:
        records (`Sequence[dict]`):
            Rollouts with golden answers, as on disk.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of `exact_match`, `f1`, `avg_at_n` and `pass_at_n`; exact match and F1 under the other one are
            there by name as well.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `dict[str, Any]`: Means over rollouts; `exact_match` and `f1` are means over objectives first. `avg_at_n` is
        the exact match of an average sample of a question and `pass_at_n` that of its best one. [`TOKENS_COUNTED`]
        says what the token figures count. `ci95` holds bootstrap intervals over questions.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"got normalizer {normalizer!r}, expected one of {sorted(NORMALIZERS)}.")
    if not records:
        raise ValueError("there are no rollouts to summarize.")
    names = [*_SCORES, "format_ok", *COSTS]
    figures = [rollout_figures(record) for record in records]
    keys: dict[str, int] = {}
    index = np.array([keys.setdefault(row_id(record), len(keys)) for record in records])
    values = np.array([[np.nan if row[name] is None else row[name] for name in names] for row in figures])
    defined = ~np.isnan(values)
    best = np.zeros(len(keys))
    np.maximum.at(best, index, values[:, names.index(f"exact_match_{normalizer}")])
    sums = np.column_stack([sum_by(index, np.where(defined, values, 0.0)), best])  # (Q, F)
    counts = np.column_stack([sum_by(index, defined), np.ones(len(keys))])  # (Q, F)
    means = divide(sums.sum(axis=0), counts.sum(axis=0))
    # The questions are drawn, with all their samples: samples of one question are no independent evidence.
    ends = interval(divide(*np.hsplit(bootstrap_sums(np.hstack([sums, counts]), seed), 2)))

    keyed = [*_SCORES, "format_ok_frac", *(f"{name}_mean" for name in COSTS), "pass_at_n"]
    mean = {name: number_or_none(value) for name, value in zip(keyed, means, strict=True)}
    ci95 = {name: [number_or_none(low), number_or_none(high)] for name, low, high in zip(keyed, *ends, strict=True)}
    for table in (mean, ci95):
        table["exact_match"] = table["avg_at_n"] = table[f"exact_match_{normalizer}"]
        table["f1"] = table[f"f1_{normalizer}"]
    order = list(dict.fromkeys(["exact_match", "f1", *_SCORES, "avg_at_n", "pass_at_n", *keyed]))
    turns = [turn for record in records for turn in record["turns"]]
    return {
        "num_rollouts": len(records),
        "num_questions": len(keys),
        "num_samples": int(np.bincount(index).max()),
        "normalizer": normalizer,
        **{name: mean[name] for name in order},
        "failures": sum(record["outcome"] == FAILED for record in records),
        "tool_errors": sum(turn.get("tool_error") is not None for turn in turns),
        "outcomes": {
            outcome: sum(record["outcome"] == outcome for record in records) for outcome in (*OUTCOMES, FAILED)
        },
        "ci95": {name: ci95[name] for name in order},
    }


def number_or_none(value: float) -> float | None:
    """A number for JSON: `None` in place of NaN."""
    return None if np.isnan(value) else float(value)


def summarize_by_objectives(records: Sequence[dict], normalizer: str = "squad", seed: int = 0) -> dict[str, dict]:
    """[`summarize`] of all rollouts (`"all"`), and of those with each number of objectives (`"1"`, `"2"`, …)."""
    counts = sorted({len(record["golden_answers"]) for record in records})
    groups = {str(k): [record for record in records if len(record["golden_answers"]) == k] for k in counts}
    return {name: summarize(group, normalizer, seed) for name, group in {"all": records, **groups}.items()}


def summarize_by_dataset(records: Sequence[dict], normalizer: str = "squad", seed: int = 0) -> dict[str, dict]:
    """[`summarize`] of the rollouts of each data set that is named in them; empty where none is."""
    names = dict.fromkeys(record.get("dataset") for record in records)
    groups = {
        str(name): [record for record in records if record.get("dataset") == name]
        for name in sorted(names, key=str)
        if name is not None
    }
    return {name: summarize(group, normalizer, seed) for name, group in groups.items()}


def latency(records: Sequence[dict]) -> dict[str, float | None]:
    """Seconds of rollouts and of their searches; `None` where no rollout says how long it took."""
    seconds = [record["seconds"] for record in records if record.get("seconds") is not None]
    tools = [turn["tool_seconds"] for record in records for turn in record["turns"] if turn["response"] is not None]
    median, late = np.percentile(seconds, [50, 95]).tolist() if seconds else (None, None)
    return {
        "rollout_seconds_mean": float(np.mean(seconds)) if seconds else None,
        "rollout_seconds_median": median,
        "rollout_seconds_p95": late,
        "search_seconds_mean": float(np.mean(tools)) if tools else None,
    }
