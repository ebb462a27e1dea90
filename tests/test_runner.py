"""Playing questions into a file: every rollout once, whatever stopped the run before."""

import json

import pytest
from conftest import call, generation, search
from stub_teacher import Reply, StubServer, chat, closed_port
from tenacity import wait_none

from mempo_trl import endpoints
from mempo_trl.endpoints import ChatGenerator
from mempo_trl.generation import GenerationError, Generator
from mempo_trl.protocol import Protocol
from mempo_trl.runner import play_questions, read_records, row_id
from mempo_trl.tools import Toolbox


ROWS = [
    {"id": f"q{i}", "dataset": "pets", "question": f"What is the pet of {name}?", "golden_answers": [["cat"]]}
    for i, name in enumerate(("Anna", "Ben", "Carl", "Dora"))
]
ANSWER = "<mem>cat</mem><think>Done.</think><answer>cat</answer>"


class Policy(Generator):
    """Searches once and answers, and keeps which questions it was asked; fails for some, or stops everything."""

    def __init__(self, tokenizer, fails=(), stops=(), max_concurrency=None):
        self.tokenizer = tokenizer
        self.fails, self.stops = fails, stops
        self.max_concurrency = max_concurrency
        self.asked, self.numbers = [], []

    async def run(self, rollouts, numbers=None):
        self.numbers += numbers
        return await super().run(rollouts, numbers)

    async def generate(self, prompt_ids, rollout=None):
        if not rollout.turns:
            self.asked.append(rollout.question)
        name = rollout.question.split()[-1].rstrip("?")
        if name in self.fails:
            raise GenerationError(f"no turn for {name}")
        if name in self.stops:
            raise KeyboardInterrupt
        return generation(self.tokenizer, ANSWER if rollout.turns else call(name))


class Engine:
    """Answers a batch at once, and keeps how many there were."""

    max_completion_length = 100

    def __init__(self, tokenizer):
        self.answer = generation(tokenizer, ANSWER).ids
        self.eos_token_ids = [tokenizer.eos_token_id]
        self.batches = []

    def __call__(self, prompts, idle):
        self.batches.append(len(prompts))
        return [self.answer] * len(prompts), None


@pytest.fixture
def play(protocol, tmp_path):
    """`play(generator, **kwargs)` plays into one file."""

    def play(generator=None, rows=ROWS, **kwargs):
        kwargs = {"protocol": protocol, "output_file": tmp_path / "out.jsonl", "max_turns": 3, **kwargs}
        play_questions(rows, generator=generator, **kwargs)
        return read_records(kwargs["output_file"])

    return play


def keys(records: list[dict]) -> list[tuple[str, int]]:
    return sorted((record["id"], record["sample"]) for record in records)


def names(asked: list[str]) -> list[str]:
    return sorted(question.split()[-1].rstrip("?") for question in asked)


def test_records(play, tokenizer):
    """Every question is played as often as asked for; a record says which one it is and how long it took."""
    seen = []
    records = play(Policy(tokenizer), num_samples=2, on_record=seen.append)
    assert keys(records) == [(f"q{i}", sample) for i in range(4) for sample in (0, 1)]
    assert {record["outcome"] for record in records} == {"answer"} and seen == records
    record = records[0]
    assert (record["dataset"], record["answer"], record["golden_answers"]) == ("pets", "cat", [["cat"]])
    assert [turn["response"] for turn in record["turns"]] == ["Doc 1(Title: Anna) Anna has a cat.", None]
    assert record["seconds"] >= 0 and "usage" not in record and "prefix" not in record
    assert play(Policy(tokenizer), overwrite=True, prompts=True)[0]["prefix"].endswith("assistant\n")


def test_a_finished_file_is_left_alone(play, tokenizer, tmp_path):
    """What is finished is not played again; further samples and questions are added to it."""
    play(Policy(tokenizer), rows=ROWS[:2])
    before = (tmp_path / "out.jsonl").read_bytes()
    policy = Policy(tokenizer)
    assert len(play(policy, rows=ROWS[:2])) == 2 and policy.asked == []
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert keys(play(policy, num_samples=2)) == [(f"q{i}", sample) for i in range(4) for sample in (0, 1)]
    assert names(policy.asked) == ["Anna", "Ben", "Carl", "Carl", "Dora", "Dora"]
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)


def test_an_interrupted_run_goes_on(play, tokenizer, tmp_path):
    """After Ctrl-C, and half a line that was being written, the next run plays what is missing and nothing else."""
    with pytest.raises(KeyboardInterrupt):
        play(Policy(tokenizer, stops=["Carl"], max_concurrency=1))
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "q2", "sample": 0, "outc')
    assert keys(read_records(path)) == [("q0", 0), ("q1", 0)]
    policy = Policy(tokenizer)
    assert keys(play(policy)) == [("q0", 0), ("q1", 0), ("q2", 0), ("q3", 0)]
    assert names(policy.asked) == ["Carl", "Dora"]
    assert path.read_bytes().startswith(whole) and len(path.read_bytes().splitlines()) == 4


def test_failures_are_recorded_and_played_again(play, tokenizer, tmp_path):
    """A rollout that fails is recorded with its cause and doesn't stop the others; the next run plays it again, last."""
    records = {record["id"]: record for record in play(Policy(tokenizer, fails=["Ben"], max_concurrency=1))}
    assert [records[f"q{i}"]["outcome"] for i in range(4)] == ["answer", "failed", "answer", "answer"]
    assert records["q1"]["error"] == "no turn for Ben" and records["q1"]["turns"] == []
    assert len(play(Policy(tokenizer, fails=["Ben"]))) == 4  # it alone fails again, which is no reason to stop
    policy = Policy(tokenizer, max_concurrency=1)
    more = {"id": "q9", "question": "What is the pet of Zoe?", "golden_answers": [["cat"]]}
    records = {record["id"]: record for record in play(policy, rows=[*ROWS, more])}
    assert {record["outcome"] for record in records.values()} == {"answer"} and len(records) == 5
    assert [question.split()[-1] for question in policy.asked] == ["Zoe?", "Ben?"]
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 7  # failures are kept, and are history


def test_too_many_failures(play, tokenizer):
    """So many failures in a row stop the run with the cause; a success between them starts the count anew."""
    policy = Policy(tokenizer, fails=["Ben", "Carl", "Dora"], max_concurrency=1)
    with pytest.raises(GenerationError, match=r"last 2 rollouts failed.*no turn for Carl.*out\.jsonl"):
        play(policy, max_failures=2)
    assert names(policy.asked) == ["Anna", "Ben", "Carl"]
    policy = Policy(tokenizer, fails=["Anna", "Carl"], max_concurrency=1)
    assert len(play(policy, max_failures=2, overwrite=True)) == 4


def test_all_failed(play, tokenizer):
    """Nothing but failures is an error even where there are too few rollouts for `max_failures`."""
    with pytest.raises(GenerationError, match="last 4 rollouts failed.*no turn for Dora"):
        play(Policy(tokenizer, fails=["Anna", "Ben", "Carl", "Dora"], max_concurrency=1))


def test_other_errors_rise(play):
    """An error that is no failure of the generator is not taken for one."""

    class Broken(Generator):
        async def generate(self, prompt_ids, rollout=None):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="^broken$"):
        play(Broken())


def test_engine(play, tokenizer):
    """An engine plays batches of `batch_size`."""
    engine = Engine(tokenizer)
    assert len(play(engine=engine, batch_size=3, num_samples=2)) == 8
    assert engine.batches == [3, 3, 2]


def test_generator_or_engine(play, tokenizer):
    """One of them, not both."""
    for wrong in ({}, {"generator": Policy(tokenizer), "engine": Engine(tokenizer)}):
        with pytest.raises(ValueError, match="one of `generator` and `engine`"):
            play(**wrong)


def test_seeds_belong_to_rollouts(play, tokenizer):
    """The number that gives a rollout its seeds doesn't depend on what else is played in the run."""
    all_at_once, first, second = (Policy(tokenizer) for _ in range(3))
    play(all_at_once, num_samples=2)
    play(first, num_samples=1, overwrite=True)
    play(second, rows=ROWS[::-1], num_samples=2)
    assert len(set(all_at_once.numbers)) == 8
    assert sorted(first.numbers + second.numbers) == sorted(all_at_once.numbers)


# What does not fit together.


def test_ids():
    """A question's id is its own, or else comes from its text."""
    assert row_id({"id": 7, "question": "q"}) == "7"
    assert row_id({"id": None, "question": "q"}) == row_id({"question": "q"}) != row_id({"question": "p"})


@pytest.mark.parametrize(
    "second", [{"id": "q0", "question": "Another?"}, {"id": "q0", "question": ROWS[0]["question"]}]
)
def test_one_id_for_two_rows(second, play, tokenizer):
    """Two rows with one id are an error that names it, before anything is played."""
    policy = Policy(tokenizer)
    with pytest.raises(ValueError, match="Two questions have the id 'q0'.*Drop one"):
        play(policy, rows=[*ROWS, {**second, "golden_answers": [["cat"]]}])
    assert policy.asked == []


def test_one_question_twice(play, tokenizer):
    """So is a question without an id that comes twice."""
    row = {"question": "Who?", "golden_answers": [["cat"]]}
    with pytest.raises(ValueError, match=f"Two questions have the id '{row_id(row)}': 'Who\\?' and 'Who\\?'"):
        play(Policy(tokenizer), rows=[row, dict(row)])


def test_other_questions_in_the_file(play, tokenizer):
    """A file in which an id stands for another question is not gone on with."""
    play(Policy(tokenizer))
    with pytest.raises(ValueError, match="id 'q0' is 'Another\\?', but 'What is the pet of Anna\\?' in"):
        play(Policy(tokenizer), rows=[{**ROWS[0], "question": "Another?"}])


def test_settings(play, tokenizer, tmp_path, protocol):
    """Other settings than the file was made with are an error that names each difference; or it is overwritten."""
    given = {"model": "a", "retrieval": {"top_k": 3, "corpus": "c"}, "sizes": (1, 2)}
    play(Policy(tokenizer), settings=given)
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["max_turns"] == 3
    play(Policy(tokenizer), settings=given)
    other = {"model": "a", "retrieval": {"top_k": 5, "corpus": "c"}, "sizes": [1, 2], "new": 1}
    says = (
        r"`max_turns` was 3 and is 2 now; `retrieval\.top_k` was 3 and is 5 now; `new` was None and is 1 now\. Choose"
    )
    policy = Policy(tokenizer)
    with pytest.raises(ValueError, match=says):
        play(policy, settings=other, max_turns=2)
    full = Protocol(tokenizer, Toolbox([search]), "full", system_prompt="Search.")
    with pytest.raises(ValueError, match="`context` was 'memory' and is 'full' now"):
        play(policy, settings=given, protocol=full)
    assert policy.asked == []
    assert len(play(policy, settings=other, max_turns=2, overwrite=True)) == len(policy.asked) == 4


def test_a_file_that_is_none_of_ours(play, tokenizer, tmp_path):
    """A file that this didn't write is neither appended to nor overwritten by itself."""
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(ValueError, match=r"out\.jsonl' exists, and '.*settings\.json'.*does not"):
        play(Policy(tokenizer))
    (tmp_path / "out.jsonl.settings.json").write_text((tmp_path / "out.jsonl").read_text())
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize("line", ["precious", "{}", "[]", '{"id": "a"}'])
def test_bad_lines(line, tmp_path):
    """A whole line that is no record is named."""
    (tmp_path / "out.jsonl").write_text(json.dumps({"id": "a", "sample": 0}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"Line 2 of '.*out\.jsonl'"):
        read_records(tmp_path / "out.jsonl")


# With a server.


def test_with_a_server(play, protocol, monkeypatch):
    """Through a server that limits, breaks off and refuses one question, the others are played, and tokens counted."""
    monkeypatch.setattr(endpoints, "BACK_OFF", wait_none())
    faults = iter([Reply("", 429, {"Retry-After": "0"}), Reply(reset=True), Reply("", 500), Reply({"choices": []})])

    def answer(request):
        messages = request.body["messages"]
        if "Ben" in messages[1]["content"]:
            return Reply({"error": "filtered"}, 400)
        with lock:
            fault = next(faults, None)
        return fault or chat(ANSWER if len(messages) > 2 else call("Anna"))

    with StubServer(answer) as server:
        lock = server.lock
        records = play(ChatGenerator(server.url, "teacher", protocol=protocol, max_concurrency=2))
    outcomes = {record["id"]: record["outcome"] for record in records}
    assert outcomes == {"q0": "answer", "q1": "failed", "q2": "answer", "q3": "answer"}
    assert [r["usage"] for r in records if r["outcome"] == "answer"] == [
        {"prompt_tokens": 20, "completion_tokens": 10}
    ] * 3


def test_no_server(play, protocol):
    """A server that isn't there stops the run before anything is tried or recorded."""
    with closed_port() as url, pytest.raises(GenerationError, match=f"no server at {url}"):
        play(ChatGenerator(url, "teacher", protocol=protocol))
