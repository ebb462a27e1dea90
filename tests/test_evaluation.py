"""Evaluation: batched generation against one prompt at a time, and the report of what is on disk."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from conftest import EOS, REPOSITORY, byte_tokenizer, tiny_model
from records import failed, record, turn
from scripted_agent import ScriptedEngine, make_folder
from stub_teacher import Reply, StubServer, chat
from stub_teacher import completion as completion_of

from mempo_trl import cli
from mempo_trl.evaluation.metrics import summarize_by_dataset, summarize_by_objectives
from mempo_trl.evaluation.report import make_report, markdown, table_rows, write_report
from mempo_trl.generation import BatchGenerator, Generator, TransformersEngine, model_eos_token_ids
from mempo_trl.provenance import tokenizer_hash, weights_stamp, without_secrets
from mempo_trl.runner import check_resumable, in_order, read_records
from mempo_trl.scripts import evaluate


PROMPTS = ["a", "What is the pet of Anna?", "Search. " * 8, "\n"]


def prompt_ids(tokenizer) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def test_batch_equals_one_prompt_at_a_time(tokenizer):
    """Greedy turns of a batch of prompts of different lengths are those of each prompt on its own, by arg max."""
    model = tiny_model(tokenizer).eval()
    prompts = prompt_ids(tokenizer)
    completions, logps = TransformersEngine(model, tokenizer, max_completion_length=12, temperature=0)(prompts)
    assert logps is None
    for ids, completion in zip(prompts, completions, strict=True):
        seen = list(ids)
        with torch.no_grad():
            while len(seen) < len(ids) + 12 and seen[-1] != tokenizer.eos_token_id:
                seen.append(model(torch.tensor([seen])).logits[0, -1].argmax().item())
        assert completion == seen[len(ids) :]


def test_the_model_s_sampling_defaults_do_not_count(tokenizer):
    """
    A model that ships sampling defaults, as Qwen2.5-Instruct ships a repetition penalty, is evaluated as it is trained:
    greedy and sampled turns are those of the bare distribution.
    """
    bare, shipped = tiny_model(tokenizer).eval(), tiny_model(tokenizer).eval()
    shipped.generation_config.update(do_sample=True, repetition_penalty=2.0, temperature=0.01, top_p=0.01, top_k=1)
    for temperature in (0, 1):
        outputs = []
        for model in (bare, shipped):
            torch.manual_seed(0)
            engine = TransformersEngine(model, tokenizer, max_completion_length=12, temperature=temperature)
            outputs.append(engine(prompt_ids(tokenizer))[0])
        assert outputs[0] == outputs[1]


def test_temperature(tokenizer):
    """Temperature 0 repeats itself, 1 samples the whole vocabulary by the model's distribution, and a seed fixes it."""
    model = tiny_model(tokenizer).eval()
    prompts = prompt_ids(tokenizer)[:1] * 400

    def sample(temperature: float, seed: int) -> list[int]:
        torch.manual_seed(seed)
        engine = TransformersEngine(model, tokenizer, max_completion_length=1, temperature=temperature)
        return [ids[0] for ids in engine(prompts)[0]]

    assert len(set(sample(0, seed=1))) == 1
    sampled = sample(1, seed=1)
    assert sampled == sample(1, seed=1) != sample(1, seed=2)
    # The distribution of an untrained model is almost flat over 267 tokens: 400 draws give 267 * (1 - exp(-400 / 267))
    # = 207 different ones on average, with a standard deviation of about 6. Cutting to the best 50 would give 50.
    assert abs(len(set(sampled)) - 207) < 25


def test_a_turn_ends_at_the_first_end_of_turn(tokenizer):
    """Sampled ids end with the first id that ends a turn, of the tokenizer or of the model, and hold no padding."""
    model = tiny_model(tokenizer).eval()
    plain = TransformersEngine(model, tokenizer, max_completion_length=8, temperature=0)(prompt_ids(tokenizer))[0]
    assert {len(ids) for ids in plain} == {8}  # nothing ends by itself
    end = plain[1][3]  # make an id that is sampled on the way end a turn
    model.generation_config.eos_token_id = [end, tokenizer.eos_token_id]
    engine = TransformersEngine(model, tokenizer, max_completion_length=8, temperature=0)
    assert engine.eos_token_ids == model_eos_token_ids(model, tokenizer) == sorted([end, tokenizer.eos_token_id])
    completions = engine(prompt_ids(tokenizer))[0]
    assert completions == [ids[: ids.index(end) + 1] if end in ids else ids for ids in plain]
    assert len(completions[1]) <= 4 and any(len(ids) == 8 for ids in completions)


def test_ids_that_end_a_turn(tokenizer):
    """The tokenizer's id ends a turn whatever the model declares, and is named once."""
    model = tiny_model(tokenizer)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    for declared, expected in ((None, [eos]), (eos, [eos]), ([eos], [eos]), ([7, eos, 3], [3, 7, eos]), (3, [3, eos])):
        model.generation_config.eos_token_id = declared
        assert model_eos_token_ids(model, tokenizer) == expected


def test_pad_token_of_a_tokenizer_without_one(tokenizer, smollm2_tokenizer):
    """Where the end of turn pads too, a turn still ends with it, once; so it is without a pad token."""
    model = tiny_model(smollm2_tokenizer).eval()
    assert smollm2_tokenizer.pad_token_id == smollm2_tokenizer.eos_token_id
    prompts = [smollm2_tokenizer(text)["input_ids"] for text in PROMPTS]
    engine = TransformersEngine(model, smollm2_tokenizer, max_completion_length=6, temperature=0)
    plain = engine(prompts)[0]
    assert {len(ids) for ids in plain} == {6}
    one_by_one = [engine([ids])[0][0] for ids in prompts]
    assert plain == one_by_one
    model.generation_config.eos_token_id = plain[2][1]
    engine = TransformersEngine(model, smollm2_tokenizer, max_completion_length=6, temperature=0)
    completion = engine(prompts)[0][2]
    assert completion == plain[2][: plain[2].index(plain[2][1]) + 1]


def test_engine_is_what_the_batch_generator_expects(tokenizer):
    """The engine and its limits go into a `BatchGenerator` as they are; a full turn without an end was cut."""
    engine = TransformersEngine(tiny_model(tokenizer).eval(), tokenizer, max_completion_length=4, temperature=0)
    generator = BatchGenerator(engine, engine.max_completion_length, engine.eos_token_ids)
    assert isinstance(generator, Generator)

    async def one(ids):
        return await generator.generate(ids)

    made = asyncio.run(generator.run([one(ids) for ids in prompt_ids(tokenizer)]))
    assert [len(one.ids) for one in made] == [4] * 4
    assert {one.finish_reason for one in made} == {"length"}
    assert [one.logps for one in made] == [None] * 4


ROWS = [
    {"id": "b", "question": "Second?", "golden_answers": [["x"]], "dataset": "nq"},
    {"id": "a", "question": "First?", "golden_answers": [["x"], ["y"]], "dataset": "hotpotqa"},
    {"id": "c", "question": "Third?", "golden_answers": [["z"]], "dataset": "nq"},
]


def records(rows=ROWS) -> list[dict]:
    """Two rollouts of each question, of different lengths."""
    rng = random.Random(0)
    return [
        record(
            "x", row["golden_answers"], [turn(10, rng.randint(1, 99), "answer")], sample=sample, seconds=0.1, **more
        )
        for row in rows
        for sample in range(2)
        for more in [{name: row[name] for name in ("id", "question", "dataset")}]
    ]


def report_of(played, protocol, rows=ROWS, **kwargs) -> dict:
    settings = {"dataset_name": "q.jsonl", "context": "memory", "temperature": 0.0, "max_turns": 4, "seed": 0}
    return make_report(
        played,
        rows=rows,
        agent={"model": "里德/agent", "base_model": None, "corpus_hash": "0123"},
        protocol=protocol,
        settings=settings | {"max_completion_length": 8},
        retrieval={"retrieval_top_k": 3},
        **kwargs,
    )


def test_report_does_not_depend_on_the_order(protocol):
    """The report is the same whatever order the rollouts were finished in, but for what is under `timing`."""
    rows = [{**ROWS[k % 3], "id": str(k)} for k in range(40)]  # few questions have the same intervals in any order
    played = records(rows)
    whole = report_of(played, protocol, rows, seconds=1.0)
    assert whole["timing"] == {
        "seconds": 1.0,
        "rollout_seconds_mean": pytest.approx(0.1),
        "rollout_seconds_median": 0.1,
        "rollout_seconds_p95": 0.1,
        "search_seconds_mean": None,
    }
    for seed in range(3):
        shuffled = random.Random(seed).sample(played, len(played))
        for row in shuffled:
            row["seconds"] = random.random()
        other = report_of(shuffled, protocol, rows, seconds=7.0)
        assert other.pop("timing") != whole["timing"]
        other.pop("commit")
        assert json.dumps(other) == json.dumps({name: whole[name] for name in other})
    played = records()
    assert [row["id"] for row in in_order(reversed(played), ROWS)] == ["b", "b", "a", "a", "c", "c"]


def test_what_a_report_states(protocol, tokenizer, tmp_path):
    """Agent, tokenizer, prompt, template, corpus, questions, versions and figures are in the files, in plain text."""
    played = records()
    played[3] = failed([["x"], ["y"]], id="a", question="First?", dataset="hotpotqa", sample=1)
    report = report_of(played, protocol)
    assert report["results"] == summarize_by_objectives(played)
    assert report["results_by_dataset"] == summarize_by_dataset(played)
    assert (report["model"], report["corpus_hash"], report["questions"]["num"]) == ("里德/agent", "0123", 3)
    assert report["system_prompt"] == protocol.system_prompt and report["server_usage"] is None
    assert report["tokenizer_hash"] == tokenizer_hash(tokenizer)
    assert {"mempo_trl", "transformers", "torch", "trl", "peft"} == set(report["versions"])
    write_report(tmp_path / "new" / "folder", report)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "evaluation.md"]
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8")) == report
    page = (folder / "evaluation.md").read_text(encoding="utf-8")
    assert page == markdown(report)
    for text in (
        "里德/agent",
        "| temperature | 0.0 |",
        "| corpus hash | 0123 |",
        protocol.system_prompt,
        "| nq | 2 |",
    ):
        assert text in page
    assert "Outcomes: answer 5, failed 1." in page and "system prompt and question included" in page


def test_groups_of_a_table(protocol):
    """The table has all rollouts, each number of objectives, and each set; a single one of a kind is not repeated."""
    assert [name for name, _ in table_rows(report_of(records(), protocol))] == [
        "all",
        "k = 1",
        "k = 2",
        "hotpotqa",
        "nq",
    ]
    report = {"results": {"all": 1, "2": 1}, "results_by_dataset": {"nq": 1}}
    assert table_rows(report) == [("all", 1)]


def test_usage_of_a_server(protocol):
    """What a server counted is summed over the rollouts that have it."""
    played = records()
    for number, row in enumerate(played):
        row["usage"] = {"prompt_tokens": 10, "completion_tokens": number}
    assert report_of(played, protocol)["server_usage"] == {"prompt_tokens": 60, "completion_tokens": 15}


def test_other_rollouts_in_the_folder():
    """A part of what is asked for is gone on with; rollouts of other questions or more samples are refused."""
    played = records()
    check_resumable(played[:3], ROWS, 2, "out")
    check_resumable([], ROWS, 1, "out")
    for rows, num_samples, surplus in ((ROWS, 1, 3), (ROWS[:2], 2, 2)):
        with pytest.raises(ValueError, match=f"'out' holds {surplus} rollouts .*--overwrite"):
            check_resumable(played, rows, num_samples, "out")


def test_tokenizer_hash(tokenizer, smollm2_tokenizer, tmp_path):
    """A tokenizer has the same hash wherever it is loaded from and however it was called, and another one another."""
    one = tokenizer_hash(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path, padding_side="right")
    loaded(["a", "long text"], padding=True, truncation=True, max_length=3)
    assert one == tokenizer_hash(byte_tokenizer()) == tokenizer_hash(loaded)
    assert len({one, tokenizer_hash(byte_tokenizer(tags_are_tokens=False)), tokenizer_hash(smollm2_tokenizer)}) == 3


def test_weights_stamp(tmp_path):
    """New weights in the same folder are told from the old ones; a name on the Hub has no stamp."""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    stamp = weights_stamp(str(tmp_path))
    (tmp_path / "notes.txt").write_text("no weights")
    assert weights_stamp(str(tmp_path)) == stamp
    os.utime(tmp_path / "model.safetensors", ns=(0, 1))
    assert weights_stamp(str(tmp_path)) != stamp
    assert weights_stamp("org/model-on-the-hub") is None


def test_settings_without_secrets():
    """URLs lose user, query and fragment wherever they are; everything else stays."""
    settings = {"url": ["https://me:pw@host:8000/v1?key=secret#x"], "n": 1, "inner": {"u": "http://h/p"}, "t": "a?b"}
    expected = {"url": ["https://host:8000/v1"], "n": 1, "inner": {"u": "http://h/p"}, "t": "a?b"}
    assert without_secrets(settings) == expected


# `mempo evaluate`, stopped on the way.


def comparable(folder) -> str:
    """The report but for what the clock says, and the commit, since somebody may commit while the tests run."""
    report = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    report.pop("commit")
    assert report.pop("timing").keys() >= {"seconds", "rollout_seconds_mean"}
    return json.dumps(report, ensure_ascii=False)


@pytest.fixture
def scripted(model_folder, tmp_path, monkeypatch) -> list[str]:
    """Arguments of `mempo evaluate` with an agent that acts by rule."""
    monkeypatch.setattr(evaluate, "TransformersEngine", ScriptedEngine)
    monkeypatch.setattr(ScriptedEngine, "kill_at", 0)
    return ["evaluate", *make_folder(tmp_path), "--model_name_or_path", model_folder, "--output_dir"]


def test_an_evaluation_goes_on(scripted, tmp_path, monkeypatch):
    """
    An evaluation that is stopped between any two rollouts, or within the line of one, goes on with the rest and ends
    with the report of one that was not stopped. Nothing that is finished is played again.
    """
    cli.main([*scripted, str(tmp_path / "whole")])
    whole = comparable(tmp_path / "whole")
    # Every third pet is a dog: 8 of 12 right. One search for names of even length (4 of 12), two for the others.
    results = json.loads(whole)["results"]["all"]
    assert (results["exact_match"], results["num_rollouts"]) == (pytest.approx(8 / 12), 24)
    assert results["searches_mean"] == pytest.approx((4 * 1 + 8 * 2) / 12)
    played = []

    class Stopped(Exception):
        pass

    class Stopping(evaluate.Running):
        """Counts on, and stops the run at some rollout."""

        stop_at = None

        def add(self, record):
            super().add(record)
            if self.stop_at is not None:
                played.append((record["id"], record["sample"]))
                if len(played) == self.stop_at:
                    raise Stopped

    monkeypatch.setattr(evaluate, "Running", Stopping)
    rollouts = tmp_path / "stopped" / "rollouts.jsonl"
    before = 0
    for stop_at in (1, 7, 8, 20):
        Stopping.stop_at = stop_at + before  # those that are there already are counted again by the bar
        del played[:]
        with pytest.raises(Stopped):
            cli.main([*scripted, str(tmp_path / "stopped")])
        before = len(rollouts.read_text().splitlines())
        assert before >= stop_at and not (tmp_path / "stopped" / "evaluation.json").exists()
        with open(rollouts, "a", encoding="utf-8") as file:
            file.write('{"id": "Boa", "sample": 0, "question": "What is')
        if before == 24:
            break
    Stopping.stop_at = None
    cli.main([*scripted, str(tmp_path / "stopped")])
    assert comparable(tmp_path / "stopped") == whole
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert len({(row["id"], row["sample"]) for row in lines}) == len(lines) == 24


def test_a_finished_evaluation_is_not_played_again(scripted, tmp_path, monkeypatch):
    """The same command again reads what is there; `--overwrite` plays anew; other settings and fewer questions don't."""
    given = [*scripted, str(tmp_path / "out")]
    cli.main(given)
    before = comparable(tmp_path / "out")
    monkeypatch.setattr(ScriptedEngine, "calls", 0)
    cli.main(given)
    assert ScriptedEngine.calls == 0 and comparable(tmp_path / "out") == before
    with pytest.raises(ValueError, match="`max_turns` was 4 and is 3 now"):
        cli.main([*given, "--max_turns", "3"])
    with pytest.raises(ValueError, match="holds 4 rollouts of other questions or more samples"):
        cli.main([*given, "--max_questions", "10"])
    cli.main([*given, "--num_samples", "3"])
    assert json.loads(comparable(tmp_path / "out"))["results"]["all"]["num_rollouts"] == 36
    monkeypatch.setattr(ScriptedEngine, "calls", 0)
    cli.main([*given, "--overwrite"])
    assert ScriptedEngine.calls > 0 and comparable(tmp_path / "out") == before


def test_greedy_turns_do_not_depend_on_the_batch(model_folder, tmp_path):
    """
    In float32 a model that goes on with more questions, so in other batches, writes what it writes in one go.
    """
    given = ["evaluate", *make_folder(tmp_path), "--model_name_or_path", model_folder, "--max_completion_length", "12"]
    given += ["--num_samples", "1", "--output_dir"]
    cli.main([*given, str(tmp_path / "whole")])
    for number in ("2", "9"):
        cli.main([*given, str(tmp_path / "parts"), "--max_questions", number])
    cli.main([*given, str(tmp_path / "parts")])
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")


def test_more_samples_are_other_ones(model_folder, tmp_path):
    """Samples that are added to an evaluation are drawn anew, and do not repeat those that are there."""
    given = ["evaluate", *make_folder(tmp_path), "--model_name_or_path", model_folder, "--max_completion_length", "12"]
    given += ["--temperature", "1", "--output_dir", str(tmp_path / "out"), "--num_samples"]
    for number in ("1", "2"):
        cli.main([*given, number])
    records = read_records(tmp_path / "out" / "rollouts.jsonl")
    assert len(records) == 24
    assert len({(record["id"], record["turns"][0]["completion"]) for record in records}) == 24


def test_servers(scripted, tokenizer, model_folder, tmp_path, monkeypatch):
    """
    The agent behind vLLM servers, or behind a chat endpoint that shows it the same turns, has the figures of the one
    here. Tokens that the servers count are told beside those of the tokenizer; the API key is nowhere in the files.
    """
    monkeypatch.setenv("POLICY_KEY", "sk-secret")
    cli.main([*scripted, str(tmp_path / "here")])
    here = json.loads(comparable(tmp_path / "here"))
    engine = ScriptedEngine(tiny_model(tokenizer), tokenizer, 200)

    def answer(request):
        if request.path == "/v1/completions":
            return completion_of(engine.turn(tokenizer.decode(request.body["prompt"])))
        shown = "".join(f"{message['role']}\n{message['content']}\n" for message in request.body["messages"])
        return chat(tokenizer.decode(engine.turn(shown)[:-1]))

    more = ("--server_model", "policy", "--api_key_env", "POLICY_KEY")
    with StubServer(answer) as one, StubServer(answer) as other:
        cli.main([*scripted, str(tmp_path / "vllm"), "--server_url", one.url, other.url, *more])
        assert one.requests and other.requests
        cli.main([*scripted, str(tmp_path / "chat"), "--chat_url", f"{one.url}/v1", *more])
    for folder in ("vllm", "chat"):
        report = json.loads(comparable(tmp_path / folder))
        assert report["results"] == here["results"] and report["results_by_dataset"] == here["results_by_dataset"]
        assert (report["server_model"], report["model"]) == ("policy", model_folder)
        turns = sum(len(record["turns"]) for record in read_records(tmp_path / folder / "rollouts.jsonl"))
        assert report["server_usage"]["prompt_tokens"] == 10 * turns  # the stub counts 10 per request
        assert not any("sk-secret" in path.read_text() for path in (tmp_path / folder).iterdir())


def test_a_server_that_fails_now_and_then(scripted, tokenizer, tmp_path, capsys):
    """Rollouts that a server refuses are in the report as failures, and the same command plays them again."""
    engine = ScriptedEngine(tiny_model(tokenizer), tokenizer, 200)
    refused = "Boa"

    def answer(request):
        text = tokenizer.decode(request.body["prompt"])
        if f"pet of {refused}?" in text:
            return Reply("too long", 400)
        return completion_of(engine.turn(text))

    with StubServer(answer) as server:
        given = [*scripted, str(tmp_path / "out"), "--server_url", server.url]
        cli.main(given)
        results = json.loads(comparable(tmp_path / "out"))["results"]["all"]
        # 16 of 24 are right otherwise, the two samples that failed among them.
        assert (results["failures"], results["outcomes"]["failed"]) == (2, 2)
        assert results["exact_match"] == pytest.approx(14 / 24) and results["num_rollouts"] == 24
        assert "2 rollouts failed" in capsys.readouterr().out
        refused = "nobody"
        server.requests.clear()
        cli.main(given)
        assert {"pet of Boa?" in tokenizer.decode(request.body["prompt"]) for request in server.requests} == {True}
    results = json.loads(comparable(tmp_path / "out"))["results"]["all"]
    assert (results["failures"], results["exact_match"]) == (0, pytest.approx(16 / 24))


def test_probe_with_the_model(scripted, tmp_path, capsys):
    """`--probe_memory` adds answer probabilities of the model that was evaluated, without playing anything again."""
    given = [*scripted, str(tmp_path / "out")]
    cli.main(given)
    report = comparable(tmp_path / "out")
    ScriptedEngine.calls = 0
    cli.main([*given, "--probe_memory", "--answer_template", "<answer>{answer}</answer>"])
    assert ScriptedEngine.calls == 0 and comparable(tmp_path / "out") == report
    probe = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert probe["probabilities"]["settings"]["answer_template"] == "<answer>{answer}</answer>"
    # 8 of 12 pets are cats, and each is found, remembered and answered; nothing else is ever guessed.
    assert probe["in_documents"] == probe["in_last_memory"] == probe["right"] == pytest.approx(8 / 12)
    assert (probe["guess"], probe["of_found"]["lost"], probe["memories"]) == (0.0, 0.0, 40)
    by_turn = probe["probabilities"]["by_turn"]
    assert {turn: row["memories"] for turn, row in by_turn.items()} == {"2": 24, "3": 16}
    for row in by_turn.values():
        assert 0 < row["P_mem"] < 1 and row["R_M"] == pytest.approx(row["P_mem"] - row["P_full"])
    assert "turn 3: P_mem, P_full, R_M" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_evaluations(model_folder, tmp_path):
    """An evaluation that is killed with `kill -9` at random points ends with the report of one that was not."""
    arguments = [*make_folder(tmp_path), "--model_name_or_path", model_folder, "--output_dir"]

    def run(kill_at: int, folder: str) -> int:
        command = [sys.executable, str(REPOSITORY / "tests" / "scripted_agent.py"), str(kill_at), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, str(tmp_path / folder)], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == (0 if kill_at == 0 else -signal.SIGKILL), done.stderr[-2000:]
        path = tmp_path / folder / "rollouts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    assert run(0, "whole") == 24
    rng, counts = random.Random(5), [0]
    while counts[-1] < 18:
        counts.append(run(rng.randint(1, 6), "killed"))
    assert counts == sorted(counts)
    assert run(0, "killed") == 24
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "whole")
