"""Pushing to the Hub: the real client against a local server, from `mempo train` to a download that answers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, HubServer
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM
from user_folder import NAMES, make_user_folder, read_lines

from mempo_trl.scripts import evaluate


REPO, BASE = "founder/agent", "village/tiny"


@pytest.fixture(scope="module")
def hub(model_folder):
    with HubServer() as server:
        server.add_folder(BASE, model_folder)
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a recipe and its data."""
    settings = dict(memory_prob_threshold=0.25, max_tool_response_length=50, system_prompt="prompt.txt")
    evaluation = dict(eval_strategy="steps", eval_steps=1, num_generations_eval=1, per_device_eval_batch_size=3)
    push = dict(push_to_hub=True, hub_model_id=REPO)
    folder = make_user_folder(tmp_path_factory.mktemp("hub"), **settings, **evaluation, **push)
    (folder / "prompt.txt").write_text("Search the village.\n", encoding="utf-8")
    return folder


def run(hub: HubServer, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python where the Hub is the local server, as it is set when the client is imported. Xet is not spoken there."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": f"{folder}/home", "HF_HUB_DISABLE_XET": "1"}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    del env["HF_HUB_OFFLINE"]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def pushed(hub, folder) -> Path:
    """Output folder of a run on a base model of the Hub that pushed; its token came as an argument."""
    arguments = ("--config", "recipe.yaml", "--model_name_or_path", BASE, "--output_dir", "out", "--hub_token", TOKEN)
    done = run(hub, folder, "-m", "mempo_trl.scripts.train", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Model pushed to {REPO}." in done.stdout
    return folder / "out"


def card_of(hub: HubServer) -> ModelCard:
    return ModelCard(hub.repos[REPO]["README.md"].decode())


def section(text: str, title: str) -> str:
    """The part of a card under a heading."""
    return re.split(r"\n##+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1)[0]


def table(text: str) -> dict[str, str]:
    """The rows of the table in a part of a card, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return dict(rows[2:])


def code(text: str, kind: str) -> str:
    """The code block in a part of a card."""
    return re.search(rf"^(`{{3,}}){kind}\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)[2]


def test_adapter_and_tokenizer_are_pushed(hub, pushed):
    """The repository holds the trained adapter and the tokenizer with its chat template, byte for byte as saved."""
    files = hub.repos[REPO]
    names = {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    names |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= set(files)
    for name in names:
        assert files[name] == (pushed / name).read_bytes(), name
    assert files["chat_template.jinja"].decode() == (pushed / "chat_template.jinja").read_text()
    assert "<tool_call>" in files["chat_template.jinja"].decode()
    assert not [name for name in files if name.startswith("model")]  # the base model is not pushed along
    assert "rollouts/train-000000-rank0.jsonl" in files  # docs/reliability.md warns of it
    weights = load(files["adapter_model.safetensors"])
    assert any(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name)


def test_card_names_method_paper_and_base_model(hub, pushed):
    """The metadata and the text name MemPO, its paper and the base model, and no other base, data set or paper."""
    card = card_of(hub)
    metadata = card.data.to_dict()
    assert metadata["base_model"] == BASE
    assert {"trl", "mempo", "generated_from_trainer"} <= set(metadata["tags"])
    assert "datasets" not in metadata  # a file of the user is no data set of the Hub
    assert "This model was trained with MemPO" in card.text
    papers = set(re.findall(r"https://huggingface.co/papers/([\d.]+)", card.text))
    assert papers == {"2603.00680"}
    assert "eprint       = {arXiv:2603.00680}" in card.text
    assert f"[{BASE}](https://huggingface.co/{BASE})" in card.text
    assert "None" not in card.text.split("## Training procedure")[0]
    assert "questions.jsonl](" not in card.text


def test_card_holds_the_recipe(hub, pushed):
    """The settings of the run are in the card, those of the recipe and the defaults, and the system prompt too."""
    recipe = section(card_of(hub).text, "Recipe")
    settings = table(recipe)
    assert settings["`memory_prob_threshold`"] == "0.25"
    assert settings["`learning_rate`"] == "0.01"
    assert settings["`max_turns`"] == "2"
    assert settings["`memory_advantage_weight`"] == "0.3"
    assert settings["`memory_baseline`"] == "previous"
    assert code(recipe, "text") == "Search the village.\n"


def test_card_holds_the_evaluation(hub, pushed):
    """The table has the figures of the last evaluation: its reward is the mean over the rollouts that it dumped."""
    evaluation = section(card_of(hub).text, "Evaluation")
    assert "At step 1" in evaluation
    figures = table(evaluation)
    rewards = [record["reward"] for record in read_lines(pushed / "rollouts" / "eval-000001-rank0.jsonl")]
    assert len(rewards) == len(NAMES)
    assert figures["reward"] == f"{sum(rewards) / len(NAMES):.4f}"
    assert "rollout/turns_mean" in figures and "rewards/first_id/mean" in figures
    # What only says how the machine or the optimiser was doing is not an evaluation.
    assert not {"runtime", "loss", "clip_ratio/region_mean", "time/rollout"} & set(figures)


def test_token_goes_nowhere_but_to_the_hub(hub, pushed):
    """The token is in no file, neither pushed nor on disk, and in no body of a request."""
    assert hub.bodies
    assert not [body for body in hub.bodies if TOKEN.encode() in body]
    files = [path for path in pushed.rglob("*") if path.is_file()]
    assert pushed / "training_args.bin" in files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_quick_start_of_the_card(hub, folder, pushed):
    """
    The code and the command of the card work as they stand: they download the agent from the Hub, with the weights
    that were saved, and play it.
    """
    quick_start = section(card_of(hub).text, "Quick start")
    script = code(quick_start, "python") + (
        "\nimport json, sys\n"
        "from safetensors.torch import save_file\n"
        "weights = {n: w.contiguous() for n, w in model.state_dict().items() if 'lora' in n}\n"
        "save_file(weights, 'downloaded.safetensors')\n"
        "from trl import ModelConfig\n"
        "from mempo_trl.scripts.arguments import is_adapter\n"
        "assert is_adapter(ModelConfig(tokenizer.name_or_path))\n"
        "assert not is_adapter(ModelConfig(model.peft_config['default'].base_model_name_or_path))\n"
        "assert tokenizer.chat_template == open('out/chat_template.jinja').read()\n"
        "from mempo_trl.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = code(quick_start, "bash").replace("\\\n", " ").split()
    assert command[:2] == ["mempo", "evaluate"]
    args, model_args, _ = evaluate.make_parser().parse_args_and_config(command[2:])
    assert (model_args.model_name_or_path, args.max_turns, args.max_completion_length) == (REPO, 2, 8)
    assert (args.context, args.max_tool_response_length) == ("memory", 50)
    (folder / "system_prompt.txt").write_text(code(section(card_of(hub).text, "Recipe"), "text"))

    done = run(hub, folder, "-c", script, *command[1:])
    assert done.returncode == 0, done.stderr[-3000:]
    saved = load_file(pushed / "adapter_model.safetensors")
    downloaded = load_file(folder / "downloaded.safetensors")
    assert len(downloaded) == len(saved) == 8  # two layers, two modules, A and B
    for name, weight in downloaded.items():
        torch.testing.assert_close(weight, saved[name.replace(".default", "")], rtol=0, atol=0)
    report = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert report["model"] == REPO
    assert report["results"]["all"]["num_rollouts"] == len(NAMES)


def test_failed_push_keeps_the_adapter(hub, folder, model_folder):
    """
    When the Hub fails at the end of a run, the error says so and the trained adapter is on disk. Its base model is a
    folder here, which the card names as that.
    """
    hub.failing = "/commit/"
    try:
        arguments = ("--config", "recipe.yaml", "--model_name_or_path", model_folder, "--output_dir", "failed")
        done = run(hub, folder, "-m", "mempo_trl.scripts.train", *arguments, HF_TOKEN=TOKEN)
    finally:
        hub.failing = None
    assert done.returncode != 0
    assert "500 Internal Server Error" in done.stderr[-600:], done.stderr[-3000:]
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, str(folder / "failed"))
    weights = {name: weight for name, weight in model.state_dict().items() if "lora_B" in name}
    assert any(weight.abs().max() > 0 for weight in weights.values())

    card = ModelCard.load(folder / "failed" / "README.md")
    assert "base_model" not in card.data.to_dict()  # the Hub takes only ids of its own there
    name = Path(model_folder).name
    assert f"fine-tuned version of `{name}`, a model in a local folder." in card.text
    assert "None" not in card.text.split("## Training procedure")[0]
    assert str(Path(model_folder).parent) not in card.content
    assert f'AutoModelForCausalLM.from_pretrained("path/to/{name}")' in section(card.text, "Quick start")
