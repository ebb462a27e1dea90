import json
import sys

import pytest
from conftest import TAGS, search
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mempo_trl import parsing
from mempo_trl.parsing import MAX_DEPTH, parse_turn
from mempo_trl.tools import Toolbox


CHECK = Toolbox([search]).check
CALL = '<tool_call>{"name": "search", "arguments": {"query": "Anna"}}</tool_call>'
OTHER_CALL = '<tool_call>{"name": "search", "arguments": {"query": "Ben"}}</tool_call>'
ANSWER = "<answer>a cat</answer>"
MEM, THINK = "<mem>Anna has a cat.</mem>", "<think>I search.</think>"
OUTCOMES = ("tool_call", "answer", "bad_call", "no_action")


def parse(text):
    return parse_turn(text, CHECK)


def in_call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "outcome", "dropped", "trailing"),
    [
        # One action.
        (CALL, "tool_call", 0, False),
        (f"{MEM}\n{THINK}\n{CALL}\n", "tool_call", 0, False),
        (f"{MEM}\n{THINK}\n{ANSWER}", "answer", 0, False),
        (in_call('\n{"arguments": {"query": "Anna"}, "name": "search"}\n'), "tool_call", 0, False),
        (in_call('{"name": "search", "arguments": {"query": "x"}, "id": 7}'), "tool_call", 0, False),
        ("<answer></answer>", "answer", 0, False),
        # Several actions: the first counts.
        (CALL + OTHER_CALL, "tool_call", 1, True),
        (CALL + ANSWER, "tool_call", 1, True),
        (ANSWER + CALL, "answer", 1, True),
        (CALL + ANSWER + OTHER_CALL, "tool_call", 2, True),
        (in_call("{oops}") + ANSWER, "bad_call", 1, True),
        # Text after the action.
        (f"{ANSWER} That is all.", "answer", 0, True),
        (f"{ANSWER}\n<tool_response>\nAnna has a dog.\n</tool_response>", "answer", 0, True),
        (f"{CALL}\n<tool_response>x</tool_response>{MEM}{THINK}{ANSWER}", "tool_call", 1, True),
        # No action.
        ("", "no_action", 0, False),
        (" \n", "no_action", 0, False),
        ("The cat.", "no_action", 0, False),
        (MEM + THINK, "no_action", 0, False),
        ("</tool_call></answer>", "no_action", 0, False),
        ("<answer>cut before its en", "no_action", 0, False),
        ("<ANSWER>a cat</ANSWER>", "no_action", 0, False),
        # Tags inside a block are text; tags that never close hide nothing.
        (f"<think>I could write {CALL}</think>", "no_action", 0, False),
        (f"<think>I could write {CALL}</think>{ANSWER}", "answer", 0, False),
        (f"<mem>{ANSWER}</mem>{CALL}", "tool_call", 0, False),
        (f"<think>never closed {CALL}", "tool_call", 0, False),
        (f"<mem>never closed {THINK}{CALL}", "tool_call", 0, False),
        (f"<answer>never closed {CALL}", "tool_call", 0, False),
        (f"<answer>outer <answer>inner</answer> rest</answer>{CALL}", "answer", 1, True),
        # A call that never closes is a bad call, unless a closed action comes first.
        (f"{MEM}<tool_call>{{", "bad_call", 0, False),
        (f"<tool_call>{{{ANSWER}", "bad_call", 0, False),
        (f"{ANSWER}<tool_call>{{", "answer", 0, True),
    ],
)
def test_outcome(text, outcome, dropped, trailing):
    """The table of outcomes of design section 4: the first closed action outside memory and think decides."""
    parsed = parse(text)
    assert (parsed.outcome, parsed.dropped_actions, parsed.trailing_text) == (outcome, dropped, trailing)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "not valid JSON"),
        ("search(Anna)", "not valid JSON"),
        ("{'name': 'search', 'arguments': {'query': 'Anna'}}", "not valid JSON"),
        ('{"name": "search", "arguments": {"query": "Anna"},}', "not valid JSON"),
        ('{"name": "search", "arguments": {"query": "An\nna"}}', "not valid JSON"),
        ('{"name": "search", "arguments": {"query": "Anna"}} {}', "not valid JSON"),
        ('{"name": "search", "arguments": {"query": "Anna"}', "not valid JSON"),
        ("null", "JSON object"),
        ("[]", "JSON object"),
        ('"search"', "JSON object"),
        ("{}", "no `name`"),
        ('{"arguments": {}}', "no `name`"),
        ('{"name": "search"}', "no `arguments`"),
        ('{"name": "search", "parameters": {"query": "Anna"}}', "no `arguments`"),
        ('{"name": "search", "arguments": "Anna"}', "must be a JSON object, not 'Anna'"),
        ('{"name": "search", "arguments": null}', "must be a JSON object, not None"),
        ('{"name": "search", "arguments": ["Anna"]}', "must be a JSON object"),
        ('{"name": "search", "arguments": {}}', "'query' is a required property"),
        ('{"name": "search", "arguments": {"query": 3}}', "is not of type 'string'"),
        ('{"name": "search", "arguments": {"query": null}}', "is not of type 'string'"),
        ('{"name": "search", "arguments": {"query": "Anna", "k": 3}}', "'k' was unexpected"),
        ('{"name": "find", "arguments": {"query": "Anna"}}', "no tool named 'find'"),
        ('{"name": null, "arguments": {}}', "no tool named None"),
        ('{"name": ["search"], "arguments": {}}', "no tool named ['search']"),
        # Halves of a surrogate pair are no text: a tokenizer, a file or a server would fail on them later.
        ('{"name": "search", "arguments": {"query": "\\ud83d"}}', "surrogate"),
        # Bombs: nesting that no parser, printer or log may follow, a number that is too long, a body of a megabyte.
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 500 + "]" * 500, "nested more than"),
        ('{"name": "search", "arguments": {"query": ' + "[" * 300 + "]" * 300 + "}}", "nested more than"),
        ('{"name": "search", "arguments": {"query": ' + "9" * 5000 + "}}", "number too long"),
        ('{"name": "search", "arguments": {"query": ["' + "x" * 1_000_000 + '"]}}', "is not of type 'string'"),
        ('{"name": "' + "x" * 1_000_000 + '", "arguments": {}}', "no tool named 'xxx"),
        ('{"name": "search", "arguments": "' + "x" * 1_000_000 + '"}', "must be a JSON object, not 'xxx"),
    ],
)
def test_bad_call(body, says):
    """Whatever is wrong with a call becomes a short sentence for the model, and nothing raises."""
    parsed = parse(f"{MEM}{in_call(body)}")
    assert parsed.outcome == "bad_call"
    assert says in parsed.error
    assert len(parsed.error) < 400  # a long argument is not repeated whole into the next prompt
    assert (parsed.name, parsed.arguments, parsed.answer) == (None, None, None)


def test_deep_but_allowed_call():
    """Nesting up to the limit reaches the check of the arguments, one level more does not."""
    # The object of the call and its `arguments` are two levels; `query` may hold lists for the others.
    for levels, says in ((MAX_DEPTH - 1, "is not of type 'string'"), (MAX_DEPTH, "nested more than")):
        query = "[" * levels + "]" * levels
        assert says in parse(in_call(f'{{"name": "search", "arguments": {{"query": {query}}}}}')).error


def test_megabyte_call():
    """A call of a megabyte is a call like any other."""
    query = "Anna " * 200_000
    parsed = parse(in_call(json.dumps({"name": "search", "arguments": {"query": query}})))
    assert parsed.outcome == "tool_call"
    assert parsed.arguments == {"query": query}


def test_parts_of_a_turn():
    """Memory, think and action are the blocks before the end of the action, as offsets into the text."""
    text = f"{MEM}\n{THINK}\n{CALL}<mem>late</mem>"
    parsed = parse(text)
    assert text[parsed.memory.start : parsed.memory.end] == MEM
    assert text[parsed.memory.inner_start : parsed.memory.inner_end] == "Anna has a cat."
    assert text[parsed.think.start : parsed.think.end] == THINK
    assert text[parsed.action.start : parsed.action_end] == CALL
    assert (parsed.name, parsed.arguments) == ("search", {"query": "Anna"})
    assert parsed.answer is None


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("<mem></mem>" + ANSWER, ""),
        ("<mem>a</mem><mem>b</mem>" + ANSWER, "a"),
        ("<mem>a <mem>b</mem>" + ANSWER, "a <mem>b"),
        ("<mem>a" + ANSWER, None),
        (ANSWER + "<mem>a</mem>", None),
        ("<think><mem>a</mem></think>" + ANSWER, None),
        ("</mem>" + ANSWER, None),
        ("<mem>a</mem>", "a"),
    ],
)
def test_memory(text, memory):
    """The memory is the first closed block before the action; one that is cut, hidden or too late is none."""
    block = parse(text).memory
    assert (None if block is None else text[block.inner_start : block.inner_end]) == memory


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\n a cat \n</answer>", "a cat"),
        ("<answer>a; b</answer>", "a; b"),
        ("<answer>first</answer><answer>second</answer>", "first"),
        ("<answer> </answer>", ""),
        ("<think><answer>x</answer></think><answer>y</answer>", "y"),
    ],
)
def test_answer(text, answer):
    """The first answer counts, stripped."""
    assert parse(text).answer == answer


@pytest.mark.parametrize(
    ("text", "first_turn", "later_turn"),
    [
        # Memory, think and action in this order, white space between them; memory is demanded from turn 2 on.
        (MEM + THINK + CALL, True, True),
        (MEM + THINK + ANSWER, True, True),
        (f"\n {MEM} \n{THINK}\t{CALL}\n", True, True),
        (MEM + CALL, True, True),
        (THINK + CALL, True, False),
        (CALL, True, False),
        (ANSWER, True, False),
        ("<mem></mem>" + ANSWER, True, True),
        # A tag inside a closed block is text.
        (MEM + "<think>then <answer>x</answer>, or <mem> again</think>" + CALL, True, True),
        # Text after the action is ignored, unless it goes on with the protocol.
        (MEM + THINK + CALL + " and I wait", True, True),
        (MEM + THINK + CALL + MEM, False, False),
        (MEM + THINK + CALL + "<think>", False, False),
        (MEM + THINK + CALL + ANSWER, False, False),
        (MEM + THINK + CALL + "<tool_call>", False, False),
        # Wrong order, twice, unclosed, or other text between.
        (THINK + MEM + CALL, False, False),
        (MEM + MEM + CALL, False, False),
        (MEM + THINK + THINK + CALL, False, False),
        ("<mem>never closed " + THINK + CALL, False, False),
        (MEM + "<think>never closed " + CALL, False, False),
        (MEM + THINK + "</think>" + CALL, False, False),
        ("Well: " + MEM + THINK + CALL, False, False),
        (MEM + "so" + THINK + CALL, False, False),
        (MEM + THINK + "so" + CALL, False, False),
        (MEM + THINK + "<tool_response>x</tool_response>" + CALL, False, False),
        # No valid action.
        (MEM + THINK, False, False),
        (MEM + THINK + in_call("{}"), False, False),
        (MEM + THINK + "<tool_call>{", False, False),
        (MEM + THINK + "<answer>cut", False, False),
        ("", False, False),
    ],
)
def test_well_formed(text, first_turn, later_turn):
    """The rules of design section 4 for a well-formed turn, exactly."""
    parsed = parse(text)
    assert parsed.well_formed(memory_required=False) == first_turn
    assert parsed.well_formed(memory_required=True) == later_turn


def lines_executed(text: str) -> int:
    """Lines of the parser that one call executes: an operation count that no busy machine changes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != parsing.__file__:
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse(text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "unit",
    [
        "<mem>",
        "</mem>",
        "<tool_call>",
        "<answer>",
        "<mem></mem>",
        CALL,
        "<mem><think></mem></think>",
        "<think><answer>",
    ],
)
def test_many_tags_stay_linear(unit):
    """Twice as many tags take twice as many operations, up to 20,000 of them."""
    small, large = lines_executed(unit * 5_000), lines_executed(unit * 10_000)
    assert small > 5_000  # the trace saw the work
    # Linear: exactly 2 for large counts. Quadratic: 4.
    assert large / small < 2.1


pieces = st.sampled_from(
    [
        *TAGS,
        "<tool_response>",
        "</tool_response>",
        CALL,
        ANSWER,
        MEM,
        THINK,
        '{"name": "search"',
        "\n",
        " ",
        "<",
        ">",
        "{",
    ]
)
texts = st.lists(pieces | st.text(max_size=5), max_size=12).map("".join) | st.text(max_size=60)


@settings(max_examples=500, deadline=None)
@given(texts)
@example("\x00")
@example("\u2028<answer>\ufeff</answer>")
def test_any_text_parses(text):
    """Any text gives one of the four outcomes, never raises, and its offsets fit the text."""
    parsed = parse(text)
    assert parsed.outcome in OUTCOMES
    assert 0 <= parsed.action_end <= len(text)
    for tag, block in (("mem", parsed.memory), ("think", parsed.think)):
        if block is not None:
            assert block.tag == tag
            assert block.end <= parsed.action_end
    for block in (parsed.memory, parsed.think, parsed.action):
        if block is not None:
            assert text[block.start : block.inner_start] == f"<{block.tag}>"
            assert text[block.inner_end : block.end] == f"</{block.tag}>"
            assert f"</{block.tag}>" not in text[block.inner_start : block.inner_end]
    if parsed.action is not None:
        assert parsed.action.end == parsed.action_end
    assert parsed.trailing_text == bool(text[parsed.action_end :].strip())
    # What each outcome promises.
    assert (parsed.name is not None and parsed.arguments is not None) == (parsed.outcome == "tool_call")
    assert (parsed.answer is not None) == (parsed.outcome == "answer")
    assert bool(parsed.error) == (parsed.outcome == "bad_call")
    if parsed.well_formed(memory_required=True):
        assert parsed.well_formed(memory_required=False)
        assert parsed.memory is not None


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_what_follows_an_action_changes_nothing(text, tail):
    """A turn that has its action reads the same, whatever the model goes on to write."""
    parsed = parse(text)
    if parsed.action is None:
        return
    longer = parse(text[: parsed.action_end] + tail)
    # Unless the tail closes a block that was open before the action, which then hides it.
    if not any(f"</{tag}>" in tail for tag in ("mem", "think", "tool_call", "answer")):
        assert (longer.outcome, longer.action_end, longer.answer, longer.name, longer.arguments, longer.memory) == (
            parsed.outcome,
            parsed.action_end,
            parsed.answer,
            parsed.name,
            parsed.arguments,
            parsed.memory,
        )
