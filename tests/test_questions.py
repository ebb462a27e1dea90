"""Questions from files and data sets in use."""

import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from question_formats import FORMATS, HOTPOTQA_HUB, MEM1, MUSIQUE, SEARCH_R1_QUESTION, TRIVIAQA, WITHOUT_FLASHRAG

from mempo_trl.data.objectives import BadRow
from mempo_trl.data.questions import load_questions, normalize_row, write_questions


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


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
        (  # columns that only belong to the first of several questions
            {
                "prompt": MEM1_PROMPT,
                "question": "Who is Anna?",
                "golden_answers": ["a baker"],
                "reward_model": {"ground_truth": {"target": [["a baker"], ["cat"]]}},
            },
            "Who is Anna?; Question: what?",
            [["a baker"], ["cat"]],
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
        (
            {"question": "q", "label": "a"},
            "No answers found .*'label', 'question'.* golden_answers, .*--answers_column",
        ),
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


def write_file(path, row, form):
    """Two equal rows, as the libraries that users have write them."""
    if form == "jsonl":
        write_rows(path, [row, row])
    elif form == "json list":
        path.write_text(json.dumps([row, row]), encoding="utf-8")
    elif form == "json data":
        path.write_text(json.dumps({"version": "1.0", "data": [row, row]}, indent=1), encoding="utf-8")
    elif form == "parquet":
        Dataset.from_list([row, row]).to_parquet(path)
    elif form == "csv of datasets":  # lists as NumPy prints them: ['a' 'b']
        Dataset.from_list([row, row]).to_csv(path)
    elif form == "csv of pandas":  # lists as Python prints them: ['a', 'b']
        pd.DataFrame([row, row]).to_csv(path, index=False)
    elif form == "csv of a parquet file":  # array(['a', 'b'], dtype=object)
        pd.DataFrame([row, row]).to_parquet(path)
        pd.read_parquet(path).to_csv(path, index=False)
    elif form == "csv with json":
        cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        pd.DataFrame([cells, cells]).to_csv(path, index=False)
    elif form == "flat csv":
        pd.json_normalize([row, row]).to_csv(path, index=False)
    else:
        pd.json_normalize([row, row]).to_parquet(path)


FORMS = {
    "jsonl": "jsonl",
    "json list": "json",
    "json data": "json",
    "parquet": "parquet",
    "flat parquet": "parquet",
    "csv of datasets": "csv",
    "csv of pandas": "csv",
    "csv of a parquet file": "csv",
    "csv with json": "csv",
    "flat csv": "csv",
}


CASES = [
    (name, form)
    for name in FORMATS
    for form in FORMS
    # Arrow can't hold pairs of a text and a number.
    if name != "hotpotqa json" or form not in ("parquet", "flat parquet", "csv of datasets", "csv of a parquet file")
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_known_formats(tmp_path, name, form):
    """A row in the shape of its original is read the same from every kind of file that it may be in."""
    row, expected = FORMATS[name]
    path = tmp_path / f"rows.{FORMS[form]}"
    write_file(path, row, form)
    assert load_questions(str(path)).to_list() == [expected, expected]


def test_rows_of_pandas(tmp_path):
    """Arrays and missing values, as pandas reads them from a Parquet file, are lists and gaps."""
    write_file(tmp_path / "rows.parquet", MEM1, "parquet")
    row = pd.read_parquet(tmp_path / "rows.parquet").to_dict("records")[0]
    assert isinstance(row["reward_model"]["ground_truth"]["target"], np.ndarray)
    assert normalize_row({**row, "id": float("nan")}) == FORMATS["mem1"][1]


@settings(deadline=None)
@given(st.lists(st.text(max_size=8), min_size=2, max_size=30), st.sampled_from(["numpy", "python", "json"]))
def test_printed_lists(aliases, printer):
    """A list of aliases that was printed into a cell is read back alias by alias; NumPy's has no commas."""
    expected = [alias for alias in dict.fromkeys(alias.strip() for alias in aliases) if alias]
    assume(expected)
    printed = {"numpy": str(np.array(aliases, dtype=object)), "python": str(aliases), "json": json.dumps(aliases)}
    row = {"question": "q", "golden_answers": printed[printer]}
    assert normalize_row(row) == {"question": "q", "golden_answers": [expected]}


def test_cells_of_csv_files(tmp_path):
    """Nothing in a CSV file is taken for a number, a truth value or a gap, and a text in brackets stays a text."""
    answers = ["007", "1.10", "1987", "None", "NA", "true", "1e5", "[sic]", "{}", "x, y", "2020-01-02", "nan"]
    path = tmp_path / "rows.csv"
    pd.DataFrame({"question": [f"q{i}" for i in range(len(answers))], "answer": answers}).to_csv(path, index=False)
    expected = [[[answer]] for answer in answers]
    expected[answers.index("{}")] = None
    dropped = Counter()
    loaded = load_questions(str(path), dropped=dropped)
    assert loaded["golden_answers"][:] == [answer for answer in expected if answer is not None]
    assert dropped == {"answers of an unknown form": 1}


def test_dates_and_numbers_of_json_files(tmp_path):
    """A date stays the text that it is, and a whole number has no decimals."""
    answers = ["1987-01-02", "2020-01-02T03:04:05", 1987, 1987.0, 0.5, 0]
    path = write_rows(tmp_path / "rows.jsonl", [{"question": f"q{i}", "answer": a} for i, a in enumerate(answers)])
    expected = ["1987-01-02", "2020-01-02T03:04:05", "1987", "1987", "0.5", "0"]
    assert load_questions(path)["golden_answers"][:] == [[[answer]] for answer in expected]


@pytest.mark.parametrize(
    ("row", "columns", "question", "answers"),
    [
        ({"query": "q", "label": ["a", "b"]}, ("query", "label"), "q", ["a", "b"]),
        ({"a": {"b": {"c": "q"}}, "x": {"y": "a"}}, ("a.b.c", "x.y"), "q", ["a"]),
        ({"a.b.c": "q", "x.y": "a"}, ("a.b.c", "x.y"), "q", ["a"]),
        ({"a": '{"b": "q"}', "x.y": "['a' 'b']"}, ("a.b", "x.y"), "q", ["a", "b"]),
        ({"question": "no", "answer": "no", "query": "q", "label": 3}, ("query", "label"), "q", ["3"]),
        ({"prompt": [{"role": "user", "content": "q"}], "answer": "a"}, ("prompt", None), "q", ["a"]),
        ({"messages": WITHOUT_FLASHRAG["prompt"], "answer": "a"}, ("messages", None), SEARCH_R1_QUESTION, ["a"]),
        ({"question": "q", "label": "a<|answer_split|>b"}, (None, "label"), "q", ["a", "b"]),
        (
            {"question": "q", "label": TRIVIAQA["answer"]},
            (None, "label"),
            "q",
            FORMATS["triviaqa"][1]["golden_answers"][0],
        ),
        # The aliases of another column are not those of the named one.
        ({"question": "q", "label": "a", "answer_aliases": ["b"]}, (None, "label"), "q", ["a"]),
    ],
)
def test_named_columns(row, columns, question, answers):
    """Question and answers may be in any column, nested, flat or as JSON, if it is named."""
    assert normalize_row(row, *columns) == {"question": question, "golden_answers": [answers]}


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        (
            {"problem": "q", "meta": {"solution": "a"}, "extra.info": 1},
            (None, None),
            r"No question found .* columns \['extra.info', 'meta.solution', 'problem'\].*--question_column",
        ),
        (
            {"question": "q", "solution": "a"},
            (None, None),
            r"No answers .* \['question', 'solution'\].*--answers_column",
        ),
        ({"question": "q", "answer": "a"}, ("qestion", None), r"No question found .* \['answer', 'question'\]"),
        ({"question": "q", "answer": "a"}, (None, "x.y"), r"No answers found .* \['answer', 'question'\]"),
        ({"question": " ", "answer": "a"}, (None, None), "No question found"),
        ({"question": None, "answer": "a"}, (None, None), "No question found"),
        ({"question": 3, "answer": "a"}, (None, None), "No question found"),
        ({**HOTPOTQA_HUB, "answer": None}, (None, None), "No answers found"),  # test split
        ({"question": "q", "answer": "", "answer_aliases": []}, (None, None), "at least one answer"),
        (  # test split
            {"question": "q", "answer": {"value": "<unk>", "aliases": [], "normalized_aliases": []}},
            (None, None),
            "at least one answer",
        ),
        ({"question": "q", "golden_answers": [" ", ""]}, (None, None), "at least one answer"),
        ({"question": "q", "golden_answers": "['a', 'b"}, (None, None), None),  # no list, so a text
        ({"question": "q", "golden_answers": "['It's', 'b']"}, (None, None), "It's.*can't be read; write it as JSON"),
        ({"question": "q", "golden_answers": "[print('a')]"}, (None, None), "can't be read"),
        ({"question": "q", "reward_model": {"ground_truth": {"label": "a"}}}, (None, None), "is no answer"),
        ({"question": "q", "reward_model": "a"}, (None, None), "No answers found"),
    ],
)
def test_rejected_rows(row, columns, says):
    """What gives no question is refused by a message that says what was found and what to do."""
    if says is None:
        assert normalize_row(row, *columns)["golden_answers"] == [[row["golden_answers"]]]
    else:
        with pytest.raises(BadRow, match=says):
            normalize_row(row, *columns)


def test_titles_where_a_gold_passage_is_missing():
    """An unanswerable question of MuSiQue has no titles: one of its gold passages was taken away."""
    assert "supporting_titles" not in normalize_row({**MUSIQUE, "answerable": False})


def test_rejected_files(tmp_path):
    """A file of an unknown kind, a broken line and a row that is no object are named."""
    with pytest.raises(ValueError, match=r"rows.tsv.*extension '.tsv'.*.jsonl, .json, .parquet and .csv"):
        load_questions(write_rows(tmp_path / "rows.tsv", [{}]))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n\n{"question": "q\n[1]\n', encoding="utf-8")
    with pytest.raises(ValueError, match="Row 1 of .*rows.jsonl.* it is no JSON"):
        load_questions(str(path))
    dropped = Counter()
    assert len(load_questions(str(path), dropped=dropped)) == 1
    assert dropped == {"no JSON": 1, "no object": 1}


def test_dropped_rows(tmp_path):
    """Bad rows are counted by reason where that is asked for; if no row is good, the first fault is told."""
    rows = [HOTPOTQA_HUB, {**HOTPOTQA_HUB, "answer": None}, {"x": 1}, {"question": "q", "answer": {"text": "a"}}]
    dropped = Counter()
    loaded = load_questions(write_rows(tmp_path / "rows.jsonl", rows), dropped=dropped)
    assert len(loaded) == 1
    assert dropped == {"no answers": 1, "no question": 1, "answers of an unknown form": 1}
    with pytest.raises(ValueError, match=r"Row 0 of .*columns \['x'\].*--question_column"):
        load_questions(write_rows(tmp_path / "rows.jsonl", [{"x": 1}, {}]), dropped=Counter())


def test_one_row_and_other_spellings(tmp_path):
    """A `.json` file may hold one row, JSON Lines or a byte order mark."""
    path = tmp_path / "rows.json"
    for text in ('{"question": "q", "answer": "a"}', '\ufeff[{"question": "q", "answer": "a"}]'):
        path.write_text(text, encoding="utf-8")
        assert load_questions(str(path)).to_list() == [{"question": "q", "golden_answers": [["a"]]}]


def test_folder_of_a_data_set(tmp_path):
    """A data set in a folder is loaded as one from the Hub, with its split."""
    for split, answer in (("train", "a"), ("test", "b")):
        Dataset.from_list([{"question": "q", "answer": answer}]).to_parquet(tmp_path / "set" / f"{split}.parquet")
    assert load_questions(str(tmp_path / "set"), split="test")["golden_answers"][:] == [[["b"]]]


WRITTEN = [
    {"id": "1", "question": "q1", "golden_answers": [["a", "b"]], "supporting_titles": []},
    {
        "id": "2",
        "dataset": "nq",
        "question": "q2?; q3?",
        "golden_answers": [["[1987]"], ["007"]],
        "objectives": [
            {"id": None, "dataset": "nq", "question": "q2?", "golden_answers": ["[1987]"], "supporting_titles": None},
            {"id": "y", "dataset": "nq", "question": "q3?", "golden_answers": ["007"], "supporting_titles": ["T"]},
        ],
    },
]


def test_written_questions(tmp_path):
    """What is written is read back equal, and nothing else is left in the folder."""
    path = tmp_path / "new" / "rows.jsonl"
    write_questions(path, [{**row, "hops": None} for row in WRITTEN])
    loaded = [{name: value for name, value in row.items() if value is not None} for row in load_questions(str(path))]
    assert loaded == WRITTEN
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*WRITTEN, {"question": "Q1!", "golden_answers": [["c"]]}], "1 questions come more than once, such as 'q1'"),
        ([*WRITTEN, {**WRITTEN[1], "objectives": WRITTEN[1]["objectives"][:1]}], "more than once, such as 'q2'"),
        ([{"question": "q", "golden_answers": [["a", " a"]]}], "would be read as"),
        ([{"question": "q", "golden_answers": [["a"]], "level": "hard"}], "would be read as"),
        ([{"question": "q", "golden_answers": [[]]}], "at least one answer"),
    ],
)
def test_refused_to_write(tmp_path, rows, says):
    """Repeated questions, and rows that would not be read back equal, leave the old file as it was."""
    path = tmp_path / "rows.jsonl"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        write_questions(path, rows)
    assert path.read_text(encoding="utf-8") == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="rows.txt.*ends in .jsonl"):
        write_questions(tmp_path / "rows.txt", WRITTEN)
