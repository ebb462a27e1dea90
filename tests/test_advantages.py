"""The credit of tokens: worked by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.advantages import EPS, standardize_memory_rewards, token_advantages


NAN = math.nan


def close(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=1e-6)


def by_hand(values: list[float], scale: bool = True) -> list[float]:
    """The definition in plain numbers: `(r - mean) / (std + ε)`, std with Bessel's correction."""
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [(value - mean) / (std + EPS if scale else 1.0) for value in values]


def test_memory_rewards_are_standardised_over_all_turns_of_the_group():
    """One mean and one standard deviation for all rollouts and turns of a group, undefined turns left out."""
    # Group of two rollouts, values 0.3, 0.1, -0.1, 0.5: mean 0.2, deviations 0.1, -0.1, -0.3, 0.3,
    # variance (0.01 + 0.01 + 0.09 + 0.09) / 3 = 0.066667, std 0.258199, and 0.1 / (0.258199 + 0.0001) = 0.387148.
    rewards = torch.tensor([[NAN, 0.3, 0.1], [NAN, -0.1, 0.5]])
    close(
        standardize_memory_rewards(rewards, 2),
        [[0.0, 0.387148, -0.387148], [0.0, -1.161445, 1.161445]],
    )


def test_uneven_turns_weigh_each_turn_once():
    """A rollout with many memories counts with each of them: not a mean of means."""
    # Values 1, 1, 1, 0: mean 0.75, deviations 0.25 (three times) and -0.75, variance (3 / 16 + 9 / 16) / 3 = 0.25.
    rewards = torch.tensor([[NAN, 1.0, 1.0, 1.0], [NAN, 0.0, NAN, NAN]])
    close(
        standardize_memory_rewards(rewards, 2),
        [[0.0, 0.25 / 0.5001, 0.25 / 0.5001, 0.25 / 0.5001], [0.0, -0.75 / 0.5001, 0.0, 0.0]],
    )


def test_groups_do_not_mix():
    """A group's values do not change another group's advantages."""
    first, second = torch.tensor([[0.3, 0.1], [NAN, 0.5]]), torch.tensor([[7.0, -2.0], [0.25, NAN]])
    both = standardize_memory_rewards(torch.cat([first, second]), 2)
    close(both, torch.cat([standardize_memory_rewards(first, 2), standardize_memory_rewards(second, 2)]))


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rows",
    [
        [[NAN, NAN], [NAN, NAN]],  # nothing defined
        [[NAN, 0.7], [NAN, NAN]],  # one value
        [[NAN, 0.1], [NAN, 0.1]],  # no spread
        [[0.1, 0.1], [0.1, NAN]],  # 0.1 three times: the mean is not exactly 0.1 in float32
    ],
)
def test_a_group_that_says_nothing_gives_zero(rows, scale_rewards):
    """Fewer than two values, or no spread: exactly 0, also beside a group that has spread, and never NaN."""
    other = [[0.0, 1.0], [NAN, 0.5]]
    advantages = standardize_memory_rewards(torch.tensor(rows + other), 2, scale_rewards)
    assert advantages[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert advantages.isfinite().all() and advantages[2:].abs().sum() > 0.9


def test_scaling_by_the_batch_and_not_at_all():
    """`scale_rewards="batch"` divides by one std over all groups, `"none"` by nothing; the mean is always the group's."""
    rewards = torch.tensor([[0.0], [1.0], [10.0], [14.0]])
    # Group means 0.5 and 12. Over the batch: mean 6.25, squares 39.0625 + 27.5625 + 14.0625 + 60.0625 = 140.75,
    # std = sqrt(140.75 / 3) = 6.849574.
    std = 6.849574 + EPS
    close(standardize_memory_rewards(rewards, 2, "batch"), [[-0.5 / std], [0.5 / std], [-2.0 / std], [2.0 / std]])
    close(standardize_memory_rewards(rewards, 2, "none"), [[-0.5], [0.5], [-2.0], [2.0]])


value = st.one_of(st.none(), st.floats(-1, 1, width=32))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(value, min_size=3, max_size=3), min_size=4, max_size=4))
def test_standardisation_equals_its_definition(rows):
    """For any pattern of defined rewards: the definition in plain Python, and 0 where it does not apply."""
    advantages = standardize_memory_rewards(torch.tensor([[NAN if v is None else v for v in row] for row in rows]), 4)
    defined = [v for row in rows for v in row if v is not None]
    expected = iter(by_hand(defined) if len(set(defined)) > 1 else [0.0] * len(defined))
    flat = [0.0 if v is None else next(expected) for row in rows for v in row]
    torch.testing.assert_close(advantages.flatten(), torch.tensor(flat), rtol=1e-3, atol=1e-4)
    assert all(
        a == 0.0 for v, a in zip([v for row in rows for v in row], advantages.flatten(), strict=True) if v is None
    )


def test_outcome_of_twelve_right_in_sixteen():
    """The worked value of the outcome: 12 of 16 right, group mean 0.75."""
    # Variance (12 * 0.0625 + 4 * 0.5625) / 15 = 0.2, std 0.447214: +0.25 / 0.447314 and -0.75 / 0.447314.
    # The same estimator serves the memory rewards, so a column of outcomes shows it.
    rewards = torch.tensor([[1.0]] * 12 + [[0.0]] * 4)
    close(standardize_memory_rewards(rewards, 16, "none"), [[0.25]] * 12 + [[-0.75]] * 4)
    close(standardize_memory_rewards(rewards, 16), [[0.558892]] * 12 + [[-1.676676]] * 4)


def test_token_advantages_by_hand():
    """`A_T + λ A_M` on a memory's tokens, of the memory's own turn; `A_T` elsewhere; 0 on padding sequences."""
    advantages = token_advantages(
        outcome_advantages=torch.tensor([2.0, -3.0]),
        memory_advantages=torch.tensor([[7.0, 0.5, 10.0], [-5.0, -1.0, 4.0]]),
        rollout_index=torch.tensor([0, 0, 1, -1]),
        memory_turns=torch.tensor(
            [
                [-1, 1, 1, -1],  # rollout 0, memory of turn 1: 2 + 0.1 * 0.5
                [2, 2, -1, -1],  # rollout 0, memory of turn 2: 2 + 0.1 * 10
                [-1, 2, 1, -1],  # rollout 1, one token of each: -3 + 0.1 * 4, -3 - 0.1
                [-1, -1, -1, -1],  # padding
            ]
        ),
        memory_weight=0.1,
    )
    close(advantages, [[2, 2.05, 2.05, 2], [3, 3, 2, 2], [-3, -2.6, -3.1, -3], [0.0, 0, 0, 0]])


def test_weight_zero_leaves_the_outcome():
    """With λ = 0 every token of a rollout has its outcome advantage, whatever the memories are worth."""
    advantages = token_advantages(
        torch.tensor([1.5]), torch.tensor([[0.0, 7.0]]), torch.tensor([0]), torch.tensor([[-1, 1, 1]]), 0.0
    )
    assert advantages.tolist() == [[1.5, 1.5, 1.5]]


def test_every_sequence_of_a_rollout_has_its_outcome_advantage():
    """Three sequences of lengths 5, 9 and 4, reward 1 against 0: the same advantage on every token of each."""
    # Pitfall of other trainers: the last turn's masked advantages broadcast to sequences with other masks.
    # Rewards 1 and 0: mean 0.5, std 0.707107, advantage 0.5 / 0.707207 = 0.707007.
    outcome = torch.tensor([0.707007, -0.707007])
    memory_turns = torch.full((4, 9), -1)
    memory_turns[1, 2:5] = 1
    memory_turns[2, 0:2] = 2
    memory_advantages = torch.tensor([[0.0, 0.5, -0.25], [0.0, 0.0, 0.0]])
    advantages = token_advantages(outcome, memory_advantages, torch.tensor([0, 0, 0, 1]), memory_turns, 2.0)
    close(advantages[0], [0.707007] * 9)
    close(advantages[1], [0.707007] * 2 + [0.707007 + 2 * 0.5] * 3 + [0.707007] * 4)
    close(advantages[2], [0.707007 - 2 * 0.25] * 2 + [0.707007] * 7)
    close(advantages[3], [-0.707007] * 9)
