"""Which rows share a forward: few of them, with little padding, within a budget of tokens."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor


SMALL_BATCH_TOKENS = 2048
"""Up to here a batch is filled whatever the padding: with less a device waits for its kernels to be launched."""

MAX_PADDING = 0.1
"""Padding that a larger batch may hold, as a fraction of its real tokens."""


def batch_by_length(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """
    Rows of like length side by side.

    Args:
        lengths (`list[int]`):
            Tokens of each row.
        max_tokens (`int`):
            Tokens of a batch, padding included; a longer row is a batch of its own.

    Returns:
        `list[list[int]]`: Indices of the rows of each batch, the longest rows first.
    """
    batches: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches:
            padded = lengths[batches[-1][0]] * (len(batches[-1]) + 1)
            dense = max(SMALL_BATCH_TOKENS, (1 + MAX_PADDING) * (tokens + lengths[row]))
            if padded <= min(max_tokens, dense):
                batches[-1].append(row)
                tokens += lengths[row]
                continue
        batches.append([row])
        tokens = lengths[row]
    return batches


def split_to_count(batches: list[list[int]], lengths: list[int], count: int) -> list[list[int]]:
    """
    Split batches until there are `count`, so that all processes make the same number of forwards.

    Args:
        batches (`list[list[int]]`):
            Of [`batch_by_length`].
        lengths (`list[int]`):
            Tokens of each row.
        count (`int`):
            Number to reach, at most the number of rows.

    Returns:
        `list[list[int]]`: The largest batches are halved first.
    """
    batches = list(batches)
    while len(batches) < count:
        largest = max((rows for rows in batches if len(rows) > 1), key=lambda rows: lengths[rows[0]] * len(rows))
        at = batches.index(largest)
        batches[at : at + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return batches


def forward_by_length(
    forward: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor | None, Tensor | None]],
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batches: list[list[int]],
    pad_token_id: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """
    What one forward of a padded block gives, from forwards of its rows in batches without the block's padding.

    Args:
        forward (`Callable`):
            `forward(input_ids, attention_mask, logits_to_keep)` gives log-probabilities, entropies (or `None`), each
            of shape `(rows, logits_to_keep)`, and an auxiliary loss (or `None`).
        input_ids (`torch.Tensor`):
            The block, `(B, P + C)`: prompts padded on the left, completions padded on the right.
        attention_mask (`torch.Tensor`):
            1 on what is no padding, `(B, P + C)`.
        logits_to_keep (`int`):
            C.
        batches (`list[list[int]]`):
            Rows that share a forward, the longest one first.
        pad_token_id (`int`):
            Id of padding.

    Returns:
        `tuple`: Log-probabilities and entropies `(B, C)`, 0 on padding, and the mean auxiliary loss.
    """
    lengths = attention_mask.sum(dim=1).tolist()  # (B,)
    completion_lengths = attention_mask[:, -logits_to_keep:].sum(dim=1).tolist()  # (B,)
    ends = [input_ids.size(1) - logits_to_keep + length for length in completion_lengths]
    per_row: list = [None] * len(lengths)
    aux_losses = []
    for rows in batches:
        width, keep = lengths[rows[0]], max(completion_lengths[row] for row in rows)
        # A row's tokens lie together, prompt and completion: here they end together.
        ids = input_ids.new_full((len(rows), width), pad_token_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - lengths[row] :] = input_ids[row, ends[row] - lengths[row] : ends[row]]
            mask[i, width - lengths[row] :] = 1
        logps, entropies, aux_loss = forward(ids, mask, keep)
        aux_losses.append(aux_loss)
        for i, row in enumerate(rows):
            start = keep - completion_lengths[row]
            padding = (0, logits_to_keep - completion_lengths[row])
            per_row[row] = [
                None if values is None else torch.nn.functional.pad(values[i, start:], padding)
                for values in (logps, entropies)
            ]
    logps, entropies = (None if column[0] is None else torch.stack(column) for column in zip(*per_row, strict=True))
    return logps, entropies, None if aux_losses[0] is None else torch.stack(aux_losses).mean()


def recompute_contexts(accelerator: Accelerator, model: torch.nn.Module) -> tuple:
    """Contexts of a forward and of its repetition: a repeated one must not tell DDP that another backward begins."""
    return nullcontext(), accelerator.no_sync(model)
