"""The candidate for another memory reward: what it makes of the default one, by hand."""

import sys

import pytest
import torch
from conftest import REPOSITORY, load_benchmark

from mempo_trl import MemoryRewardCallback
from mempo_trl.rollout import Rollout, Turn
from mempo_trl.scripts.train import load_callback


candidates = load_benchmark("learning_candidates")
NAN = torch.nan


def rollout(rewards: list[float | None], question="q", answer="cat") -> tuple[Rollout, list]:
    """A rollout, and the memory rewards that the parent is to write to its turns."""
    turns = [Turn([], [], None, "", "answer", True, carried=0) for _ in rewards]
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


def test_name_in_a_recipe(monkeypatch):
    """`mempo train` finds the candidate by its name, from the root of the repository."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    callback = load_callback("benchmarks.learning_candidates.HindsightMemoryReward")
    assert isinstance(callback, MemoryRewardCallback)
