"""Figures of rollouts: by hand, against the published definition of SQuAD, and their intervals."""

import math
import random
import re
import string
from collections import Counter

import numpy as np
import pytest
from records import failed, record, turn

from mempo_trl.evaluation.metrics import (
    bootstrap_sums,
    interval,
    latency,
    rollout_figures,
    summarize,
    summarize_by_dataset,
    summarize_by_objectives,
)
from mempo_trl.monitoring import OUTCOMES


@pytest.fixture
def four_records() -> list[dict]:
    """Three of one objective, one of two; three answers, one of them wrong in part."""
    return [
        # One search, then "The U.S." for "US": squad "us" = "us"; words "the u s" against "us".
        record("The U.S.", [["US"]], [turn(10, 5), turn(25, 7, "answer")], question="a"),
        # No search. "Anna Anna Smith" for "Anna Smith".
        record("Anna Anna Smith", [["Anna Smith"]], [turn(10, 4, "answer", well_formed=False)], question="b"),
        # Two searches, one of them in the last turn that was allowed, which is not made any more; one failed tool.
        record(
            None,
            [["cat"]],
            [turn(10, 5, tool_error="no network"), turn(30, 50, response=None)],
            "out_of_turns",
            question="c",
        ),
        # A bad call, a search, and the answers to two objectives, the second wrong.
        record(
            "cat; Rome",
            [["cat", "a cat"], ["Paris"]],
            [turn(10, 5, "bad_call", well_formed=False, response="Error"), turn(20, 5), turn(20, 15, "answer")],
            question="d",
        ),
    ]


def test_figures_by_hand(four_records):
    """Every figure of the summary under each normaliser, derived by hand."""
    # Exact match, squad: "us" = "us" 1; "anna anna smith" 0; no answer 0; two objectives 1 and 0, mean 0.5.
    #   (1 + 0 + 0 + 0.5) / 4 = 0.375. Words: "the u s" is not "us": 0.5 / 4 = 0.125.
    # F1, squad: 1; "anna anna smith" (3 tokens) against "anna smith" (2), 2 in common as a multiset: 4 / 5 = 0.8;
    #   0; 0.5. Sum 2.3. Words: {the, u, s} against {us} 0; as sets {anna, smith} both: 1; 0; 0.5. Sum 1.5.
    # Tokens, prompt and completion of every turn: 15 + 32 = 47; 14; 15 + 80 = 95; 15 + 25 + 35 = 75. Sum 231.
    #   Without the prefix of 10, once per turn: 27, 4, 75, 45. Sum 151. Generated: 12, 4, 55, 25. Sum 96.
    # Peak, the longest turn: 32; 14; 80; 35. Sum 161. Without the prefix: 121.
    # Turns 2 + 1 + 2 + 3 = 8. Searches made: 1, 0, 1, 1. Well formed: 1, 0, 1, 0.
    figures = summarize(four_records)
    intervals = figures.pop("ci95")
    expected = {
        "num_rollouts": 4,
        "num_questions": 4,
        "num_samples": 1,
        "normalizer": "squad",
        "exact_match": 1.5 / 4,
        "f1": 2.3 / 4,
        "exact_match_squad": 1.5 / 4,
        "exact_match_words": 0.5 / 4,
        "f1_squad": 2.3 / 4,
        "f1_words": 1.5 / 4,
        "avg_at_n": 1.5 / 4,
        "pass_at_n": 1.5 / 4,
        "format_ok_frac": 2 / 4,
        "tokens_total_mean": 231 / 4,
        "tokens_total_without_prefix_mean": 151 / 4,
        "tokens_peak_mean": 161 / 4,
        "tokens_peak_without_prefix_mean": 121 / 4,
        "tokens_generated_mean": 96 / 4,
        "turns_mean": 8 / 4,
        "searches_mean": 3 / 4,
        "failures": 0,
        "tool_errors": 1,
        "outcomes": {**dict.fromkeys((*OUTCOMES, "failed"), 0), "answer": 3, "out_of_turns": 1},
    }
    assert figures == {
        name: value if isinstance(value, (str, dict)) else pytest.approx(value, abs=1e-12)
        for name, value in expected.items()
    }
    assert intervals.keys() == {name for name in expected if isinstance(expected[name], float)}
    assert all(low <= figures[name] <= high for name, (low, high) in intervals.items())
    words = summarize(four_records, "words")
    assert (words["normalizer"], words["exact_match"], words["f1"]) == ("words", 0.125, 0.375)
    assert words["ci95"]["f1"] == words["ci95"]["f1_words"] == intervals["f1_words"]
    same = ("exact_match_squad", "f1_words", "tokens_total_mean", "outcomes")
    assert [words[name] for name in same] == [figures[name] for name in same]


def test_samples_of_a_question():
    """`avg_at_n` is the exact match of an average sample, `pass_at_n` that of the best one of each question."""
    # First question: 1, 0 and 0; second, two objectives: 0.5, 0.5 and 0; third: never.
    # Average (1 + 1 + 0) / 9; best (1 + 0.5 + 0) / 3.
    answers = {"a": ["cat", "dog", None], "b": ["x; no", "no; y", "no; no"], "c": [None, None, "dog"]}
    golden = {"a": [["cat"]], "b": [["x"], ["y"]], "c": [["cat"]]}
    records = [
        record(answer, golden[id], question=f"Question {id}?", id=id, sample=sample)
        for id, given in answers.items()
        for sample, answer in enumerate(given)
    ]
    figures = summarize(records)
    assert (figures["num_rollouts"], figures["num_questions"], figures["num_samples"]) == (9, 3, 3)
    assert figures["avg_at_n"] == figures["exact_match"] == pytest.approx(2 / 9)
    assert figures["pass_at_n"] == pytest.approx(0.5)


def test_a_failed_rollout_is_wrong_and_costs_nothing_known(four_records):
    """
    A rollout that failed counts as wrong and malformed, with or without turns and answer, and is left out of tokens,
    turns and searches; where all failed these are unknown.
    """
    begun = record("US", [["US"]], [turn(10, 5)], "failed", question="e", error="no server")
    figures, without = summarize([*four_records, begun, failed([["cat"]], question="f")]), summarize(four_records)
    assert (figures["num_rollouts"], figures["failures"], figures["outcomes"]["failed"]) == (6, 2, 2)
    for name in ("exact_match", "f1", "format_ok_frac", "pass_at_n"):
        assert figures[name] == pytest.approx(without[name] * 4 / 6)
    for name in ("tokens_total_mean", "tokens_peak_mean", "turns_mean", "searches_mean"):
        assert figures[name] == without[name]
    nothing = summarize([failed([["cat"]])])
    assert (nothing["exact_match"], nothing["tokens_total_mean"]) == (0.0, None)
    assert nothing["ci95"]["tokens_total_mean"] == [None, None]


def test_prefix_of_a_record():
    """The prefix is what the record says, else the prompt of the first turn; it is counted once per turn."""
    turns = [turn(10, 5), turn(25, 7, "answer")]
    assert rollout_figures(record("x", [["x"]], turns))["tokens_total_without_prefix"] == 47 - 2 * 10
    figures = rollout_figures(record("x", [["x"]], turns, prefix_tokens=8))
    assert (figures["tokens_total_without_prefix"], figures["tokens_peak_without_prefix"]) == (47 - 2 * 8, 32 - 8)


def test_figures_by_number_of_objectives(four_records):
    """All rollouts first, then those of each number of objectives in rising order, each with its own means."""
    twelve = record(None, [["a"]] * 12, [turn(10, 1, "no_action")], "no_action", question="e")
    figures = summarize_by_objectives([twelve, *four_records])
    assert list(figures) == ["all", "1", "2", "12"]
    assert [row["num_rollouts"] for row in figures.values()] == [5, 3, 1, 1]
    assert figures["1"] == summarize(four_records[:3])
    assert (figures["2"]["exact_match"], figures["2"]["tokens_total_mean"]) == (0.5, 75)
    assert figures["all"]["exact_match"] == 1.5 / 5
    assert summarize_by_objectives(four_records, "words")["1"]["normalizer"] == "words"


def test_figures_by_set(four_records):
    """Each named set has figures of its own; rollouts without one are in none."""
    for row, name in zip(four_records, ("nq", "hotpotqa", "nq", None), strict=True):
        row["dataset"] = name
    figures = summarize_by_dataset(four_records)
    assert list(figures) == ["hotpotqa", "nq"]
    assert figures["nq"] == summarize([four_records[0], four_records[2]])
    assert summarize_by_dataset([record("x", [["x"]])]) == {}


def test_seconds():
    """Mean, median and 95th percentile of the rollouts that say how long they took, and the mean of the searches."""
    rows = [
        record("x", [["x"]], [turn(1, 1, tool_seconds=s / 10), turn(1, 1, "answer")], seconds=s) for s in range(21)
    ]
    assert latency([*rows, record("x", [["x"]])]) == {
        "rollout_seconds_mean": 10.0,
        "rollout_seconds_median": 10.0,
        "rollout_seconds_p95": 19.0,
        "search_seconds_mean": pytest.approx(1.0),
    }
    assert set(latency([failed([["x"]])]).values()) == {None}


def test_wrong_input():
    """What can't be judged is refused by name."""
    with pytest.raises(ValueError, match="'who\\?' has no `golden_answers`"):
        summarize([record("x", None, question="who?")])
    with pytest.raises(ValueError, match="'loose'.*'squad', 'words'"):
        summarize([record("x", [["x"]])], "loose")
    with pytest.raises(ValueError, match="no rollouts"):
        summarize([])


# The definition of SQuAD's evaluation script, version 1.1, as published.


def squad_normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_f1(prediction: str, truth: str) -> float:
    prediction_tokens, truth_tokens = squad_normalize(prediction).split(), squad_normalize(truth).split()
    same = sum((Counter(prediction_tokens) & Counter(truth_tokens)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction_tokens), same / len(truth_tokens)
    return 2 * precision * recall / (precision + recall)


def test_published_definition_of_squad():
    """On random answers, exact match and F1 are those of SQuAD's definition: the best over the aliases."""
    rng = random.Random(0)
    words = [
        "the",
        "The",
        "a",
        "U.S.",
        "us",
        "well-known",
        "well",
        "known",
        "cat",
        "cat's",
        "Anna",
        "anna,",
        "(b)",
        "42%",
    ]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 5)))

    scores = []
    for _ in range(2000):
        answer, aliases = text(), [text() for _ in range(rng.randint(1, 3))]
        figures = rollout_figures(record(answer, [aliases]))
        if squad_normalize(answer):  # SQuAD gives 1 for nothing against nothing, which is no answer here
            exact = max(float(squad_normalize(answer) == squad_normalize(alias)) for alias in aliases)
            scores.append((figures["exact_match_squad"], figures["f1_squad"]))
            assert scores[-1] == (exact, pytest.approx(max(squad_f1(answer, alias) for alias in aliases), abs=1e-12))
        else:
            assert figures["exact_match_squad"] == figures["f1_squad"] == 0.0
    assert {0.0, 1.0} <= {exact for exact, _ in scores} and len({score for _, score in scores}) > 10


@pytest.mark.parametrize(
    "answer, alias, squad, words",
    [
        # exact match and F1 under each normaliser
        ("U.S.", "us", (1, 1), (0, 0)),  # "us" | "u s"
        ("The Beatles", "Beatles", (1, 1), (0, 2 / 3)),  # article removed | kept: 1 of 2, 1 of 1
        ("well-known", "well known", (0, 0), (1, 1)),  # "wellknown" | "well known"
        ("cat cat", "cat", (0, 2 / 3), (0, 1)),  # multiset: 1 of 2, 1 of 1 | set
        ("yes it is", "yes", (0, 0), (0, 0.5)),  # the guard of HotpotQA | none: 1 of 3, 1 of 1
    ],
)
def test_normalisers_differ(answer, alias, squad, words):
    """Every difference between the two families of normalisers is in the figures under its name."""
    figures = rollout_figures(record(answer, [[alias]]))
    assert (figures["exact_match_squad"], figures["f1_squad"]) == pytest.approx(squad)
    assert (figures["exact_match_words"], figures["f1_words"]) == pytest.approx(words)


def test_bootstrap_of_a_proportion():
    """The interval of the mean of 400 tosses is the normal one: p -+ 1.96 sqrt(p (1 - p) / n)."""
    n, p = 400, 0.3
    values = np.zeros((n, 1))
    values[: int(p * n)] = 1.0
    low, high = interval(bootstrap_sums(values, seed=3, resamples=20_000) / n)[:, 0]
    half = 1.96 * math.sqrt(p * (1 - p) / n)  # 0.0449
    # The ends lie on a grid of 1 / 400; their Monte Carlo error is about 0.0004.
    assert (low, high) == (pytest.approx(p - half, abs=0.003), pytest.approx(p + half, abs=0.003))


def test_bootstrap_draws_questions():
    """
    Samples of a question are drawn together: 100 copies of each of 25 answers are as uncertain as the 25, not as 2,500
    independent ones, and the seed fixes the draws.
    """
    once = [record("x" if k < 5 else "y", [["x"]], question=f"{k}") for k in range(25)]
    often = [{**row, "sample": sample} for row in once for sample in range(100)]
    assert summarize(often)["ci95"]["exact_match"] == pytest.approx(summarize(once)["ci95"]["exact_match"])
    low, high = summarize(once)["ci95"]["exact_match"]
    # A binomial of 25 tosses at 0.2: P(X <= 1) = 0.027 and P(X >= 9) = 0.047, P(X >= 10) = 0.017.
    assert (low, high) in {(0.04, 0.36), (0.08, 0.36), (0.04, 0.4)}
    assert summarize(once, seed=1) == summarize(once, seed=1)
    assert not np.array_equal(bootstrap_sums(np.eye(5), seed=1), bootstrap_sums(np.eye(5), seed=2))


def test_bootstrap_in_chunks():
    """However many rows there are, a resample draws as many of them, and each of them as often as any other."""
    rows = 30_001
    sums = bootstrap_sums(np.column_stack([np.ones(rows), np.arange(rows) < 3000]), resamples=150)
    assert sums.shape == (150, 2) and (sums[:, 0] == rows).all()
    assert sums[:, 1].mean() == pytest.approx(3000, abs=5 * math.sqrt(3000 * 0.9 / 150))
