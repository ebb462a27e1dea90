import re
import string
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.rewards import (
    NORMALIZERS,
    REWARD_FUNCS,
    answer_exact_match_reward,
    answer_f1_reward,
    exact_match,
    exact_match_reward,
    f1,
    f1_reward,
    format_reward,
    normalize_squad,
    normalize_words,
    score_answer,
    split_answers,
)


@dataclass
class FakeRollout:
    answer: str | None
    well_formed: bool = True


# Words and marks that the normalizers and the guard treat in a special way, mixed with ordinary ones.
texts = st.lists(
    st.sampled_from(
        ["the", "A", "an", "yes", "No", "noanswer", "U.S.", "well-known", "x", "x", "1987", ";", "里", " "]
    )
).map(" ".join) | st.text(max_size=12)
alias_lists = st.lists(texts, min_size=1, max_size=4)
normalizers = st.sampled_from(sorted(NORMALIZERS))


@pytest.mark.parametrize(
    ("text", "squad", "words"),
    [
        ("U.S.", "us", "u s"),
        ("The Beatles", "beatles", "the beatles"),
        ("well-known", "wellknown", "well known"),
        ("New York, New York", "new york new york", "new york new york"),
        ("  Tab\tand\nnewline ", "tab and newline", "tab and newline"),
        ("a.n", "", "a n"),  # squad: the point goes first, then "an" is an article
        ("Theatre, an anthem", "theatre anthem", "theatre an anthem"),  # articles are whole words
        ("42%", "42", "42"),
        ("里德学院", "里德学院", "里德学院"),
        ("The", "", "the"),
        (" ;.! ", "", ""),
    ],
)
def test_normalizers(text, squad, words):
    """Each normalizer gives the published form, where the two differ and where they agree."""
    assert normalize_squad(text) == squad
    assert normalize_words(text) == words


@pytest.mark.parametrize("score", [exact_match, f1])
def test_unknown_normalizer(score):
    """An unknown normalizer is refused with its name and the choices, also for an empty answer."""
    with pytest.raises(ValueError, match=r"'squda'.*\['squad', 'words'\]"):
        score("", ["x"], normalizer="squda")


@pytest.mark.parametrize("aliases", ["Paris", [], ""])
def test_aliases_must_be_a_list(aliases):
    """A bare string is not taken for a list of letters, and no alias is no judgement."""
    with pytest.raises(ValueError, match="expected a list of at least one string"):
        exact_match("p", aliases)


@pytest.mark.parametrize(
    ("answer", "aliases", "normalizer", "em", "expected_f1"),
    [
        ("the US", ["U.S."], "squad", 1, 1),
        ("the US", ["U.S."], "words", 0, 0),  # {the, us} against {u, s}
        ("well known", ["well-known"], "squad", 0, 0),
        ("well known", ["well-known"], "words", 1, 1),
        ("Beatles", ["The Beatles"], "squad", 1, 1),
        ("Beatles", ["The Beatles"], "words", 0, 2 / 3),  # precision 1, recall 1/2
        # Repeated words: with counts 2 of 4 and 2 of 2 tokens are common, as sets 1 of 1 and 1 of 1.
        ("duran duran duran duran", ["Duran Duran"], "squad", 0, 2 / 3),
        ("duran duran duran duran", ["Duran Duran"], "words", 0, 1),
        ("Ann Lee", ["Bob", "Ann", "Ann Example"], "squad", 0, 2 / 3),  # the best alias, not the first or last
        ("ann", ["Bob", "Ann", "Ann Example"], "words", 1, 1),
        ("里德学院", ["里德学院"], "squad", 1, 1),
    ],
)
def test_exact_match_and_f1(answer, aliases, normalizer, em, expected_f1):
    """Exact match and F1 are those of the named family, the best over the aliases."""
    assert exact_match(answer, aliases, normalizer) == em
    assert f1(answer, aliases, normalizer) == pytest.approx(expected_f1, abs=1e-12)


@pytest.mark.parametrize("guarded", ["yes", "No.", "noanswer"])
def test_yes_no_guard(guarded):
    """A yes/no answer or alias that is not matched exactly gives 0 in the squad family, and overlaps in the other."""
    longer = f"{guarded} indeed"
    assert f1(guarded, [guarded], "squad") == 1
    assert f1(longer, [guarded], "squad") == 0
    assert f1(guarded, [longer], "squad") == 0
    assert f1(longer, [guarded, longer], "squad") == 1
    assert f1(longer, [guarded], "words") == pytest.approx(2 / 3)


FIFTY_WORDS = " ".join(["Ann Example"] + [f"word{i}" for i in range(48)])


@pytest.mark.parametrize("normalizer", sorted(NORMALIZERS))
@pytest.mark.parametrize(
    ("answer", "f1_by_normalizer"),
    [
        ("", {"squad": 0, "words": 0}),
        (" \n", {"squad": 0, "words": 0}),
        ("; ; ", {"squad": 0, "words": 0}),
        # squad: "or b or ann example", 2 of 5 and 2 of 2; words: {a, or, b, ann, example}, the same counts.
        ("A or B or Ann Example", {"squad": 4 / 7, "words": 4 / 7}),
        (FIFTY_WORDS, {"squad": 4 / 52, "words": 4 / 52}),  # 2 of 50 and 2 of 2
        ("Bob Other", {"squad": 0, "words": 0}),  # the honest wrong answer
    ],
)
def test_hedged_and_empty_answers(answer, f1_by_normalizer, normalizer):
    """No hedge or empty answer is an exact match, and F1 pays for every further word."""
    aliases = ["Ann Example"]
    assert exact_match(answer, aliases, normalizer) == 0
    assert f1(answer, aliases, normalizer) == pytest.approx(f1_by_normalizer[normalizer], abs=1e-12)


@pytest.mark.parametrize("score", [exact_match, f1])
@pytest.mark.parametrize(("answer", "normalizer"), [("", "squad"), ("The", "squad"), ("...", "words")])
def test_nothing_equals_nothing_is_no_match(answer, normalizer, score):
    """An answer that is normalized to nothing scores 0 even where an alias is normalized to nothing too."""
    assert score(answer, [answer], normalizer) == 0


@pytest.mark.parametrize(
    ("answer", "num_objectives", "expected"),
    [
        ("x; y", 3, ["x", "y", ""]),
        ("x; y; z; w", 3, ["x", "y", "z"]),
        ("x;y;z", 3, ["x", "y", "z"]),
        ("x; y; z;", 3, ["x", "y", "z"]),
        ("x; ; z", 3, ["x", "", "z"]),
        ("; ; ", 3, ["", "", ""]),
        ("", 3, ["", "", ""]),
        (None, 3, ["", "", ""]),
        ("Steins;Gate; y; z", 3, ["Steins", "Gate", "y"]),  # nothing tells this semicolon from a separator
        ("Steins;Gate", 1, ["Steins;Gate"]),
        (" x \n", 1, ["x"]),
        (None, 1, [""]),
    ],
)
def test_split_answers(answer, num_objectives, expected):
    """Parts are aligned by position, missing ones empty, surplus ones dropped; one objective is never split."""
    assert split_answers(answer, num_objectives) == expected


@pytest.mark.parametrize("normalizer", sorted(NORMALIZERS))
@pytest.mark.parametrize("metric", ["em", "f1"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("x; y", [1, 1, 0]),
        ("x; y; z; w", [1, 1, 1]),
        ("x;y;z", [1, 1, 1]),
        ("y; x; z", [0, 0, 1]),
        ("x; y y; w; z", [1, None, 0]),
        ("p;x; y; z", [0, 0, 0]),  # an answer that holds ";" shifts the others
        ("; ; ", [0, 0, 0]),
        (None, [0, 0, 0]),
    ],
)
def test_score_answer_of_several_objectives(answer, expected, metric, normalizer):
    """Each objective is scored at its own position, whatever the number of parts."""
    if None in expected:  # "y y" for "y": squad F1 has precision 1/2, recall 1; the sets of words are equal
        expected = [
            {("f1", "squad"): 2 / 3, ("f1", "words"): 1}.get((metric, normalizer), 0) if e is None else e
            for e in expected
        ]
    scores = score_answer(answer, [["x"], ["other", "y"], ["z"]], metric, normalizer)
    assert scores == pytest.approx(expected, abs=1e-12)


def test_score_answer_refuses():
    """An unknown metric and an empty list of objectives are refused by name."""
    with pytest.raises(ValueError, match=r"'bleu'.*\['em', 'f1'\]"):
        score_answer("x", [["x"]], metric="bleu")
    with pytest.raises(ValueError, match="got 0 objectives"):
        score_answer("x", [])


def reference_squad(answer, alias):
    """Exact match and F1 by the published formulas, written another way: token lists, precision and recall."""
    drop = re.compile("[" + re.escape(string.punctuation) + "]")
    gold, guess = (
        [token for token in re.split(r"\b(?:a|an|the)\b|\s", drop.sub("", text.lower())) if token]
        for text in (alias, answer)
    )
    if not guess:
        return 0.0, 0.0
    if guess == gold:
        return 1.0, 1.0
    if any(" ".join(side) in ("yes", "no", "noanswer") for side in (guess, gold)):
        return 0.0, 0.0
    left, common = list(gold), 0
    for token in guess:
        if token in left:
            left.remove(token)
            common += 1
    if common == 0:
        return 0.0, 0.0
    precision, recall = common / len(guess), common / len(gold)
    return 0.0, 2 * precision * recall / (precision + recall)


def reference_words(answer, alias):
    """The same for the words family: tokens are what is left between white space and punctuation."""
    gold, guess = (
        [token for token in re.split(r"[\s" + re.escape(string.punctuation) + "]", text.lower()) if token]
        for text in (alias, answer)
    )
    if not guess:
        return 0.0, 0.0
    common = len({token for token in guess if token in gold})
    precision, recall = common / len(set(guess)), common / max(len(set(gold)), 1)
    return float(guess == gold), 2 * precision * recall / (precision + recall) if common else 0.0


@settings(deadline=None)
@given(answer=texts, aliases=alias_lists)
def test_against_reference(answer, aliases):
    """Scores equal those of an independent implementation, for both families."""
    for normalizer, reference in (("squad", reference_squad), ("words", reference_words)):
        pairs = [reference(answer, alias) for alias in aliases]
        assert exact_match(answer, aliases, normalizer) == max(em for em, _ in pairs)
        assert f1(answer, aliases, normalizer) == pytest.approx(max(score for _, score in pairs), abs=1e-12)


@settings(deadline=None)
@given(answer=texts, aliases=alias_lists, normalizer=normalizers, data=st.data())
def test_score_properties(answer, aliases, normalizer, data):
    """Scores are in [0, 1], an exact match has F1 1, and the order of the aliases is irrelevant."""
    em, score = exact_match(answer, aliases, normalizer), f1(answer, aliases, normalizer)
    assert em in (0.0, 1.0) and 0 <= score <= 1
    if em == 1:
        assert score == 1
    shuffled = data.draw(st.permutations(aliases))
    assert exact_match(answer, shuffled, normalizer) == em and f1(answer, shuffled, normalizer) == score


@settings(deadline=None)
@given(answer=st.none() | texts, golden_answers=st.lists(alias_lists, min_size=1, max_size=4))
def test_every_answer_has_one_score_per_objective(answer, golden_answers):
    """Whatever the model answers, there is one score per objective and none raises."""
    for metric in ("em", "f1"):
        assert len(score_answer(answer, golden_answers, metric)) == len(golden_answers)


ROLLOUTS = [
    FakeRollout("x; y z"),
    FakeRollout("x; y z", well_formed=False),
    FakeRollout("x; y", well_formed=True),
    FakeRollout(None),
    FakeRollout("x"),
    FakeRollout("x"),
    FakeRollout("x", well_formed=False),
]
GOLDEN = [[["x"], ["y"]], [["x"], ["y"]], [["x"], ["y"]], [["x"]], None, [], [["x"], []]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Objective 1 matches; objective 2 is "y z" for "y": exact match 0, F1 2/3. The mean is over both objectives.
        ("exact_match_reward", [0.5, 0.0, 1.0, 0.0, None, None, None]),
        ("answer_exact_match_reward", [0.5, 0.5, 1.0, 0.0, None, None, None]),
        ("f1_reward", [5 / 6, 0.0, 1.0, 0.0, None, None, None]),
        ("answer_f1_reward", [5 / 6, 5 / 6, 1.0, 0.0, None, None, None]),
        ("format_reward", [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_reward_funcs(name, expected):
    """One reward per rollout, called as TRL does; `None`, never 0 or 1, where there is nothing to judge by."""
    rewards = REWARD_FUNCS[name](
        prompts=[""] * 7, completions=[""] * 7, golden_answers=GOLDEN, rollouts=ROLLOUTS, trainer_state=None
    )
    assert [reward is None for reward in rewards] == [value is None for value in expected]
    assert [r for r in rewards if r is not None] == pytest.approx([e for e in expected if e is not None], abs=1e-12)
    assert all(type(reward) is float for reward in rewards if reward is not None)


def test_reward_func_names():
    """Recipes find each reward function under its own name, which is also its name in TRL's logs."""
    expected = [exact_match_reward, f1_reward, answer_exact_match_reward, answer_f1_reward, format_reward]
    assert list(REWARD_FUNCS.values()) == expected
    assert list(REWARD_FUNCS) == [func.__name__ for func in expected]


@pytest.mark.parametrize("reward_func", [exact_match_reward, answer_f1_reward])
def test_reward_of_unequal_counts(reward_func):
    """A number of golden answers that is not that of the rollouts raises instead of dropping the rest."""
    with pytest.raises(ValueError, match="zip"):
        reward_func([""], golden_answers=[[["x"]]], rollouts=[FakeRollout("x"), FakeRollout("x")])
