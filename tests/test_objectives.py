import pytest
from datasets import Dataset, IterableDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mempo_trl.data.objectives import (
    check_dataset,
    compose_objectives,
    deduplicate,
    golden_answers_of,
    normalize_golden_answers,
    question_key,
    separate_questions,
)
from mempo_trl.rewards import score_answer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("value", "objectives"),
    [
        ("a cat", [["a cat"]]),
        (["a cat"], [["a cat"]]),
        (["a cat", "the cat"], [["a cat", "the cat"]]),  # aliases of one objective
        ([["a cat"]], [["a cat"]]),
        ([["a cat", "the cat"], ["Ben"]], [["a cat", "the cat"], ["Ben"]]),
        ([["a cat"], "Ben"], [["a cat"], ["Ben"]]),
        (("a", "b"), [["a", "b"]]),
        (["", "a cat", " "], [["a cat"]]),  # empty aliases are dropped
        ([["a cat", None], [None, "Ben"]], [["a cat"], ["Ben"]]),  # Arrow fills up with `None`
        (1987, [["1987"]]),
        ([1987, "'87"], [["1987", "'87"]]),
        ([[1987], [0]], [["1987"], ["0"]]),
    ],
)
def test_golden_answers(value, objectives):
    """Every usual form of the truth becomes objectives x aliases."""
    assert normalize_golden_answers(value) == objectives
    assert normalize_golden_answers(objectives) == objectives


@pytest.mark.parametrize(
    "value", [None, [], "", " ", [""], [[]], [["a"], []], [["a"], [" "]], [None], [["a"], [None]]]
)
def test_no_golden_answer(value):
    """A truth without an answer for each objective is refused, and quoted."""
    with pytest.raises(ValueError, match="(?s)`golden_answers` is .*at least one answer"):
        normalize_golden_answers(value)


@pytest.mark.parametrize(
    "value", [{"text": ["a cat"], "answer_start": [3]}, {"value": "a", "aliases": ["b"]}, [{"text": "a"}], [[["a"]]]]
)
def test_truth_of_another_form(value):
    """A truth of another form, such as SQuAD's or TriviaQA's, is an error; its keys are no answers."""
    with pytest.raises(ValueError, match="is no answer"):
        normalize_golden_answers(value)


alias = st.text(min_size=1, max_size=5).filter(str.strip)


@settings(deadline=None)
@given(st.lists(st.lists(alias, min_size=1, max_size=3), min_size=1, max_size=4))
def test_objectives_are_kept(objectives):
    """Objectives x aliases keep their order and none is lost, but for white space around and repeated aliases."""
    expected = [list(dict.fromkeys(alias.strip() for alias in aliases)) for aliases in objectives]
    assert normalize_golden_answers(objectives) == expected
    assert normalize_golden_answers(expected) == expected
    assert golden_answers_of({"golden_answers": objectives}) == expected


def test_golden_answers_of():
    """A training row's truth is objectives x aliases; only where it is not needed it may be missing."""
    assert golden_answers_of({"golden_answers": ["a", "b"]}) == [["a", "b"]]
    assert golden_answers_of({"golden_answers": ["a"]}, required=False) == [["a"]]
    for row in ({}, {"golden_answers": None}, {"golden_answers": []}):
        assert golden_answers_of(row, required=False) is None
        with pytest.raises(ValueError, match="at least one answer"):
            golden_answers_of(row)


GOOD = {"question": ["q1", "q2"], "golden_answers": [["a"], ["b"]]}


@pytest.mark.parametrize("needs_answers", [True, False])
def test_check_of_a_good_dataset(needs_answers):
    """A data set with questions and answers passes, as a table and as a stream."""
    dataset = Dataset.from_dict({**GOOD, "other": [None, 1]})
    check_dataset(dataset, "train_dataset", needs_answers)
    check_dataset(dataset.to_iterable_dataset(), "train_dataset", needs_answers)
    check_dataset(IterableDataset.from_generator(lambda: iter([dict(dataset[0])])), "train_dataset", needs_answers)


def test_check_without_answers():
    """Answers are demanded only where a reward needs them."""
    dataset = Dataset.from_dict({"question": ["q1"]})
    check_dataset(dataset, "train_dataset", needs_answers=False)
    with pytest.raises(
        ValueError, match="`train_dataset` has no column 'golden_answers'; its columns are .'question'."
    ):
        check_dataset(dataset, "train_dataset", needs_answers=True)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": ["q"]}, "has no column 'question' and no column 'golden_answers'.*load_questions"),
        ({**GOOD, "images": [[], []]}, "`eval_dataset` has an image column"),
        ({**GOOD, "image": [None, None]}, "`eval_dataset` has an image column"),
        ({**GOOD, "question": ["q1", " "]}, "Row 1 of `eval_dataset` has the question ' '"),
        ({**GOOD, "question": ["q1", None]}, "Row 1 of `eval_dataset` has the question None"),
        ({**GOOD, "question": [["q1"], ["q2"]]}, "Row 0 of `eval_dataset` has the question .'q1'."),
        ({**GOOD, "golden_answers": [["a"], []]}, "Row 1 of `eval_dataset`: `golden_answers` is .."),
        ({**GOOD, "golden_answers": [["a"], None]}, "Row 1 of `eval_dataset`: `golden_answers` is None"),
    ],
)
def test_check_of_a_bad_dataset(columns, says):
    """A missing column, an image, a question that is no text and an empty truth are named with their row."""
    with pytest.raises(ValueError, match=says):
        check_dataset(Dataset.from_dict(columns), "eval_dataset", needs_answers=True)
    if "Row 1" not in says:  # of a stream only the first row is looked at
        with pytest.raises(ValueError, match=says):
            check_dataset(Dataset.from_dict(columns).to_iterable_dataset(), "eval_dataset", needs_answers=True)


def row(question, *aliases, **columns):
    return {"question": question, "golden_answers": [list(aliases)], **columns}


def test_deduplicate():
    """A question is kept once, from the first source that has it, however it is spelled."""
    first = [row("Who is Ann?", "z"), row("who is  ann", "b"), row("What?", "c")]
    second = [row("WHAT", "d"), row("Where?", "e")]
    kept, dropped = deduplicate({"x": first, "y": second})
    assert kept == {"x": [row("What?", "c"), row("Who is Ann?", "z")], "y": [row("Where?", "e")]}
    assert dropped == {("x", "repeated"): 1, ("y", "repeated"): 1}


def test_deduplicate_keeps_gold_passages():
    """Of equal questions the one with gold passages is kept, whatever the order."""
    rows = [row("q?", "z"), row("q?", "b", supporting_titles=["T"]), row("q?", "c", supporting_titles=[])]
    for order in (rows, rows[::-1]):
        assert deduplicate({"x": order})[0] == {"x": [rows[1]]}


@pytest.mark.parametrize(
    "held_out",
    [
        row("who is ann", "z"),
        {"question": "Where?; Who is Ann?", "golden_answers": [["z"], ["z"]]},  # MEM1
        {"question": "any", "golden_answers": [["z"]], "objectives": [row("Who is Ann?", "z")]},
    ],
)
def test_held_out(held_out):
    """No question of a held-out file is kept, neither as a whole nor as an objective of a composed one."""
    several = {"question": "Who is Ann?; Who is Ben?", "golden_answers": [["a"], ["b"]]}
    kept, dropped = deduplicate({"x": [row("Who is Ann?", "z"), several, row("Who is Ben?", "b")]}, [held_out])
    assert kept == {"x": [row("Who is Ben?", "b")]}
    assert dropped == {("x", "held out"): 2}


def test_answers_that_never_count():
    """A question is dropped if normalization leaves nothing of all answers to it, so that no reward can be won."""
    kept, dropped = deduplicate({"x": [row("q1", "A", "the"), row("q2", "!"), row("q3", "A", "type A")]})
    assert kept == {"x": [row("q3", "A", "type A")]}
    assert dropped == {("x", "answer is only an article or punctuation"): 2}


def test_separate_questions():
    """A question with several objectives is split only where the parts are as many as the objectives."""
    assert separate_questions({"question": "Who?; What?", "golden_answers": [["a"], ["b"]]}) == ["who", "what"]
    assert separate_questions({"question": "A; B?; What?", "golden_answers": [["a"], ["b"]]}) == ["a b what"]
    assert separate_questions(row("Who; what?", "a")) == ["who what"]
    assert question_key("?!") == "?!"


def test_composition():
    """One question of HotpotQA and one of NQ make one of two objectives, which keeps what is known of each."""
    hotpotqa = [row("Which is older, A or B", "B1", id="h", dataset="hotpotqa", supporting_titles=["A", "B"])]
    nq = [row("who is b? ", "b; c", "b", "c", supporting_titles=["B"])]
    (composed,), unused = compose_objectives({"hotpotqa": hotpotqa, "nq": nq}, 2)
    assert composed.pop("id").startswith("2-")
    assert composed == {
        "dataset": "hotpotqa+nq",
        "question": "Which is older, A or B?; who is b?",
        "golden_answers": [["B1"], ["b", "c"]],
        "supporting_titles": ["A", "B"],
        "objectives": [
            {
                "id": "h",
                "dataset": "hotpotqa",
                "question": "Which is older, A or B?",
                "golden_answers": ["B1"],
                "supporting_titles": ["A", "B"],
            },
            {
                "id": None,
                "dataset": "nq",
                "question": "who is b?",
                "golden_answers": ["b", "c"],
                "supporting_titles": ["B"],
            },
        ],
    }
    assert not unused


def test_titles_of_only_some_objectives():
    """Without the gold titles of every objective a composed question has none: a scripted rollout would lack some."""
    (composed,), _ = compose_objectives({"x": [row("q1", "z", supporting_titles=["T"]), row("q2", "b")]}, 2)
    assert "supporting_titles" not in composed


def test_rows_that_can_not_be_objectives():
    """A question composed already, and one whose every answer holds a semicolon, are not used and counted."""
    rows = [
        {"question": "q1?; q2?", "golden_answers": [["a"], ["b"]]},
        row("q3", "a; b", "c;"),
        row("q4", "a; b", "the"),
        *(row(f"q{i}", str(i)) for i in (5, 6, 7)),
    ]
    composed, unused = compose_objectives({"x": rows}, 2)
    assert len(composed) == 1
    assert unused == {("x", "several objectives"): 1, ("x", "semicolon in the answer"): 2, ("x", "left over"): 1}


@pytest.mark.parametrize(
    ("k", "num_questions", "says"),
    [
        (0, None, "0 objectives can't be taken from the 2 sources .'x', 'y'."),
        (1, 6, "6 questions with 1 objectives were asked for, but 5 can be made from 3 of x, 2 of y"),
        (2, 3, "3 questions with 2 objectives were asked for, but 2 can be made from 3 of x, 2 of y"),
        (2, 0, "0 questions"),
        (6, None, "0 questions with 6 objectives"),
    ],
)
def test_impossible_compositions(k, num_questions, says):
    """Too few questions are an error that says how many there are."""
    sources = {"x": [row(f"q{i}", "z") for i in range(3)], "y": [row(f"p{i}", "z") for i in range(2)]}
    with pytest.raises(ValueError, match=says):
        compose_objectives(sources, k, num_questions)


def test_more_sources_than_objectives():
    """Each source must give an objective; with one objective per question all sources are mixed."""
    sources = {name: [row(f"{name}{i}", "z", id="train_0") for i in range(4)] for name in "xyz"}
    with pytest.raises(ValueError, match="2 objectives can't be taken from the 3 sources"):
        compose_objectives(sources, 2)
    rows, unused = compose_objectives(sources, 1, num_questions=9)
    assert len({row["question"] for row in rows}) == 9 and sum(unused.values()) == 3
    assert len({row["id"] for row in rows}) == 9  # FlashRAG's ids are the same in all of its sets
    assert all(row["id"].startswith(f"{row['question'][0]}-") and row["dataset"] in "xyz" for row in rows)


def test_ids_of_questions_that_stay_as_they_are():
    """An id is kept where it is the only one of its kind."""
    rows, _ = compose_objectives({"x": [row("q1", "z", id="7"), row("q2", "b")]}, 1)
    assert {row["question"]: row["id"][:2] for row in rows} == {"q1": "7", "q2": "x-"}


def test_repetitions_are_refused():
    """Rows that still have repetitions can't be composed: an answer could be read off the other objective."""
    with pytest.raises(ValueError, match="'q' comes 2 times; drop repetitions with `deduplicate`"):
        compose_objectives({"x": [row("q?", "z")], "y": [row("Q", "b")]}, 2)


# Few different questions, so that some come again, in other spellings.
rows_of_a_source = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["q {}", "Q {}?", " q  {}."])), max_size=15)


@settings(deadline=None, max_examples=50)
@given(st.lists(rows_of_a_source, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 3), st.randoms())
def test_properties_of_composition(sources, k, seed, random):
    """
    No question is used twice, every objective keeps its own answers, every row is used or counted, and the result
    depends on the seed alone, not on the order of the rows.
    """
    rows_by_source = {
        f"source {i}": [row(form.format(n), f"{i}x{j}", f"x{j}", id=f"{i}-{j}") for j, (n, form) in enumerate(rows)]
        for i, rows in enumerate(sources)
    }
    kept, dropped = deduplicate(rows_by_source)
    assume(k == 1 or k >= len(kept))
    turns = list(kept) * k
    if k == 1:
        assume(any(kept.values()))
    else:
        assume(all(len(rows) >= turns[:k].count(source) for source, rows in kept.items()))
    composed, unused = compose_objectives(kept, k, seed=seed)

    of_id = {row["id"]: (source, row) for source, rows in rows_by_source.items() for row in rows}
    objectives = [objective for row in composed for objective in row.get("objectives", [row])]
    ids = [objective["id"] for objective in objectives]
    assert (
        len(set(map(question_key, (objective["question"] for objective in objectives)))) == len(ids) == len(set(ids))
    )
    for objective in objectives:
        source, original = of_id[objective["id"]]
        aliases = original["golden_answers"] if k == 1 else original["golden_answers"][0]
        assert (objective["golden_answers"], objective["dataset"]) == (aliases, source)
        assert question_key(objective["question"]) == question_key(original["question"])
    for question in composed if k > 1 else []:
        assert [objective["dataset"] for objective in question["objectives"]] == turns[:k]
        assert question["golden_answers"] == [objective["golden_answers"] for objective in question["objectives"]]
        assert question["question"] == "; ".join(objective["question"] for objective in question["objectives"])
        answer = "; ".join(aliases[0] for aliases in question["golden_answers"])
        assert score_answer(answer, question["golden_answers"]) == [1.0] * k
    for source, rows in rows_by_source.items():
        used = sum(of_id[i][0] == source for i in ids)
        counts = dropped + unused
        assert used + sum(count for (name, _), count in counts.items() if name == source) == len(rows)

    shuffled = {source: random.sample(rows, len(rows)) for source, rows in kept.items()}
    assert compose_objectives(shuffled, k, seed=seed)[0] == composed
    assert compose_objectives(kept, k, len(composed) // 2 or None, seed)[0] == composed[: len(composed) // 2 or None]


def test_seed_of_composition():
    """Another seed gives another choice."""
    rows = {"x": [row(f"q{i}", "z") for i in range(20)]}
    questions = [[row["question"] for row in compose_objectives(rows, 2, seed=seed)[0]] for seed in (0, 0, 1)]
    assert questions[0] == questions[1] != questions[2]
