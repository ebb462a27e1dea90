"""Comparisons of evaluations: tests by hand, pairs, and what is refused."""

import itertools
import json

import numpy as np
import pytest
from markdown_it import MarkdownIt
from records import failed, record, turn

from mempo_trl import cli
from mempo_trl.evaluation.comparison import (
    compare,
    compare_pairs,
    condition_warnings,
    examples,
    markdown,
    mcnemar_test,
    pair,
    sign_flip_test,
)
from mempo_trl.evaluation.metrics import summarize_by_objectives


def test_mcnemar_by_hand():
    """The exact test is the two-sided binomial test of wins among wins and losses."""
    assert mcnemar_test(0, 0) == 1.0
    assert mcnemar_test(1, 0) == 1.0  # 2 * 1 / 2
    assert mcnemar_test(8, 1) == mcnemar_test(1, 8) == pytest.approx(2 * (1 + 9) / 2**9)  # 0.0390625
    assert mcnemar_test(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert mcnemar_test(5, 5) == 1.0  # twice a tail with the middle is more than 1


def test_sign_flips_by_hand():
    """With few differences all signs are tried: the share of them with a sum at least as far from 0."""
    # 1, 2, 3: the sum 6 is reached by +++ and --- alone: 2 of 8.
    assert sign_flip_test(np.array([1.0, 2.0, 3.0])) == 2 / 8
    # 1, 1, 1, -1: the sum 2; of 16 sign patterns all but those with two of each sign (6) reach 2: 10 of 16.
    assert sign_flip_test(np.array([1.0, 1.0, 1.0, -1.0])) == 10 / 16
    assert sign_flip_test(np.array([0.0, 0.0, 0.1, 0.2, -0.3])) == 1.0  # 0.1 + 0.2 - 0.3 is not 0 in floats
    assert sign_flip_test(np.zeros(4)) == 1.0
    assert sign_flip_test(np.array([0.0, 5.0, 0.0])) == 1.0
    values = np.array([0.3, -0.1, 0.25, 0.7, -0.2])
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip_test(values) == sum(s >= abs(values.sum()) - 1e-12 for s in sums) / 32


def test_sign_flips_at_random():
    """With many differences random signs give the same p-value as all of them do, and the seed fixes it."""
    # 20 differences of 1, 15 of them positive: the sum is 10, reached by at least 15 equal signs:
    # 2 * (C(20,15) + ... + C(20,20)) / 2^20 = 2 * 21700 / 1048576 = 0.04139.
    values = np.array([1.0] * 15 + [-1.0] * 5)
    p = sign_flip_test(values, seed=1)
    assert p == pytest.approx(0.04139, abs=5 * (0.04139 / 10_000) ** 0.5)
    assert p == sign_flip_test(values, seed=1)
    assert sign_flip_test(np.ones(40)) == 1 / 10_001  # never 0


def rows(answers: list[str | None], tokens: int = 10) -> list[dict]:
    """One rollout per answer to questions with the golden answer `x`, each of one turn."""
    return [
        record(answer, [["x"]], [turn(tokens, 5, "answer")], question=f"Question {k}?", id=str(k), sample=0)
        for k, answer in enumerate(answers)
    ]


def test_differences_by_hand():
    """Means, differences and token savings of pairs, with a rollout that failed on one side."""
    # Exact match of the first 1, 0, 0, 0 and of the second 1, 1, 1, 0 (the last one failed).
    # Tokens over the three pairs that were played on both sides: 105 against 35.
    first, second = rows(["x", "y", None, "y"], tokens=100), rows(["x", "x", "x", None], tokens=30)
    second[3] = failed([["x"]], question="Question 3?", id="3", sample=0)
    result = compare_pairs(pair(first, second))
    assert (result["num_pairs"], result["num_questions"], result["failed_pairs"]) == (4, 4, 1)
    exact = result["exact_match"]
    assert (exact["first"], exact["second"], exact["difference"]) == (0.25, 0.75, 0.5)
    assert exact["p_sign_flip"] == 2 / 4  # two differences of 1: ++ and -- of four
    assert exact["ci95"][0] >= 0 and exact["ci95"][1] == 1.0
    tokens = result["tokens_total"]
    assert (tokens["first"], tokens["second"], tokens["difference"]) == (105, 35, -70)
    assert tokens["saving_percent"] == pytest.approx(100 * 70 / 105)
    assert tokens["saving_percent_ci95"] == pytest.approx([100 * 70 / 105] * 2)
    assert result["tokens_total_without_prefix"]["saving_percent"] == pytest.approx(0.0)  # 5 and 5
    assert result["mcnemar"] == {"wins": 2, "losses": 0, "p": 0.5}


def test_interval_of_a_difference():
    """The interval is of the paired difference: what both sides share does not widen it."""
    # Of 300 questions, both are right in 150, and the second alone in 30: the difference is 0.1 with the standard
    # error sqrt(0.1 * 0.9 / 300) = 0.01732; unpaired it would be sqrt(0.25 / 300 + 0.24 / 300) = 0.0404.
    first = rows(["x"] * 150 + ["y"] * 150)
    second = rows(["x"] * 180 + ["y"] * 120)
    exact = compare_pairs(pair(first, second))["exact_match"]
    assert exact["ci95"] == pytest.approx([0.1 - 1.96 * 0.01732, 0.1 + 1.96 * 0.01732], abs=0.006)
    assert exact["p_sign_flip"] == 1 / 10_001


def test_samples_are_paired():
    """Pairs are of the same question and sample; with several samples McNemar's test, which needs one, is left out."""
    first = [{**row, "sample": s} for s in range(2) for row in rows(["x", "y"])]
    second = list(reversed(first))
    pairs = pair(first, second)
    assert all(one == other for one, other in pairs) and len(pairs) == 4
    result = compare_pairs(pairs)
    assert (result["num_pairs"], result["num_questions"], result["mcnemar"]) == (4, 2, None)
    assert result["exact_match"]["difference"] == 0.0 and result["exact_match"]["p_sign_flip"] == 1.0


def test_everything_failed():
    """Where no pair was played on both sides nothing is said about tokens."""
    first = [failed([["x"]], question="Question 0?", id="0", sample=0)]
    result = compare_pairs(pair(first, rows(["x"])))
    assert result["exact_match"]["difference"] == 1.0 and result["tokens_total"] is None


def test_examples_of_wins_and_losses():
    """Wins and losses of the second, at most so many, with both answers."""
    chosen = examples(pair(rows(["x", "y", "y", "y", "x"]), rows(["y", "x", "x", "y", "x"])), limit=1)
    assert [row["id"] for row in chosen["losses"]] == ["0"] and [row["id"] for row in chosen["wins"]] == ["1"]
    assert (chosen["wins"][0]["first"], chosen["wins"][0]["second"]) == ("y", "x")


def evaluation(records: list[dict], **settings) -> tuple[dict, list[dict]]:
    """A report with the settings, and its rollouts."""
    settings = {"max_turns": 4, "temperature": 0.0, "num_samples": 1} | settings
    retrieval = {"retrieval_top_k": settings.pop("retrieval_top_k", 3)}
    top = {name: settings.pop(name, "same") for name in ("corpus_hash", "tokenizer_hash")}
    report = {**top, "settings": {"normalizer": "squad", **settings}, "retrieval": retrieval}
    return report | {"results": summarize_by_objectives(records)}, records


@pytest.mark.parametrize(
    "other, message",
    [
        (rows(["x"]), "A has 1 and B has 0 rollouts of questions or samples that the other does not have"),
        (rows(["x", "y", "z"]), "A has 0 and B has 1 rollouts"),
        (
            [*rows(["x"]), record("x", [["x"]], id="1", sample=0, question="Another?")],
            "`question` of the question '1'",
        ),
        (
            [*rows(["x"]), record("x", [["y"]], id="1", sample=0, question="Question 1?")],
            r"`golden_answers` of the question '1' is \[\['x'\]\] in A and \[\['y'\]\] in B",
        ),
        ([*rows(["x", "y"]), *rows(["x"])], "B has several rollouts of the same question and sample"),
    ],
)
def test_other_questions_are_refused(other, message):
    """Evaluations of other questions, other texts or other truths are refused, with what differs."""
    with pytest.raises(ValueError, match=message):
        compare({"A": evaluation(rows(["x", "y"])), "B": evaluation(other)})


def test_common_questions():
    """Asked for, the questions that both have are compared, and the rest is counted; without any it is refused."""
    tables = {"A": evaluation(rows(["x", "y"])), "B": evaluation(rows(["x", "x", "x"]))}
    comparison = compare(tables, common_questions=True)["comparisons"]["B"]
    assert comparison["unpaired"] == [0, 1]
    assert comparison["results"]["all"]["exact_match"]["difference"] == 0.5
    strange = [{**row, "id": f"other-{row['id']}"} for row in rows(["x"])]
    with pytest.raises(ValueError, match="A and B have no question in common"):
        compare({"A": tables["A"], "B": evaluation(strange)}, common_questions=True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("normalizer", "words"),
        ("corpus_hash", "other"),
        ("retrieval_top_k", 5),
        ("max_turns", 8),
        ("tokenizer_hash", "other"),
        ("temperature", 1.0),
    ],
)
def test_other_conditions_are_told(name, value):
    """Each condition that differs is told with both values; the same ones are not."""
    same = compare({"A": evaluation(rows(["x"])), "B": evaluation(rows(["x"]))})
    assert condition_warnings(same) == []
    comparison = compare({"A": evaluation(rows(["x"])), "B": evaluation(rows(["x"]), **{name: value})})
    (line,) = condition_warnings(comparison)
    assert line.startswith(f"`{name}` differs: ") and f"{value!r} in `B`" in line
    assert line in markdown(comparison)


def test_two_are_needed():
    """One evaluation can't be compared."""
    with pytest.raises(ValueError, match="got 1 evaluation"):
        compare({"A": evaluation(rows(["x"]))})


def write(folder, table: tuple[dict, list[dict]]) -> None:
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(table[0]))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table[1]))


def test_command(tmp_path, capsys):
    """`mempo compare A B C` takes folders and reports, prints a table for each, and writes JSON and Markdown."""
    two = [record("x; y|z", [["x"], ["y"]], question="Two?", id="two", sample=0)]
    write(tmp_path / "a", evaluation(rows(["x", "y", "y"], tokens=100) + two))
    write(tmp_path / "b", evaluation(rows(["y", "x", "x"], tokens=40) + two))
    write(tmp_path / "c", evaluation(rows(["x", "y", "x"]) + two, max_turns=8))
    paths = [str(tmp_path / "a"), str(tmp_path / "b" / "evaluation.json"), str(tmp_path / "c")]
    assert cli.main(["compare", *paths, "--output_dir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Warning: `max_turns` differs" in printed and "saving" in printed and "…" not in printed
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert comparison["first"] == paths[0] and comparison["others"] == paths[1:]
    results = comparison["comparisons"][paths[1]]["results"]
    assert list(results) == ["all", "1", "2"]
    # Over the three questions of one objective 105 against 45 tokens, a saving of 60 / 105.
    assert results["1"]["tokens_total"]["saving_percent"] == pytest.approx(100 * 60 / 105)
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "| k = 1 | exact match | 0.333 | 0.667 | +0.333 |" in text and "Wins of the second" in text


def test_answers_stay_text(tmp_path):
    """What a model wrote is shown in the page as it is: neither HTML nor Markdown comes of it."""
    foreign = "<img src=x> ![a](http://x) `c` | [b](y) &amp; \\<b>"
    page = markdown(compare({"A": evaluation(rows(["x", "x"])), "B": evaluation(rows(["x", foreign]))}))
    html = MarkdownIt("commonmark").enable("table").render(page)
    assert "&lt;img src=x&gt; ![a](http://x) `c` | [b](y) &amp;amp; \\&lt;b&gt;" in html
    assert "<img" not in html and "<a " not in html and "<b>" not in html


def test_missing_files_are_named(tmp_path):
    """A folder without one of the two files is refused, naming it."""
    write(tmp_path / "a", evaluation(rows(["x"])))
    (tmp_path / "a" / "rollouts.jsonl").unlink()
    for path, name in (("nowhere", "nowhere"), ("a", "rollouts.jsonl")):
        with pytest.raises(FileNotFoundError, match=f"{name}.*finished `mempo evaluate`"):
            cli.main(["compare", str(tmp_path / path), str(tmp_path / "a")])
