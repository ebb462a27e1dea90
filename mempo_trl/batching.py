"""Which rows share a forward: few of them, with little padding, within a budget of tokens."""

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
