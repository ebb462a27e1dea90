"""The outcome reward of the sparse regime in `benchmarks/learning/full.yaml`."""

from mempo_trl.rewards import exact_match_reward


def all_right_reward(completions: list, golden_answers: list, rollouts: list, **kwargs) -> list[float | None]:
    """1.0 where every objective is answered right and every turn is well formed, else 0.0."""
    rewards = exact_match_reward(completions, golden_answers, rollouts)
    return [None if reward is None else float(reward == 1.0) for reward in rewards]
