"""Checkpoints: a resumed run is the unbroken one, a half-saved checkpoint is never taken, other settings are named."""

import json
import random
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ScriptedTrainer, build, call, config, search
from datasets import Dataset
from transformers import TrainerCallback

from mempo_trl import MemPOTrainer


def questions(count: int = 4) -> Dataset:
    rows = {"question": [f"What is pet {i}?" for i in range(count)], "golden_answers": [["cat"]] * count}
    return Dataset.from_dict(rows)


def variety(completion_ids, **kwargs):
    """A reward that tells the texts of a random model apart."""
    return [float(len(set(ids))) for ids in completion_ids]


def random_script(number, turn):
    """Rollouts of three turns that depend on the state of the random numbers."""
    if turn == 0:
        return call("a")
    word = "abcd"[torch.randint(4, ()).item()]
    return f"<mem>{word}</mem>" + (call("b") if turn == 1 else f"<answer>{'cat' if word < 'c' else word}</answer>")


def make(folder, output_dir, kind="sampled", **kwargs):
    """A trainer on few questions, which samples from the tiny model or draws written turns."""
    settings = dict(save_strategy="steps", save_steps=1, max_steps=6, weight_decay=0.1, learning_rate=0.01)
    settings |= dict(callbacks=[], data=questions()) | kwargs
    if kind == "scripted":
        return build(folder, output_dir, random_script, trainer_class=ScriptedTrainer, **settings)
    given = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "peft_config") if name in settings}
    return MemPOTrainer(
        folder,
        reward_funcs=variety,
        train_dataset=settings.pop("data"),
        args=config(output_dir, max_completion_length=8, **settings),
        tools=[search],
        **given,
    )


def dumped(output_dir, pattern="train-*.jsonl"):
    """All rollouts in the order in which they were played, as `(step, question, completions)`."""
    lines = [line for path in sorted(Path(output_dir, "rollouts").glob(pattern)) for line in open(path)]
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["question"], [turn["completion"] for turn in r["turns"]]) for r in records]


def outcome(trainer):
    """What two runs are compared by."""
    timeless = [
        {name: value for name, value in log.items() if "time" not in name and "latency" not in name}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    return {
        "steps": trainer.state.global_step,
        "logs": timeless,  # with the learning rates, the norms of the gradients and the tokens so far
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "rollouts": dumped(trainer.args.output_dir),
    }


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


# Two rollouts of a question per micro-batch. Four questions are four micro-batches, so that six steps are more than one
# epoch in all cases, and every epoch has an order of its own.
LAYOUTS = {
    "a batch per step": dict(),
    "two micro-batches": dict(gradient_accumulation_steps=2),
    # Generated once for two steps, and trained on twice: steps 1 to 3 of four are in the middle.
    "in the middle": dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, beta=0.1),
    "two batches per step": dict(gradient_accumulation_steps=2, steps_per_generation=1),
    "uneven": dict(gradient_accumulation_steps=2, steps_per_generation=3, num_iterations=1),
}


@pytest.mark.parametrize(
    "layout, kind, at",
    [
        ("a batch per step", "sampled", 3),
        ("two micro-batches", "scripted", 4),
        ("in the middle", "sampled", 1),
        ("in the middle", "scripted", 3),
        ("two batches per step", "scripted", 3),
        ("uneven", "sampled", 4),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(layout, kind, at, short_folder, tmp_path):
    """
    Wherever a run dies: after the resume the same questions in the same order, the same rollouts, learning rates,
    metrics, random states and weights, bit for bit; and the dump holds each rollout once.
    """
    settings = dict(kind=kind, **LAYOUTS[layout])
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
