"""The learning benchmark: what it counts, and what it says about memories."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from learning_suites import SUITE, learning_results, learning_tables, memory_content, plan_of
from records import record, turn

from mempo_trl.data.village import ATTRIBUTES, RELATIONS, Village


# What is counted


def test_intervals():
    """Student's t with 2 degrees of freedom: 4.3027 · 1 / √3 = 2.4841 around the mean of 1, 2, 3; none for one value."""
    entry = learning_tables.mean_interval([1.0, 2.0, 3.0])
    assert (entry["mean"], entry["n"]) == (2.0, 3)
    assert entry["ci95"] == pytest.approx([2 - 2.4841, 2 + 2.4841], abs=1e-4)
    assert learning_tables.mean_interval([0.5]) == {"mean": 0.5, "ci95": None, "n": 1}


def test_differences_are_of_pairs():
    """
    By seed, whatever else a side has: differences 0.1, 0.2, 0.3 with half-width 4.3027 · 0.1 / √3 = 0.2484; of the 8
    signs two are as far from 0: p = 0.25.
    """
    entry = learning_tables.compare_arms({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {2: 0.6, 1: 0.5, 0: 0.4, 8: 1.0})
    assert (entry["mean"], entry["n"], entry["p_sign_flip"]) == (pytest.approx(0.2), 3, 0.25)
    assert entry["ci95"] == pytest.approx([0.2 - 0.2484, 0.2 + 0.2484], abs=1e-4)
    assert learning_tables.compare_arms({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("level, steps", [(0.1, 1), (0.3, 2), (0.4, 4), (0.5, None)])
def test_steps_to_a_level(level, steps):
    """Means of two steps: 0.1, 0.3, 0.3, 0.4 after 1, 2, 3, 4 steps."""
    training = [{"step": step, "exact_match": value} for step, value in enumerate([0.0, 0.2, 0.4, 0.2, 0.6])]
    assert learning_tables.steps_to(training, level, window=2) == steps


# What memories hold


def make_village() -> Village:
    """Everyone's attributes are `x`, but Anna has a cat and Carl drinks tea; Bob's friend is Carl."""
    people = {
        name: dict.fromkeys(ATTRIBUTES, "x") | dict.fromkeys(RELATIONS, "Dora")
        for name in ("Anna", "Bob", "Carl", "Dora")
    }
    people["Anna"]["pet"], people["Bob"]["friend"], people["Carl"]["drink"] = "cat", "Carl", "tea"
    return Village(0, people)


VILLAGE = make_village()
QUESTION = "What is the pet of Anna?; What is the drink of the friend of Bob?"


def memory_turn(memory: str | None, searched: str | None, R_M: float | None = None, tokens: int = 3, **kwargs) -> dict:
    """A turn that writes a memory and reads a passage; the markers are those of a memory of so many tokens."""
    markers = [0] * 8
    if memory is not None:
        markers[tokens - 1] = 2
        markers[0] = 1
    response = None if searched is None else f"Doc 1(Title: {searched}) {VILLAGE.passage(searched)}\n"
    probabilities = {"R_M": R_M, "P_mem": R_M, "P_full": None if R_M is None else 0.0}
    outcome = "answer" if searched is None else "tool_call"
    defaults = {"memory": memory, "response": response, "mem_rewards_idx_list": markers} | probabilities
    return turn(10, 8, outcome, **(defaults | kwargs))


def rollout(answer: str | None, *turns: dict, id: str = "q0", step: int = 0, **kwargs) -> dict:
    score = 0.5 * sum(a == b for a, b in zip((answer or "").split("; "), ("cat", "tea"), strict=False))
    given = {"id": id, "step": step, "reward": score} | kwargs
    return record(answer, [["cat"], ["tea"]], list(turns), question=QUESTION, **given)


def test_facts_of_a_question():
    """The answers, and the name between two hops unless the question says it; each with the passage that states it."""
    assert memory_content.question_facts(QUESTION, VILLAGE) == [("Anna", "cat"), ("Bob", "carl"), ("Carl", "tea")]
    question = "What is the pet of Carl?; What is the drink of the friend of Bob?"
    assert memory_content.question_facts(question, VILLAGE) == [("Carl", "x"), ("Carl", "tea")]


def test_memories_of_a_rollout():
    """
    Facts: cat, Carl, tea. Turn 2 (Anna read): holds cat, 1/3 of all and 1/1 of those found. Turn 3 (Bob read): holds
    Carl and lost the cat, 1/3 and 1/2. Turn 4 (Dora read, who states none of them): all wrong but a guessed tea, which
    was not found: 1/3 and 0/2. Turn 5 has no closed memory and turn 1 no history. Turn 6 holds all: 3/3 and 2/2.
    """
    turns = [
        memory_turn("cat", "Anna"),
        memory_turn("Anna pet cat", "Bob", R_M=0.1, tokens=1),
        memory_turn("Anna pet dog; Bob friend Carl", "Dora", R_M=0.2),
        memory_turn("tea, concatenated", "Dora", R_M=0.3),
        memory_turn(None, "Dora"),
        memory_turn("cat, Carl, tea", None, tokens=8),
    ]
    table = memory_content.memory_table([rollout("cat; x", *turns)], VILLAGE)
    assert table["turn"].tolist() == [2, 3, 4, 6]
    assert table["content"].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert table["kept"].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert table["change"].tolist() == pytest.approx([0, 0, 0, 1])  # turn 1 held the cat, turn 5 nothing
    assert table["memory_tokens"].tolist() == [1, 3, 3, 8]
    assert table["exact_match"].tolist() == [0.5] * 4
    assert table["memory_reward"].tolist()[:3] == [0.1, 0.2, 0.3] and np.isnan(table["memory_reward"].iloc[3])


def test_correlations_within_groups():
    """
    y rises with x in each group, but the group with the larger x has the smaller y.

    Ranks in a: 1 2 3 and 1 3 2, ρ = 1 - 6 · 2 / (3 · 8) = 0.5; in b: ρ = 1; their mean is 0.75. Overall 1 2 3 4 5 and
    3 5 4 1 2: Σd² = 32, ρ = 1 - 6 · 32 / (5 · 24) = -0.6. The pair with a NaN is left out.
    """
    x = pd.Series([1, 2, 3, 11, 12, np.nan])
    y = pd.Series([101, 103, 102, 1, 2, 0.0])
    group = pd.Series(list("aaabbb"))
    assert memory_content.spearman_within(x, y, [group]) == {"mean": pytest.approx(0.75), "groups": 2, "pairs": 5}
    assert memory_content.spearman_within(x, y, []) == {"mean": pytest.approx(-0.6), "groups": 1, "pairs": 5}
    flat = memory_content.spearman_within(pd.Series([1.0, 2.0]), pd.Series([5.0, 5.0]), [])
    assert flat == {"mean": None, "groups": 0, "pairs": 0}


def test_correlations_have_ties():
    """Ties share their mean rank. x: 1 2 2 3 → 1 2.5 2.5 4; y: 1 3 2 4. Pearson of the ranks: 4.5 / √(4.5 · 5) = 0.9487."""
    mean = memory_content.spearman_within(pd.Series([1, 2, 2, 3]), pd.Series([1, 3, 2, 4]), [])["mean"]
    assert mean == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_a_reward_of_the_position_is_told_from_one_of_the_content():
    """
    A memory reward that is the turn's number follows the content of a group, since later memories hold more, and says
    nothing within a turn. One that is the content does both.
    """
    contents = {2: ["cat", "dog"], 3: ["cat, Carl", "dog, Carl"], 4: ["cat, Carl, tea", "dog, Carl, tea"]}

    def rollouts(reward) -> list[dict]:
        return [
            rollout("x; x", memory_turn(None, "Anna"), *(
                memory_turn(texts[which], "Bob", R_M=reward(t, texts[which])) for t, texts in contents.items()
            ))
            for which in (0, 1)
        ]  # fmt: skip

    position = memory_content.memory_table(rollouts(lambda t, text: t / 10), VILLAGE)
    by_kind = memory_content.correlations(position)["content"]
    # Ranks of content 1/3 2/3 1 and 0 1/3 2/3: 2.5 4.5 6 and 1 2.5 4.5; of the turn: 1.5 3.5 5.5 twice.
    expected = np.corrcoef([2.5, 4.5, 6, 1, 2.5, 4.5], [1.5, 3.5, 5.5, 1.5, 3.5, 5.5])[0, 1]
    assert by_kind["within_groups"]["mean"] == pytest.approx(expected)
    assert by_kind["within_turns"] == {"mean": None, "groups": 0, "pairs": 0}
    content = memory_content.memory_table(rollouts(lambda t, text: len(text) - 2 * text.count("dog")), VILLAGE)
    assert memory_content.correlations(content)["content"]["within_turns"] == {"mean": 1.0, "groups": 3, "pairs": 6}


def test_description_without_memories():
    """Rollouts without a memory have nothing to say about them, and no error either."""
    told = memory_content.describe_memories([rollout("cat; x", memory_turn(None, None))], VILLAGE)
    assert (told["memories"], told["content"], told["by_turn"]) == (0, None, {})
    assert told["correlations"]["turn"]["overall"]["mean"] is None
    assert json.loads(json.dumps(told)) == told


# From folders to tables


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def finish(task, seconds: float = 8.0) -> None:
    task.folder.mkdir(parents=True, exist_ok=True)
    task.write_done(seconds)


ANSWERS = ("x; x", "cat; x", "cat; tea")
"""Exact match 0, 0.5 and 1."""


@pytest.fixture
def study(tmp_path, in_repository, monkeypatch):
    """
    A finished study of two arms and two seeds of four steps, made by hand. `grpo` answers 0 0.5 0.5 0.5 and 0.5 0.5 0.5
    0.5, `paper` 0.5 1 1 1 and 0.5 0.5 0.5 1, each in two rollouts of one question; held out it is 0, then 0.5 (and 1 for
    `paper`).
    """
    monkeypatch.setattr(learning_results.Village, "generate", lambda seed, num_people: VILLAGE)
    suite = SUITE | {"regimes": {"plain": {}}, "arms": {name: SUITE["arms"][name] for name in ("grpo", "paper")}}
    plan = plan_of(tmp_path, suite)
    trained = {
        ("grpo", 0): (0, 1, 1, 1),
        ("grpo", 1): (1,) * 4,
        ("paper", 0): (1, 2, 2, 2),
        ("paper", 1): (1, 1, 1, 2),
    }

    def play(score: int, R_M: float | None, **kwargs) -> dict:
        turns = memory_turn(None, "Anna"), memory_turn("Anna pet cat", None, R_M=R_M)
        return rollout(ANSWERS[score], *turns, **kwargs)

    for task in plan.tasks.values():
        finish(task, seconds=10.0)
    for run in plan.runs:
        R_M = None if run.arm == "grpo" else 0.25
        for step, score in enumerate(trained[run.arm, run.seed]):
            rows = [play(score, R_M, step=step), play(score, R_M, step=step)]
            write_lines(run.train.folder / "rollouts" / f"train-{step:06d}-rank0.jsonl", rows)
        for step, task in run.evaluations.items():
            score = 0 if step == 0 else 1 if run.arm == "grpo" else 2
            probe = [{"R_M": None, "P_mem": None, "P_full": None}, {"R_M": 0.5, "P_mem": 0.75, "P_full": 0.25}]
            write_lines(task.folder / "rollouts.jsonl", [play(score, None, sample=0)])
            probed = {"probabilities": {"rollouts": [{"id": "q0", "sample": 0, "turns": probe}]}}
            (task.folder / "probe.json").write_text(json.dumps(probed))
    return plan


def test_results_of_runs(study):
    """A row per step and point, the mean exact match as area, and the probe's probabilities in what is held out."""
    results = learning_results.read_results(study.runs)
    by_run = {(result["arm"], result["seed"]): result for result in results}
    assert {run: result["area"] for run, result in by_run.items()} == {
        ("grpo", 0): 0.375, ("grpo", 1): 0.5, ("paper", 0): 0.875, ("paper", 1): 0.625,
    }  # fmt: skip
    paper = by_run["paper", 0]
    assert [row["exact_match"] for row in paper["training"]] == [0.5, 1, 1, 1]
    assert [row["step"] for row in paper["training"]] == [0, 1, 2, 3]
    first = paper["training"][0]
    assert (first["memory_reward"], first["memory_tokens"], first["groups_without_spread"]) == (0.25, 3, 1.0)
    assert (first["tokens_total"], first["tokens_peak"], first["outcomes"]["answer"]) == (36, 18, 1.0)
    assert by_run["grpo", 0]["training"][0]["memory_reward"] is None
    assert list(paper["held_out"]) == ["0", "2", "4"]
    assert [point["exact_match"] for point in paper["held_out"].values()] == [0.0, 1.0, 1.0]
    end = by_run["grpo", 0]["held_out"]["4"]
    assert (end["exact_match"], end["p_mem"], end["p_full"], end["memory_reward"]) == (0.5, 0.75, 0.25, 0.5)
    assert end["exact_match_by_objectives"] == {"2": 0.5} and end["memories"]["kept"] == 1.0
    assert paper["commands"]["runs/plain/paper/seed_0/train"] == list(study.runs[1].train.command)


def test_results_are_kept_until_a_task_is_made_anew(study):
    """`result.json` is read where it is there, made again after a task was, and missing while one is not finished."""
    run = study.runs[0]
    learning_results.read_results(study.runs)
    path = run.folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"area": 0.125}))
    assert learning_results.read_results([run])[0]["area"] == 0.125
    last = run.evaluations[4]
    (last.folder / "done.json").unlink()
    assert learning_results.read_results([run]) == []
    finish(last)
    assert learning_results.read_results(study.runs, last)[0]["area"] == 0.375


def test_summary_and_tables(study, tmp_path):
    """
    Means over seeds and pairs of seeds. Area: grpo 0.4375, paper 0.75, differences 0.5 and 0.125: 0.3125 ± 12.7062 ·
    0.265165 / √2 = 2.3824; both signs alike: p = 2 / 4. Level 0.5 with means of two steps: grpo after 2 and 1 steps.
    """
    results = learning_results.read_results(study.runs)
    tables = learning_tables.write_results(study.folder, results, study.suite, {"suite": "made up"})
    arms = learning_tables.summarize_results(results, study.suite)["plain"]
    assert arms["grpo"]["values"]["area"]["mean"] == 0.4375 and arms["grpo"]["differences"] == {}
    entry = arms["paper"]["differences"]["area"]
    assert (entry["mean"], entry["n"], entry["p_sign_flip"]) == (0.3125, 2, 0.5)
    assert entry["ci95"] == pytest.approx([0.3125 - 2.3824, 0.3125 + 2.3824], abs=1e-4)
    assert arms["grpo"]["values"]["steps to 0.5"]["mean"] == 1.5 and arms["grpo"]["reached"] == {"0.5": 2}
    assert arms["paper"]["values"]["held out 2/2: exact_match"]["mean"] == 1.0
    assert arms["paper"]["values"]["seconds of a step"]["mean"] == 2.5
    assert (
        "| paper | 2 | 0.750 (-0.838 to 2.338) | +0.312 (-2.070 to +2.695), p 0.5 | 0.000 (0.000 to 0.000) |" in tables
    )
    assert (
        "| paper | last tenth | kept | 1 |  |" in tables and "| paper | first tenth | memory reward | 0.25 |" in tables
    )
    assert tables == (study.folder / "tables.md").read_text()
    lines = (study.folder / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["grpo", "paper", "grpo", "paper"]
    report = json.loads((study.folder / "learning.json").read_text())
    assert report["summary"]["plain"]["paper"]["differences"]["area"]["mean"] == 0.3125
    assert report["suite"]["arms"]["grpo"] == SUITE["arms"]["grpo"] and "content" in report["definitions"]
