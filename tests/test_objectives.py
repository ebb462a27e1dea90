import json

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.data.objectives import check_dataset, golden_answers_of, normalize_golden_answers
from mempo_trl.data.questions import load_questions, normalize_row


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


SEARCH_R1_PROMPT = (
    "Answer the given question. ... For example, <answer> Beijing </answer>. Question: What is the pet of Anna?\n"
)
MEM1_PROMPT = "You will answer multiple questions. Answer the following questions: Who is Anna?; Question: what?\n"
QUESTION = "What is the pet of Anna?"


@pytest.mark.parametrize(
    ("row", "question", "golden_answers"),
    [
        ({"question": QUESTION, "golden_answers": ["cat", "a cat"]}, QUESTION, [["cat", "a cat"]]),  # FlashRAG
        ({"question": QUESTION, "golden_answers": [["cat"], ["dog"]]}, QUESTION, [["cat"], ["dog"]]),
        ({"question": QUESTION, "answers": ["cat", "a cat"]}, QUESTION, [["cat", "a cat"]]),
        ({"question": QUESTION, "answer": "cat", "type": "bridge"}, QUESTION, [["cat"]]),  # HotpotQA
        ({"question": QUESTION, "answer": ["cat", "a cat"]}, QUESTION, [["cat", "a cat"]]),  # NQ-open
        (
            {"question": QUESTION, "answer": "cat", "answer_aliases": ["a cat"]},
            QUESTION,
            [["cat", "a cat"]],
        ),  # MuSiQue
        ({"question": QUESTION, "answer": "cat", "answer_aliases": []}, QUESTION, [["cat"]]),
        ({"question": QUESTION, "answer": 9}, QUESTION, [["9"]]),
        (  # Search-R1
            {
                "prompt": [{"role": "user", "content": SEARCH_R1_PROMPT}],
                "reward_model": {"style": "rule", "ground_truth": {"target": ["cat", "a cat"]}},
            },
            QUESTION,
            [["cat", "a cat"]],
        ),
        (  # MEM1: the marker before the list of questions, not one inside them
            {
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": MEM1_PROMPT}],
                "reward_model": {"ground_truth": {"target": [["a baker"], ["cat", "a cat"]]}},
            },
            "Who is Anna?; Question: what?",
            [["a baker"], ["cat", "a cat"]],
        ),
        # MemSearcher
        ({"question": QUESTION, "reward_model": {"ground_truth": ["cat"]}}, QUESTION, [["cat"]]),
        ({"prompt": SEARCH_R1_PROMPT, "answer": "cat"}, QUESTION, [["cat"]]),
        ({"prompt": "Question: An example?\n" + SEARCH_R1_PROMPT, "answer": "cat"}, QUESTION, [["cat"]]),
        ({"question": ["Who?", "What?"], "answers": [["a"], ["b"]]}, "Who?; What?", [["a"], ["b"]]),
        # The first known column that is filled counts.
        ({"question": "q", "golden_answers": ["a"], "answer": "b"}, "q", [["a"]]),
        ({"question": "q", "golden_answers": None, "answer": "b"}, "q", [["b"]]),
        ({"question": "q", "prompt": SEARCH_R1_PROMPT, "answer": "b"}, "q", [["b"]]),
    ],
)
def test_known_rows(row, question, golden_answers):
    """Rows of the data sets in use become `question` and `golden_answers`."""
    assert normalize_row(row) == {"question": question, "golden_answers": golden_answers}


def test_kept_columns():
    """The columns that later stages use are kept where they are filled, others are not."""
    row = {"id": "7", "dataset": "hotpotqa", "question": "q", "answer": "a", "level": "hard"}
    assert normalize_row(row) == {"id": "7", "dataset": "hotpotqa", "question": "q", "golden_answers": [["a"]]}
    assert "id" not in normalize_row({**row, "id": None})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"query": "q", "answer": "a"}, "No question found in a row with the columns .'answer', 'query'."),
        ({"prompt": "Tell me.", "answer": "a"}, "No question found"),
        ({"question": "q", "label": "a"}, "No answers found .*'label', 'question'.* golden_answers, .*--answers_column"),
        ({"question": "q", "golden_answers": None}, "No answers found"),
        ({"question": "q", "golden_answers": []}, "at least one answer"),
        ({"question": "q", "answers": {"text": ["a"], "answer_start": [1]}}, "is no answer"),  # SQuAD
        ({"question": "q", "answer": {"text": "a"}}, "is no answer"),
    ],
)
def test_unknown_rows(row, says):
    """A row of no known form is an error that lists what was found and what is needed."""
    with pytest.raises(ValueError, match=says):
        normalize_row(row)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_load_questions(tmp_path):
    """Rows of a JSONL file are converted; forms may be mixed, and a column that some rows lack is kept."""
    rows = [
        {"question": "q1", "golden_answers": ["a", "b"]},
        {"question": "q2", "golden_answers": [["c"], ["d"]], "id": "2"},
        {"question": "q3", "golden_answers": 3},
    ]
    loaded = load_questions(write_rows(tmp_path / "rows.jsonl", rows))
    assert loaded["question"][:] == ["q1", "q2", "q3"]
    assert loaded["golden_answers"][:] == [[["a", "b"]], [["c"], ["d"]], [["3"]]]
    assert loaded["id"][:] == [None, "2", None]


@pytest.mark.parametrize("extension", ["json", "parquet", "csv"])
def test_load_other_files(tmp_path, extension):
    """JSON, Parquet and CSV files are read as well."""
    rows = Dataset.from_dict({"question": ["q1", "q2"], "answer": ["a", "b"]})
    path = str(tmp_path / f"rows.{extension}")
    getattr(rows, f"to_{extension}")(path)
    assert load_questions(path)["golden_answers"][:] == [[["a"]], [["b"]]]


def test_load_failures(tmp_path):
    """A missing file, an empty one and a bad row are named."""
    with pytest.raises(FileNotFoundError, match="no question file .*missing.jsonl"):
        load_questions(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="empty.jsonl' holds no questions"):
        load_questions(write_rows(tmp_path / "empty.jsonl", []))
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}, {"question": "q", "answer": ""}])
    with pytest.raises(ValueError, match="Row 1 of .*rows.jsonl.*at least one answer"):
        load_questions(path)


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
