"""What memories in the village truly hold, and whether the memory reward knows it."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from mempo_trl.data.village import Village, parse_objectives
from mempo_trl.evaluation.metrics import rollout_figures
from mempo_trl.evaluation.probe import holds, probe_texts
from mempo_trl.rewards import NORMALIZERS


DEFINITIONS = {
    "facts": "what a question needs: the golden answer of each objective, and the name between the two hops of a chain "
    "(unless the question names that person anyway)",
    "content": "share of the facts of the question that the memory holds, as whole words",
    "found": "a fact is found once a tool response holds the passage that states it",
    "kept": "of the facts found before the turn, the share that its memory holds",
    "change": "content minus that of the memory of the turn before (0 where there was none)",
    "exact_match": "of the rollout: one value for all its memories",
    "turn": "from 1",
    "memory_tokens": "tokens of the memory block, its tags included",
    "overall": "Spearman's correlation over all memories",
    "within_groups": "mean of Spearman's correlations within each group (the rollouts of a question in a step), which "
    "share a baseline when advantages are made; groups without spread of one of the two are left out",
    "within_turns": "the same within the memories of one turn of a group, where the position can't explain anything",
}
"""What the figures of this module mean."""

COLUMNS = ("content", "kept", "change", "exact_match", "turn", "memory_tokens")
"""What the memory reward is correlated with."""

_normalize = NORMALIZERS["squad"]


def question_facts(question: str, village: Village) -> list[tuple[str, str]]:
    """
    What has to be found out for a question.

    Args:
        question (`str`):
            A question about the village.
        village ([`~mempo_trl.data.village.Village`]):
            The village that it is about.

    Returns:
        `list[tuple[str, str]]`: Per fact the person whose passage states it, and the fact, normalised.
    """
    objectives = parse_objectives(question)
    named = {objective.name for objective in objectives}
    facts = []
    for objective in objectives:
        person = objective.name
        if objective.relation is not None:
            person = village.people[objective.name][objective.relation]
            if person not in named:
                facts.append((objective.name, _normalize(person)))
        facts.append((person, _normalize(village.answer(objective))))
    return facts


def memory_tokens(turn: dict) -> int | None:
    """Tokens of a turn's memory block, from the markers in the dump; `None` without a closed block."""
    markers = turn["mem_rewards_idx_list"]
    if 1 not in markers:
        return None
    first = markers.index(1)
    return (markers.index(2) if 2 in markers else first) - first + 1


def memory_table(records: Sequence[dict], village: Village) -> pd.DataFrame:
    """
    One row per memory from the second turn on, as the memory reward has it.

    Args:
        records (`Sequence[dict]`):
            Rollouts as on disk.
        village ([`~mempo_trl.data.village.Village`]):
            The village that they were played in.

    Returns:
        `pd.DataFrame`: Columns `step`, `group`, `rollout`, `memory_reward` (NaN where it was not computed) and
        [`COLUMNS`]; [`DEFINITIONS`] says what they mean.
    """
    rows = []
    for number, record in enumerate(records):
        facts = question_facts(record["question"], village)
        exact_match = rollout_figures(record)["exact_match_squad"]
        found: set[tuple[str, str]] = set()
        before = 0.0
        for t, turn in enumerate(record["turns"], start=1):
            memory = None if memory_tokens(turn) is None else _normalize(turn["memory"] or "")
            held = [memory is not None and holds(memory, [text]) for _, text in facts]
            content = sum(held) / len(held)
            if memory is not None and t > 1:
                kept = [held for held, fact in zip(held, facts, strict=True) if fact in found]
                rows.append(
                    {
                        "step": record.get("step", 0),
                        "group": record["id"],
                        "rollout": number,
                        "memory_reward": np.nan if turn["R_M"] is None else turn["R_M"],
                        "content": content,
                        "kept": sum(kept) / len(kept) if kept else np.nan,
                        "change": content - before,
                        "exact_match": exact_match,
                        "turn": t,
                        "memory_tokens": memory_tokens(turn),
                    }
                )
            before = content
            found |= {fact for fact in facts if village.passage(fact[0]) in (turn["response"] or "")}
    return pd.DataFrame(rows, columns=["step", "group", "rollout", "memory_reward", *COLUMNS])


def spearman_within(x: pd.Series, y: pd.Series, groups: list[pd.Series]) -> dict[str, float | int | None]:
    """
    Mean of Spearman's correlations within groups.

    Args:
        x (`pd.Series`), y (`pd.Series`):
            Paired values; pairs of which one is NaN are left out.
        groups (`list[pd.Series]`):
            Values that are equal within a group. Without any, all pairs are one group.

    Returns:
        `dict`: `mean` over the groups in which both vary (`None` if there are none), the number of these `groups` and
        of the `pairs` in them.
    """
    defined = x.notna() & y.notna()
    if not defined.any():
        return {"mean": None, "groups": 0, "pairs": 0}
    keys = pd.DataFrame({str(i): group for i, group in enumerate(groups)} or {"all": 0}, index=x.index)[defined]
    ranks = pd.DataFrame({"x": x, "y": y})[defined]
    by = [keys[column] for column in keys]
    ranks = ranks.groupby(by).rank()
    ranks -= ranks.groupby(by).transform("mean")
    products = pd.DataFrame({"xy": ranks["x"] * ranks["y"], "xx": ranks["x"] ** 2, "yy": ranks["y"] ** 2, "pairs": 1})
    sums = products.groupby(by).sum()
    sums = sums[(sums["xx"] > 0) & (sums["yy"] > 0)]
    correlations = sums["xy"] / np.sqrt(sums["xx"] * sums["yy"])
    mean = float(correlations.mean()) if len(sums) else None
    return {"mean": mean, "groups": len(sums), "pairs": int(sums["pairs"].sum())}


def correlations(table: pd.DataFrame) -> dict[str, dict[str, dict]]:
    """
    Spearman's correlations of the memory reward with what could explain it.

    Args:
        table (`pd.DataFrame`):
            What [`memory_table`] made.

    Returns:
        `dict`: Per column of [`COLUMNS`], `overall`, `within_groups` and `within_turns` ([`DEFINITIONS`]), each with
        `mean`, `groups` and `pairs`.
    """
    group = [table["step"], table["group"]]
    kinds = {"overall": [], "within_groups": group, "within_turns": [*group, table["turn"]]}
    return {
        column: {kind: spearman_within(table["memory_reward"], table[column], by) for kind, by in kinds.items()}
        for column in COLUMNS
    }


def describe_memories(records: Sequence[dict], village: Village) -> dict:
    """
    What the memories of some rollouts are like.

    Args:
        records (`Sequence[dict]`):
            Rollouts as on disk.
        village ([`~mempo_trl.data.village.Village`]):
            The village that they were played in.

    Returns:
        `dict`: Number of `memories`; means of length, `content` and `kept`, also `by_turn`; `correlations`; and where
        golden answers are kept or lost ([`~mempo_trl.evaluation.probe.probe_texts`]).
    """
    table = memory_table(records, village)
    figures = ["memory_tokens", "content", "kept", "memory_reward"]
    by_turn = table.groupby("turn")[figures].mean()
    by_turn.insert(0, "memories", table.groupby("turn").size())
    probe = probe_texts(records)
    for left_out in ("rollouts", "normalizer", "skipped_objectives"):
        del probe[left_out]
    return {
        **numbers(table[figures].mean()),
        "by_turn": {str(turn): numbers(row) for turn, row in by_turn.iterrows()},
        "correlations": correlations(table),
        **probe,
    }


def numbers(row: pd.Series) -> dict[str, float | None]:
    """A row for JSON: `None` in place of NaN."""
    return {name: None if pd.isna(value) else float(value) for name, value in row.items()}
