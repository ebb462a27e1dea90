"""The scripts behind the `mempo` command, from files to files: what they write, and what they refuse."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import EOS, PAD, REPOSITORY, call, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoTokenizer
from user_folder import NAMES, make_user_folder, read_lines, write_lines

from mempo_trl import BM25Retriever, cli
from mempo_trl.protocol import load_chat_template
from mempo_trl.scripts import arguments, sft, train


CPU_CONFIG = str(REPOSITORY / "recipes" / "accelerate_configs" / "cpu.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder) -> Path:
    return make_user_folder(tmp_path_factory.mktemp("scripts"), model_name_or_path=model_folder)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run a module of this Python in a user's folder."""
    command = [sys.executable, "-m", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def run_here(script, folder: Path, monkeypatch, *given: str):
    """Run a launched script in this process, as the launcher's process would."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["script", *given])
    return script.main(*arguments.parse_launched(script.make_parser()))


def lora_weights(folder: Path, part: str = "lora_") -> dict[str, torch.Tensor]:
    weights = load_file(folder / "adapter_model.safetensors")
    return {name: weight for name, weight in weights.items() if part in name}


def is_trained(folder: Path) -> bool:
    """Whether an adapter that began as nothing has moved: LoRA's B starts at zero."""
    weights = lora_weights(folder, "lora_B")
    return bool(weights) and any(weight.abs().max() > 0 for weight in weights.values())


# `mempo train`.


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    """Output of `mempo train` with a recipe, an `--accelerate_config` and an override, in processes of its own."""
    given = ("--config", "recipe.yaml", "--accelerate_config", CPU_CONFIG)
    done = run(folder, "mempo_trl.cli", "train", *given, "--output_dir", "trained", "--max_completion_length", "10")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Model saved to trained." in done.stdout
    return folder / "trained"


def test_train_end_to_end(trained, model_folder):
    """
    `mempo train` trains a LoRA adapter on the questions of a file with the reward functions that the recipe names, and
    saves it with its tokenizer; the override counts.
    """
    assert is_trained(trained)
    config = json.loads((trained / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, model_folder)
    template = AutoTokenizer.from_pretrained(trained).chat_template
    assert template == load_chat_template("chatml")
    (rollouts,) = (trained / "rollouts").iterdir()
    records = read_lines(rollouts)
    assert len(records) == 2
    for record in records:
        assert record["question"] in {f"What is the pet of {name}?" for name in NAMES}
        assert record["golden_answers"] == [["cat"]]
        assert all(turn["completion_tokens"] <= 10 for turn in record["turns"])
        assert record["reward"] == record["reward"] // 1 >= 0  # an id of the first function, and the format's 0 or 1
    assert any(turn["completion_tokens"] == 10 for record in records for turn in record["turns"])


@pytest.mark.slow
def test_accelerate_launch(folder):
    """`accelerate launch -m mempo_trl.scripts.train` does the same."""
    launch = ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    given = ("--config", "recipe.yaml", "--output_dir", "by_accelerate")
    done = run(folder, *launch, "--mixed_precision", "no", "-m", "mempo_trl.scripts.train", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert is_trained(folder / "by_accelerate")


@pytest.mark.slow
def test_an_error_of_a_launched_script(folder):
    """An error in the launched process is shown, and the command fails."""
    done = run(folder, "mempo_trl.cli", "train", "--config", "recipe.yaml", "--dataset_name", "nowhere.jsonl")
    assert done.returncode != 0
    assert "There is no question file 'nowhere.jsonl'." in done.stderr


def make_adapter(model_folder: str, output: Path, tokenizer) -> None:
    """An adapter with a weight of its own in B."""
    model = tiny_model(tokenizer).from_pretrained(model_folder)
    adapter = get_peft_model(model, LoraConfig(r=3, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    for name, weight in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapter.save_pretrained(output)
    tokenizer.save_pretrained(output)


@pytest.mark.parametrize("learning_rate", ["0.0", "1e-2"])
def test_train_goes_on_with_an_adapter(folder, model_folder, tokenizer, learning_rate, monkeypatch, tmp_path):
    """
    An adapter is trained further as it is: no second one is put on it or beside it, whatever the recipe says about
    LoRA. With a learning rate of 0 it is saved as it was.
    """
    make_adapter(model_folder, tmp_path / "adapter", tokenizer)
    given = ("--config", "recipe.yaml", "--model_name_or_path", str(tmp_path / "adapter"))
    given += ("--output_dir", str(tmp_path / "out"), "--learning_rate", learning_rate, "--beta", "0.1")
    run_here(train, folder, monkeypatch, *given)
    before, after = lora_weights(tmp_path / "adapter"), lora_weights(tmp_path / "out")
    assert before.keys() == after.keys() and len(after) == 4  # two layers, one module, A and B
    same = [torch.equal(before[name], after[name]) for name in before]
    assert all(same) if learning_rate == "0.0" else not any(same)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (3, model_folder)


def test_full_fine_tuning(folder, model_folder, monkeypatch, tmp_path):
    """Without `use_peft` the model itself is trained and saved, in a folder of its own with the tokenizer."""
    before = load_file(Path(model_folder) / "model.safetensors")
    run_here(
        train, folder, monkeypatch, "--config", "recipe.yaml", "--output_dir", str(tmp_path), "--use_peft", "false"
    )
    after = load_file(tmp_path / "model.safetensors")
    assert not (tmp_path / "adapter_config.json").exists()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is not None


@pytest.mark.parametrize(
    "given, error, message",
    [
        (["--dataset_name", "nowhere.jsonl"], FileNotFoundError, "no question file 'nowhere.jsonl'"),
        (["--corpus_path", "nowhere.jsonl"], FileNotFoundError, "nowhere.jsonl"),
        (
            ["--index_path", "index"],
            ValueError,
            "Give one of `corpus_path`, `index_path`, `search_url` and `web_search`",
        ),
        (["--reward_funcs", "exact_mach"], ValueError, "no reward function 'exact_mach'.*exact_match_reward"),
        (["--reward_funcs", "user_rewards.none"], ValueError, "'user_rewards' has no reward function 'none'"),
        (["--reward_funcs", "no_module.f"], ModuleNotFoundError, "no_module"),
        (["--chat_template_path", "chatmll"], ValueError, "'chatmll'.*'chatml'"),
        (["--eval_strategy", "steps", "--eval_dataset_name", "nowhere.csv"], FileNotFoundError, "nowhere.csv"),
    ],
)
def test_wrong_input_of_train(given, error, message, folder, monkeypatch, tmp_path):
    """Wrong input stops `mempo train` before it trains, with an error that names it."""
    with pytest.raises(error, match=message):
        run_here(train, folder, monkeypatch, "--config", "recipe.yaml", "--output_dir", str(tmp_path), *given)


def test_wrong_configuration_of_train(folder, monkeypatch, tmp_path, capsys):
    """What the configuration refuses is one line and the exit code of a wrong command."""
    given = ["--config", "recipe.yaml", "--output_dir", str(tmp_path), "--max_tool_calling_iterations", "3"]
    with pytest.raises(SystemExit) as exit:
        run_here(train, folder, monkeypatch, *given)
    assert exit.value.code == 2
    assert "set `max_turns` instead" in capsys.readouterr().err.splitlines()[-1]


def test_corpus_or_index(folder, tokenizer, tmp_path):
    """One of corpus and index is needed, not both; either gives the same passages, cut to the tokens asked for."""
    args = arguments.RetrievalArguments
    corpus, index = str(folder / "corpus.jsonl"), str(tmp_path / "index")
    both = args(corpus_path=corpus, index_path=index)
    for wrong, message in ((args(), "got none"), (both, f"got corpus_path={corpus!r} and index_path={index!r}")):
        with pytest.raises(ValueError, match=message):
            arguments.make_search_tool(wrong, tokenizer)
    BM25Retriever.from_corpus(corpus).save(index)
    tools = [
        arguments.make_search_tool(args(retrieval_top_k=1, max_passage_tokens=8, **place), tokenizer)
        for place in ({"corpus_path": corpus}, {"index_path": index})
    ]
    assert [tool("Anna") for tool in tools] == ["Doc 1(Title: Anna) Anna was"] * 2


def test_token_stays_out_of_what_is_saved(folder, monkeypatch):
    """`hub_token` reaches the client by the environment, and is not in the arguments, which are saved with a model."""
    monkeypatch.setenv("HF_TOKEN", "another")
    monkeypatch.setattr("sys.argv", ["x", "--config", str(folder / "recipe.yaml"), "--hub_token", "hf_dummy"])
    _, args, *_ = arguments.parse_launched(train.make_parser())
    assert args.hub_token is None and os.environ["HF_TOKEN"] == "hf_dummy"
    monkeypatch.setenv("HF_TOKEN", "another")
    monkeypatch.setattr("sys.argv", ["x", "--config", str(folder / "recipe.yaml")])
    arguments.parse_launched(train.make_parser())
    assert os.environ["HF_TOKEN"] == "another"


# `mempo collect` and `mempo sft`.


@pytest.fixture(scope="module")
def collected(folder) -> Path:
    """Rollouts of `mempo collect`."""
    path = folder / "new" / "rollouts.jsonl"
    questions, corpus = str(folder / "questions.jsonl"), str(folder / "corpus.jsonl")
    given = ["--dataset_name", questions, "--corpus_path", corpus, "--output_file", str(path)]
    assert cli.main(["collect", *given, "--retrieval_top_k", "1"]) == 0
    return path


SFT = ("--use_cpu", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--dtype", "float32")
SFT += ("--system_prompt", "Search.", "--gradient_checkpointing", "false", "--disable_tqdm", "true")


def sft_arguments(collected: Path, model: str, output: Path, *more: str) -> list[str]:
    given = ["--rollouts", str(collected), "--model_name_or_path", model, "--output_dir", str(output)]
    return [*given, *SFT, "--max_steps", "1", *more]


def test_sft_then_train(collected, folder, model_folder, monkeypatch, capsys, tmp_path):
    """
    `mempo sft` trains an adapter on collected rollouts, with an evaluation loss if asked for, and `mempo train` goes on
    with it: the adapter is the same one, moved.
    """
    lora = ("--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj", "--learning_rate", "1e-2")
    evaluation = ("--eval_rollouts", str(collected), "--eval_strategy", "steps", "--eval_steps", "1")
    run_here(
        sft, folder, monkeypatch, *sft_arguments(collected, model_folder, tmp_path / "sft", *lora, *evaluation),
        *("--max_length", "2048"),
    )  # fmt: skip
    printed = capsys.readouterr().out
    # Each of the three rollouts has two turns, which the memory context keeps in one sequence.
    assert re.search(r"sequences\W+3\W+3\b", printed) and re.search(r"turns\W+6\W+6\b", printed)
    assert re.search(r"eval_loss at the end: \d+\.\d{4} over 3 sequences", printed)
    assert is_trained(tmp_path / "sft")
    given = ("--config", "recipe.yaml", "--model_name_or_path", str(tmp_path / "sft"))
    run_here(train, folder, monkeypatch, *given, "--output_dir", str(tmp_path / "mempo"))
    before, after = lora_weights(tmp_path / "sft"), lora_weights(tmp_path / "mempo")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_B" in name)


def test_sft_mixture(folder, model_folder, monkeypatch, capsys, tmp_path):
    """
    `mempo sft` trains on several files; a part of the questions is set apart, with all their rollouts; those that
    failed, that have too low a reward or too many tokens are left out; and all of it is said.
    """

    def written(i: int, answer: str = "cat", **more) -> dict:
        turns = [{"completion": f"<answer>{answer}</answer>"}]
        return {"question": f"q{i}", "golden_answers": ["cat"], "turns": turns, **more}

    write_lines(tmp_path / "a.jsonl", [written(i) for i in range(8)])
    failed = {"question": "q9", "outcome": "failed", "error": "no server", "turns": []}
    long = written(0)
    long["turns"] = [{"completion": f"<think>{'x' * 2000}</think><answer>cat</answer>"}]
    others = [written(i) for i in range(8)] + [written(1, "dog"), written(2, reward=0.2), failed, long]
    write_lines(tmp_path / "b.jsonl", others)
    fed = []
    real = sft.sft_rows
    monkeypatch.setattr(sft, "sft_rows", lambda *args: fed.append((args[0], real(*args))) or fed[-1][1])
    given = sft_arguments(tmp_path / "a.jsonl", model_folder, tmp_path / "out", "--max_length", "1500")
    given[2:2] = [str(tmp_path / "b.jsonl")]
    run_here(sft, folder, monkeypatch, *given, "--dev_fraction", "0.25", "--min_reward", "0.5")
    (train_records, (train_rows, counts)), (dev_records, (dev_rows, dev_counts)) = fed
    questions = [{record["question"] for record in records} for records in (train_records, dev_records)]
    assert not questions[0] & questions[1] and questions[0] | questions[1] == {f"q{i}" for i in (*range(8), 9)}
    assert len(questions[1]) == 2  # a quarter of nine
    total = counts + dev_counts
    assert {name: total[name] for name in total if "rollouts" in name or "dropped" in name} == {
        "rollouts read": 20,
        "rollouts used": 17,
        "rollouts dropped: reward too low": 2,
        "rollouts dropped: failed": 1,
        "sequences dropped: too long": 1,
    }
    assert len(train_rows) + len(dev_rows) == total["sequences"] == 16
    labels = [label for rows in (train_rows, dev_rows) for row in rows for label in row["labels"] if label >= 0]
    assert len(labels) == total["trained tokens"]
    printed = capsys.readouterr().out
    assert re.search(
        r"1 sequences have more than `max_length` = 1500 tokens and are left out\. Raise it to \d+", printed
    )
    assert re.search(rf"eval_loss at the end: \d+\.\d{{4}} over {len(dev_rows)} sequences", printed)


def test_sft_goes_on_with_an_adapter(collected, folder, model_folder, tokenizer, monkeypatch, tmp_path):
    """`mempo sft` trains an adapter further too."""
    make_adapter(model_folder, tmp_path / "adapter", tokenizer)
    given = sft_arguments(collected, str(tmp_path / "adapter"), tmp_path / "out", "--max_length", "2048")
    run_here(sft, folder, monkeypatch, *given, "--learning_rate", "1e-2")
    before, after = lora_weights(tmp_path / "adapter"), lora_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_sft_saves_the_chat_template(collected, folder, tokenizer, monkeypatch, tmp_path):
    """A chat template that is given is the one that is trained with and saved with the model."""
    tiny_model(tokenizer).save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    given = sft_arguments(collected, str(tmp_path / "bare"), tmp_path / "out", "--max_length", "2048")
    with pytest.raises(ValueError, match="has no chat template. Set `chat_template_path`"):
        run_here(sft, folder, monkeypatch, *given)
    run_here(sft, folder, monkeypatch, *given, "--chat_template_path", "chatml")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == load_chat_template("chatml")


def test_sft_ends_turns_as_training_does(folder, tokenizer, monkeypatch, tmp_path):
    """
    Where the model declares the end of turn and the tokenizer another end, as Gemma does, the end of turn is what SFT
    trains: it is the one that the template writes and that training samples.
    """
    other = tokenizer.__class__.from_pretrained(save_with_eos(tokenizer, tmp_path / "model", PAD))
    assert other.eos_token == PAD
    rollout = {
        "question": "What is the pet of Anna?",
        "turns": [{"completion": call("Anna"), "response": "a cat"}, {"completion": "<answer>cat</answer>"}],
    }
    write_lines(tmp_path / "rollouts.jsonl", [rollout])
    fed = []
    real = sft.sft_rows
    monkeypatch.setattr(sft, "sft_rows", lambda *args: fed.append(real(*args)) or fed[-1])
    given = sft_arguments(tmp_path / "rollouts.jsonl", str(tmp_path / "model"), tmp_path / "out")
    run_here(sft, folder, monkeypatch, *given, "--max_length", "2048")
    (row,) = fed[0][0]
    trained = [label for label in row["labels"] if label >= 0]
    end = tokenizer.convert_tokens_to_ids(EOS)
    assert trained[-1] == end and trained.count(end) == 2
    assert tokenizer.convert_tokens_to_ids(PAD) not in row["input_ids"]


def save_with_eos(tokenizer, output: Path, eos: str) -> str:
    """The tiny model, which declares the end of turn, with a tokenizer that declares another token."""
    tiny_model(tokenizer).save_pretrained(output)
    tokenizer.save_pretrained(output)
    config = json.loads((output / "tokenizer_config.json").read_text())
    (output / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos}))
    return str(output)


@pytest.mark.parametrize(
    "name, content, error, message",
    [
        (
            "short",
            None,
            ValueError,
            r"nothing left to train on: .* 3 sequences dropped: too long.*`max_length` is 100",
        ),
        ("short evaluation", None, ValueError, "nothing left to evaluate on: .* 1 sequences dropped: too long"),
        ("missing", None, FileNotFoundError, "nowhere.jsonl"),
        ("empty", "\n", ValueError, "There are no rollouts in '.*given.jsonl'"),
        ("bad line", '{"question": "q"}\n', ValueError, "Line 1 of '.*given.jsonl' is not a rollout"),
        (
            "another protocol",
            json.dumps(
                {
                    "question": "q",
                    "turns": [
                        {"completion": call("a").replace("search", "find"), "outcome": "tool_call", "response": "r"},
                        {"completion": "<answer>a</answer>", "outcome": "answer"},
                    ],
                }
            ),
            ValueError,
            "made for another protocol",
        ),
        ("both", None, ValueError, "Give one of `eval_rollouts` and `dev_fraction`"),
        ("all dev", None, ValueError, "dev_fraction=0.9 leaves none of the 3 questions"),
        ("no fraction", None, ValueError, "got dev_fraction=1.5"),
    ],
)
def test_wrong_input_of_sft(
    name, content, error, message, collected, folder, model_folder, monkeypatch, tmp_path
):  # fmt: skip
    """Wrong input stops `mempo sft` before it trains, with an error that names it."""
    path, more = collected, []
    if content is not None:
        path = tmp_path / "given.jsonl"
        path.write_text(content, encoding="utf-8")
    elif name == "missing":
        path = tmp_path / "nowhere.jsonl"
    elif name == "short evaluation":
        long = {"question": "q", "turns": [{"completion": "<think>" + "x" * 3000 + "</think><answer>a</answer>"}]}
        write_lines(tmp_path / "long.jsonl", [long])
        more = ["--eval_rollouts", str(tmp_path / "long.jsonl"), "--eval_strategy", "steps"]
    elif name == "both":
        more = ["--eval_rollouts", str(collected), "--dev_fraction", "0.5"]
    elif name in ("all dev", "no fraction"):
        more = ["--dev_fraction", "0.9" if name == "all dev" else "1.5"]
    max_length = "100" if name == "short" else "2048"
    given = sft_arguments(path, model_folder, tmp_path / "out", "--max_length", max_length, *more)
    with pytest.raises(error, match=message):
        run_here(sft, folder, monkeypatch, *given)


# `mempo evaluate`.


def evaluate_arguments(folder: Path, model: str, output: Path, *more: str) -> list[str]:
    given = ["--model_name_or_path", model, "--dtype", "float32", "--dataset_name", str(folder / "questions.jsonl")]
    given += ["--corpus_path", str(folder / "corpus.jsonl"), "--output_dir", str(output), "--max_turns", "2"]
    return ["evaluate", *given, "--max_completion_length", "8", "--system_prompt", "Search.", *more]


def test_evaluate(trained, folder, model_folder, capsys, tmp_path):
    """
    `mempo evaluate` plays the agent, an adapter here, on every question, and writes its figures with all that is needed
    to make them again, the rollouts, a page and a table.
    """
    assert cli.main(evaluate_arguments(folder, str(trained), tmp_path, "--seed", "5", "--batch_size", "2")) == 0
    report = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert report["model"] == str(trained) and report["base_model"] == model_folder
    settings = {
        name: report["settings"][name] for name in ("seed", "max_turns", "temperature", "normalizer", "context")
    }
    assert settings == {"seed": 5, "max_turns": 2, "temperature": 1.0, "normalizer": "squad", "context": "memory"}
    assert report["retrieval"]["retrieval_top_k"] == 3 and len(report["corpus_hash"]) == 64
    assert report["system_prompt"].startswith("Search.")
    assert report["versions"]["trl"] == importlib.metadata.version("trl")
    assert report["timing"]["seconds"] > 0
    assert "system prompt and question included" in report["tokens_counted"]["tokens_total_mean"]
    assert list(report["results"]) == ["all", "1"] and report["results"]["all"]["num_rollouts"] == 3

    records = {record["question"]: record for record in read_lines(tmp_path / "rollouts.jsonl")}
    assert sorted(records) == [f"What is the pet of {name}?" for name in NAMES]
    assert all("Search." in record["prefix"] for record in records.values())
    for name, figure in (("tokens_total", "tokens_total_mean"), ("tokens_peak", "tokens_peak_mean")):
        mean = sum(record[name] for record in records.values()) / 3
        assert report["results"]["all"][figure] == pytest.approx(mean)
    table = capsys.readouterr().out
    # Headers are whole words even in the 80 columns of a file.
    words = ("normaliser: squad", "rollouts", "exact", "match", "format", "total", "peak", "turns")
    assert all(word in table for word in words)
    assert "…" not in table and re.search(r"\ball\b.*\b3\b", table)
    assert "| all | 3 | 3 |" in (tmp_path / "evaluation.md").read_text(encoding="utf-8")


def test_evaluate_is_repeatable(folder, model_folder, tmp_path):
    """The same seed gives the same rollouts, another one gives others, and temperature 0 needs none."""

    def rollouts(name: str, *more: str) -> list[str]:
        cli.main(evaluate_arguments(folder, model_folder, tmp_path / name, *more))
        records = read_lines(tmp_path / name / "rollouts.jsonl")
        return [row["turns"][0]["completion"] for row in sorted(records, key=lambda row: row["question"])]

    assert rollouts("a", "--seed", "1") == rollouts("b", "--seed", "1") != rollouts("c", "--seed", "2")
    assert rollouts("d", "--temperature", "0") == rollouts("e", "--temperature", "0", "--seed", "7")


def test_evaluate_part_and_context(folder, model_folder, tmp_path):
    """`max_questions` takes the first ones; the full context and the other normaliser are written down as such."""
    more = ("--max_questions", "2", "--context", "full", "--normalizer", "words")
    cli.main(evaluate_arguments(folder, model_folder, tmp_path, *more))
    report = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert report["results"]["all"]["num_rollouts"] == 2
    assert (report["settings"]["context"], report["results"]["all"]["normalizer"]) == ("full", "words")


@pytest.mark.parametrize(
    "given, error, message",
    [
        (["--dataset_name", "nowhere.jsonl"], FileNotFoundError, "no question file 'nowhere.jsonl'"),
        (["--corpus_path", "nowhere.jsonl"], FileNotFoundError, "nowhere.jsonl"),
        (
            ["--index_path", "index"],
            ValueError,
            "Give one of `corpus_path`, `index_path`, `search_url` and `web_search`",
        ),
        (["--max_completion_length", "9000"], ValueError, "`max_completion_length` is 9000, but the model takes 8192"),
        (["--max_questions", "0"], ValueError, "`max_questions` is 0, expected at least 1"),
        (["--server_model", "policy"], ValueError, "`server_model` is 'policy'; give the URL"),
        (["--server_url", "http://h", "--chat_url", "http://h"], ValueError, "one of `server_url` and `chat_url`"),
    ],
)
def test_wrong_input_of_evaluate(given, error, message, folder, model_folder, tmp_path):
    """Wrong input stops `mempo evaluate` with an error that names it."""
    with pytest.raises(error, match=message):
        cli.main([*evaluate_arguments(folder, model_folder, tmp_path), *given])


def test_choices_are_checked(folder, model_folder, tmp_path, capsys):
    """A value outside the choices of an argument is refused with the choices."""
    with pytest.raises(SystemExit):
        cli.main(evaluate_arguments(folder, model_folder, tmp_path, "--normalizer", "loose"))
    assert "squad" in capsys.readouterr().err
