"""The token benchmark: what it counts, and that its scripted comparison is one at equal exact match."""

import pytest
from conftest import load_benchmark

from mempo_trl.data import village as village_module
from mempo_trl.data.village import Village, VillageArguments
from mempo_trl.rollout import Rollout, Turn


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/tokens.py`, which imports its neighbour `reporting` as a script does."""
    return load_benchmark("tokens")


@pytest.fixture(scope="module")
def records(benchmark, tmp_path_factory):
    """Records of the scripted rollouts of 24 questions in each context."""
    folder = tmp_path_factory.mktemp("tokens")
    village_module.main(
        VillageArguments(str(folder / "village"), num_train=1, num_test=24, objectives=[2, 6], num_rollouts=20)
    )
    rows = benchmark.read_rows(folder / "village" / "test.jsonl")
    return benchmark.script(rows, Village.generate(), benchmark.make_protocols(folder, top_k=1))


def turn(prompt_ids: list[int], completion_ids: list[int]) -> Turn:
    return Turn(prompt_ids, completion_ids, None, "", "tool_call", True, carried=len(completion_ids))


def test_computed_tokens_of_a_context_that_grows(benchmark):
    """Full context: every token is computed once, 3 + 2, then the response 1 and the turn 2, then 1 + 1."""
    turns = [turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6], [7, 8]), turn([1, 2, 3, 4, 5, 6, 7, 8, 9], [10])]
    assert benchmark.computed_tokens(Rollout("q", None, [1, 2, 3], turns)) == 5 + 3 + 2


def test_computed_tokens_of_a_context_that_is_rewritten(benchmark):
    """
    Memory context: the prefix [1, 2] is reused, and of the last turn what is as in the turn before it, at its place.

    Turn 1: 2 + 2. Turn 2 goes on from it: response 1 + turn 3 = 4. Turn 3 has the prompt prefix + [4, 7, 8] + [6]; the
    turn-2 prompt begins [1, 2, 4], so 3 are reused: 3 + 1 = 4.
    """
    turns = [turn([1, 2], [4, 5]), turn([1, 2, 4, 5, 6], [4, 7, 8]), turn([1, 2, 4, 7, 8, 6], [9])]
    assert benchmark.computed_tokens(Rollout("q", None, [1, 2], turns)) == 4 + 4 + 4


def test_the_script_is_right_in_both_contexts(benchmark, records):
    """The two contexts search and answer alike and are always right; only memories are missing in the full one."""
    assert all(record["outcome"] == "answer" and record["well_formed"] for c in records for record in records[c])
    for memory, full in zip(records["memory"], records["full"], strict=True):
        assert memory["answer"] == full["answer"]
        assert [t["call"] for t in memory["turns"]] == [t["call"] for t in full["turns"]]
        assert not any(t["memory"] for t in full["turns"]) and all(t["memory"] for t in memory["turns"][1:])
    results = benchmark.compare(records)
    assert list(results) == ["2", "6"]
    for result in results.values():
        assert result["exact_match"]["first"] == result["exact_match"]["second"] == 1.0


def test_figures_are_those_of_the_prompts(benchmark, records):
    """Totals, peaks and savings follow from the turns; a full context computes each of its tokens once."""
    rows = {context: [r for r in records[context] if len(r["golden_answers"]) == 6] for context in records}
    lengths = {
        context: [[t["prompt_tokens"] + t["completion_tokens"] for t in record["turns"]] for record in rows[context]]
        for context in rows
    }
    result = benchmark.compare(records)["6"]
    totals = {context: sum(map(sum, lengths[context])) for context in lengths}
    peaks = {context: sum(map(max, lengths[context])) for context in lengths}
    for name, sums in (("tokens_total", totals), ("tokens_peak", peaks)):
        assert result[name]["saving_percent"] == pytest.approx(100 * (1 - sums["memory"] / sums["full"]))
    assert [record["tokens_computed"] for record in rows["full"]] == [turns[-1] for turns in lengths["full"]]
    computed = {context: sum(record["tokens_computed"] for record in rows[context]) for context in rows}
    entry = result["tokens_computed"]
    assert entry["saving_percent"] == pytest.approx(100 * (1 - computed["memory"] / computed["full"]))
    low, high = entry["saving_percent_ci95"]
    assert low <= entry["saving_percent"] <= high


def test_where_both_are_right(benchmark, records):
    """A question that one context answered wrong in one objective leaves the comparison of right answers."""
    first = records["memory"][0] | {"answer": "nothing"}
    kept = benchmark.both_right(records | {"memory": [first, *records["memory"][1:]]})
    for context in kept:
        assert [record["id"] for record in kept[context]] == [record["id"] for record in records[context]][1:]
