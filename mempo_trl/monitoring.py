"""What a run tells about its rollouts: metrics, and one JSON line per rollout."""

import json
import logging
import math
import os
import re
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback

from .parsing import parse_turn
from .rollout import Rollout, Turn
from .token_spans import decode, token_spans


logger = logging.getLogger(__name__)

OUTCOMES = ("answer", "no_action", "truncated", "out_of_turns", "out_of_context")
"""Outcomes of a rollout. A turn can also be a `tool_call` or a `bad_call`, after which the rollout goes on."""

_FILE_NAME = re.compile(r"(?P<mode>train|eval)-(?P<step>\d+)-rank(?P<rank>\d+)\.jsonl")


def rollout_statistics(rollouts: list[Rollout]) -> dict[str, tuple[float, int]]:
    """
    Statistics of rollouts as sums and counts, so that those of several processes can be added.

    Args:
        rollouts (`list[Rollout]`):
            Played rollouts, with memory rewards where they are defined.

    Returns:
        `dict[str, tuple[float, int]]`: Metric name to sum and count, always with the same names in the same order.
        The README says what each metric means.
    """
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    later_turns = [turn for rollout in rollouts for turn in rollout.turns[1:]]
    with_memory = [turn for turn in turns if turn.memory_span is not None]
    with_think = [turn for turn in turns if turn.think_span is not None]
    calls = [turn for turn in turns if turn.outcome == "tool_call" and turn.response is not None]
    bad_calls = sum(turn.outcome == "bad_call" for turn in turns)

    def total(values) -> float:
        return float(sum(values))

    def defined(values) -> tuple[float, int]:
        values = [value for value in values if value is not None]
        return total(values), len(values)

    statistics = {
        "memory/reward_mean": defined(turn.memory_reward for turn in turns),
        "memory/p_mem": defined(turn.p_mem for turn in turns),
        "memory/p_full": defined(turn.p_full for turn in turns),
        "memory/kept_frac_mem": defined(turn.kept_frac_mem for turn in turns),
        "memory/kept_frac_full": defined(turn.kept_frac_full for turn in turns),
        "memory/tokens_mean": (total(len(turn.memory_ids) for turn in with_memory), len(with_memory)),
        "memory/defined_frac": (sum(turn.memory_reward is not None for turn in turns), len(later_turns)),
        "rollout/turns_mean": (len(turns), len(rollouts)),
        "rollout/searches_mean": (len(calls), len(rollouts)),
        "rollout/format_ok_frac": (total(rollout.well_formed for rollout in rollouts), len(rollouts)),
        "rollout/think_tokens_mean": (
            total(turn.think_span[1] - turn.think_span[0] for turn in with_think),
            len(with_think),
        ),
        "rollout/prompt_tokens_peak": (
            total(max(len(turn.prompt_ids) for turn in rollout.turns) for rollout in rollouts),
            len(rollouts),
        ),
        "rollout/tokens_total_mean": (total(total_tokens(rollout) for rollout in rollouts), len(rollouts)),
        "rollout/excluded_frac": (total(rollout.excluded for rollout in rollouts), len(rollouts)),
        "rollout/bad_call_frac": (bad_calls, len(calls) + bad_calls),
        "rollout/dropped_actions_mean": (total(turn.dropped_actions for turn in turns), len(rollouts)),
        "rollout/trailing_text_frac": (total(turn.trailing_text for turn in turns), len(turns)),
        "tool/error_frac": (total(turn.tool_error is not None for turn in calls), len(calls)),
        "tool/empty_frac": (total(turn.tool_empty for turn in calls), len(calls)),
        "tool/latency_mean": (total(turn.tool_seconds for turn in calls), len(calls)),
    }
    for outcome in OUTCOMES:
        count = sum(rollout.outcome == outcome for rollout in rollouts)
        statistics[f"rollout/outcome/{outcome}"] = (count, len(rollouts))
    return statistics


def total_tokens(rollout: Rollout) -> int:
    """Tokens that a rollout costs: prompt and completion of every turn, system prompt and question included."""
    return sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in rollout.turns)


def peak_tokens(rollout: Rollout) -> int:
    """Most tokens that a rollout holds at once: prompt and completion of its longest turn, system prompt included."""
    return max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in rollout.turns), default=0)


def last_tool_failure(rollouts: list[Rollout]) -> str | None:
    """The last of the tool calls that failed for good, with its cause; `None` if all went well."""
    failed = [turn for rollout in rollouts for turn in rollout.turns if turn.tool_error is not None]
    if not failed:
        return None
    name, arguments = failed[-1].call["name"], repr(failed[-1].call["arguments"])
    return f"{name}({arguments if len(arguments) <= 200 else arguments[:200] + '…'}): {failed[-1].tool_error}"


def memory_markers(turn: Turn) -> list[int]:
    """The published code's `mem_rewards_idx_list`: per token 0, 1 at the first of a memory and 2 at its last."""
    markers = [0] * len(turn.completion_ids)
    if turn.memory_span is not None:
        markers[turn.memory_span[1] - 1] = 2
        markers[turn.memory_span[0]] = 1
    return markers


def length_metrics(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """
    TRL's metrics of completions, for rollouts.

    Args:
        lengths (`torch.Tensor`):
            Sampled tokens of each rollout of all processes. # (R,)
        truncated (`torch.Tensor`):
            Whether it was cut. # (R,)

    Returns:
        `dict[str, float]`
    """
    metrics = {"completions/clipped_ratio": truncated.float().mean().item()}
    for suffix, values in (("", lengths), ("terminated_", lengths[~truncated])):
        values = values.float() if len(values) else torch.zeros(1)
        metrics[f"completions/mean_{suffix}length"] = values.mean().item()
        metrics[f"completions/min_{suffix}length"] = values.min().item()
        metrics[f"completions/max_{suffix}length"] = values.max().item()
    return metrics


def rollout_record(
    rollout: Rollout, *, tokenizer: PreTrainedTokenizerBase | None = None, ids: bool = False, **extra
) -> dict:
    """
    A rollout as a JSON object.

    Args:
        rollout ([`~mempo_trl.rollout.Rollout`]):
            A played rollout.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            With it the record holds the decoded prompts too: the prefix once, and per turn what follows the prefix. A
            prompt that goes on from that of the turn before (`context="full"`) is left out after the second turn, so
            that records do not grow with the square of the turns.
        ids (`bool`, *optional*, defaults to `False`):
            Whether token ids and log-probabilities are part of it, and with a tokenizer the text of each token.
        extra:
            Further fields: `id` and `dataset` of the question, `sample`, `rewards` per function, `memory_weight`,
            `step`, `mode`, `seconds`, `error`.

    Returns:
        `dict`: Text, outcome and credit of the rollout and of each turn.
    """
    turns = []
    for i, turn in enumerate(rollout.turns):
        record = {
            "completion": turn.text,
            "outcome": turn.outcome,
            "well_formed": turn.well_formed,
            "memory": turn.memory,
            "think": _think_text(turn),
            "call": turn.call,
            "error": turn.error,
            "response": turn.response,
            "tool_error": turn.tool_error,
            "tool_seconds": round(turn.tool_seconds, 4),
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": len(turn.completion_ids),
            "R_M": turn.memory_reward,
            "P_mem": turn.p_mem,
            "P_full": turn.p_full,
            "kept_frac_mem": turn.kept_frac_mem,
            "kept_frac_full": turn.kept_frac_full,
            "A_M": turn.memory_advantage,
            "mem_rewards_idx_list": memory_markers(turn),
        }
        last_ids = rollout.turns[i - 1].prompt_ids
        goes_on = i > 1 and turn.prompt_ids[: len(last_ids)] == last_ids
        if tokenizer is not None and not goes_on:
            record["prompt"] = decode(tokenizer, turn.prompt_ids[len(rollout.prefix_ids) :])
        if ids:
            # What is not finite is no JSON.
            logps = turn.logps and [logp if math.isfinite(logp) else None for logp in turn.logps]
            record |= {"prompt_ids": turn.prompt_ids, "completion_ids": turn.completion_ids, "logps": logps}
        if ids and tokenizer is not None:
            record["tokens"] = _token_texts(tokenizer, turn.completion_ids)
        turns.append(record)
    prefix = {} if tokenizer is None else {"prefix": decode(tokenizer, rollout.prefix_ids)}
    return {
        **extra,
        "question": rollout.question,
        "golden_answers": rollout.golden_answers,
        "outcome": rollout.outcome,
        "answer": rollout.answer,
        "well_formed": rollout.well_formed,
        "excluded": rollout.excluded,
        "reward": rollout.reward,
        "A_T": rollout.advantage,
        "tokens_total": total_tokens(rollout),
        "tokens_peak": peak_tokens(rollout),
        "prefix_tokens": len(rollout.prefix_ids),
        **prefix,
        "turns": turns,
    }


def _think_text(turn: Turn) -> str | None:
    think = parse_turn(turn.text, lambda name, arguments: None).think
    return None if think is None else turn.text[think.inner_start : think.inner_end]


def _token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """One text per token, joined the text of all: a character of several tokens is the text of the first of them."""
    text, spans = token_spans(tokenizer, ids)
    texts, done = [], 0
    for start, end in spans:
        texts.append(text[max(start, done) : end])
        done = max(done, end)
    return texts


class RolloutBar(tqdm):
    """Progress of the rollouts of a generation batch, and of their turns where they take them together."""

    turn = 0

    def on_turn(self, live: int, total: int) -> None:
        """Before a turn of `live` rollouts of `total`."""
        self.turn += 1
        self.set_postfix(turn=self.turn, live=live, refresh=False)
        self.update(total - live - self.n)
        self.refresh()


class RolloutWriter(TrainerCallback):
    """
    Writes rollouts as JSON lines, one file per step and process.

    A run that starts or resumes at a step moves the files of what it plays anew into `replaced/`, so that the others
    are the rollouts of this run, each of them once. As a callback of the trainer it does so by itself.

    Args:
        folder (`str` or `Path`):
            Where the files go.
        process_index (`int`, *optional*, defaults to `0`):
            This process.
    """

    def __init__(self, folder: str | os.PathLike, process_index: int = 0):
        self.folder = Path(folder)
        self.process_index = process_index
        self._started: set[Path] = set()
        self._failed = False

    def on_train_begin(self, args, state, control, **kwargs):
        replaced = 0
        for path in self.folder.glob("*.jsonl"):
            match = _FILE_NAME.fullmatch(path.name)
            # A run on fewer processes has to take care of the files of the others as well.
            if match is None or int(match["rank"]) % args.world_size != self.process_index:
                continue
            # A step is evaluated before its checkpoint is saved, and the next rollouts are played after it.
            if int(match["step"]) + (match["mode"] == "train") > state.global_step:
                (self.folder / "replaced").mkdir(exist_ok=True)
                path.replace(self.folder / "replaced" / path.name)
                replaced += 1
        self._started.clear()
        if replaced:
            logger.warning(
                f"{replaced} files of rollouts from step {state.global_step} on, where this run starts, are now in "
                f"{str(self.folder / 'replaced')!r}."
            )

    def write(self, records: list[dict], mode: str, step: int) -> bool:
        """
        Append records to the file of a step: all of them, or none if that fails, as on a full disk.

        Args:
            records (`list[dict]`):
                What [`rollout_record`] made.
            mode (`str`):
                `"train"` or `"eval"`.
            step (`int`):
                Optimiser steps done so far.

        Returns:
            `bool`: Whether they were written. The first failure is a warning in the log.
        """
        path = self.folder / f"{mode}-{step:06d}-rank{self.process_index}.jsonl"
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "ab" if path in self._started else "wb", buffering=0) as file:
                size = file.tell()
                try:
                    rest = memoryview(lines.encode())
                    while rest:  # a disk that becomes full takes a part before it refuses
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            if not self._failed:
                logger.warning(
                    f"The rollouts of step {step} could not be written: {error}. They are trained on all the same; "
                    "`rollout/dump_failed_frac` counts such generation batches."
                )
            self._failed = True
            return False
        self._started.add(path)
        return True
