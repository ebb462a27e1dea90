"""One turn's text to its outcome: a single pass over the tags, linear in the text, and no input that raises."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


TAGS = ("mem", "think", "tool_call", "answer", "tool_response")
MAX_DEPTH = 32
"""Levels of nesting in a tool call; deeper ones would break what prints or stores it later."""

_TAG = re.compile(r"<(/?)(mem|think|tool_call|answer)>")


@dataclass(frozen=True)
class Block:
    """A closed `<tag>…</tag>` block as character offsets, the tags included in `start:end`, not in the inner span."""

    tag: str
    start: int
    inner_start: int
    inner_end: int
    end: int


@dataclass(frozen=True)
class ParsedTurn:
    """
    What the model said in one turn (the table of outcomes in the README).

    Args:
        outcome (`str`):
            `"tool_call"`, `"answer"`, `"bad_call"` or `"no_action"`. Whether the turn was cut is not visible in its text.
        memory (`Block`, *optional*):
            The first closed memory block before the action.
        think (`Block`, *optional*):
            The first closed think block before the action.
        action (`Block`, *optional*):
            The block that counts: the first call or answer outside memory and think.
        name (`str`, *optional*), arguments (`dict`, *optional*):
            The tool call, when the outcome is `"tool_call"`.
        answer (`str`, *optional*):
            The stripped text of the answer, when the outcome is `"answer"`.
        error (`str`, *optional*):
            What was wrong with the call, in words for the model, when the outcome is `"bad_call"`.
        action_end (`int`):
            Characters of the text up to the end of the action; what follows is never shown to the model again.
        dropped_actions (`int`):
            Further calls and answers after the one that counts.
        trailing_text (`bool`):
            Whether anything but white space follows the action.
        in_order (`bool`):
            Whether memory, think and action come at most once, closed, in this order, with white space between them
            and none of their tags opened after the action. What is inside a closed block is its text, tags or not.
    """

    outcome: str
    action_end: int
    memory: Block | None = None
    think: Block | None = None
    action: Block | None = None
    name: str | None = None
    arguments: dict | None = None
    answer: str | None = None
    error: str | None = None
    dropped_actions: int = 0
    trailing_text: bool = False
    in_order: bool = False

    def well_formed(self, memory_required: bool) -> bool:
        """Whether the turn has the demanded form (design section 4): right blocks, right order, and a valid action."""
        return (
            self.outcome in ("tool_call", "answer")
            and self.in_order
            and (self.memory is not None or not memory_required)
        )


def _blocks(text: str) -> tuple[list[Block], list[re.Match]]:
    """Closed blocks in order, nothing inside a block counting as a block, and the opening tags that never close."""
    tags = list(_TAG.finditer(text))
    # Index of the next closing tag of each name, from the back: one pass, so thousands of unclosed tags stay linear.
    next_close: dict[str, int] = {}
    closes = [None] * len(tags)
    for i in range(len(tags) - 1, -1, -1):
        closes[i] = next_close.get(tags[i][2])
        if tags[i][1]:
            next_close[tags[i][2]] = i
    blocks, unclosed = [], []
    i = 0
    while i < len(tags):
        tag, close = tags[i], closes[i]
        if tag[1]:  # a closing tag without its opening one
            i += 1
        elif close is None:
            unclosed.append(tag)
            i += 1
        else:
            blocks.append(Block(tag[2], tag.start(), tag.end(), tags[close].start(), tags[close].end()))
            i = close + 1
    return blocks, unclosed


def _too_deep(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _too_deep(child, depth - 1) for child in children)


def _read_call(body: str, check_call: Callable[[Any, Any], str | None]) -> tuple[str | None, dict | None, str | None]:
    """The JSON of a call as `(name, arguments, error)`, of which either the first two or the last is set."""
    try:
        call = json.loads(body)
        # JSON can spell half of a surrogate pair, which is no text for a tokenizer, a file or a server. And Python reads
        # numbers that are not finite (NaN, 1e999), which neither a tool nor a reader of the records expects.
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        return None, None, f"the tool call is not valid JSON ({error.msg} at character {error.pos})"
    except UnicodeEncodeError:
        return (
            None,
            None,
            "the tool call holds half of a surrogate pair (`\\ud800` to `\\udfff`), which is no character",
        )
    except (RecursionError, ValueError):  # nested too deeply, an integer of too many digits, or not finite
        return None, None, "the tool call is not valid JSON (nested too deeply, or a number too long or not finite)"
    if _too_deep(call, MAX_DEPTH):
        return None, None, f"the tool call is nested more than {MAX_DEPTH} deep"
    if not isinstance(call, dict):
        return None, None, "the tool call must be a JSON object with `name` and `arguments`"
    if "name" not in call or "arguments" not in call:
        missing = "name" if "name" not in call else "arguments"
        return None, None, f"the tool call has no `{missing}`"
    error = check_call(call["name"], call["arguments"])
    return (None, None, error) if error else (call["name"], call["arguments"], None)


def parse_turn(text: str, check_call: Callable[[Any, Any], str | None]) -> ParsedTurn:
    """
    Parse one turn.

    Args:
        text (`str`):
            Decoded text of the turn, without the end-of-turn token. Any string is valid input.
        check_call (`Callable`):
            `check_call(name, arguments)` returns what is wrong with a call, or `None`
            ([`~mempo_trl.tools.Toolbox.check`]).

    Returns:
        [`ParsedTurn`]
    """
    blocks, unclosed = _blocks(text)
    actions = [block for block in blocks if block.tag in ("tool_call", "answer")]
    # A call that never closes counts as a (bad) call unless a closed action comes before it.
    open_call = next((tag for tag in unclosed if tag[2] == "tool_call"), None)
    if open_call is not None and (not actions or open_call.start() < actions[0].start):
        action, action_start, action_end = None, open_call.start(), len(text)
    elif actions:
        action, action_start, action_end = actions[0], actions[0].start, actions[0].end
    else:
        action, action_start, action_end = None, len(text), len(text)

    before = [block for block in blocks if block.end <= action_start]
    memory = next((block for block in before if block.tag == "mem"), None)
    think = next((block for block in before if block.tag == "think"), None)
    dropped = sum(block.start >= action_end for block in actions)
    shared = dict(memory=memory, think=think, action_end=action_end, dropped_actions=dropped)
    shared["trailing_text"] = bool(text[action_end:].strip())
    outside = "".join(
        text[end:start]
        for end, start in zip(
            [0] + [block.end for block in before], [block.start for block in before] + [action_start], strict=True
        )
    )
    order = [block.tag for block in before]
    opened_after = any(block.start >= action_end for block in blocks) or any(
        tag.start() >= action_end for tag in unclosed
    )
    shared["in_order"] = (
        not outside.strip() and order in ([], ["mem"], ["think"], ["mem", "think"]) and not opened_after
    )

    if action is None:
        if action_start < len(text):
            return ParsedTurn("bad_call", error="the `<tool_call>` is not closed", **shared)
        return ParsedTurn("no_action", **shared)
    body = text[action.inner_start : action.inner_end]
    if action.tag == "answer":
        return ParsedTurn("answer", action=action, answer=body.strip(), **shared)
    name, arguments, error = _read_call(body, check_call)
    if error:
        return ParsedTurn("bad_call", action=action, error=error, **shared)
    return ParsedTurn("tool_call", action=action, name=name, arguments=arguments, **shared)
