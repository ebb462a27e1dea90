import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mempo_trl.token_spans import decode, token_spans, tokens_of


NAMES = ("byte", "smollm2", "qwen")
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}
quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
texts = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["<mem>", "</mem>", "<think>", "</think>", "<answer>", "里德学院", "🐈‍⬛", "é", " ", "\n", "42%", "a"]
    )
).map("".join)


@pytest.fixture(params=NAMES)
def any_tokenizer(request, tokenizer):
    if request.param == "byte":
        return tokenizer
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="session")
def byte_fallback_tokenizer():
    """Like Llama 2's: a space is a part of the next word, the first one is dropped, and unknown characters are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyz<>/":
        vocab[char] = len(vocab)
    merges = [("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "a"), (">", "<")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def has_all_bytes(tokenizer) -> bool:
    return all(tokenizer.convert_tokens_to_ids(char) != tokenizer.unk_token_id for char in BYTES)


def token_bytes(tokenizer, token_id) -> bytes:
    """Bytes of a token of a byte-level vocabulary."""
    if token_id in tokenizer.added_tokens_decoder:
        return tokenizer.added_tokens_decoder[token_id].content.encode()
    return bytes(BYTES[char] for char in tokenizer.convert_ids_to_tokens(token_id))


def spans_by_bytes(tokenizer, ids):
    """The reference: lay the bytes side by side, cut them into characters, and see which token touches which."""
    parts = [token_bytes(tokenizer, token_id) for token_id in ids]
    data = b"".join(parts)
    text, char_of_byte = "", []
    while len(char_of_byte) < len(data):
        start = len(char_of_byte)
        head = data[start : start + 4]
        try:
            length = len(head.decode()[0].encode())
        except UnicodeDecodeError as error:  # one replacement character for the longest part of a broken sequence
            length = error.end if error.start == 0 else len(head[: error.start].decode()[0].encode())
        char_of_byte += [len(text)] * length
        text += data[start : start + length].decode(errors="replace")
    spans, byte = [], 0
    for part in parts:
        spans.append((char_of_byte[byte], char_of_byte[byte + len(part) - 1] + 1))
        byte += len(part)
    return text, spans


@pytest.mark.parametrize(
    "text",
    [
        "<mem>Anna has a cat.</mem><think>Done.</think>\n<answer>42%</answer>",
        "<mem>里德学院</mem><think>🐈‍⬛ é</think>",
        "<answer> Paris </answer>",
        "a\n\n  b\t\r\n",
        "",
    ],
)
def test_spans_of_text(any_tokenizer, text):
    """The spans of an encoded text join to the text and are those of its bytes."""
    ids = encode(any_tokenizer, text)
    assert token_spans(any_tokenizer, ids) == spans_by_bytes(any_tokenizer, ids)
    assert token_spans(any_tokenizer, ids)[0] == text


@quick
@given(text=texts)
def test_spans_of_any_text(any_tokenizer, text):
    """The same for random unicode."""
    ids = encode(any_tokenizer, text)
    joined, spans = token_spans(any_tokenizer, ids)
    assert (joined, spans) == spans_by_bytes(any_tokenizer, ids)
    # SmolLM2's vocabulary lacks some bytes of rare characters, which its encoding drops.
    assert joined == text or not has_all_bytes(any_tokenizer)
    assert joined == decode(any_tokenizer, ids)


@quick
@given(data=st.data())
def test_spans_of_any_ids(any_tokenizer, data):
    """The same for random ids: splits that no tokenizer would choose, broken characters, special tokens anywhere."""
    byte_ids = [any_tokenizer.convert_tokens_to_ids(char) for char in BYTES]
    known = encode(any_tokenizer, "<mem>里</mem><think>🐈") + [any_tokenizer.eos_token_id]
    token_ids = st.integers(0, len(any_tokenizer) - 1) | st.sampled_from(byte_ids) | st.sampled_from(known)
    ids = data.draw(st.lists(token_ids, max_size=30))
    text, spans = token_spans(any_tokenizer, ids)
    assert (text, spans) == spans_by_bytes(any_tokenizer, ids)
    assert text == decode(any_tokenizer, ids)


def byte_ids(tokenizer, *parts):
    """Ids of bytes, one each, and of texts."""
    char_of = {byte: char for char, byte in BYTES.items()}
    ids = []
    for part in parts:
        ids += (
            encode(tokenizer, part)
            if isinstance(part, str)
            else [tokenizer.convert_tokens_to_ids(char_of[byte]) for byte in part]
        )
    return ids


def test_broken_characters(tokenizer):
    """Bytes that are no character stand for themselves and do not spread into their neighbours."""
    # "里" is E9 87 8C. First its two first bytes, broken off by a tag, then the whole character, then a lone byte.
    ids = byte_ids(tokenizer, b"\xe9\x87", "<mem>", b"\xe9\x87\x8c", b"\x8c", "</mem>", b"\xff")
    text, spans = token_spans(tokenizer, ids)
    assert text == "\ufffd<mem>里\ufffd</mem>\ufffd"
    assert spans == [(0, 1), (0, 1), (1, 6), (6, 7), (6, 7), (6, 7), (7, 8), (8, 14), (14, 15)]
    # The memory block is the tag, the four bytes and the other tag, and nothing of what stands around it.
    assert tokens_of(spans, 1, 14) == (2, 8)


def test_character_split_over_tokens(smollm2_tokenizer):
    """Where a character is split over tokens, all of them belong to it."""
    ids = encode(smollm2_tokenizer, "里德")
    assert len(ids) > 2  # else this tests nothing
    text, spans = token_spans(smollm2_tokenizer, ids)
    assert text == "里德"
    first, second = tokens_of(spans, 0, 1), tokens_of(spans, 1, 2)
    assert first[0] == 0
    assert second[1] == len(ids)
    assert first[1] >= second[0]  # no token in between belongs to neither


def test_token_shared_by_two_tags(smollm2_tokenizer):
    """SmolLM2's `><` in `</mem><think>` belongs to the memory block and to the think block."""
    text = "<mem>cat</mem><think>dog</think>"
    ids = encode(smollm2_tokenizer, text)
    tokens = smollm2_tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<", "mem", ">", "cat", "</", "mem", "><", "think", ">", "dog", "</", "think", ">"]
    _, spans = token_spans(smollm2_tokenizer, ids)
    assert tokens_of(spans, 0, text.index("<think>")) == (0, 7)
    assert tokens_of(spans, text.index("<think>"), len(text)) == (6, 13)


def test_split_that_no_tokenizer_chooses(smollm2_tokenizer, qwen_tokenizer):
    """Sampled splits keep their own tokens: `<`, `m`, `em`, `>` are four tokens of the tag, whatever encoding gives."""
    for tokenizer in (smollm2_tokenizer, qwen_tokenizer):
        ids = [
            tokenizer.convert_tokens_to_ids(token) for token in ("<", "m", "em", ">", "c", "at", "</", "me", "m", ">")
        ]
        assert ids != encode(tokenizer, "<mem>cat</mem>")
        text, spans = token_spans(tokenizer, ids)
        assert text == "<mem>cat</mem>"
        assert spans == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 8), (8, 10), (10, 12), (12, 13), (13, 14)]


@quick
@given(text=st.text("abc t<>/里🐈é\n", max_size=20))
@example(text=" cat")
@example(text="a  cat里")
def test_byte_fallback(byte_fallback_tokenizer, text):
    """With tokens whose space depends on their place and with bytes for unknown characters, the spans cover the text."""
    ids = encode(byte_fallback_tokenizer, text)
    decoded, spans = token_spans(byte_fallback_tokenizer, ids)
    assert decoded == text
    assert_cover(decoded, spans)
    # Each character is carried by tokens that encode it: one token, or the bytes of its UTF-8 form.
    for i, char in enumerate(text):
        start, end = tokens_of(spans, i, i + 1)
        assert end - start == (len(char.encode()) if char in "里🐈é\n" else 1)


@quick
@given(data=st.data())
def test_byte_fallback_any_ids(byte_fallback_tokenizer, data):
    """Random ids of such a tokenizer, broken bytes among them, give spans that cover the text without a hole."""
    size = len(byte_fallback_tokenizer)
    token_ids = st.integers(0, size - 1) | st.integers(256, size - 1) | st.sampled_from([0xE9, 0x87, 0x8C])
    assert_cover(*token_spans(byte_fallback_tokenizer, data.draw(st.lists(token_ids, max_size=20))))


def assert_cover(text, spans):
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    covered = set()
    for start, end in spans:
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))
    assert spans == sorted(spans)


def test_tokens_of():
    """Tokens that carry any character count, those that only touch the span do not, and no character has no token."""
    spans = [(0, 2), (2, 5), (5, 5), (5, 6), (5, 6), (6, 9)]
    assert tokens_of(spans, 0, 9) == (0, 6)
    assert tokens_of(spans, 2, 5) == (1, 2)
    assert tokens_of(spans, 3, 4) == (1, 2)
    assert tokens_of(spans, 1, 3) == (0, 2)
    assert tokens_of(spans, 5, 6) == (3, 5)
    assert tokens_of(spans, 3, 3) == (0, 0)
    assert tokens_of(spans, 9, 12) == (0, 0)
    assert tokens_of([], 0, 1) == (0, 0)
