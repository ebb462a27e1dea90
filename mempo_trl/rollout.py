"""A rollout, and the one coroutine that plays it."""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .generation import Generator
from .protocol import Protocol
from .tools import ToolResult


logger = logging.getLogger(__name__)


@dataclass
class Turn:
    """
    One model generation.

    Args:
        prompt_ids (`list[int]`):
            Prompt `x[i,t]`.
        completion_ids (`list[int]`):
            Sampled ids `y[i,t]`.
        logps (`list[float]`, *optional*):
            Log-probabilities of the sampled ids under the sampling policy.
        text (`str`):
            Decoded completion without the end-of-turn token.
        outcome (`str`):
            `"tool_call"`, `"answer"`, `"bad_call"`, `"no_action"` or `"truncated"`.
        well_formed (`bool`):
            Whether the turn has the demanded form.
        memory_span (`tuple[int, int]`, *optional*):
            Half-open span of the memory block `m[i,t]` in `completion_ids`, tags included; `None` without a closed one.
        memory (`str`, *optional*):
            The text inside `<mem>`.
        think_span (`tuple[int, int]`, *optional*):
            Half-open span of the think block in `completion_ids`, tags included.
        answer (`str`, *optional*):
            The answer, when the turn gives one.
        answer_span (`tuple[int, int]`, *optional*):
            Half-open span of the answer in `completion_ids`.
        call (`dict`, *optional*):
            The tool call as `{"name", "arguments"}`.
        error (`str`, *optional*):
            What was wrong with a bad call.
        carried (`int`):
            Number of sampled ids that later prompts repeat.
        response_ids (`list[int]`):
            Ids `o[i,t]` between this turn and the next one; empty after the last turn.
        response (`str`, *optional*):
            Text of the tool response as the tool gave it.
        tool_error (`str`, *optional*):
            Why the tool failed, when it did.
        tool_empty (`bool`):
            Whether the tool worked and found nothing.
        dropped_actions (`int`), trailing_text (`bool`):
            What was ignored after the action.
        tool_seconds (`float`):
            Time that the tool took.
        memory_reward (`float`, *optional*):
            `R_M[i,t]`; `None` where it is undefined.
        p_mem (`float`, *optional*), p_full (`float`, *optional*):
            Answer probability after the memory, and after the baseline context (the full history in the paper).
        kept_frac_mem (`float`, *optional*), kept_frac_full (`float`, *optional*):
            Fraction of answer tokens that the confidence filter kept on each side.
        memory_advantage (`float`, *optional*):
            `A_M[i,t]`.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logps: list[float] | None
    text: str
    outcome: str
    well_formed: bool
    carried: int
    memory_span: tuple[int, int] | None = None
    memory: str | None = None
    think_span: tuple[int, int] | None = None
    answer: str | None = None
    answer_span: tuple[int, int] | None = None
    call: dict | None = None
    error: str | None = None
    response_ids: list[int] = field(default_factory=list)
    response: str | None = None
    tool_error: str | None = None
    tool_empty: bool = False
    dropped_actions: int = 0
    trailing_text: bool = False
    tool_seconds: float = 0.0
    memory_reward: float | None = None
    p_mem: float | None = None
    p_full: float | None = None
    kept_frac_mem: float | None = None
    kept_frac_full: float | None = None
    memory_advantage: float | None = None

    @property
    def carried_ids(self) -> list[int]:
        """The sampled ids that later prompts repeat: up to the end of the action."""
        return self.completion_ids[: self.carried]

    @property
    def memory_ids(self) -> list[int]:
        """Ids of the memory block `m[i,t]`, tags included; empty without one."""
        start, end = self.memory_span or (0, 0)
        return self.completion_ids[start:end]


@dataclass
class Rollout:
    """
    One sampled conversation, turns 1..T.

    Args:
        question (`str`):
            The question; several objectives are one text.
        golden_answers (`list[list[str]]`, *optional*):
            Objectives x aliases.
        prefix_ids (`list[int]`):
            Ids of system prompt, question and the header of the assistant's turn.
        turns (`list[Turn]`):
            Turns in order; at least one after playing.
        outcome (`str`):
            Outcome of the last turn, or `"out_of_turns"`, or `"out_of_context"` when the next prompt did not fit.
        answer (`str`, *optional*):
            The final answer.
        excluded (`bool`):
            Whether it takes no part in training ([`exclude_rollouts`]).
        reward (`float`, *optional*):
            `R_T[i]`, the weighted sum of the reward functions, once they ran; `None` if all of them gave none.
        advantage (`float`, *optional*):
            `A_T[i]`.
    """

    question: str
    golden_answers: list[list[str]] | None
    prefix_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    outcome: str = ""
    answer: str | None = None
    excluded: bool = False
    reward: float | None = None
    advantage: float | None = None

    @property
    def well_formed(self) -> bool:
        """Whether every turn has the demanded form."""
        return all(turn.well_formed for turn in self.turns)

    @property
    def completion_ids(self) -> list[int]:
        """The sampled ids of all turns, in order."""
        return [token_id for turn in self.turns for token_id in turn.completion_ids]

    def history_length(self, index: int) -> int:
        """Number of ids in `h[i,t]`, the prefix and the turns before turn `index` (from 0) with their responses."""
        return len(self.prefix_ids) + sum(turn.carried + len(turn.response_ids) for turn in self.turns[:index])

    @property
    def history_ids(self) -> list[int]:
        """Ids of `h[i,T]`, of which every `h[i,t]` is the start: what the last turn would have seen of everything."""
        ids = list(self.prefix_ids)
        for turn in self.turns[:-1]:
            ids += turn.carried_ids + turn.response_ids
        return ids

    def messages(self) -> list[dict]:
        """The completion as chat messages: one of the assistant per turn, one of the tool per response."""
        messages = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            if turn.response is not None:
                messages.append({"role": "tool", "content": turn.response})
        return messages


def exclude_rollouts(rollouts: list[Rollout], tool_failure: str = "respond") -> None:
    """
    Mark the rollouts that take no part in training: no reward, no part in the baselines of the group, no trained token.

    These are the ones whose log-probabilities an engine could not give, and, if so wanted, those with a failed call.

    Args:
        rollouts (`list[Rollout]`):
            Played rollouts.
        tool_failure (`str`, *optional*, defaults to `"respond"`):
            `"exclude"` to exclude those with a tool call that failed for good.
    """
    not_finite = 0
    for rollout in rollouts:
        finite = all(math.isfinite(logp) for turn in rollout.turns for logp in turn.logps or [])
        failed = any(turn.tool_error is not None for turn in rollout.turns)
        rollout.excluded = not finite or (failed and tool_failure == "exclude")
        not_finite += not finite
    if not_finite:
        logger.warning(
            "%d of %d rollouts have log-probabilities of sampled tokens that are not finite, and are not trained on. "
            "If they do not stay single ones, look at the engine and its dtype.",
            not_finite,
            len(rollouts),
        )


def read_turn(protocol: Protocol, prompt_ids: list[int], generation, memory_required: bool) -> Turn:
    """
    Make a [`Turn`] of what was sampled.

    Args:
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Reads the sampled ids.
        prompt_ids (`list[int]`):
            The prompt.
        generation ([`~mempo_trl.generation.Generation`]):
            What was sampled after it.
        memory_required (`bool`):
            Whether a turn without memory is malformed.

    Returns:
        [`Turn`]
    """
    read = protocol.read_turn(generation.ids)
    parsed = read.parsed
    # A cut turn ends the rollout, unless its answer was complete before the cut.
    cut = generation.finish_reason == "length" and parsed.outcome != "answer"
    memory = parsed.memory
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=generation.ids,
        logps=generation.logps,
        text=read.text,
        outcome="truncated" if cut else parsed.outcome,
        well_formed=not cut and parsed.well_formed(memory_required),
        carried=read.carried,
        memory_span=read.memory_span,
        memory=None if memory is None else read.text[memory.inner_start : memory.inner_end],
        think_span=read.think_span,
        answer=parsed.answer,
        answer_span=read.answer_span,
        call=None if cut or parsed.name is None else {"name": parsed.name, "arguments": parsed.arguments},
        error=parsed.error,
        dropped_actions=parsed.dropped_actions,
        trailing_text=parsed.trailing_text,
    )


async def play(
    question: str,
    golden_answers: list[list[str]] | None,
    *,
    protocol: Protocol,
    generator: Generator,
    call_tool: Callable[[str, dict], Awaitable[ToolResult]],
    max_turns: int,
    max_prompt_length: int | None = None,
) -> Rollout:
    """
    Play one rollout: generate a turn, make its search, build the next prompt, until it answers or has to stop.

    The next prompt is `prefix + y + o` of the last turn with `context="memory"` (the paper), and the last prompt
    followed by `y + o` with `context="full"`, where `y` reaches up to the end of the call and `o` is the response.

    Args:
        question (`str`):
            The question.
        golden_answers (`list[list[str]]`, *optional*):
            Objectives x aliases; kept with the rollout, never shown to the model.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Makes prompts and reads turns; knows the context.
        generator ([`~mempo_trl.generation.Generator`]):
            Samples the turns.
        call_tool (`Callable`):
            `await call_tool(name, arguments)` gives a [`~mempo_trl.tools.ToolResult`]
            ([`~mempo_trl.tools.Toolbox.call`]).
        max_turns (`int`):
            Turns after which a rollout without an answer ends as `"out_of_turns"`.
        max_prompt_length (`int`, *optional*):
            Tokens above which the next prompt does not fit; the rollout then ends as `"out_of_context"`.

    Returns:
        [`Rollout`]
    """
    rollout = Rollout(question, golden_answers, protocol.prefix_ids(question))
    prompt_ids = rollout.prefix_ids
    while True:
        generation = await generator.generate(prompt_ids, rollout)
        memory_required = protocol.context == "memory" and bool(rollout.turns)
        turn = read_turn(protocol, prompt_ids, generation, memory_required)
        rollout.turns.append(turn)
        rollout.outcome, rollout.answer = turn.outcome, turn.answer
        if turn.outcome in ("answer", "no_action", "truncated"):
            return rollout
        if len(rollout.turns) == max_turns:
            rollout.outcome = "out_of_turns"
            return rollout

        if turn.outcome == "tool_call":
            result = await call_tool(turn.call["name"], turn.call["arguments"])
            turn.response, turn.tool_seconds = result.text, result.seconds
            turn.tool_error, turn.tool_empty = result.error, result.empty
        else:
            turn.response = f"Error: {turn.error}."
        turn.response_ids = protocol.response_ids(turn.carried_ids, turn.response)
        start_ids = rollout.prefix_ids if protocol.context == "memory" else prompt_ids
        prompt_ids = start_ids + turn.carried_ids + turn.response_ids
        if max_prompt_length is not None and len(prompt_ids) > max_prompt_length:
            rollout.outcome = "out_of_context"
            return rollout
