"""Batches by length: budget, padding, equal counts; and the same loss and gradients whatever the budget."""

import weakref

import pytest
import torch
from conftest import build, call, script_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl import batching
from mempo_trl.batching import batch_by_length, split_to_count
from mempo_trl.config import LOSS_TYPES


def test_by_hand():
    """Longest first, as many as the budget holds; a row that is longer than the budget is alone."""
    # 50 alone; 20 + 20 = 40 tokens of 45; 15 x 3 = 45 of 45.
    assert batch_by_length([15, 20, 50, 15, 20, 10], 45) == [[2], [1, 4], [0, 3, 5]]
    assert batch_by_length([], 45) == []


def test_large_batches_hold_little_padding():
    """Above the size of a small batch, rows of other lengths start a new one: at most a tenth of padding."""
    # 4000 and 3800: 8000 tokens for 7800, 3% of padding. With 3000 it would be 12000 for 10800, 11%.
    assert batch_by_length([4000, 3800, 3000, 100], 10**6) == [[0, 1], [2], [3]]
    # Small rows share a batch whatever the padding: 10 x 200 = 2000 tokens.
    assert batch_by_length([200] + [10] * 9, 10**6) == [list(range(10))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9000), max_size=60), st.integers(1, 20000), st.data())
def test_every_row_once(lengths, max_tokens, data):
    """For any rows: each in one batch, within budget and padding; and split into any possible count the same."""
    batches = batch_by_length(lengths, max_tokens)
    for rows in batches:
        area, tokens = lengths[rows[0]] * len(rows), sum(lengths[row] for row in rows)
        assert lengths[rows[0]] == max(lengths[row] for row in rows)
        assert len(rows) == 1 or area <= max_tokens
        assert area <= max(batching.SMALL_BATCH_TOKENS, 1.1 * tokens + 1e-6)
    count = data.draw(st.integers(len(batches), len(lengths)))
    for parts in (batches, split_to_count(batches, lengths, count)):
        assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
    assert len(split_to_count(batches, lengths, count)) == count


def test_the_largest_batch_is_split_first():
    """Extra forwards are taken from where most tokens are."""
    assert split_to_count([[0, 1, 2, 3], [4, 5]], [10] * 4 + [3, 3], 3) == [[0, 1], [2, 3], [4, 5]]


# Rows of very different lengths: 4 turns, 2 turns and a single one, with an odd number of sequences (padding).
ROLLOUTS = [
    [call("a" * 40), "<mem>x</mem>" + call("b"), "<mem>yy</mem>" + call("c"), "<mem>z</mem><answer>cat</answer>"],
    [call("g"), "<mem>" + "w" * 30 + "</mem><answer>fish</answer>"],
    ["<answer>cat</answer>"],
    [call("d"), "<mem>q</mem><answer>dog</answer>"],
]
REWARDS = [[None, 0.3, 0.1, -0.2], [None, 0.8], [None], [None, -0.5]]


def gradients(folder, tmp_path, max_tokens, **kwargs):
    torch.manual_seed(0)  # TRL shuffles the rows of a generation batch
    trainer = build(
        folder,
        tmp_path / str(max_tokens),
        script_of(*ROLLOUTS),
        rewards=REWARDS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_grad_norm=0.0,
        max_tokens_per_microbatch=max_tokens,
        **kwargs,
    )
    sizes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(0)
    trainer.train()
    return trainer, sizes


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_do_not_depend_on_the_budget(short_folder, tmp_path, loss_type):
    """Loss and gradient of every parameter: one forward per row, a few, or one for all, with padding sequences."""
    runs = {n: gradients(short_folder, tmp_path, n, loss_type=loss_type, beta=0.1) for n in (1, 800, 10**6)}
    expected, _ = runs[10**6]
    assert len(expected.gradients) == 1
    for max_tokens, (trainer, sizes) in runs.items():
        assert trainer.state.global_step == 1
        assert trainer.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-7)
        for name, gradient in expected.gradients[0].items():
            tolerance = 3e-5 * gradient.abs().max().item() + 1e-8
            torch.testing.assert_close(trainer.gradients[0][name], gradient, rtol=1e-4, atol=tolerance)
        assert all(rows == 1 or rows * width <= max_tokens for rows, width in sizes)
    assert len(runs[1][1]) > len(runs[800][1]) > len(runs[10**6][1])


@pytest.mark.parametrize("kwargs", [{"num_iterations": 2}, {"steps_per_generation": 4, "beta": 0.0}])
def test_old_log_probabilities_too(short_folder, tmp_path, kwargs):
    """The old policy's forwards keep to the budget, and the run is the same."""
    (few, _), (one, sizes) = (gradients(short_folder, tmp_path, n, max_steps=2, **kwargs) for n in (10**6, 1))
    assert {rows for rows, _ in sizes} == {1}
    assert any("old_per_token_logps" in inputs for inputs in one.inputs_seen)
    assert one.losses == pytest.approx(few.losses, rel=1e-4, abs=1e-6)


def test_padding_is_reported_and_small(short_folder, tmp_path):
    """`sequences/padding_frac` is the padding of the forwards: 0 with a row each, and that of the block with one."""
    (one, _), (block, sizes) = (gradients(short_folder, tmp_path, n, beta=0.0) for n in (1, 10**6))
    padding = [trainer.state.log_history[0]["sequences/padding_frac"] for trainer in (one, block)]
    assert padding[0] == 0
    lengths = [
        (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist() for inputs in block.inputs_seen
    ]
    # Two micro-batches, each one block as wide as its longest row.
    expected = [1 - sum(rows) / (len(rows) * max(rows)) for rows in lengths]
    assert padding[1] == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert [width for _, width in sizes] == [max(rows) for rows in lengths]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_recomputed_forwards(short_folder, tmp_path, gradient_checkpointing):
    """`recompute_forwards` makes each forward of the loss twice, with the same loss and gradients."""
    settings = dict(beta=0.1, gradient_checkpointing=gradient_checkpointing)
    kept, sizes = gradients(short_folder, tmp_path / "kept", 1, **settings)
    repeated, more_sizes = gradients(short_folder, tmp_path / "repeated", 1, recompute_forwards=True, **settings)
    # The reference is another model, whose forwards are not counted.
    assert sorted(more_sizes) == sorted(sizes * 2)
    assert repeated.losses == kept.losses
    for name, gradient in kept.gradients[0].items():
        assert torch.equal(repeated.gradients[0][name], gradient)


def test_recomputed_forwards_keep_one_graph(short_folder, tmp_path):
    """What the backward pass needs of one forward is gone before that of the next is made."""
    alive, most = set(), []

    counts = {}
    for recompute in (False, True):
        trainer = build(
            short_folder,
            tmp_path / str(recompute),
            script_of(*ROLLOUTS),
            rewards=REWARDS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_tokens_per_microbatch=1,
            recompute_forwards=recompute,
        )
        alive.clear()
        most.clear()

        def keep(module, args, output):
            if output.grad_fn is not None:
                alive.add(id(output))
                weakref.finalize(output, alive.discard, id(output))
                most.append(len(alive))

        trainer.model.model.layers[0].mlp.act_fn.register_forward_hook(keep)
        trainer.train()
        counts[recompute] = max(most)
    assert counts == {False: 6, True: 1}
