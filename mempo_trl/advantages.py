"""Credit: from rewards to one advantage per token. Pure functions on tensors."""

import torch
from trl.trainer.utils import nanstd


EPS = 1e-4
"""The ε of `(r - mean) / (std + ε)`: TRL's own for the outcome, used for the memory reward as well."""


def standardize_memory_rewards(
    memory_rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group"
) -> torch.Tensor:
    """
    Memory advantages `A_M[i,t]`: the memory rewards standardised over all rollouts and turns of their group.

    Args:
        memory_rewards (`torch.Tensor`):
            `R_M[i,t]`, NaN where undefined, of all processes, the rollouts of a group next to each other. # (R, T)
        num_generations (`int`):
            Rollouts per group, `G`; `R` is a multiple of it.
        scale_rewards (`str`, *optional*, defaults to `"group"`):
            As TRL's: divide by the standard deviation of the `"group"`, of the `"batch"`, or by nothing (`"none"`).

    Returns:
        `torch.Tensor`: 0 where undefined, in groups with fewer than two values, and in groups without spread. # (R, T)
    """
    groups = memory_rewards.reshape(-1, num_generations * memory_rewards.size(1))  # (R / G, G * T)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    centered = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "none":
        advantages = centered
    else:
        std = nanstd(groups) if scale_rewards == "batch" else nanstd(groups, dim=1, keepdim=True)
        advantages = centered / (std + EPS)
    # Equal values leave rounding noise after centering, which a small ε would let through.
    spread = groups.nan_to_num(-torch.inf).amax(dim=1) > groups.nan_to_num(torch.inf).amin(dim=1)
    advantages = torch.where((count > 1) & spread.unsqueeze(1), advantages, torch.zeros_like(advantages))
    return advantages.nan_to_num(0.0).reshape(memory_rewards.shape)


def without_spread(
    rewards_per_func: torch.Tensor,
    reward_weights: torch.Tensor,
    num_generations: int,
    aggregation: str = "sum_then_normalize",
) -> torch.Tensor:
    """
    Which rollouts are in a group whose rewards say nothing: their advantage is 0, but for rounding noise.

    Args:
        rewards_per_func (`torch.Tensor`):
            Rewards of all processes, NaN where a function gave none, the rollouts of a group next to each other.
            # (R, F)
        reward_weights (`torch.Tensor`):
            Weight of each function. # (F,)
        num_generations (`int`):
            Rollouts per group, `G`; `R` is a multiple of it.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`):
            TRL's `multi_objective_aggregation`: whether the sums have to be equal, or the rewards of each function.

    Returns:
        `torch.Tensor`: # (R,)
    """
    rewards = rewards_per_func * reward_weights  # (R, F)
    if aggregation == "sum_then_normalize":
        undefined = rewards_per_func.isnan().all(dim=1)
        rewards = rewards.nansum(dim=1).masked_fill(undefined, torch.nan).unsqueeze(1)  # (R, 1)
    groups = rewards.reshape(-1, num_generations, rewards.size(1))  # (R / G, G, F or 1)
    spread = groups.nan_to_num(-torch.inf).amax(dim=1) > groups.nan_to_num(torch.inf).amin(dim=1)
    return (~spread.any(dim=1)).repeat_interleave(num_generations)


def token_advantages(
    outcome_advantages: torch.Tensor,
    memory_advantages: torch.Tensor,
    rollout_index: torch.Tensor,
    memory_turns: torch.Tensor,
    memory_weight: float,
) -> torch.Tensor:
    """
    Token advantages `A[i,t,k] = A_T[i] + λ · A_M[i,t] · memory_mask[i,t,k]`.

    Args:
        outcome_advantages (`torch.Tensor`):
            `A_T[i]` of this process's rollouts. # (R,)
        memory_advantages (`torch.Tensor`):
            `A_M[i,t]` of this process's rollouts. # (R, T)
        rollout_index (`torch.Tensor`):
            Rollout of each sequence, -1 for padding sequences, which get 0. # (S,)
        memory_turns (`torch.Tensor`):
            Turn whose memory block the token belongs to, -1 outside every memory block. # (S, C)
        memory_weight (`float`):
            λ.

    Returns:
        `torch.Tensor`: One advantage per token; outside the loss mask it has no effect. # (S, C)
    """
    real = (rollout_index >= 0).unsqueeze(1)
    rows = rollout_index.clamp(min=0)
    in_memory = memory_turns >= 0
    memory = memory_advantages[rows].gather(1, memory_turns.clamp(min=0)) * in_memory  # (S, C)
    return (outcome_advantages[rows].unsqueeze(1) + memory_weight * memory) * real
