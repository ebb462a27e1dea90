"""The weights that turn a mean over rows into a mean over rollouts, and the KL that goes with them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.sequences import Sequence, kl_per_sequence, loss_weights, pad_sequences


def sequence(rollout_index: int, loss_mask: list[int]) -> Sequence:
    return Sequence(rollout_index, [1], [2] * len(loss_mask), loss_mask, [-1] * len(loss_mask))


# Rollout 0: rows of 3 and 1 trained tokens; rollout 1: a row of 2; rollout 2: cut and masked. Two padding rows.
ROWS = [
    sequence(0, [1, 1, 0, 1]),
    sequence(0, [1]),
    sequence(1, [1, 1]),
    sequence(2, [0, 0, 0]),
]
PADDED = pad_sequences(list(ROWS), 6, token_id=0)


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        # S / R = 6 / 3 = 2 rows per rollout: 2 * 3 / 4, 2 * 1 / 4, 2 * 2 / 2, and nothing where nothing is trained.
        ("grpo", [1.5, 0.5, 2.0, 0.0, 0.0, 0.0]),
        ("sapo", [1.5, 0.5, 2.0, 0.0, 0.0, 0.0]),
        ("dr_grpo", [2.0, 2.0, 2.0, 2.0, 0.0, 0.0]),
        ("luspo", [2.0, 2.0, 2.0, 2.0, 0.0, 0.0]),
        ("dapo", [1.0] * 6),
        ("bnpo", [1.0] * 6),
        ("cispo", [1.0] * 6),
        ("vespo", [1.0] * 6),
    ],
)
def test_weights_by_hand(loss_type, weights):
    """Each loss type's weights for rows of three rollouts and two padding rows."""
    assert loss_weights(PADDED, 3, loss_type).tolist() == pytest.approx(weights, abs=1e-6)


def test_one_row_per_rollout_has_weight_one():
    """Where no context is rewritten every weight is exactly 1, so that the loss is the parent's."""
    rows = [sequence(i, [1] * (i + 1)) for i in range(3)]
    for loss_type in ("grpo", "sapo", "dr_grpo", "luspo", "dapo"):
        assert loss_weights(rows, 3, loss_type).tolist() == [1.0, 1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=3), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_weighted_rows_are_rollouts(rollouts, padding):
    """For any split into rows and any padding: TRL's mean over rows, weighted, is the mean over rollouts."""
    rows = [sequence(i, mask) for i, masks in enumerate(rollouts) for mask in masks]
    rows = pad_sequences(rows, len(rows) + padding, token_id=0)
    if not rows:
        return
    values = torch.rand(sum(len(row.loss_mask) for row in rows), dtype=torch.float64).split(
        [len(row.loss_mask) for row in rows]
    )
    masks = [torch.tensor(row.loss_mask, dtype=torch.float64) for row in rows]
    sums = torch.stack([(value * mask).sum() for value, mask in zip(values, masks, strict=True)])
    counts = torch.tensor([mask.sum() for mask in masks])
    index = torch.tensor([row.rollout_index for row in rows])
    per_rollout = [(sums[index == i].sum(), counts[index == i].sum()) for i in range(len(rollouts))]
    mean_of_means = sum(total / count if count else 0.0 for total, count in per_rollout) / len(rollouts)
    mean_of_sums = sum(total for total, _ in per_rollout) / len(rollouts)
    weights = loss_weights(rows, len(rollouts), "grpo").double()
    assert (weights * sums / counts.clamp(min=1)).mean().item() == pytest.approx(float(mean_of_means), abs=1e-6)
    weights = loss_weights(rows, len(rollouts), "luspo").double()
    assert (weights * sums).mean().item() == pytest.approx(float(mean_of_sums), abs=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "divisors"), [("grpo", (2, 1)), ("sapo", (2, 1)), ("dr_grpo", (10, 10)), ("luspo", (1, 1))]
)
def test_kl_by_hand(loss_type, divisors):
    """`exp(r) - r - 1` with `r = ref - policy`, over trained tokens only, reduced as the loss type reduces."""
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -1.0, -9.0], [-1.0, -5.0, -5.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    # r = -0.5 and 1: exp(-0.5) + 0.5 - 1 = 0.106531, exp(1) - 1 - 1 = 0.718282. The second row trains nothing.
    total = math.exp(-0.5) - 0.5 + math.exp(1.0) - 2.0
    actual = kl_per_sequence(logps, reference, mask, loss_type, 10)
    torch.testing.assert_close(actual, torch.tensor([total / divisors[0], 0.0]), rtol=0, atol=1e-6)


def test_kl_with_importance_weights():
    """With bias correction each token's KL counts with its importance weight, or with that of its row."""
    logps, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    mask = torch.ones(1, 2)
    first, second = math.exp(-0.5) - 0.5, math.exp(1.0) - 2.0
    per_token = torch.tensor([[math.log(2.0), math.log(0.5)]])
    actual = kl_per_sequence(logps, reference, mask, "luspo", 10, per_token)
    torch.testing.assert_close(actual, torch.tensor([2 * first + 0.5 * second]), rtol=0, atol=1e-6)
    per_row = torch.tensor([[math.log(3.0)]])
    actual = kl_per_sequence(logps, reference, mask, "grpo", 10, per_row)
    torch.testing.assert_close(actual, torch.tensor([3 * (first + second) / 2]), rtol=0, atol=1e-6)
