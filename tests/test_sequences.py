import asyncio
from functools import cache

import pytest
from conftest import call, search
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mempo_trl.generation import Generation, ReplayGenerator
from mempo_trl.protocol import Protocol
from mempo_trl.rollout import Rollout, Turn, play
from mempo_trl.sequences import Sequence, build_sequences, pad_sequences, padded_count
from mempo_trl.tools import Toolbox, ToolResult


TOOLBOX = Toolbox([search], retries=0)
ACTIONS = [
    call("Anna"),
    call("里德"),
    "<tool_call>{}</tool_call>",
    "<tool_call>never closed",
    "<answer>cat</answer>",
    "<answer></answer>",
    "",
]
JUNK = [
    "",
    "",
    "",
    " \n",
    " I wait.",
    "\n<tool_response>a dog</tool_response>",
    call("Ben"),
    "<mem>late</mem>",
    "<mem>cut",
]


@st.composite
def scripts(draw):
    """Turns as a model may write them: parts there or not, any action, junk after it, several ends, with logps or not."""
    with_logps = draw(st.booleans())
    # Rollouts of one turn are most of what independent choices would give: mostly draw calls.
    action = st.sampled_from(ACTIONS[:2]) | st.sampled_from(ACTIONS[:3]) | st.sampled_from(ACTIONS)
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        text = draw(st.sampled_from(["<mem>Anna has a cat.</mem>", "<mem></mem>", "<mem>里</mem>\n", "<mem>open", ""]))
        text += draw(st.sampled_from(["<think>So.</think>", ""])) + draw(action) + draw(st.sampled_from(JUNK))
        turns.append((text, draw(st.sampled_from(["eos"] * 6 + ["pad", "none", "length", "empty"]))))
    return turns, with_logps, draw(st.sampled_from(["memory", "full"]))


@cache
def protocol_of(tokenizer, context) -> Protocol:
    eos_token_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    return Protocol(tokenizer, TOOLBOX, context=context, system_prompt="Search.", eos_token_ids=eos_token_ids)


def play_turns(tokenizer, turns, with_logps, context) -> Rollout:
    protocol = protocol_of(tokenizer, context)
    script, logp = [], 0.0
    for text, end in turns:
        ids = [] if end == "empty" else tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += {"eos": [tokenizer.eos_token_id], "pad": [tokenizer.pad_token_id]}.get(end, [])
        logps = [logp := logp - 1.0 for _ in ids]  # each sampled token has a value of its own
        script.append(Generation(ids, logps if with_logps else None, "length" if end == "length" else "stop"))

    async def tool(name, arguments):
        failed = arguments["query"] == "Anna" and len(turns) % 2 == 0
        return ToolResult("no service", error="500") if failed else ToolResult(f"about {arguments['query']}")

    generator = ReplayGenerator(script)
    return asyncio.run(
        play("Who?", None, protocol=protocol, generator=generator, call_tool=tool, max_turns=len(turns))
    )


@pytest.mark.parametrize("name", ["tokenizer", "smollm2_tokenizer"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts())
def test_what_is_trained_is_what_was_sampled(request, name, script):
    """
    Whatever the turns are: each sampled token is trained exactly once, after exactly the prompt that was sent for it.
    """
    rollout = play_turns(request.getfixturevalue(name), *script)
    sequences = build_sequences(rollout, 7)
    event(f"{len(rollout.turns)} turns, {len(sequences)} sequences, {script[2]}")

    for sequence in sequences:
        assert sequence.rollout_index == 7
        width = len(sequence.completion_ids)
        assert width == len(sequence.loss_mask) == len(sequence.memory_turns)
        assert set(sequence.loss_mask) <= {0, 1}
        # A row starts with a trained token and ends with one: nothing before or after them is needed.
        assert sequence.loss_mask[0] == sequence.loss_mask[-1] == 1
        assert sequence.num_trained == sum(sequence.loss_mask)
        # A memory token is a trained one.
        assert all(mask for mask, turn in zip(sequence.loss_mask, sequence.memory_turns, strict=True) if turn >= 0)
        assert (sequence.logps is not None) == script[1]
        if sequence.logps is not None:
            assert len(sequence.logps) == width
            assert all((logp != 0) == mask for logp, mask in zip(sequence.logps, sequence.loss_mask, strict=True))

    # Concatenated trained ids = concatenated sampled ids; the same for log-probabilities.
    trained = [
        (token_id, i)
        for sequence in sequences
        for i, (token_id, mask) in enumerate(zip(sequence.completion_ids, sequence.loss_mask, strict=True))
        if mask
    ]
    assert [token_id for token_id, _ in trained] == rollout.completion_ids
    if script[1]:
        assert [logp for s in sequences for logp in s.logps if logp] == [
            p for turn in rollout.turns for p in turn.logps
        ]

    # Turn by turn: the row up to the turn's first token is the prompt that was sent, then come the sampled ids, and of
    # these the memory block carries the turn's index.
    rows = iter(sequences)
    row, position = next(rows, None), 0
    for index, turn in enumerate(rollout.turns):
        if not turn.completion_ids:
            continue
        while True:
            rest = row.loss_mask[position:]
            if 1 in rest:
                start = position + rest.index(1)
                break
            row, position = next(rows), 0
        end = start + len(turn.completion_ids)
        assert row.prompt_ids + row.completion_ids[:start] == turn.prompt_ids
        assert row.completion_ids[start:end] == turn.completion_ids
        assert row.loss_mask[position:end] == [0] * (start - position) + [1] * (end - start)
        memory_start, memory_end = turn.memory_span or (0, 0)
        assert row.memory_turns[position:end] == [-1] * (start - position) + [
            index if memory_start <= k < memory_end else -1 for k in range(end - start)
        ]
        position = end
    assert row is None or position == len(row.completion_ids)
    assert next(rows, None) is None

    # A turn continues the row of the turn before where nothing of that was left behind: always in the full context,
    # and only as the second turn in the memory context.
    sampled = [turn for turn in rollout.turns if turn.completion_ids]
    continued = sum(
        before.carried == len(before.completion_ids) and (script[2] == "full" or t == 0)
        for t, before in enumerate(sampled[:-1])
    )
    assert len(sequences) == len(sampled) - continued


def turn(prompt_ids, completion_ids, memory_span=None, logps=None) -> Turn:
    return Turn(prompt_ids, completion_ids, logps, "", "tool_call", True, len(completion_ids), memory_span=memory_span)


def test_rows_by_hand():
    """
    Memory context, three turns: the second continues the first one's row, the third starts its own.

    Prefix 1 2; y1 = 3 4, o1 = 5; y2 = 6 7 8 with memory 6 7, o2 = 9; y3 = 10 with memory 10.
    """
    rollout = Rollout("q", None, [1, 2])
    rollout.turns = [
        turn([1, 2], [3, 4], None, [-0.1, -0.2]),
        turn([1, 2, 3, 4, 5], [6, 7, 8], (0, 2), [-0.3, -0.4, -0.5]),
        turn([1, 2, 6, 7, 8, 9], [10], (0, 1), [-0.6]),
    ]
    assert build_sequences(rollout, 3) == [
        Sequence(
            3,
            [1, 2],
            [3, 4, 5, 6, 7, 8],
            [1, 1, 0, 1, 1, 1],
            [-1, -1, -1, 1, 1, -1],
            [-0.1, -0.2, 0.0, -0.3, -0.4, -0.5],
        ),
        Sequence(3, [1, 2, 6, 7, 8, 9], [10], [1], [2], [-0.6]),
    ]
    # In the full context the third prompt goes on as well: one row.
    rollout.turns[2] = turn([1, 2, 3, 4, 5, 6, 7, 8, 9], [10], (0, 1), [-0.6])
    (row,) = build_sequences(rollout, 3)
    assert row.completion_ids == [3, 4, 5, 6, 7, 8, 9, 10]
    assert row.loss_mask == [1, 1, 0, 1, 1, 1, 0, 1]
    assert row.memory_turns == [-1, -1, -1, 1, 1, -1, -1, 2]


def test_building_changes_no_rollout():
    """The rows are lists of their own: what is done to them later doesn't reach the rollout, and they can be built again."""
    rollout = Rollout("q", None, [1])
    rollout.turns = [turn([1], [2], None, [-0.1]), turn([1, 2, 3], [4], (0, 1), [-0.2])]
    first = build_sequences(rollout, 0)
    first[0].completion_ids.append(99)
    first[0].logps.append(99.0)
    assert build_sequences(rollout, 0)[0].completion_ids == [2, 3, 4]
    assert [(t.completion_ids, t.logps) for t in rollout.turns] == [([2], [-0.1]), ([4], [-0.2])]


def test_nothing_sampled(tokenizer):
    """A rollout of nothing has no row; an empty last turn adds none."""
    assert build_sequences(Rollout("q", None, [1]), 0) == []
    assert build_sequences(play_turns(tokenizer, [("", "empty")], False, "memory"), 0) == []
    rollout = play_turns(tokenizer, [(call("Anna"), "eos"), ("", "empty")], True, "memory")
    assert len(rollout.turns) == 2
    (row,) = build_sequences(rollout, 0)
    assert row.completion_ids == rollout.turns[0].completion_ids


def test_invented_response_that_comes_true(tokenizer):
    """If what the model invents is exactly what follows, the row goes on and is still what was sent and sampled."""
    protocol = Protocol(tokenizer, TOOLBOX, system_prompt="Search.", eos_token_ids=[tokenizer.pad_token_id])
    call_ids = protocol.encode(call("Anna"))
    guess = call_ids + protocol.response_ids([], search("Anna"))
    answer = protocol.encode("<mem>A cat.</mem><answer>cat</answer>")
    generator = ReplayGenerator([Generation(guess), Generation(answer)])
    rollout = asyncio.run(
        play("Who?", None, protocol=protocol, generator=generator, call_tool=TOOLBOX.call, max_turns=3)
    )
    assert rollout.turns[0].carried == len(call_ids)
    assert rollout.turns[1].prompt_ids == rollout.prefix_ids + guess
    (row,) = build_sequences(rollout, 0)
    assert row.completion_ids == guess + answer
    assert row.loss_mask == [1] * len(guess + answer)


@pytest.mark.parametrize("with_logps", [True, False])
def test_padding(with_logps):
    """Padding rows hold two real tokens, train none, belong to no rollout, and have log-probabilities if others have."""
    real = Sequence(0, [1], [2, 3], [1, 1], [-1, 0], [-0.1, -0.2] if with_logps else None)
    padded = pad_sequences([real], 3, 5)
    assert padded[0] is real
    assert padded[1:] == [Sequence(-1, [5], [5], [0], [-1], [0.0] if with_logps else None)] * 2
    assert padded[1] is not padded[2]
    assert [sequence.num_trained for sequence in padded] == [2, 0, 0]
    assert pad_sequences([real], 1, 5) == [real]
    assert pad_sequences([], 2, 5) == [Sequence(-1, [5], [5], [0], [-1], None)] * 2


@pytest.mark.parametrize(
    ("counts", "multiple", "count"),
    [
        ([7], 2, 8),  # TRL alone would make 3 + 3 of 7 rows
        ([7], 4, 8),
        ([8], 4, 8),
        ([3], 4, 4),
        ([6, 2], 2, 6),  # every process has as many as the fullest
        ([6, 7], 2, 8),
        ([0], 3, 3),  # even with nothing to train each step has a row
        ([0, 0], 1, 1),
        ([1], 1, 1),
    ],
)
def test_padded_count(counts, multiple, count):
    """The number of rows is the same on every process and splits into equal parts."""
    assert padded_count(counts, multiple) == count


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 8))
def test_padded_count_of_any(counts, multiple):
    """It is the smallest positive multiple that holds every process's rows."""
    count = padded_count(counts, multiple)
    assert count % multiple == 0
    assert max(counts) <= count
    assert count == multiple or count - multiple < max(counts)
