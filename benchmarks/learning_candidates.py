"""
A candidate for another memory reward, for the arms of `benchmarks/learning.py`: a recipe names it by
`callbacks: [benchmarks.learning_candidates.HindsightMemoryReward]`. Candidates that don't earn their place leave again.

A group here is the rollouts of this process that stand next to each other and have the same question. With several
processes each of them has to hold whole groups. What a candidate writes is the memory reward of the logs and the
rollout files; `p_mem - p_full` stays the published one.
"""

from itertools import groupby

import torch

from mempo_trl import MemoryRewardCallback
from mempo_trl.rewards import exact_match_reward
from mempo_trl.rollout import Rollout


def groups_of(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """The groups, in order."""
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.question)]


def rewards_of(group: list[Rollout]) -> torch.Tensor:
    """The memory rewards of a group's rollouts, NaN where a turn has none. # (G, T)"""
    rewards = torch.full((len(group), max(len(rollout.turns) for rollout in group)), torch.nan)
    for i, rollout in enumerate(group):
        for t, turn in enumerate(rollout.turns):
            if turn.memory_reward is not None:
                rewards[i, t] = turn.memory_reward
    return rewards


def write_rewards(group: list[Rollout], rewards: torch.Tensor) -> None:
    """Put other memory rewards, of the shape of [`rewards_of`], in place of those that are there."""
    for rollout, row in zip(group, rewards.tolist(), strict=True):
        for turn, reward in zip(rollout.turns, row, strict=False):
            if turn.memory_reward is not None:
                turn.memory_reward = reward


def hindsight_filter(rewards: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """
    Keep the memory rewards that point where the outcome does, and put the group's mean in place of the others.

    Args:
        rewards (`torch.Tensor`):
            Memory rewards of a group, NaN where a turn has none. # (G, T)
        outcomes (`torch.Tensor`):
            Outcome of each rollout, NaN for one that does not count. # (G,)

    Returns:
        `torch.Tensor`: Above the mean for a rollout that ends above the mean outcome, below for one that ends below,
        and the mean everywhere else. # (G, T)
    """
    mean = rewards.nanmean()
    ends = outcomes - outcomes.nanmean()
    # Equal values leave rounding noise after centering. A comparison with NaN is false.
    sign = torch.where(ends.abs() > 1e-6, ends.sign(), 0.0).unsqueeze(1)
    return torch.where((rewards - mean) * sign > 1e-6, rewards, mean)


class HindsightMemoryReward(MemoryRewardCallback):
    """
    A hindsight filter by outcome: a rollout that ends better than its group on average keeps its memory rewards above
    the group's mean, one that ends worse those below, and every other turn gets that mean, which is next to no credit
    after the standardisation (the mean of what is left differs a little). Where all rollouts of a group end alike, no
    memory gets credit. The outcome is [`~mempo_trl.rewards.exact_match_reward`], whatever the recipe trains on.

    Source: the idea of [HiMPO](https://huggingface.co/papers/2606.16285), which attenuates credit for a memory that the
    outcome does not support. Not its code or its formulas: by its abstract it weakens such credit within bounds, where
    this drops it, and compares a memory with the one before it, which is `memory_baseline: previous` here.
    """

    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        super().on_rollouts_end(args, state, control, rollouts=rollouts, **kwargs)
        golden_answers = [None if rollout.excluded else rollout.golden_answers for rollout in rollouts]
        outcomes = iter(exact_match_reward([], golden_answers, rollouts))  # None for an excluded one
        for group in groups_of(rollouts):
            ends = [torch.nan if (end := next(outcomes)) is None else end for _ in group]
            write_rewards(group, hindsight_filter(rewards_of(group), torch.tensor(ends)))
