"""
What each process of the distributed tests runs: `distributed_run.py MODEL OUTPUT SCENARIO...` under a launcher.

Every scenario writes what the tests compare to `OUTPUT/<scenario>-<rank>.json`.
"""

import faulthandler
import itertools
import json
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import fsdp_on_cpu
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from conftest import (
    GivenMemoryRewards,
    RecordedTrainer,
    ScriptedTrainer,
    call,
    config,
    dataset,
    search,
)
from peft import LoraConfig
from stub_vllm import StubVllm
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from mempo_trl import MemoryRewardCallback, MemPOTrainer


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
    """The same run on one process, on two or on four: one group per optimiser step."""
    defaults = dict(
        per_device_train_batch_size=2 if num_processes == 1 else 1,
        gradient_accumulation_steps=1 if num_processes == 4 else 2,
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
        "weights": weights_of(trainer.model),
        "logged": [
            {name: entry[name] for name in ("reward", "rollout/turns_mean", "sequences/per_rollout")}
            for entry in trainer.state.log_history
            if "reward" in entry
        ],
    }


def full(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with the parts of all processes."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def weights_of(model) -> dict[str, list[float]]:
    """The start of every trained parameter."""
    return {name: full(p).flatten()[:50].tolist() for name, p in model.named_parameters() if p.requires_grad}


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


def given_rewards(folder, output, rank, num_processes, **kwargs):
    trainer = given_rewards_trainer(folder, output, rank, num_processes, **kwargs)
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


def random_turns(number: int) -> list[str]:
    """One to five turns, with and without memory, of which the last one answers or not: the same for each number."""
    rng = random.Random(number)

    def memory() -> str:
        return f"<mem>{''.join(rng.choices('abcdefgh', k=rng.randint(0, 12)))}</mem>" * (rng.random() < 0.8)

    searches = [memory() * (turn > 0) + call(rng.choice("pqrst") * 3) for turn in range(rng.randint(0, 4))]
    return [*searches, memory() + rng.choice(["<answer>cat</answer>"] * 2 + ["<answer>dog</answer>", "I give up"])]


class Order:
    """The order of forwards (`n` without gradient, `g` with it) and backwards (`b`), outside of `generate` or not."""

    def __init__(self, trainer, with_generation: bool):
        self.events = []
        self.generating = False
        self.with_generation = with_generation
        model = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
        model.register_forward_hook(lambda *args: self.add("g" if torch.is_grad_enabled() else "n"))
        generate, backward = trainer._generate_turns, trainer.accelerator.backward

        def generate_turns(*args):
            self.generating = True
            made = generate(*args)
            self.generating = False
            return made

        def counted_backward(*args, **kwargs):
            self.add("b")
            return backward(*args, **kwargs)

        trainer._generate_turns, trainer.accelerator.backward = generate_turns, counted_backward

    def add(self, event: str) -> None:
        if self.with_generation or not self.generating:
            self.events.append(event)


class KeptRollouts(MemoryRewardCallback):
    """Scores the memories and keeps what the credit is made of."""

    def __init__(self):
        self.batches = []

    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        super().on_rollouts_end(args, state, control, rollouts=rollouts, **kwargs)
        self.batches.append(rollouts)


def random_trainer(folder, output, rank: int, num_processes: int, *, lora=False, trainer_class=None, **kwargs):
    """Twenty steps on random rollouts, numbered as over all processes; memories are scored."""
    own = 4 // num_processes
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    defaults = dict(max_steps=20, max_completion_length=6, memory_token_filter="none", max_tokens_per_microbatch=700)
    return (trainer_class or GeneratingTrainer)(
        model=folder,
        args=config(output, **settings(num_processes, **(defaults | kwargs))),
        train_dataset=dataset(20, id=list(range(20))),
        tools=[search],
        callbacks=[KeptRollouts()],
        peft_config=adapter if lora else None,
        script=lambda number, turn: random_turns(number // own * 4 + own * rank + number % own)[turn],
    )


def random_run(folder, output, rank: int, num_processes: int, **kwargs) -> dict:
    trainer = random_trainer(folder, output, rank, num_processes, **kwargs)
    order = Order(trainer, with_generation=trainer.is_fsdp_enabled)
    trainer.train()
    kept = next(c for c in trainer.callback_handler.callbacks if isinstance(c, KeptRollouts))
    return {
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "scorer": trainer._scorer_type.__name__,
        "steps": trainer.state.global_step,
        "order": "".join(order.events),
        "turns": [[len(rollout.turns) for rollout in batch] for batch in kept.batches],
        "generated": [calls[1] for calls in trainer.generated] if isinstance(trainer, GeneratingTrainer) else None,
        "advantages": [[rollout.advantage for rollout in batch] for batch in kept.batches],
        "memory_rewards": [[[turn.memory_reward for turn in r.turns] for r in batch] for batch in kept.batches],
        "memory_advantages": [[[turn.memory_advantage for turn in r.turns] for r in batch] for batch in kept.batches],
        "weights": weights_of(trainer.model),
        "kl": [entry["kl"] for entry in trainer.state.log_history if "kl" in entry],
    }


def sampling(folder, output, rank: int, num_processes: int, **kwargs) -> dict:
    """Really sampled rollouts, with nothing put in their place."""
    trainer = MemPOTrainer(
        model=folder,
        args=config(output, **settings(num_processes, max_steps=20, max_completion_length=12, **kwargs)),
        train_dataset=dataset(20),
        tools=[search],
        callbacks=[KeptRollouts()],
    )
    trainer.train()
    kept = next(c for c in trainer.callback_handler.callbacks if isinstance(c, KeptRollouts))
    return {
        "steps": trainer.state.global_step,
        "completions": [[rollout.completion_ids for rollout in batch] for batch in kept.batches],
    }


def saving(folder, output, rank: int, num_processes: int, **kwargs) -> dict:
    """Two steps with a checkpoint after each, and what plain transformers and PEFT should find in the folders."""
    trainer = random_trainer(
        folder, output, rank, num_processes, max_steps=2, save_strategy="steps", save_steps=1, **kwargs
    )
    trainer.train()
    trainer.save_model(f"{output}/final")
    return {"weights": weights_of(trainer.model)}


def failure(where: str, rank: int, folder, output, num_processes: int) -> None:
    """One thing fails on the second process only."""
    failing = rank == 1
    reward_funcs, tools, kwargs = None, [search], {}

    def broken(*args, **kwargs):
        raise ArithmeticError(f"no {where} today")

    class Broken(KeptRollouts):
        on_rollouts_end = broken

    if where == "reward":
        reward_funcs = [broken if failing else lambda completions, **kwargs: [0.0] * len(completions)]
        reward_funcs[0].__name__ = "reward"
    if where == "tool":
        tools = [blocking_search if failing else search]
        kwargs = {"tool_timeout": 0.5, "max_tool_error_rate": 0.1}
    trainer = ScriptedTrainer(
        model=folder,
        args=config(output, **settings(num_processes, **kwargs)),
        train_dataset=dataset(),
        tools=tools,
        reward_funcs=reward_funcs,
        callbacks=[Broken() if failing and where == "scoring" else KeptRollouts()],
        script=lambda number, turn: ROLLOUTS[2 * rank + number % 2][turn],
    )
    if failing and where == "rollout":
        trainer.protocol.response_ids = broken
    if failing and where == "engine":
        trainer._generate_single_turn = broken
    if failing and where == "backward":
        trainer.accelerator.backward = broken
    trainer.train()


def hanging_search(query: str) -> str:
    """
    Searches, and comes back much too late.

    Args:
        query: What to search for.
    """
    time.sleep(600)


async def blocking_search(query: str) -> str:
    """
    Searches, and gives way to nothing else until it comes back, much too late.

    Args:
        query: What to search for.
    """
    time.sleep(600)


hanging_search.__name__ = blocking_search.__name__ = "search"


def hanging_tool(folder, output, rank: int, num_processes: int, tool) -> dict:
    """A tool hangs on the second process only, and its failures are not too many."""
    trainer = ScriptedTrainer(
        model=folder,
        args=config(output, **settings(num_processes, tool_timeout=0.5, max_steps=1, max_tool_error_rate=0.5)),
        train_dataset=dataset(),
        tools=[tool if rank == 1 else search],
        callbacks=[KeptRollouts()],
        script=lambda number, turn: ROLLOUTS[2 * rank + number % 2][turn],
    )
    trainer.train()
    return {"tool/error_frac": trainer.state.log_history[0]["tool/error_frac"], "steps": trainer.state.global_step}


def partly_broken_search(query: str) -> str:
    """
    Fails for some queries.

    Args:
        query: What to search for.
    """
    if query == "broken":
        raise ConnectionError("http://localhost:8000 refused")
    return query


# A group of which a call fails in the second and in the fourth rollout: on two processes one on each.
EXCLUDED = [
    [call("a"), "<mem>x</mem><answer>cat</answer>"],
    [call("broken"), "<mem>y</mem>" + call("b"), "<mem>y</mem><answer>cat</answer>"],
    [call("c"), "<mem>z</mem><answer>dog</answer>"],
    [call("broken"), "<mem>w</mem><answer>dog</answer>"],
]


def excluded_trainer(folder, output, rank: int, num_processes: int) -> RecordedTrainer:
    partly_broken_search.__name__ = "search"
    start = rank * 4 // num_processes
    return RecordedTrainer(
        model=folder,
        args=config(output, **settings(num_processes, tool_failure="exclude", max_tool_error_rate=1.0, max_steps=1)),
        train_dataset=dataset(),
        tools=[partly_broken_search],
        callbacks=[GivenMemoryRewards([[None, 0.3], [None, 5.0, 7.0], [None, 0.1], [None, -9.0]][start:])],
        script=lambda number, turn: EXCLUDED[start + number % (4 // num_processes)][turn],
    )


def excluded(folder, output, rank: int, num_processes: int) -> dict:
    trainer = excluded_trainer(folder, output, rank, num_processes)
    trainer.train()
    return outcome_of(trainer)


def served(folder, output, num_processes):
    """An adapter on a vLLM server, as the stub in the main process plays it: two turns per rollout."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = itertools.cycle(["cat", "dog"])

    def script(prompt):
        searched = "has a cat" in tokenizer.decode(prompt)
        text = f"<mem>m</mem><answer>{next(answers)}</answer>" if searched else call("a")
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    state = PartialState()
    with StubVllm(folder, script) if state.is_main_process else nullcontext() as server:
        (url,) = broadcast_object_list([server.url if state.is_main_process else None])
        trainer = MemPOTrainer(
            model=folder,
            args=config(
                output,
                **settings(
                    num_processes,
                    use_vllm=True,
                    vllm_mode="server",
                    vllm_server_base_url=url,
                    beta=0.0,
                    optim="adamw_torch",
                    memory_token_filter="none",
                ),
            ),
            train_dataset=dataset(),
            tools=[search],
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"),
        )
        trainer.train()
        state.wait_for_everyone()
    requests = [request.body for request in server.requests if request.path == "/v1/completions"] if server else []
    return {
        "loaded": server.loaded if server else [],
        "models": [body["model"] for body in requests],
        "seeds": [body["seed"] for body in requests],
        "gaps": [
            entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "loss" in entry
        ],
        "weights": weights_of(trainer.model),
    }


def main():
    folder, output, *names = sys.argv[1:]
    rank, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.enable()
    # A deadlock ends with a trace of every process instead of a time-out.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_SECONDS"]), exit=True)
    if "ACCELERATE_USE_FSDP" in os.environ:
        fsdp_on_cpu.enable()
    scenarios = {
        "grpo": lambda path: given_rewards(folder, path, rank, num_processes, loss_type="grpo"),
        # Each row in a forward of its own.
        "dapo": lambda path: given_rewards(
            folder, path, rank, num_processes, loss_type="dapo", max_tokens_per_microbatch=100
        ),
        "recomputed": lambda path: given_rewards(
            folder,
            path,
            rank,
            num_processes,
            loss_type="dapo",
            max_tokens_per_microbatch=100,
            recompute_forwards=True,
            gradient_checkpointing=True,
        ),
        "served": lambda path: served(folder, path, num_processes),
        "generating": lambda path: generating(folder, path, rank),
        "comb": lambda path: random_run(folder, path, rank, num_processes, memory_scoring="comb"),
        "rows": lambda path: random_run(folder, path, rank, num_processes, memory_scoring="rows"),
        "lora": lambda path: random_run(folder, path, rank, num_processes, lora=True),
        "checkpointing": lambda path: random_run(
            folder, path, rank, num_processes, max_steps=3, gradient_checkpointing=True
        ),
        "sampling": lambda path: sampling(folder, path, rank, num_processes),
        "saving": lambda path: saving(folder, path, rank, num_processes),
        "saving_lora": lambda path: saving(folder, path, rank, num_processes, lora=True),
        "excluded": lambda path: excluded(folder, path, rank, num_processes),
        "hanging_tool": lambda path: hanging_tool(folder, path, rank, num_processes, hanging_search),
        "blocking_tool": lambda path: hanging_tool(folder, path, rank, num_processes, blocking_search),
    }
    for name in names:
        path = f"{output}/{name}"
        if name.startswith("failing_"):
            failure(name.removeprefix("failing_"), rank, folder, path, num_processes)
            continue
        result = scenarios[name](path)
        Path(output, f"{name}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
