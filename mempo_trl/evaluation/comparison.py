"""Two or more evaluations of the same questions: what differs, by how much, and whether that can be chance."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..rewards import NORMALIZERS
from ..runner import FAILED, read_records, row_id
from .metrics import (
    bootstrap_sums,
    divide,
    interval,
    number_or_none,
    rollout_figures,
    sum_by,
)


TOKENS = ("tokens_total", "tokens_peak", "tokens_total_without_prefix", "tokens_peak_without_prefix")
CONDITIONS = (
    "normalizer",
    "corpus_hash",
    "retrieval_top_k",
    "max_passage_tokens",
    "max_turns",
    "max_completion_length",
    "max_tool_response_length",
    "temperature",
    "num_samples",
    "tokenizer_hash",
)
"""What two evaluations have to share for their figures to differ by the agent alone. They differ often for a good
reason, so a difference is a warning; only other questions are refused."""


def read_evaluation(path: str | os.PathLike) -> tuple[dict, list[dict]]:
    """
    Read an evaluation from its folder.

    Args:
        path (`str` or `PathLike`):
            The folder that `mempo evaluate` wrote, or its `evaluation.json`.

    Returns:
        `tuple[dict, list[dict]]`: The report, and the rollouts of `rollouts.jsonl` beside it.

    Raises:
        FileNotFoundError: If one of the two files is missing.
        ValueError: If one of them can't be read.
    """
    report_path = Path(path)
    if report_path.is_dir():
        report_path = report_path / "evaluation.json"
    rollouts_path = report_path.parent / "rollouts.jsonl"
    for file in (report_path, rollouts_path):
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no {str(file)!r}. Give the folder of a finished `mempo evaluate`, with `evaluation.json` and "
                "`rollouts.jsonl`."
            )
    try:
        report = json.loads(report_path.read_text(encoding="utf-8"))
        report["results"]["all"]  # noqa: B018
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(report_path)!r} is not the report of an evaluation ({error!r}).") from None
    return report, read_records(rollouts_path)


def conditions(report: dict) -> dict[str, Any]:
    """The [`CONDITIONS`] of an evaluation, as far as its report says them."""
    return {
        name: next(
            (
                table[name]
                for table in (report, report.get("settings", {}), report.get("retrieval", {}))
                if name in table
            ),
            "not stated",
        )
        for name in CONDITIONS
    }


def sign_flip_test(differences: np.ndarray, seed: int = 0, permutations: int = 10_000) -> float:
    """
    Two-sided paired permutation test: how often random signs give a mean at least as far from 0.

    Args:
        differences (`np.ndarray`):
            Paired differences, one per question. # (Q,)
        seed (`int`, *optional*, defaults to `0`):
            Seed of the signs.
        permutations (`int`, *optional*, defaults to `10000`):
            Number of random signs; with at most 13 differences other than 0 all of them are tried instead.

    Returns:
        `float`: The p-value, 1 where nothing differs.
    """
    differences = differences[differences != 0]
    count = len(differences)
    if count == 0:
        return 1.0
    observed = abs(differences.sum()) - 1e-12 * abs(differences).sum()  # a tie may not depend on the order of a sum
    if count <= 13:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)  # (2**Q, Q)
        return float((np.abs(signs @ differences) >= observed).mean())
    rng, extreme = np.random.default_rng(seed), 0
    chunk = max(1, 2_000_000 // count)
    for start in range(0, permutations, chunk):
        shape = min(chunk, permutations - start), -(-count // 8)
        positive = np.unpackbits(rng.integers(256, size=shape, dtype=np.uint8), axis=1, count=count)  # (chunk, Q)
        sums = 2 * (positive @ differences) - differences.sum()
        extreme += int((np.abs(sums) >= observed).sum())
    return (1 + extreme) / (1 + permutations)  # the observed signs are one of the permutations


def mcnemar_test(wins: int, losses: int) -> float:
    """
    McNemar's exact test, two-sided: whether wins and losses can be tosses of a fair coin.

    Args:
        wins (`int`), losses (`int`):
            Questions that only one of two agents answers right.

    Returns:
        `float`: The p-value, 1 without wins and losses.
    """
    tosses, fewer = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(tosses, k) for k in range(fewer + 1)) / 2**tosses)


def pair(first: Sequence[dict], second: Sequence[dict], names: Sequence[str] = ("A", "B")) -> list[tuple[dict, dict]]:
    """
    Pairs of rollouts with the same question and sample.

    Args:
        first (`Sequence[dict]`), second (`Sequence[dict]`):
            Rollouts of two evaluations.
        names (`Sequence[str]`):
            What the two are called in messages.

    Returns:
        `list[tuple[dict, dict]]`: In the order of the first.

    Raises:
        ValueError: If a rollout is there twice, or if a question has the same `id` but another text or other golden
            answers.
    """
    tables = []
    for name, records in zip(names, (first, second), strict=True):
        table = {(row_id(record), record.get("sample", 0)): record for record in records}
        if len(table) != len(records):
            raise ValueError(f"{name} has several rollouts of the same question and sample, so they can't be paired.")
        tables.append(table)
    pairs = [(record, tables[1][key]) for key, record in tables[0].items() if key in tables[1]]
    for one, other in pairs:
        for key in ("question", "golden_answers"):
            if one[key] != other[key]:
                raise ValueError(
                    f"`{key}` of the question {row_id(one)!r} is {one[key]!r} in {names[0]} and {other[key]!r} in "
                    f"{names[1]}. The two were made on different questions."
                )
    return pairs


def compare_pairs(pairs: Sequence[tuple[dict, dict]], normalizer: str = "squad", seed: int = 0) -> dict[str, Any]:
    """
    Differences of the second rollouts from the first ones.

    Args:
        pairs (`Sequence[tuple[dict, dict]]`):
            What [`pair`] made.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of exact match and F1.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap and of the permutations.

    Returns:
        `dict[str, Any]`: Per figure the mean of both, their difference, its bootstrap interval over questions and the
        p-value of a sign-flip test over questions; for tokens also the saving in per cent with its interval, over the
        pairs of which neither failed. With one sample per question `mcnemar` counts the questions that only one
        answers right in all objectives.
    """
    scores = (f"exact_match_{normalizer}", f"f1_{normalizer}")
    figures = [[rollout_figures(record) for record in sides] for sides in zip(*pairs, strict=True)]
    keys: dict[str, int] = {}
    index = np.array([keys.setdefault(row_id(one), len(keys)) for one, _ in pairs])
    names = (*scores, *TOKENS)
    first, second = (
        np.array([[np.nan if row[name] is None else row[name] for name in names] for row in side]) for side in figures
    )  # (pairs, F)
    # A figure of a pair counts only where both have it: tokens are unknown where one failed.
    defined = ~np.isnan(first + second)
    first, second, number = (
        sum_by(index, np.where(defined, values, 0.0)) for values in (first, second, np.ones_like(first))
    )  # (Q, F)
    draws = np.hsplit(bootstrap_sums(np.hstack([first, second, number]), seed), 3)
    differences = interval(divide(draws[1] - draws[0], draws[2]))
    savings = interval(100 * (1 - divide(draws[1], draws[0])))
    failed = sum(FAILED in (one["outcome"], other["outcome"]) for one, other in pairs)
    result: dict[str, Any] = {"num_pairs": len(pairs), "num_questions": len(keys), "failed_pairs": failed}
    for k, name in enumerate(names):
        one, other, count = first[:, k], second[:, k], number[:, k]
        if not count.any():
            result[name] = None
            continue
        entry = {
            "first": float(one.sum() / count.sum()),
            "second": float(other.sum() / count.sum()),
            "difference": float((other - one).sum() / count.sum()),
            "ci95": [number_or_none(end) for end in differences[:, k]],
            "p_sign_flip": sign_flip_test((other - one)[count > 0] / count[count > 0], seed),
        }
        if name in TOKENS:
            entry["saving_percent"] = number_or_none(100 * (1 - divide(other.sum(), one.sum())))
            entry["saving_percent_ci95"] = [number_or_none(end) for end in savings[:, k]]
        result[name.removesuffix(f"_{normalizer}")] = entry
    if len(pairs) == result["num_questions"]:  # samples of one question are not independent tosses
        right = [[row[scores[0]] == 1.0 for row in side] for side in figures]
        wins = sum(other and not one for one, other in zip(*right, strict=True))
        losses = sum(one and not other for one, other in zip(*right, strict=True))
        result["mcnemar"] = {"wins": wins, "losses": losses, "p": mcnemar_test(wins, losses)}
    else:
        result["mcnemar"] = None
    return result


def _exact(record: dict, normalizer: str) -> float:
    return rollout_figures(record)[f"exact_match_{normalizer}"]


def examples(pairs: Sequence[tuple[dict, dict]], normalizer: str = "squad", limit: int = 5) -> dict[str, list[dict]]:
    """Rollouts in which the second does better (`"wins"`) or worse (`"losses"`), those that differ most first."""
    scored = []
    for one, other in pairs:
        difference = _exact(other, normalizer) - _exact(one, normalizer)
        scored.append((difference, one, other))
    chosen = {}
    for name, sign in (("wins", 1), ("losses", -1)):
        better = sorted((row for row in scored if sign * row[0] > 0), key=lambda row: -sign * row[0])
        chosen[name] = [
            {
                "id": row_id(one),
                "sample": one.get("sample", 0),
                "question": one["question"],
                "golden_answers": one["golden_answers"],
                "first": one.get("answer"),
                "second": other.get("answer"),
                "difference": difference,
            }
            for difference, one, other in better[:limit]
        ]
    return chosen


def compare(
    evaluations: dict[str, tuple[dict, list[dict]]],
    normalizer: str | None = None,
    common_questions: bool = False,
    seed: int = 0,
    max_examples: int = 5,
) -> dict[str, Any]:
    """
    Compare evaluations with the first of them.

    Args:
        evaluations (`dict[str, tuple[dict, list[dict]]]`):
            Name to what [`read_evaluation`] gave; at least two.
        normalizer (`str`, *optional*):
            Normaliser of exact match and F1; that of the first evaluation if not given. All of them are scored under
            it, whatever their own tables show.
        common_questions (`bool`, *optional*, defaults to `False`):
            Compare the questions and samples that both have, instead of refusing where one has more.
        seed (`int`, *optional*, defaults to `0`):
            Seed of bootstrap and permutations.
        max_examples (`int`, *optional*, defaults to `5`):
            Examples of wins, and of losses.

    Returns:
        `dict[str, Any]`: `normalizer`, the names in `first` and `others`, `conditions` that differ, and per other
        evaluation its `comparisons` by number of objectives and its `examples`.

    Raises:
        ValueError: If there are fewer than two evaluations, or if their questions differ.
    """
    if len(evaluations) < 2:
        raise ValueError(f"got {len(evaluations)} evaluation, expected at least two; each needs a path of its own.")
    (base_name, (base_report, base)), *others = evaluations.items()
    normalizer = normalizer or base_report["results"]["all"]["normalizer"]
    if normalizer not in NORMALIZERS:
        raise ValueError(f"got normalizer {normalizer!r}, expected one of {sorted(NORMALIZERS)}.")
    stated = {name: conditions(report) for name, (report, _) in evaluations.items()}
    differing = {
        condition: {name: values[condition] for name, values in stated.items()}
        for condition in CONDITIONS
        if any(values[condition] != stated[base_name][condition] for values in stated.values())
    }
    comparisons = {}
    for name, (_, records) in others:
        pairs = pair(base, records, (base_name, name))
        only = len(base) - len(pairs), len(records) - len(pairs)
        if any(only) and not common_questions:
            raise ValueError(
                f"{base_name} has {only[0]} and {name} has {only[1]} rollouts of questions or samples that the other "
                "does not have. Evaluate both on the same ones, or compare those that they share with "
                "`--common_questions`."
            )
        if not pairs:
            raise ValueError(f"{base_name} and {name} have no question in common.")
        counts = sorted({len(one["golden_answers"]) for one, _ in pairs})
        groups = {"all": pairs}
        if len(counts) > 1:
            groups |= {str(k): [p for p in pairs if len(p[0]["golden_answers"]) == k] for k in counts}
        comparisons[name] = {
            "unpaired": list(only),
            "results": {key: compare_pairs(group, normalizer, seed) for key, group in groups.items()},
            "examples": examples(pairs, normalizer, max_examples),
        }
    return {
        "first": base_name,
        "others": list(comparisons),
        "normalizer": normalizer,
        "seed": seed,
        "differing_conditions": differing,
        "comparisons": comparisons,
    }


FIGURES = {
    "exact_match": "exact match",
    "f1": "F1",
    "tokens_total": "tokens total",
    "tokens_peak": "tokens peak",
    "tokens_total_without_prefix": "tokens total, without prefix",
    "tokens_peak_without_prefix": "tokens peak, without prefix",
}
"""Figures of a comparison, with their names in tables."""

HEADER = ("group", "figure", "first", "second", "difference", "95%", "p", "saving %", "95%")


def table_rows(results: dict[str, dict]) -> list[tuple[str, ...]]:
    """Cells of the `results` of one comparison, under [`HEADER`]."""
    rows = []
    for group, result in results.items():
        for name, label in FIGURES.items():
            entry = result[name]
            if entry is None:
                continue
            digits = 0 if name in TOKENS else 3
            saving = entry.get("saving_percent")
            rows.append(
                (
                    "all" if group == "all" else f"k = {group}",
                    label,
                    f"{entry['first']:.{digits}f}",
                    f"{entry['second']:.{digits}f}",
                    f"{entry['difference']:+.{digits}f}",
                    _ends(entry["ci95"], digits),
                    f"{entry['p_sign_flip']:.2g}",
                    "" if saving is None else f"{saving:.1f}",
                    "" if saving is None else _ends(entry["saving_percent_ci95"], 1),
                )
            )
    return rows


def _ends(ends: list[float], digits: int) -> str:
    low, high = ends
    return f"{low:+.{digits}f} to {high:+.{digits}f}"


def markdown(comparison: dict[str, Any]) -> str:
    """The comparison as a Markdown page."""
    lines = ["# Comparison", ""]
    lines += [f"First: `{comparison['first']}`. Normaliser: `{comparison['normalizer']}`. {EXPLANATION}", ""]
    lines += [f"> {line}" for line in condition_warnings(comparison)] or ["All stated conditions are the same."]
    for name, entry in comparison["comparisons"].items():
        lines += ["", f"## `{name}` against `{comparison['first']}`", ""]
        lines += [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
        lines += [f"| {' | '.join(row)} |" for row in table_rows(entry["results"])]
        mcnemar = entry["results"]["all"]["mcnemar"]
        if mcnemar is not None:
            lines += ["", f"Right in all objectives only in the second: {mcnemar['wins']}, only in the first: "
                      f"{mcnemar['losses']}; McNemar's exact test p = {mcnemar['p']:.2g}."]  # fmt: skip
        failed = entry["results"]["all"]["failed_pairs"]
        if failed:
            lines += ["", f"{failed} pairs with a rollout that failed count as wrong, and not in the tokens."]
        for kind, rows in entry["examples"].items():
            if rows:
                lines += ["", f"### {kind.capitalize()} of the second", "", "| question | golden | first | second |"]
                lines += ["| --- | --- | --- | --- |"]
            for row in rows:
                golden = "; ".join(aliases[0] for aliases in row["golden_answers"])
                cells = (row["question"], golden, row["first"], row["second"])
                lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


_MARKUP = re.compile(r"[\\`*_{}\[\]()<>#!|~$&]")

EXPLANATION = (
    "Differences are second minus first over the same questions, k is the number of objectives. Intervals: bootstrap "
    "over questions; p: two-sided sign-flip test over questions. Tokens with system prompt and question counted, and "
    "without them (without prefix)."
)


def condition_warnings(comparison: dict[str, Any]) -> list[str]:
    """One line per condition in which the evaluations differ."""
    lines = []
    for condition, values in comparison["differing_conditions"].items():
        told = ", ".join(f"{value!r} in `{name}`" for name, value in values.items())
        lines.append(f"`{condition}` differs: {told}. The difference of the figures is not the agent's alone.")
    return lines


def _cell(text: str | None) -> str:
    """A question or an answer as the text of a cell: nothing in it is Markdown or HTML."""
    return "none" if text is None else _MARKUP.sub(r"\\\g<0>", " ".join(str(text).split())[:300])
