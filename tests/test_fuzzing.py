"""Anything that a model may sample, read as a turn: an outcome of the table, in time that grows with the text."""

import json
import math
import sys

import pytest
from conftest import byte_tokenizer, search
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mempo_trl import parsing, token_spans
from mempo_trl.generation import Generation
from mempo_trl.parsing import parse_turn
from mempo_trl.protocol import Protocol
from mempo_trl.rollout import read_turn
from mempo_trl.tools import Toolbox


OUTCOMES = ("tool_call", "answer", "bad_call", "no_action", "truncated")
CALL = '<tool_call>{"name": "search", "arguments": {"query": "Anna"}}</tool_call>'
MARKS = [f"<{slash}{tag}>" for tag in ("mem", "think", "tool_call", "answer", "tool_response") for slash in ("", "/")]
fuzz = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = ("byte", "smollm2", "qwen")


def numbered(value: float, site: str | None = None, flags: list[int] | None = None) -> str:
    """
    Takes more than a string.

    Args:
        value: A number.
        site: A string or nothing.
        flags: Numbers.
    """


BYTE_PROTOCOL = Protocol(byte_tokenizer(), Toolbox([search, numbered]))


@pytest.fixture(params=NAMES)
def any_protocol(request):
    tokenizer = byte_tokenizer() if request.param == "byte" else request.getfixturevalue(f"{request.param}_tokenizer")
    return Protocol(tokenizer, Toolbox([search, numbered]))


def check_turn(protocol, ids, finish_reason="stop"):
    """Read a turn, and see that everything that was read fits what was sampled."""
    turn = read_turn(protocol, [], Generation(ids, None, finish_reason), memory_required=True)
    assert turn.outcome in OUTCOMES
    assert (turn.outcome == "truncated") <= (finish_reason == "length")
    assert 0 <= turn.carried <= len(ids) and turn.completion_ids == ids
    for span in (turn.memory_span, turn.think_span, turn.answer_span):
        assert span is None or 0 <= span[0] <= span[1] <= len(ids)
    assert (turn.answer is None) or turn.outcome == "answer"
    assert (turn.call is not None) == (turn.outcome == "tool_call")
    assert (turn.memory is None) == (turn.memory_span is None)
    assert bool(turn.error) >= (turn.outcome == "bad_call")
    # What is told to the model, recorded or sent can be written.
    json.dumps(
        [turn.text, turn.memory, turn.answer, turn.call, turn.error], ensure_ascii=False, allow_nan=False
    ).encode()
    assert turn.error is None or len(turn.error) < 500
    protocol.response_ids(turn.carried_ids, f"Error: {turn.error}.")
    return turn


@fuzz
@given(data=st.binary(max_size=80) | st.lists(st.sampled_from(MARKS) | st.binary(max_size=4), max_size=12))
@example(b"<answer>\x00\r\xed\xa0\x80\xff</answer>")
@example(b"\r")
def test_any_bytes(data):
    """Any string of bytes, valid UTF-8 or not."""
    data = data if isinstance(data, bytes) else b"".join(p.encode() if isinstance(p, str) else p for p in data)
    chars = bytes_to_unicode()
    ids = [BYTE_PROTOCOL.tokenizer.convert_tokens_to_ids(chars[byte]) for byte in data]
    for finish_reason in ("stop", "length"):
        turn = check_turn(BYTE_PROTOCOL, ids, finish_reason)
    assert turn.text == data.decode(errors="replace")


@fuzz
@given(data=st.data())
def test_any_token_ids(any_protocol, data):
    """Any sequence of ids: every split, special tokens anywhere, and ids above the tokenizer's, which models do have."""
    tokenizer = any_protocol.tokenizer
    marks = [token_id for mark in [*MARKS, CALL] for token_id in any_protocol.encode(mark)]
    ids = st.integers(0, len(tokenizer) + 300) | st.sampled_from([*marks, *tokenizer.added_tokens_decoder])
    pieces = st.sampled_from([*MARKS, CALL]).map(any_protocol.encode) | ids.map(lambda token_id: [token_id])
    check_turn(any_protocol, sum(data.draw(st.lists(pieces, max_size=16)), []))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


@fuzz
@given(
    name=st.sampled_from(["search", "numbered"]) | json_values,
    arguments=st.fixed_dictionaries({"value": json_values}) | json_values,
    tail=st.sampled_from(["", ', "name": "search"', ', "arguments": 3', ", ", "}"]),
)
@example("numbered", {"value": math.nan}, "")
@example("numbered", {"value": -math.inf}, "")
@example("numbered", {"value": 10**4299}, "")
@example("search", {"query": "\ud800"}, "")
def test_any_json(name, arguments, tail):
    """Any JSON, and what Python takes for JSON: a call that is made has finite numbers and whole characters."""
    body = f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}{tail}}}'
    parsed = parse_turn(f"<tool_call>{body}</tool_call>", BYTE_PROTOCOL.toolbox.check)
    assert parsed.outcome in ("tool_call", "bad_call")
    if parsed.outcome == "tool_call":
        written = json.dumps(parsed.arguments, ensure_ascii=False, allow_nan=False).encode()
        assert json.loads(written) == parsed.arguments
    else:
        assert 0 < len(parsed.error) < 500


@pytest.mark.parametrize(
    ("value", "outcome"),
    [("7", "tool_call"), ("1e3", "tool_call"), ("NaN", "bad_call"), ("-Infinity", "bad_call"), ("1e999", "bad_call")],
)
def test_numbers(value, outcome):
    """A number has to be finite, however it is spelled."""
    text = f'<tool_call>{{"name": "numbered", "arguments": {{"value": {value}}}}}</tool_call>'
    parsed = parse_turn(text, BYTE_PROTOCOL.toolbox.check)
    assert parsed.outcome == outcome
    assert outcome == "tool_call" or "not finite" in parsed.error


def test_duplicate_keys():
    """Of equal keys the last one counts, as for most readers of JSON."""
    body = '{"name": "none", "name": "search", "arguments": {"query": "a", "query": "b"}}'
    parsed = parse_turn(f"<tool_call>{body}</tool_call>", BYTE_PROTOCOL.toolbox.check)
    assert (parsed.name, parsed.arguments) == ("search", {"query": "b"})


def work_of(protocol, ids, monkeypatch) -> tuple[int, int]:
    """Lines of Python that reading a turn executes in this package, and tokens that it decodes for them."""
    lines = tokens = 0
    files = {parsing.__file__, token_spans.__file__}

    def trace(frame, event, arg):
        nonlocal lines
        lines += frame.f_code.co_filename in files
        return trace if frame.f_code.co_filename in files else None

    def counted(tokenizer, ids):
        nonlocal tokens
        tokens += len(ids)
        return decode(tokenizer, ids)

    decode = token_spans.decode
    with monkeypatch.context() as patch:
        patch.setattr(token_spans, "decode", counted)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            turn = protocol.read_turn(ids)
        finally:
            sys.settrace(before)
    assert turn.parsed.outcome in OUTCOMES
    return lines, tokens


UNITS = {
    "open": "<mem>",
    "close": "</mem>",
    "nested": "<mem><think><tool_call><answer>",
    "unclosed calls": "<tool_call>",
    "calls": CALL,
    "angles": "<<<</",
    "JSON depth": '{"a":',
    "characters of several tokens": "里德🐈",
    "NUL and CR": "\x00\r",
    # Bytes that are no character: they have no text of their own and could be the start of a longer one.
    "broken bytes": b"\xe9\x87",
    "continuation bytes": b"\x8c",
    "starts": b"\xf0",
}


@pytest.mark.parametrize("unit", UNITS)
def test_work_is_linear(unit, monkeypatch):
    """Four times the turn takes four times the work, and no more than a few decoded tokens per token."""
    chars, tokenizer = bytes_to_unicode(), BYTE_PROTOCOL.tokenizer
    # A character that is spread over several tokens sends the whole turn the long way.
    start = [tokenizer.convert_tokens_to_ids(chars[byte]) for byte in "里<mem>".encode()]
    data = UNITS[unit] if isinstance(UNITS[unit], bytes) else UNITS[unit].encode()
    body = [tokenizer.convert_tokens_to_ids(chars[byte]) for byte in data * (400 // len(data))]
    small = work_of(BYTE_PROTOCOL, start + body, monkeypatch)
    large = work_of(BYTE_PROTOCOL, start + body * 4, monkeypatch)
    assert small[0] > 400  # the trace saw the work
    # Linear: 4. Quadratic: 16.
    assert large[0] / small[0] < 4.5 and large[1] / small[1] < 4.5
    assert large[1] <= 60 * 4 * len(body)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + '{"a":' * 200_000,
        "<tool_call>" + "[" * 1_000_000 + "</tool_call>",
        '<tool_call>{"name": "search", "arguments": ' + '{"query":' * 100_000 + "1" + "}" * 100_001 + "</tool_call>",
        '<tool_call>{"name": "search", "arguments": {"query": [' + "1," * 300_000 + "1]}}</tool_call>",
        '<tool_call>{"name": "search", "arguments": {' + '"query": "a",' * 80_000 + '"query": 1}}</tool_call>',
        "<tool_call>" + "<mem>" * 100_000 + "</tool_call>",
        "<mem>" * 100_000 + "</mem>" * 100_000 + CALL,
        "<answer>" * 100_000,
        "<" * 1_000_000,
        "\ud800" * 100_000 + CALL,
    ],
    ids=lambda text: text[:24],
)
def test_bombs(text):
    """A megabyte of anything is read, and what is said about it stays short."""
    parsed = parse_turn(text, BYTE_PROTOCOL.toolbox.check)
    assert parsed.outcome in OUTCOMES
    assert parsed.error is None or len(parsed.error) < 500


# Foreign text in a prompt


@fuzz
@given(data=st.data())
def test_no_text_becomes_a_special_token(any_protocol, data):
    """Neither a tool's text nor a question makes a special token or a tag, whatever it is put together from."""
    tokenizer = any_protocol.tokenizer
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if len(token.content.strip()) > 2]
    names += MARKS
    cut = [name[:k] for name in names for k in (1, 2, -1)] + [name[k:] for name in names for k in (1, 2, -1)]
    text = "".join(data.draw(st.lists(st.sampled_from(names + cut) | st.text(max_size=3), max_size=10)))
    reserved = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content in names}
    broken = any_protocol.neutralize(text)
    assert not any(name in broken for name in names)
    assert not reserved & set(any_protocol.encode(broken))
    assert broken.replace(" ", "") == text.replace(" ", "")  # nothing else was changed
    harmless = [i for i in any_protocol.response_ids([], "x") if i in reserved]
    assert [i for i in any_protocol.response_ids([], text) if i in reserved] == harmless


def test_names_that_overlap():
    """Breaking one name must not leave or make another one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<x>", "< x>", "x>y"])
    protocol = Protocol(tokenizer, Toolbox([search]))
    reserved = set(tokenizer.convert_tokens_to_ids(["<x>", "< x>", "x>y"]))
    for text in ("<x>", "< x>", "<x>y", "<<x>y<x>", "< x>y"):
        assert not reserved & set(protocol.encode(protocol.neutralize(text))), text


def test_normalized_names():
    """Where a tokenizer writes full-width brackets as plain ones, they make no tag either."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    protocol = Protocol(tokenizer, Toolbox([search]))
    [mem] = protocol.encode("<mem>")
    text = "\uff1cmem\uff1e \uff43afe <mem>"
    assert mem in protocol.encode(text)  # else this tests nothing
    assert mem not in protocol.encode(protocol.neutralize(text))
    assert protocol.neutralize("\uff43afe") == "\uff43afe"  # other text is left as it is
