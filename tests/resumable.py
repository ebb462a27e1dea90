"""Short runs with checkpoints, for `test_resume.py`, `test_checkpoints.py` and the processes that they start."""

import json
import random
from pathlib import Path

import numpy
import torch
from conftest import ScriptedTrainer, build, call, config, search
from datasets import Dataset

from mempo_trl import MemPOTrainer


def questions(count: int = 4) -> Dataset:
    rows = {"question": [f"What is pet {i}?" for i in range(count)], "golden_answers": [["cat"]] * count}
    return Dataset.from_dict(rows)


def variety(completion_ids, **kwargs):
    """A reward that tells the texts of a random model apart."""
    return [float(sum(ids) % 7) for ids in completion_ids]


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


# Two rollouts of a question per micro-batch. Four questions are four micro-batches, so that five steps are more than one
# epoch in all cases, and every epoch has an order of its own.
LAYOUTS = {
    "a batch per step": dict(),
    "two micro-batches": dict(gradient_accumulation_steps=2),
    # Generated once for two steps, and trained on twice: steps 1 to 3 of four are in the middle.
    "in the middle": dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, beta=0.1),
    "two batches per step": dict(gradient_accumulation_steps=2, steps_per_generation=1),
    "uneven": dict(gradient_accumulation_steps=2, steps_per_generation=3, num_iterations=1),
}
