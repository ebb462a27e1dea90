"""The candidates for another memory reward: what each makes of the published one, by hand."""

import sys

import pytest
import torch
from conftest import REPOSITORY, GivenMemoryRewards, call, load_benchmark, script_of, train
from user_folder import read_lines

from mempo_trl import MemoryRewardCallback
from mempo_trl.rollout import Rollout, Turn
from mempo_trl.scripts.train import load_callback


candidates = load_benchmark("learning_candidates")
NAN = torch.nan


def rollout(rewards: list[float | None], question="q", answer="cat", tokens=4) -> tuple[Rollout, list]:
    """A rollout whose turns have a memory block of so many tokens, with the memory rewards that the parent is to write."""
    turns = [
        Turn([], [0] * (tokens + 2), None, "", "answer", True, carried=0, memory_span=(1, tokens + 1)) for _ in rewards
    ]
    return Rollout(question, [["cat"]], [], turns, answer=answer), rewards


def rewarded(monkeypatch, callback, *played: tuple[Rollout, list], exclude=()) -> list[list[float | None]]:
    """The memory rewards after a callback whose parent writes the given ones."""
    rollouts = [one for one, _ in played]

    def published(self, args, state, control, *, rollouts, scorer, processing_class, **kwargs):
        for number, (one, rewards) in enumerate(played):
            one.excluded = number in exclude
            for turn, reward in zip(one.turns, rewards, strict=True):
                turn.memory_reward, turn.p_mem, turn.p_full = reward, 0.75, 0.25

    monkeypatch.setattr(MemoryRewardCallback, "on_rollouts_end", published)
    callback.on_rollouts_end(None, None, None, rollouts=rollouts, scorer=None, processing_class=None)
    assert {(turn.p_mem, turn.p_full) for one in rollouts for turn in one.turns} == {(0.75, 0.25)}
    return [[turn.memory_reward for turn in one.turns] for one in rollouts]


def test_standardize_per_turn():
    """A turn is compared with the same turn of the others; one value or equal values say nothing."""
    rewards = torch.tensor([[NAN, 0.1, 0.9, 1 / 3], [NAN, 0.3, NAN, 1 / 3], [NAN, 0.5, NAN, 1 / 3]])
    # Turn 2: mean 0.3, variance (0.04 + 0 + 0.04) / 2 = 0.04, so ±0.2 / (0.2 + 1e-4) = ±0.9995.
    expected = [[0, -0.9995, 0, 0], [0, 0, 0, 0], [0, 0.9995, 0, 0]]
    assert candidates.standardize_per_turn(rewards).tolist() == [pytest.approx(row, abs=1e-5) for row in expected]


def test_turn_standardized(monkeypatch):
    """Groups are apart, in the order of the rollouts, and a turn without a memory reward stays without one."""
    played = [
        *(rollout([None, 0.1, 0.5], "q"), rollout([None, 0.3], "q")),
        *(rollout([None, 5.0], "r"), rollout([None, 1.0], "r")),
    ]
    rewards = rewarded(monkeypatch, candidates.TurnStandardizedMemoryReward(), *played)
    # Two values a < b: mean in the middle, std |b - a| / √2, so ∓1 / √2 but for ε.
    s = 0.5**0.5
    expected = [[None, -s, 0.0], [None, s], [None, s], [None, -s]]
    for row, of_turns in zip(rewards, expected, strict=True):
        assert row[0] is None and row[1:] == pytest.approx(of_turns[1:], abs=1e-3)


def test_hindsight_filter():
    """What points where the outcome does is kept; equal to the mean, against the outcome or without one is the mean."""
    # Rewards 0.6, 0.2, 0.1, 0.4, 0.2 and 0.3: mean 0.3. Outcomes 1, 0 and 0.5: mean 0.5, the last without a side.
    rewards = torch.tensor([[NAN, 0.6, 0.2], [NAN, 0.1, 0.4], [NAN, 0.2, 0.3]])
    filtered = candidates.hindsight_filter(rewards, torch.tensor([1.0, 0.0, 0.5]))
    expected = [[0.6, 0.3], [0.1, 0.3], [0.3, 0.3]]
    assert filtered[:, 1:].tolist() == [pytest.approx(row) for row in expected]
    # A rollout that does not count leaves the mean outcome at 0.25.
    filtered = candidates.hindsight_filter(rewards, torch.tensor([NAN, 0.0, 0.5]))
    assert filtered[:, 1:].tolist() == [pytest.approx(row) for row in [[0.3, 0.3], [0.1, 0.3], [0.3, 0.3]]]
    for outcomes in ([1 / 3] * 8, [NAN] * 8):  # the mean of eight thirds is not a third
        filtered = candidates.hindsight_filter(torch.tensor([[0.2, 0.4]] * 8), torch.tensor(outcomes))
        assert filtered.unique().tolist() == pytest.approx([0.3])


def test_hindsight(monkeypatch):
    """The outcome is the exact match of the answer, taken within the group; an excluded rollout has none."""
    played = [
        *(rollout([None, 0.5, 0.1]), rollout([None, 0.2, 0.4], answer="dog"), rollout([None, None], answer="dog")),
        *(rollout([None, 0.9], "r", answer="dog"), rollout([None, 0.1], "r", answer=None), rollout([None], "r")),
    ]
    rewards = rewarded(monkeypatch, candidates.HindsightMemoryReward(), *played, exclude=[5])
    # Group q: mean reward 0.3. Group r: all that count are wrong, and get their mean 0.5.
    expected = [[0.5, 0.3], [0.2, 0.3], [None], [0.5], [0.5], []]
    for row, of_turns in zip(rewards, expected, strict=True):
        assert row[0] is None and row[1:] == pytest.approx(of_turns)


def test_costly(monkeypatch):
    """Each token of the memory block costs 0.005, where the turn has a memory reward."""
    played = [rollout([None, 0.5], tokens=10), rollout([None, 0.5], tokens=60)]
    rewards = rewarded(monkeypatch, candidates.CostlyMemoryReward(), *played)
    assert rewards[0] == [None, pytest.approx(0.5 - 0.05)] and rewards[1] == [None, pytest.approx(0.5 - 0.3)]


class AnnealedGiven(candidates.AnnealedMemoryReward, GivenMemoryRewards):
    """λ falls, and the memory rewards are given ones."""


def test_annealed(short_folder, tmp_path):
    """λ falls by a quarter of its value in each of four steps, counts in the loss, and is as configured afterwards."""
    weights = [0.8, 0.6, 0.4, 0.2]
    assert [candidates.annealed_weight(0.8, step, 4) for step in range(4)] == pytest.approx(weights)
    right = [call("a"), "<mem>cat</mem><answer>cat</answer>"]
    wrong = [call("a"), "<mem>dogs</mem><answer>dog</answer>"]
    callback = AnnealedGiven([[None, 1.0], [None, 0.0]])
    settings = dict(memory_advantage_weight=0.8, max_steps=4, callbacks=[callback])
    trainer = train(short_folder, tmp_path, script_of(right, wrong), **settings)
    records = [record for file in sorted((tmp_path / "rollouts").iterdir()) for record in read_lines(file)]
    assert [record["memory_weight"] for record in records[::2]] == pytest.approx(weights)
    # A_T and A_M are ±0.5 / (1 / √2 + 1e-4) = ±0.7070, so A_T + λ A_M = ±0.7070 (1 + λ) on the memory's tokens.
    largest = [(i["advantages"] / i["loss_weights"].unsqueeze(1)).abs().max().item() for i in trainer.inputs_seen]
    assert largest == pytest.approx([0.7070 * (1 + weight) for weight in weights], abs=1e-3)
    assert trainer.args.memory_advantage_weight == 0.8


@pytest.mark.parametrize("name", ["TurnStandardized", "Hindsight", "Annealed", "Costly"])
def test_name_in_a_recipe(name, monkeypatch):
    """`mempo train` finds a candidate by its name, from the root of the repository."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    callback = load_callback(f"benchmarks.learning_candidates.{name}MemoryReward")
    assert isinstance(callback, MemoryRewardCallback)
