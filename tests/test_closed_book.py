"""What a model answers without searching, and the file that lets a killed run go on."""

import json

import pytest
from conftest import byte_tokenizer

from mempo_trl.data.closed_book import answer_without_search


QUESTIONS = [f"Q{i}é?" for i in range(5)]


class ScriptedEngine:
    """Answers `Q3?` by `A3`, and remembers the prompts of each batch."""

    def __init__(self, tokenizer, fail_in_batch=None, after=""):
        self.tokenizer, self.fail_in_batch, self.after = tokenizer, fail_in_batch, after
        self.batches = []

    def __call__(self, prompts):
        if len(self.batches) == self.fail_in_batch:
            raise KeyboardInterrupt
        self.batches.append([self.tokenizer.decode(ids) for ids in prompts])
        answers = [text.rsplit("Question: Q", 1)[1].split("?")[0] for text in self.batches[-1]]
        return [self.tokenizer.encode(f"\n A{answer} {self.after}") for answer in answers], None


def ask(engine, path, questions=QUESTIONS, name="model"):
    return answer_without_search(questions, engine, engine.tokenizer, name, path, batch_size=2)


ANSWERS = [f"A{i}é" for i in range(5)]


def test_answers(tokenizer, tmp_path):
    """Each question is asked once, in batches; special tokens and all lines but the first are left out."""
    engine = ScriptedEngine(tokenizer, after="\nThis is\x85because<|im_end|>")
    assert ask(engine, tmp_path / "new" / "x.jsonl", QUESTIONS + QUESTIONS[:1]) == ANSWERS + ANSWERS[:1]
    assert list(map(len, engine.batches)) == [2, 2, 1]
    records = [json.loads(line) for line in (tmp_path / "new" / "x.jsonl").open(encoding="utf-8")]
    assert records == [{"model": "model", "question": q, "answer": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]


def test_empty_answer(tokenizer, tmp_path):
    """A model that says nothing has answered nothing."""
    assert answer_without_search(["q"], lambda prompts: ([[]], None), tokenizer, "m", tmp_path / "x.jsonl") == [""]


def test_prompts(tmp_path):
    """The question comes in the model's chat form, and as a text to complete for a model that has none."""
    engine = ScriptedEngine(byte_tokenizer())
    ask(engine, tmp_path / "chat.jsonl")
    text = "Answer the question with a few words and nothing else.\nQuestion: Q0é?"
    assert engine.batches[0][0] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    engine.tokenizer.chat_template = None
    ask(engine, tmp_path / "base.jsonl")
    assert engine.batches[3][0] == f"{text}\nAnswer:"


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_stopped_run_goes_on(tokenizer, tmp_path, batch):
    """What was answered before a run was stopped is not asked again."""
    path = tmp_path / "x.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(ScriptedEngine(tokenizer, fail_in_batch=batch), path)
    engine = ScriptedEngine(tokenizer)
    assert ask(engine, path) == ANSWERS
    assert sum(map(len, engine.batches)) == 5 - 2 * batch
    assert ask(ScriptedEngine(tokenizer, fail_in_batch=0), path) == ANSWERS


def test_each_batch_is_on_disk_before_the_next(tokenizer, tmp_path):
    """A run that is killed loses no batch but the one that it was at."""
    path, on_disk, engine = tmp_path / "x.jsonl", [], ScriptedEngine(tokenizer)

    def watched(prompts):
        on_disk.append(path.read_bytes().count(b"\n"))
        return engine(prompts)

    answer_without_search(QUESTIONS, watched, tokenizer, "model", path, batch_size=2)
    assert on_disk == [0, 2, 4]


def test_line_that_was_cut_off(tokenizer, tmp_path):
    """Wherever in the file the writing was cut off, the run goes on, and the file ends as without the cut."""
    whole = tmp_path / "whole.jsonl"
    ask(ScriptedEngine(tokenizer), whole)
    content = whole.read_bytes()
    for length in range(0, len(content), 7):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:length])
        assert ask(ScriptedEngine(tokenizer), path) == ANSWERS
        assert path.read_bytes() == content


def test_answers_of_another_model(tokenizer, tmp_path):
    """The answers of another model in the same file do not count."""
    path = tmp_path / "x.jsonl"
    ask(ScriptedEngine(tokenizer), path, name="other")
    engine = ScriptedEngine(tokenizer)
    assert ask(engine, path) == ANSWERS and len(engine.batches) == 3
    assert len(path.read_text(encoding="utf-8").splitlines()) == 10
