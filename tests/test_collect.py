"""`mempo collect`: rollouts by rule from gold passages, and those of teachers that fail, limit and are killed."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import call
from stub_teacher import Reply, StubServer, chat, completion
from user_folder import NAMES, make_user_folder, read_lines, write_lines

from mempo_trl import SearchTool, cli
from mempo_trl.data.cold_start import read_rollouts, replay
from mempo_trl.generation import GenerationError
from mempo_trl.protocol import Protocol
from mempo_trl.tools import Toolbox


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder) -> Path:
    return make_user_folder(tmp_path_factory.mktemp("collect"), model_name_or_path=model_folder)


# From gold passages.


def test_collect(folder, capsys, tmp_path):
    """`mempo collect` writes a rollout for each question whose gold passages are found, at most as many as asked for."""
    given = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    output = ["--output_file", str(tmp_path / "new" / "out.jsonl")]
    assert cli.main(["collect", *given, *output, "--retrieval_top_k", "1"]) == 0
    records = read_lines(tmp_path / "new" / "out.jsonl")
    assert [record["question"] for record in records] == [f"What is the pet of {name}?" for name in NAMES]
    for record, name in zip(records, NAMES, strict=True):
        assert record["answer"] == "cat" and len(record["turns"]) == 2
        assert record["turns"][0]["response"] == f"Doc 1(Title: {name}) {name} was born in Rome. The pet is a cat."
    questions = read_lines(folder / "questions.jsonl")
    questions[0]["supporting_titles"] = ["Nobody"]
    write_lines(tmp_path / "questions.jsonl", questions)
    given = ["--dataset_name", str(tmp_path / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    given += ["--output_file", str(tmp_path / "out.jsonl")]
    cli.main(["collect", *given])
    assert [record["question"] for record in read_lines(tmp_path / "out.jsonl")] == [
        "What is the pet of Ben?",
        "What is the pet of Carl?",
    ]
    assert "2 rollouts of 3 questions" in capsys.readouterr().out
    cli.main(["collect", *given, "--max_rollouts", "1"])
    assert len(read_lines(tmp_path / "out.jsonl")) == 1
    assert "1 rollouts of 2 questions" in capsys.readouterr().out


def test_collect_counts_passage_tokens(folder, model_folder, tmp_path):
    """`max_passage_tokens` is counted by the tokenizer that is named, and needs one."""
    given = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    given += ["--output_file", str(tmp_path / "out.jsonl"), "--max_passage_tokens", "8", "--retrieval_top_k", "1"]
    with pytest.raises(ValueError, match="no `tokenizer` to count with"):
        cli.main(["collect", *given])
    cli.main(["collect", *given, "--tokenizer_name_or_path", model_folder])
    assert read_lines(tmp_path / "out.jsonl")[0]["turns"][0]["response"] == "Doc 1(Title: Anna) Anna was"


def test_collect_needs_titles(folder, tmp_path):
    """Questions without gold titles are refused, with the columns that there are."""
    write_lines(tmp_path / "plain.jsonl", [{"question": "q", "golden_answers": ["a"]}])
    given = ["--dataset_name", str(tmp_path / "plain.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    with pytest.raises(ValueError, match="supporting_titles.*'question', 'golden_answers'"):
        cli.main(["collect", *given, "--output_file", str(tmp_path / "out.jsonl")])


# From a teacher, or a model.


ANSWER = "<mem>Anna: a cat</mem><think>Done.</think><answer>cat</answer>"


def teach(request) -> Reply:
    """A teacher that searches once, and is wrong about Ben, untidy about Carl."""
    messages = request.body["messages"]
    if len(messages) == 2:
        return chat("<think>Who?</think>" + call("pet"), tokens=(1000, 100))
    text = {"Ben": ANSWER.replace("cat<", "dog<"), "Carl": "Well. " + ANSWER}
    return chat(text.get(messages[1]["content"].split()[-1].rstrip("?"), ANSWER), tokens=(2000, 200))


def teacher_arguments(folder: Path, model: str, server, output: Path, *more: str) -> list[str]:
    given = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    given += ["--teacher_url", server.url, "--teacher_model", "teacher", "--tokenizer_name_or_path", model]
    return ["collect", *given, "--output_file", str(output), "--system_prompt", "Search.", *more]


def test_collect_from_a_teacher(folder, model_folder, tokenizer, monkeypatch, capsys, tmp_path):
    """
    `mempo collect` plays with a teacher, keeps what is right and well formed, says why the others were dropped and what
    they cost, and doesn't ask again for what is on disk when the filter changes. Its rollouts are food for `mempo sft`.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    output = tmp_path / "out" / "taught.jsonl"
    prices = ("--prompt_price", "2", "--completion_price", "10")
    with StubServer(teach) as server:
        given = teacher_arguments(folder, model_folder, server, output, *prices)
        given += ["--teacher_extra_body", '{"top_p": 0.9}']
        cli.main(given)
        assert len(server.requests) == 6
        assert server.requests[0].headers["authorization"] == "Bearer secret-key"
        assert server.requests[0].body["top_p"] == 0.9
        (record,) = read_lines(output)
        assert (record["question"], record["answer"], record["reward"]) == ("What is the pet of Anna?", "cat", 1.0)
        assert {r["question"]: r["outcome"] for r in read_lines(tmp_path / "out" / "taught.all.jsonl")} == {
            f"What is the pet of {name}?": "answer" for name in NAMES
        }
        printed = capsys.readouterr().out
        for said in (r"kept\W+1\b", r"dropped: reward too low\W+1\b", r"dropped: not well formed\W+1\b"):
            assert re.search(said, printed), said
        # 3 x (1000 + 2000) prompt tokens at 2 and 3 x (100 + 200) completion tokens at 10, per million.
        assert "9,000 in prompts and 900 in completions, which cost 0.03." in printed  # 0.018 + 0.009

        cli.main([*given, "--min_reward", "0", "--no_require_format"])
        assert len(server.requests) == 6
        assert [record["reward"] for record in read_lines(output)] == [1.0, 0.0, 0.0]
        cli.main([*given, "--min_reward", "0", "--no_require_format", "--max_rollouts", "2"])
        assert len(read_lines(output)) == 2 and "over `max_rollouts`" in capsys.readouterr().out
        cli.main([*given, "--min_reward", "0", "--no_require_format", "--max_tokens", "100"])
        assert read_lines(output) == [] and re.search(r"too long\W+3\b", capsys.readouterr().out)
        with pytest.raises(ValueError, match="`max_turns` was 16 and is 5 now"):
            cli.main([*given, "--max_turns", "5"])
        cli.main(given)
        assert all("secret-key" not in path.read_text() for path in (tmp_path / "out").iterdir())
    (again,) = read_rollouts(output)
    assert replay(again, Protocol(tokenizer, Toolbox([SearchTool(None)]), system_prompt="Search.")).answer == "cat"


def test_collect_from_a_vllm_server(folder, model_folder, tokenizer, tmp_path):
    """With the completions API, ids go to a server that has the student's tokenizer, with its end of turn."""
    ids = tokenizer(ANSWER)["input_ids"] + [tokenizer.eos_token_id]
    with StubServer(lambda request: completion(ids)) as server:
        more = ("--teacher_api", "completions", "--max_questions", "2", "--num_samples", "2")
        cli.main(teacher_arguments(folder, model_folder, server, tmp_path / "out.jsonl", *more))
    assert [record["sample"] for record in read_lines(tmp_path / "out.jsonl")] == [0, 1, 0, 1]
    assert {request.path for request in server.requests} == {"/v1/completions"}
    assert len({request.body["seed"] for request in server.requests}) == 4
    assert server.requests[0].body["stop_token_ids"] == [tokenizer.eos_token_id]


def test_collect_from_a_local_model(folder, model_folder, capsys, tmp_path):
    """A model that is named plays itself; what a random one writes is dropped, and said to be."""
    given = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    given += ["--model_name_or_path", model_folder, "--dtype", "float32", "--system_prompt", "Search."]
    given += ["--output_file", str(tmp_path / "out.jsonl"), "--max_completion_length", "8", "--batch_size", "2"]
    cli.main(["collect", *given])
    assert read_lines(tmp_path / "out.jsonl") == []
    assert len(read_lines(tmp_path / "out.all.jsonl")) == 3
    assert re.search(r"dropped: not well formed\W+3\b", capsys.readouterr().out)


@pytest.mark.slow
def test_collect_after_a_kill(folder, model_folder, tmp_path):
    """
    Killed with `kill -9` in the middle, `mempo collect` goes on where it was: no question is lost, none that was
    finished is asked for again, and none is there twice.
    """
    names = [f"Person{i}" for i in range(12)]
    questions = [{"question": f"What is the pet of {name}?", "golden_answers": ["cat"]} for name in names]
    write_lines(tmp_path / "questions.jsonl", questions)
    everything = tmp_path / "out.all.jsonl"
    stuck = threading.Event()

    def answer(request) -> Reply:
        if not killed.is_set() and everything.is_file() and everything.read_bytes().count(b"\n") >= 5:
            stuck.set()
            killed.wait(120)
        return chat(ANSWER)

    killed = threading.Event()
    with StubServer(answer) as server:
        given = teacher_arguments(folder, model_folder, server, tmp_path / "out.jsonl", "--batch_size", "2")
        given += ["--dataset_name", str(tmp_path / "questions.jsonl")]
        process = subprocess.Popen([sys.executable, "-m", "mempo_trl.cli", *given], stderr=subprocess.DEVNULL)
        assert stuck.wait(120), "the teacher was not asked"
        process.kill()
        process.wait()
        killed.set()
        finished = {record["question"] for record in read_lines(everything)}
        assert 5 <= len(finished) < 12
        with open(everything, "a", encoding="utf-8") as file:
            file.write('{"id": "')  # what a kill in the middle of a line would leave
        server.requests.clear()
        cli.main(given)
        asked = [request.body["messages"][1]["content"] for request in server.requests]
    assert sorted(asked) == sorted({row["question"] for row in questions} - finished)
    for path in (everything, tmp_path / "out.jsonl"):
        assert sorted(r["question"] for r in read_lines(path)) == sorted(row["question"] for row in questions)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--teacher_url", "http://localhost:1"], "Give the name of the model at `teacher_url`"),
        (["--teacher_model", "gpt"], "`teacher_model` is 'gpt'; give the URL"),
        (["--teacher_url", "localhost:1", "--teacher_model", "gpt"], "tokenizer as `tokenizer_name_or_path`"),
    ],
)
def test_wrong_teachers(given, message, folder, tmp_path):
    """Half a teacher is refused, with what is missing."""
    base = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    with pytest.raises(ValueError, match=message):
        cli.main(["collect", *base, "--output_file", str(tmp_path / "out.jsonl"), *given])


@pytest.mark.parametrize("body", ["{top_p: 1}", "[1]"])
def test_wrong_extra_body(body, folder, model_folder, tmp_path):
    """`teacher_extra_body` is a JSON object."""
    with StubServer(teach) as server:
        given = teacher_arguments(folder, model_folder, server, tmp_path / "out.jsonl", "--teacher_extra_body", body)
        with pytest.raises(ValueError, match="`teacher_extra_body` is '.*JSON"):
            cli.main(given)
    assert server.requests == []


def test_collect_from_a_dead_teacher(folder, model_folder, tmp_path):
    """Without a server the command ends at once, and the output file stays as it was."""
    (tmp_path / "out.jsonl").write_text("before\n")
    with StubServer(teach) as server:
        given = teacher_arguments(folder, model_folder, server, tmp_path / "out.jsonl")
    with pytest.raises(GenerationError, match=f"no server at {server.url}"):
        cli.main(given)
    assert (tmp_path / "out.jsonl").read_text() == "before\n"
