"""The configurations of `recipes/accelerate_configs` really launch, as far as a CPU can."""

import sys

import pytest
import torch
from launching import RECIPES, run
from transformers import AutoModelForCausalLM
from user_folder import make_user_folder, read_lines


pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SETTINGS = {
    "use_peft": False,
    "max_steps": 2,
    "per_device_train_batch_size": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "output_dir": "out",
}


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2"])
def test_two_processes_train_by_recipe(config, short_folder, tmp_path, monkeypatch):
    """`mempo train` on two processes: every step is made, each process dumps its rollouts, and the model loads."""
    folder = make_user_folder(tmp_path, model_name_or_path=short_folder, **SETTINGS)
    monkeypatch.chdir(folder)
    launched = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    if config == "multi_gpu":
        command = [sys.executable, "-m", "mempo_trl.cli", "train", "--accelerate_config"]
        command += [str(RECIPES / f"{config}.yaml"), *launched, "--config", "recipe.yaml"]
    else:
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(RECIPES / f"{config}.yaml"),
        ]
        command += [*launched, str(RECIPES.parent.parent / "tests" / "fsdp_on_cpu.py"), "--config", "recipe.yaml"]
    returncode, output = run(command, timeout=200)
    assert returncode == 0, output[-10000:]
    dumps = sorted((folder / "out" / "rollouts").glob("*.jsonl"))
    assert [path.name.split("-")[-1] for path in dumps] == ["rank0.jsonl", "rank1.jsonl"] * 2
    assert all(len(read_lines(path)) == 1 for path in dumps)
    trained = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    before = AutoModelForCausalLM.from_pretrained(short_folder).state_dict()
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    checkpoint = AutoModelForCausalLM.from_pretrained(folder / "out" / "checkpoint-2").state_dict()
    assert all(torch.equal(checkpoint[name], trained[name]) for name in trained)
