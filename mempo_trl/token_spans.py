"""Character spans of token ids, for any tokenizer and any split, canonical or not."""

import os
from functools import lru_cache

from transformers import PreTrainedTokenizerBase


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode ids to the text they stand for, special tokens and spaces kept as they are."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=1_000_000)
def _decode_one(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    return decode(tokenizer, [token_id])


def token_spans(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """
    Text of token ids and the characters that each of them carries.

    The ids are never re-tokenized: a sampled split that the tokenizer itself would not choose keeps its own spans.
    Tokens that share a character (parts of one UTF-8 sequence) all carry it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the ids.
        ids (`list[int]`):
            Token ids.

    Returns:
        `tuple[str, list[tuple[int, int]]]`: The text, and per token its half-open span of characters.
    """
    text = decode(tokenizer, ids)
    pieces = [_decode_one(tokenizer, token_id) for token_id in ids]
    if "".join(pieces) == text:
        spans, end = [], 0
        for piece in pieces:
            spans.append((end, end + len(piece)))
            end += len(piece)
        return text, spans

    # Some token has no text of its own (a part of a character, a space that depends on the token before it): decode
    # a window that starts at the token before the last settled one, and settle whenever the text is whole.
    text, spans = "", []
    begin = settled = length = 0  # `length`: characters of the settled tokens in the window
    parts = []  # what the window adds to them with each further token
    for end in range(1, len(ids) + 1):
        parts.append(decode(tokenizer, ids[begin:end])[length:])
        if parts[-1].endswith("\ufffd") and end < len(ids) and not _parts_here(tokenizer, ids, begin, end):
            continue
        whole, before, known = parts[-1], "", 0
        for token_id, part in zip(ids[settled:end], parts, strict=True):
            # A token starts after the characters that were known before it, and in the last of them if it changed it.
            apart = part == before + _decode_one(tokenizer, token_id)
            start = known if apart else max(0, min(known, len(before) - 1))
            spans.append((len(text) + start, len(text) + min(len(part), len(whole))))
            before, known = part, len(os.path.commonprefix([part, whole]))
        text += whole
        begin, settled, parts = settled, end, []
        length = len(decode(tokenizer, ids[begin:settled]))
    return text, spans


def _parts_here(tokenizer: PreTrainedTokenizerBase, ids: list[int], begin: int, end: int) -> bool:
    """Whether no character goes on beyond `end`, though the text before it is broken there: garbage of any length."""
    before = decode(tokenizer, ids[begin:end])
    # A character has at most four bytes, and its tokens have one each at least.
    return all(
        before + decode(tokenizer, ids[end:ahead]) == decode(tokenizer, ids[begin:ahead])
        for ahead in range(end + 1, min(end + 3, len(ids)) + 1)
    )


def tokens_of(spans: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """
    Tokens that carry any character of `start:end`; a token that only partly belongs counts as belonging.

    Args:
        spans (`list[tuple[int, int]]`):
            Spans of [`token_spans`].
        start (`int`), end (`int`):
            Half-open span of characters.

    Returns:
        `tuple[int, int]`: Half-open span of token indices, `(0, 0)` if there are no such characters.
    """
    inside = [i for i, (token_start, token_end) in enumerate(spans) if max(start, token_start) < min(end, token_end)]
    if not inside:
        return 0, 0
    return inside[0], inside[-1] + 1
