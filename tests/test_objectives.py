
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.data.objectives import check_dataset, golden_answers_of, normalize_golden_answers


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
