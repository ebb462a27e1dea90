"""A resumed run is the unbroken one, wherever and however it ended."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, HubServer
from peft import LoraConfig
from resumable import LAYOUTS, dumped, make, outcome, questions
from safetensors.torch import load_file
from transformers import TrainerCallback

from mempo_trl.checkpoints import SENTINEL, read_manifest


def assert_same(actual, expected):
    for name in ("steps", "logs", "random", "rollouts"):
        assert actual[name] == expected[name], name
    for name, weight in expected["weights"].items():
        assert torch.equal(actual["weights"][name], weight), name


class Dies(TrainerCallback):
    """Ends the process of thought in the middle of a step: its rollouts are played, its update is not made."""

    def __init__(self, at):
        self.at = at

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise ConnectionAbortedError("gone")


class Terminated(Dies):
    """Saves a checkpoint there before, as transformers does on SIGTERM with `enable_jit_checkpoint`."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(exist_ok=True)
            (folder / SENTINEL).write_text("in progress")
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            (folder / SENTINEL).unlink()
        super().on_pre_optimizer_step(args, state, control)


@pytest.mark.parametrize(
    "layout, kind, at",
    [
        pytest.param("a batch per step", "sampled", 3, marks=pytest.mark.slow),
        pytest.param("two micro-batches", "scripted", 4, marks=pytest.mark.slow),
        pytest.param("in the middle", "sampled", 1, marks=pytest.mark.slow),
        ("in the middle", "scripted", 3),
        pytest.param("two batches per step", "scripted", 3, marks=pytest.mark.slow),
        pytest.param("uneven", "sampled", 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(layout, kind, at, short_folder, tmp_path):
    """
    Wherever a run dies: after the resume the same questions in the same order, the same rollouts, learning rates,
    metrics, random states and weights, bit for bit; and the dump holds each rollout once.
    """
    settings = dict(kind=kind, max_steps=5, **LAYOUTS[layout])
    unbroken = make(short_folder, tmp_path / "unbroken", **settings)
    unbroken.train()
    expected = outcome(unbroken)
    assert expected["logs"][-1]["grad_norm"] > 0 and len({question for _, question, _ in expected["rollouts"]}) == 4

    dying = make(short_folder, tmp_path / "broken", **{**settings, "callbacks": [Dies(at)]})
    with pytest.raises(ConnectionAbortedError):
        dying.train()
    torch.manual_seed(12345)  # another process has another state
    resumed = make(short_folder, tmp_path / "broken", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed), expected)


@pytest.mark.slow
def test_saved_on_sigterm(short_folder, tmp_path):
    """In the middle of a step: its update is not made, so it is made again, from the same half of the batch."""
    settings = dict(kind="scripted", max_steps=4, **LAYOUTS["in the middle"])
    unbroken = make(short_folder, tmp_path / "unbroken", **settings)
    unbroken.train()
    dying = make(short_folder, tmp_path / "broken", **settings | dict(callbacks=[Terminated(1)], save_steps=10))
    next(c for c in dying.callback_handler.callbacks if isinstance(c, Terminated)).trainer = dying
    with pytest.raises(ConnectionAbortedError):
        dying.train()
    assert read_manifest(tmp_path / "broken" / "checkpoint-1")["micro_step"] == 2
    resumed = make(short_folder, tmp_path / "broken", **settings)
    resumed.train(resume_from_checkpoint=True)
    for name, weight in unbroken.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), weight), name
    assert dumped(tmp_path / "broken") == dumped(tmp_path / "unbroken")


def test_a_resume_near_the_start_of_a_later_epoch(short_folder, tmp_path):
    """At the end of an epoch too: the next one has an order of its own, which no state of a checkpoint holds."""
    unbroken = make(short_folder, tmp_path / "unbroken", learning_rate=0.0)
    unbroken.train()
    asked = [question for _, question, _ in dumped(tmp_path / "unbroken")]
    assert len(set(asked[:8])) == 4 and asked[8:] != asked[:4]  # four steps are an epoch
    for step in (4, 5):
        shutil.copytree(tmp_path / "unbroken", tmp_path / f"from {step}")
        resumed = make(short_folder, tmp_path / f"from {step}", learning_rate=0.0)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"from {step}" / f"checkpoint-{step}"))
        assert_same(outcome(resumed), outcome(unbroken))


@pytest.mark.slow
def test_a_stream_is_resumed_within_its_first_pass(short_folder, tmp_path, caplog):
    """A stream goes on where it was; one that had started again is refused, for where it was can't be found."""
    settings = dict(data=questions().to_iterable_dataset(), shuffle_dataset=False)
    unbroken = make(short_folder, tmp_path, max_steps=3, **settings)
    unbroken.train()
    expected = outcome(unbroken)
    assert [question for _, question, _ in expected["rollouts"]] == [f"What is pet {i}?" for i in (0, 0, 1, 1, 2, 2)]
    resumed = make(short_folder, tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(outcome(resumed), expected)

    make(short_folder, tmp_path / "twice", max_steps=6, **settings).train()
    again = make(short_folder, tmp_path / "twice", max_steps=6, **settings)
    with pytest.raises(ValueError, match="stream that the run had read to its end"):
        again.train(resume_from_checkpoint=str(tmp_path / "twice" / "checkpoint-5"))


def test_resuming_a_finished_run_changes_nothing(short_folder, tmp_path):
    """No further step, as a supervisor that starts the command again would get otherwise."""
    finished = make(short_folder, tmp_path, max_steps=2)
    finished.train()
    again = make(short_folder, tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and len(dumped(tmp_path)) == 4
    for name, weight in finished.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), weight)


# Other options


@pytest.mark.slow
def test_limit_and_best_model(short_folder, tmp_path):
    """`save_total_limit` with `load_best_model_at_end`: the best and the last stay, also over a resume."""
    rewards = iter([3.0, 1.0, 2.0, 0.0])

    def given(completions, **kwargs):
        return [scripted.pop(0) if evaluating else float(i % 2) for i in range(len(completions))]

    scripted, evaluating = [], False

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            nonlocal evaluating
            scripted[:] = [next(rewards)] * 8
            evaluating = True

        def on_evaluate(self, args, state, control, **kwargs):
            nonlocal evaluating
            evaluating = False

    settings = dict(
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2, save_total_limit=2, max_steps=4,
        load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=True, callbacks=[Evaluates()],
    )  # fmt: skip

    def trainer(*more):
        made = make(
            short_folder, tmp_path, eval_dataset=questions(2), **{**settings, "callbacks": [Evaluates(), *more]}
        )
        made.reward_funcs = [given]
        return made

    with pytest.raises(ConnectionAbortedError):
        trainer(Dies(2)).train()
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-2"]
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_metric == 3.0 and resumed.state.best_global_step == 1
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-4"]
    for name, weight in best.items():
        assert torch.equal(resumed.model.get_parameter(name), weight)


@pytest.mark.slow
def test_an_adapter_goes_on(short_folder, tmp_path):
    """LoRA with a reference: adapter, optimiser and KL go on where they were."""
    settings = dict(
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), beta=0.5, max_steps=4
    )
    unbroken = make(short_folder, tmp_path, **settings)
    unbroken.train()
    assert unbroken.state.log_history[-2]["kl"] > 0
    expected = outcome(unbroken)
    resumed = make(short_folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(outcome(resumed), expected)


# Processes


def launch(processes, folder, output, scenario):
    """A run of `resume_run.py` in a process group of its own."""
    output.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)),
            *(str(Path(__file__).parent / "resume_run.py"), folder, str(output), scenario),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=open(output / f"{scenario}.log", "w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def results_of(process, processes, output, scenario):
    """What each process of a run wrote."""
    assert process.wait(timeout=240) == 0, (output / f"{scenario}.log").read_text()[-4000:]
    return [json.loads((output / f"{scenario}-{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed(processes, short_folder, tmp_path):
    """
    `kill -9` in the middle of a step, with half a generation batch in the checkpoint: resumed, on one process and on
    two, the run ends with the weights, random states, learning rates and rollouts of the one that was left alone.
    """
    whole = launch(processes, short_folder, tmp_path / "whole", "whole")
    expected = results_of(whole, processes, tmp_path / "whole", "whole")
    output = tmp_path / "killed"
    killed = launch(processes, short_folder, output, "waits")
    deadline = time.monotonic() + 240
    while len(list(output.glob("waits-*"))) < processes:
        assert time.monotonic() < deadline and killed.poll() is None, (output / "waits.log").read_text()[-4000:]
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = launch(processes, short_folder, output, "resumes")
    actual = results_of(resumed, processes, output, "resumes")
    for result, wanted in zip(actual, expected, strict=True):
        assert result["hashes"] == wanted["hashes"][3:]  # it was resumed after the third step, and not from the start
        for name in ("steps", "weights", "random", "rates", "tokens", "rollouts"):
            assert result[name] == wanted[name], name
    assert len({result["weights"] for result in actual}) == 1
    manifest = read_manifest(output / "checkpoint-3")
    assert {f"generation_batch_{rank}.safetensors" for rank in range(processes)} <= set(manifest["files"])


@pytest.mark.slow
def test_processes_agree_on_a_step_without_signal(short_folder, tmp_path):
    """Signal on one of two processes moves both alike; signal on none moves neither, and neither waits for the other."""
    results = results_of(launch(2, short_folder, tmp_path, "quiet"), 2, tmp_path, "quiet")
    assert results[0]["hashes"] == results[1]["hashes"]
    assert results[0]["no_signal"] == [0.0, 1.0]
    assert results[0]["hashes"][0] == results[0]["hashes"][1]


@pytest.mark.slow
def test_a_checkpoint_from_the_hub(short_folder, tmp_path):
    """`hub_strategy="checkpoint"`: what was pushed as `last-checkpoint` is complete, and a run goes on from it."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from resumable import make
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = False  # the other tests are offline
hub = dict(push_to_hub=True, hub_model_id="founder/agent", hub_strategy="checkpoint", hub_always_push=True)
make({short_folder!r}, "run", max_steps=2, **hub).train()
"""
    with HubServer() as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": f"{tmp_path}/home", "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_TOKEN": TOKEN}
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        files = hub.repos["founder/agent"]
    folder = tmp_path / "downloaded" / "last-checkpoint"
    for name, content in files.items():
        if name.startswith("last-checkpoint/"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name.removeprefix("last-checkpoint/")).write_bytes(content)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    resumed = make(short_folder, tmp_path / "again", max_steps=3)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 3
