"""No NaN, no infinity, whatever comes together; and a step without signal leaves the weights exactly as they are."""

import itertools
import json
import logging
import math

import pytest
import torch
from conftest import GivenMemoryRewards, ScriptedTrainer, build, call, generation, search
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback
from trl.trainer.utils import nanstd

from mempo_trl import durable
from mempo_trl.advantages import EPS, standardize_memory_rewards, token_advantages, without_spread


# Groups without spread


def test_equal_rewards_leave_noise_in_the_definition():
    """Why it is looked after: ten rewards of 0.7 have a mean that is not 0.7, and an ε of 1e-4 lets the rest through."""
    rewards = torch.full((10, 1), 0.7)
    noise = (rewards - rewards.mean()) / (nanstd(rewards) + EPS)
    assert noise.abs().max() > 1e-5
    assert without_spread(rewards, torch.ones(1), 10).all()


def test_groups_without_spread_by_hand():
    """Per group; what a function did not judge is left out; equal sums are equal rewards, unless each is normalised."""
    nan = torch.nan
    rewards = torch.tensor(
        [
            [0.5, 1.0], [0.5, 1.0],  # equal
            [0.5, 1.0], [0.5, 0.0],  # not equal
            [1.0, 0.0], [0.0, 0.5],  # equal with the weights 1 and 2
            [nan, nan], [0.5, 0.0],  # one is judged
            [nan, nan], [nan, nan],  # none is
        ]
    )  # fmt: skip
    weights = torch.tensor([1.0, 2.0])
    pairs = lambda *values: [value for value in values for _ in range(2)]  # noqa: E731
    assert without_spread(rewards, weights, 2).tolist() == pairs(True, False, True, True, True)
    actual = without_spread(rewards, weights, 2, "normalize_then_sum").tolist()
    assert actual == pairs(True, False, False, True, True)


numbers = st.floats(-1, 1, width=32) | st.just(math.nan) | st.sampled_from([0.0, 0.1, 1 / 3, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(numbers, min_size=12, max_size=12),
    num_generations=st.sampled_from([2, 3, 4, 6]),
    scale=st.sampled_from(["group", "batch", "none"]),
    weight=st.sampled_from([0.0, 1.0, 1e6]),
)
def test_advantages_are_finite(values, num_generations, scale, weight):
    """Any memory rewards, any that are missing, any λ: finite, and exactly 0 in groups that say nothing."""
    rewards = torch.tensor(values).reshape(12, 1)
    memory = standardize_memory_rewards(rewards, num_generations, scale)
    nothing = without_spread(rewards, torch.ones(1), num_generations)
    assert memory.isfinite().all() and (memory[nothing] == 0).all()
    tokens = token_advantages(torch.zeros(12), memory, torch.arange(12), torch.zeros(12, 1, dtype=torch.long), weight)
    assert tokens.isfinite().all() and (tokens[nothing] == 0).all()


# Everything together


def no_signal(log):
    return log["loss/no_signal_frac"]


def turns_of(kind):
    """A script of two kinds of rollouts per group; the answers differ, and so do the rewards."""

    def script(number, turn):
        if kind == "cut":
            return generation(script.tokenizer, "x" * 20, end=False)
        answer = f"<answer>{'c' if number % 2 else 'dog'}</answer>"
        if kind == "memories":
            return [call("a"), f"<mem>{'c' * (number % 3)}</mem>" + call("b"), "<mem>c</mem>" + answer][turn]
        if kind == "failed":
            return [call("a"), call("b"), "nothing"][turn]
        return answer

    return script


def down(query: str) -> str:
    """
    Searches the village.

    Args:
        query: What to search for.
    """
    raise ConnectionError("no route")


REWARDS = {
    "mixed": lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
    "equal": lambda completions, **kwargs: [0.7] * len(completions),
    "one": lambda completions, **kwargs: [1.0] + [None] * (len(completions) - 1),
    "none": lambda completions, **kwargs: [None] * len(completions),
    "huge": lambda completions, **kwargs: [1e6 * (i % 2) for i in range(len(completions))],
}
CASES = {
    "rewards": list(REWARDS),
    "rollouts": ["memories", "answers", "cut", "failed"],
    "weight": [0.0, 1.0, 1e6],
    "tokens": ["filtered", "kept", "objectives"],
    "answer": [["c"], ["a long answer of several words"]],
    "precision": ["fp32", "bf16"],
    "layout": [(4, 1, 1), (1, 4, 4), (2, 2, 1)],  # rollouts per micro-batch, micro-batches per step and generation
    "loss": ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
    "beta": [0.0, 0.1],
    "failure": ["respond", "exclude"],
}


def pairwise(cases):
    """Combinations such that any two values of two different columns meet in one of them (greedy)."""

    def pairs_of(row):
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(cases, 2) if a in row and b in row}

    columns = {name: range(len(values)) for name, values in cases.items()}
    missing = set().union(
        *(pairs_of({a: i, b: j}) for a, b in itertools.combinations(cases, 2) for i in columns[a] for j in columns[b])
    )
    rows = []
    while missing:
        row = dict(min(missing))
        for name in cases:
            if name not in row:
                met = [len(pairs_of({**row, name: i}) & missing) for i in columns[name]]
                row[name] = met.index(max(met))
        missing -= pairs_of(row)
        rows.append({name: cases[name][row[name]] for name in cases})
    return rows


COMBINATIONS = pairwise(CASES)


def strict(text):
    """A JSON value; NaN and infinity are not JSON."""

    def refuse(name):
        raise AssertionError(f"{name} in {text[:200]}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if i % 14 else [], id=str(i)) for i, case in enumerate(COMBINATIONS)],
)
def test_any_two_of_them_together(case, short_folder, tmp_path):
    """Two steps of any combination: metrics, weights and dumps are finite; without signal the weights do not move."""
    size, accumulation, per_generation = case["layout"]
    script = turns_of(case["rollouts"])
    trainer = build(
        short_folder,
        tmp_path,
        script,
        trainer_class=ScriptedTrainer,
        callbacks=[],
        data=Dataset.from_dict({"question": ["Which pet?"] * 4, "golden_answers": [case["answer"]] * 4}),
        reward_funcs=REWARDS[case["rewards"]],
        tools=[down if case["rollouts"] == "failed" else search],
        tool_failure=case["failure"],
        max_tool_error_rate=1.0,
        mask_truncated_completions=True,
        num_generations=min(4, size * per_generation),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        memory_advantage_weight=case["weight"],
        memory_prob_threshold=1.0,
        memory_token_filter="independent" if case["tokens"] == "filtered" else "none",
        memory_answer="objectives" if case["tokens"] == "objectives" else "joint",
        loss_type=case["loss"],
        beta=case["beta"],
        bf16=case["precision"] == "bf16",
        max_completion_length=120 if case["rollouts"] != "cut" else 20,
        weight_decay=0.1,
        max_steps=2,
    )
    script.tokenizer = trainer._tokenizer
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    for log in trainer.state.log_history:
        for name, value in log.items():
            assert not isinstance(value, float) or math.isfinite(value), name
    for parameter in trainer.model.parameters():
        assert parameter.isfinite().all()
    for path in (tmp_path / "rollouts").iterdir():
        assert all(strict(line) for line in path.read_text(encoding="utf-8").splitlines())
    if all(no_signal(log) == 1 for log in trainer.state.log_history if "loss" in log):
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, before[name]), name
    elif case["rewards"] == "mixed" and case["rollouts"] != "cut":
        assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


# Steps without signal


class Weights(TrainerCallback):
    """Keeps the weights and the optimiser's state after each step."""

    def __init__(self):
        self.weights, self.states = [], []

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        self.weights.append([p.detach().clone() for p in model.parameters()])
        states = optimizer.state_dict()["state"]
        self.states.append(
            [value.clone() if torch.is_tensor(value) else value for one in states.values() for value in one.values()]
        )


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(first, second, strict=True)
    )


def rewards_of_steps(*steps):
    """A reward function that gives one list per call."""
    steps = iter(steps)
    return lambda completions, **kwargs: next(steps)


def answers(number, turn):
    return "<answer>cat</answer>" if number % 2 else "<answer>dog</answer>"


@pytest.mark.parametrize(
    "optim, optim_args",
    [
        ("adamw_torch", None),
        pytest.param("adafactor", None, marks=pytest.mark.slow),
        pytest.param("sgd", "momentum=0.9", marks=pytest.mark.slow),
    ],
)
def test_a_step_without_signal_changes_nothing(optim, optim_args, short_folder, tmp_path, caplog):
    """
    Between two steps with signal, under weight decay and momentum (0.9 is a reward whose mean of three is another
    number): weights and optimiser state stay bit for bit, the
    learning rate and the count of steps go on, the log says it once and the metric counts it.
    """
    watch = Weights()
    trainer = build(
        short_folder, tmp_path, answers, trainer_class=ScriptedTrainer, callbacks=[watch, GivenMemoryRewards()],
        reward_funcs=rewards_of_steps([0.0, 1.0, 1.0], [0.9] * 3, [0.1] * 3, [1.0, 0.0, 0.0]), optim=optim, optim_args=optim_args,
        weight_decay=0.1, num_generations=3, per_device_train_batch_size=3, learning_rate=0.01, lr_scheduler_type="linear", max_steps=4, beta=0.0,
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.train()
    after = [before, *watch.weights]
    assert [same(after[i], after[i + 1]) for i in range(4)] == [False, True, True, False]
    assert same(watch.states[0], watch.states[2]) and not same(watch.states[2], watch.states[3])
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [no_signal(log) for log in logs] == [0.0, 1.0, 1.0, 0.0]
    assert [log["grad_norm"] > 0 for log in logs] == [True, False, False, True]
    assert [log["learning_rate"] for log in logs] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert sum("has no signal" in record.getMessage() for record in caplog.records) <= 1


def test_the_log_says_it(short_folder, tmp_path, caplog):
    """The first step without signal of a process is a warning with the name of the metric."""
    durable.logger.warning_once.__func__.cache_clear()
    trainer = build(short_folder, tmp_path, answers, reward_funcs=rewards_of_steps(*[[0.7, 0.7]] * 2), max_steps=2)
    trainer.train()
    (line,) = (record.getMessage() for record in caplog.records if "has no signal" in record.getMessage())
    assert "`loss/no_signal_frac`" in line and trainer.gradients == [{}, {}]


def test_signal_in_another_micro_batch(short_folder, tmp_path):
    """One of two generation batches of a step says something: that is a signal for the step."""
    watch = Weights()
    trainer = build(
        short_folder, tmp_path, answers, trainer_class=ScriptedTrainer, callbacks=[watch, GivenMemoryRewards()],
        reward_funcs=rewards_of_steps([0.7, 0.7], [0.0, 1.0], [0.7, 0.7], [0.7, 0.7]), beta=0.0,
        gradient_accumulation_steps=2, steps_per_generation=1, weight_decay=0.1, max_steps=2,
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert not same(before, watch.weights[0]) and same(watch.weights[0], watch.weights[1])
    assert [no_signal(log) for log in trainer.state.log_history if "loss" in log] == [0.0, 1.0]


def test_a_kl_term_is_a_signal(short_folder, tmp_path):
    """With β > 0 the policy is drawn back to the reference when the rewards are equal, once it has left it."""
    watch = Weights()
    trainer = build(
        short_folder, tmp_path, answers, trainer_class=ScriptedTrainer, callbacks=[watch, GivenMemoryRewards()],
        reward_funcs=rewards_of_steps([0.0, 1.0], [0.7, 0.7]), beta=0.1, learning_rate=0.01, max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert not same(watch.weights[0], watch.weights[1])
    assert [no_signal(log) for log in trainer.state.log_history if "loss" in log] == [0.0, 0.0]


def test_a_memory_reward_is_a_signal(short_folder, tmp_path):
    """Equal outcomes with memories that differ train the memories, and with λ = 0 they train nothing."""
    rollouts = [[call("a"), f"<mem>{word}</mem><answer>cat</answer>"] for word in ("cat", "dog")]
    moved = []
    for weight in (1.0, 0.0):
        trainer = build(
            short_folder, tmp_path / str(weight), lambda number, turn: rollouts[number % 2][turn],
            trainer_class=ScriptedTrainer, rewards=[[None, 0.3], [None, -0.3]], memory_advantage_weight=weight, beta=0.0,
        )  # fmt: skip
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        moved.append(not same(before, list(trainer.model.parameters())))
    assert moved == [True, False]
