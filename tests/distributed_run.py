"""
What each process of `test_distributed.py` runs: `torchrun --nproc_per_node 2 distributed_run.py MODEL OUTPUT`.

Every scenario writes what the test compares to `OUTPUT/<scenario>-<rank>.json`. The last one ends with an error.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
from conftest import (
    GivenMemoryRewards,
    RecordedTrainer,
    ScriptedTrainer,
    call,
    config,
    dataset,
    generation,
    search,
)

from mempo_trl import MemPOTrainer


# One group of four rollouts. On two processes the first has two rollouts of four turns (three sequences each), the
# second one of two turns and one of a single turn (one sequence each).
ROLLOUTS = [
    [call("a"), "<mem>x</mem>" + call("b"), "<mem>yy</mem>" + call("c"), "<mem>z</mem><answer>cat</answer>"],
    [call("d"), "<mem>no</mem>" + call("e"), "<mem>so</mem>" + call("f"), "<mem>q</mem><answer>dog</answer>"],
    [call("g"), "<mem>w</mem><answer>fish</answer>"],
    ["<think>I know</think><answer>cat</answer>"],
]
MEMORY_REWARDS = [[None, 0.3, 0.1, -0.2], [None, -0.1, 0.5, 0.0], [None, 0.8], [None]]


def settings(num_processes: int, **kwargs) -> dict:
    """The same run on one process or on two: one group per optimiser step, two micro-batches."""
    defaults = dict(
        per_device_train_batch_size=2 // num_processes,
        gradient_accumulation_steps=2,
        num_generations=4,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        beta=0.1,
        memory_advantage_weight=0.5,
        max_steps=2,
        ddp_find_unused_parameters=False,
    )
    return defaults | kwargs


def given_rewards_trainer(folder, output, rank: int, num_processes: int, **kwargs) -> RecordedTrainer:
    """A scripted run with given memory rewards, rollouts numbered as over all processes."""
    start = rank * 4 // num_processes
    return RecordedTrainer(
        model=folder,
        args=config(output, **settings(num_processes, **kwargs)),
        train_dataset=dataset(),
        tools=[search],
        callbacks=[GivenMemoryRewards(MEMORY_REWARDS[start:])],
        # Rollouts count through the run on each process: 4 / num_processes of them per step.
        script=lambda number, turn: ROLLOUTS[start + number % (4 // num_processes)][turn],
    )


def outcome_of(trainer: RecordedTrainer) -> dict:
    """What does not depend on the number of processes, of this process's rollouts; and the weights."""
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, GivenMemoryRewards))
    return {
        "steps": trainer.state.global_step,
        "rewards": [[rollout.reward for rollout in batch] for batch in callback.rollouts],
        "advantages": [[rollout.advantage for rollout in batch] for batch in callback.rollouts],
        "memory_advantages": [
            [[turn.memory_advantage for turn in rollout.turns] for rollout in batch] for batch in callback.rollouts
        ],
        "weights": {name: p.flatten()[:50].tolist() for name, p in trainer.model.named_parameters()},
        "logged": [
            {name: entry[name] for name in ("reward", "rollout/turns_mean", "sequences/per_rollout")}
            for entry in trainer.state.log_history
            if "reward" in entry
        ],
    }


class Counts:
    """Forwards and backwards of a model, with the number of rows of each forward."""

    def __init__(self, model: torch.nn.Module):
        self.rows, self.backwards = [], 0
        model.register_forward_hook(lambda module, args, kwargs, output: self._forward(kwargs), with_kwargs=True)
        model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: self._backward())

    def _forward(self, kwargs):
        self.rows.append([len(kwargs["input_ids"]), torch.is_grad_enabled()])

    def _backward(self):
        self.backwards += 1


class GeneratingTrainer(ScriptedTrainer):
    """Really generates every turn, dummies too, and then puts the script's turns in place of what came out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generated = []

    def _generate_turns(self, prompts, idle):
        self._really = True
        super()._generate_turns(prompts, idle)
        self._really = False
        return super()._generate_turns(prompts, idle)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not self._really:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        ids, logps = MemPOTrainer._generate_single_turn(self, prompt_ids, *args, **kwargs)
        self.generated.append([len(prompt_ids), max(map(len, ids))])
        return ids, logps


def given_rewards(folder, output, rank, **kwargs):
    trainer = given_rewards_trainer(folder, output, rank, 2, **kwargs)
    counts = Counts(trainer.model)
    trainer.train()
    rows = [len(inputs["completion_ids"]) for inputs in trainer.inputs_seen]
    return outcome_of(trainer) | {"forwards": counts.rows, "backwards": counts.backwards, "rows": rows}


def generating(folder, output, rank):
    trainer = GeneratingTrainer(
        model=folder,
        args=config(
            output,
            **settings(
                2, max_steps=1, max_completion_length=3, per_device_eval_batch_size=2, memory_scoring_max_tokens=400
            ),
        ),
        train_dataset=dataset(),
        eval_dataset=dataset(1),
        tools=[search],
        script=lambda number, turn: ROLLOUTS[2 * rank + number % 2][turn],
    )
    counts = Counts(trainer.model)
    trainer.train()
    training = len(trainer.generated)
    evaluated = trainer.evaluate()
    return {
        "generated": trainer.generated[:training],
        "generated_in_evaluation": trainer.generated[training:],
        "forwards": len(counts.rows),
        "backwards": counts.backwards,
        "eval_reward": evaluated["eval_reward"],
        "eval_turns": evaluated["eval_rollout/turns_mean"],
        "dumps": sorted(path.name for path in (Path(output) / "rollouts").iterdir()),
    }


def failing_rollout(folder, output, rank):
    """A rollout raises on the second process, in its second turn: both have to end, here by an exception."""
    trainer = given_rewards_trainer(folder, output, rank, 2)

    def script(number, turn):
        return (
            "<answer>cat</answer>"
            if rank == 0
            else [call("a"), "<mem>m</mem>" + call("b"), "<answer>x</answer>"][turn]
        )

    def response_ids(carried_ids, response):
        raise ArithmeticError("no response today")

    trainer.script = script
    if rank == 1:
        trainer.protocol.response_ids = response_ids
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def failing_engine(folder, output, rank):
    """The engine itself raises on the second process while the first goes on: the launcher has to end both."""
    trainer = given_rewards_trainer(folder, output, rank, 2)

    def script(number, turn):
        if rank == 1:
            raise ArithmeticError("no tokens today")
        return generation(trainer._tokenizer, ROLLOUTS[number % 2][turn])

    trainer.script = script
    trainer.train()


def main():
    folder, output = sys.argv[1:]
    rank = int(os.environ["RANK"])
    faulthandler.dump_traceback_later(150, exit=True)  # a deadlock ends with a trace instead of a time-out
    for name, scenario in (
        ("grpo", lambda path: given_rewards(folder, path, rank, loss_type="grpo")),
        # Each row in a forward of its own.
        ("dapo", lambda path: given_rewards(folder, path, rank, loss_type="dapo", max_tokens_per_microbatch=100)),
        ("generating", lambda path: generating(folder, path, rank)),
        ("failing_rollout", lambda path: failing_rollout(folder, path, rank)),
        ("failing_engine", lambda path: failing_engine(folder, path, rank)),
    ):
        result = scenario(f"{output}/{name}")
        Path(output, f"{name}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
