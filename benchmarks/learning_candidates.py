"""
Candidates for another memory reward, for the arms of `benchmarks/learning.py`: a recipe names one by, for example,
`callbacks: [benchmarks.learning_candidates.CostlyMemoryReward]`. Those that don't earn their place leave again.

A group here is the rollouts of this process that stand next to each other and have the same question. With several
processes each of them has to hold whole groups. What a candidate writes is the memory reward of the logs and the
rollout files; `p_mem - p_full` stays the published one.
"""

from itertools import groupby

import torch

from mempo_trl import MemoryRewardCallback
from mempo_trl.advantages import standardize_memory_rewards
from mempo_trl.rewards import exact_match_reward
from mempo_trl.rollout import Rollout


TOKEN_COST = 0.005
"""The cost of a memory token. In the village a fact takes 4 to 6 tokens, so 0.02 to 0.03. That is a third to a half of
the standard deviation of the memory reward within a group (0.058 in the first 20 steps of the quickstart): enough to
decide between memories that predict the answer alike. A needed fact is worth up to 1/n with n objectives, 0.125 for the
most that the suite trains on, so that dropping one does not pay."""


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


def standardize_per_turn(rewards: torch.Tensor) -> torch.Tensor:
    """Standardise a group's rewards among those of the same turn: 0 where there are fewer than two or no spread. # (G, T)"""
    return standardize_memory_rewards(rewards.T, num_generations=1).T  # a turn in place of a group


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


def annealed_weight(weight: float, step: int, max_steps: int) -> float:
    """λ in a step (from 0) of a run: `weight` in the first one, `weight / max_steps` in the last one."""
    return weight * (1 - step / max_steps)


class TurnStandardizedMemoryReward(MemoryRewardCallback):
    """
    The memory reward standardised among the turns of the same index within a group, so that a turn is compared with
    what others made of the same turn, and a reward that grows with the turn index gives no credit.

    A turn index with fewer than two rewards, or without spread, gives 0. The trainer standardises over the group once
    more, which changes little. Source: the group baseline of GRPO taken turn by turn; our own variation.
    """

    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        super().on_rollouts_end(args, state, control, rollouts=rollouts, **kwargs)
        for group in groups_of(rollouts):
            write_rewards(group, standardize_per_turn(rewards_of(group)))


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


class AnnealedMemoryReward(MemoryRewardCallback):
    """
    The memory reward as it is, with a weight λ that falls linearly from `memory_advantage_weight` towards 0, which it
    would reach one step after the last: the dense reward is to help at the start and leaves the end to the outcome.

    Source: annealing of a shaping reward, as is common in reinforcement learning; our own variation. λ goes by the step,
    so a resumed run has the λ of its step. The configured value is back when the training ends.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.weight = args.memory_advantage_weight

    def on_step_begin(self, args, state, control, **kwargs):
        args.memory_advantage_weight = annealed_weight(self.weight, state.global_step, state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        args.memory_advantage_weight = self.weight


class CostlyMemoryReward(MemoryRewardCallback):
    """
    The memory reward minus [`TOKEN_COST`] per token of the memory block, tags included, in every turn that has one.

    Source: a length penalty, as is common in reinforcement learning; our own variation.
    """

    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        super().on_rollouts_end(args, state, control, rollouts=rollouts, **kwargs)
        for rollout in rollouts:
            for turn in rollout.turns:
                if turn.memory_reward is not None:
                    turn.memory_reward -= TOKEN_COST * len(turn.memory_ids)
