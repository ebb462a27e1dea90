"""Cold start: from rollouts on disk to SFT rows that hold exactly the ids that the RL stage would train."""

import json
import os
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

from datasets import Dataset

from ..generation import Generation, ReplayGenerator, run_in_event_loop
from ..protocol import Protocol
from ..retrieval.tool import SearchTool
from ..rewards import score_answer
from ..rollout import Rollout, play
from ..runner import FAILED
from ..sequences import build_sequences
from ..tools import ToolResult
from .objectives import normalize_golden_answers


IGNORE_INDEX = -100


def read_rollouts(path: str | os.PathLike) -> Iterator[dict]:
    """
    Read rollouts from a JSON Lines file, as [`~mempo_trl.monitoring.rollout_record`] writes them.

    Args:
        path (`str` or `PathLike`):
            File with one rollout per line. Needed are `question` and `turns`, each with `completion` and, but for the
            last, `response`. A rollout that failed has no turns.

    Returns:
        `Iterator[dict]`

    Raises:
        ValueError: If a line can't be read; the message names it.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                has_turns = isinstance(record["question"], str) and (
                    bool(record["turns"]) or record.get("outcome") == FAILED
                )
                texts = [turn["completion"] for turn in record["turns"]]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"Line {number} of {str(path)!r} is not a rollout ({error!r}).") from None
            if not has_turns or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"Line {number} of {str(path)!r} is not a rollout: a question and turns are needed.")
            yield record


def replay(record: dict, protocol: Protocol) -> Rollout:
    """
    Play a recorded rollout again, with its own turns and tool responses.

    Args:
        record (`dict`):
            A rollout of [`read_rollouts`]. Its turns are the recorded token ids where it has them, and else the
            tokenized texts with the end of turn.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Prompts and parsing as in training.

    Returns:
        [`~mempo_trl.rollout.Rollout`]

    Raises:
        ValueError: If the rollout would go another way than recorded, because it was made for another protocol.
    """
    end_id = protocol.tokenizer.eos_token_id if protocol.end_of_turn_id is None else protocol.end_of_turn_id
    recorded, current = record["turns"], {}

    def generations() -> Iterator[Generation]:
        nonlocal current
        for current in recorded:
            cut = current.get("outcome") == "truncated"
            ids = current.get("completion_ids")
            if ids is None:
                ids = protocol.encode(current["completion"]) + [end_id] * (not cut)
            yield Generation(ids, current.get("logps"), "length" if cut else "stop")

    async def call_tool(name: str, arguments: dict) -> ToolResult:
        response = current.get("response")
        if response is None:
            raise ValueError(f"A search of the rollout has no recorded response: {record['question']!r}.")
        return ToolResult(response)

    rollout = run_in_event_loop(
        play(
            record["question"],
            record.get("golden_answers"),
            protocol=protocol,
            generator=ReplayGenerator(generations()),
            call_tool=call_tool,
            max_turns=len(recorded),
        )
    )
    if rollout.outcome == "out_of_turns" and record.get("outcome") == "out_of_context":
        rollout.outcome = "out_of_context"  # room is not measured here; either way nothing follows the last turn
    expected = record.get("outcome", rollout.outcome)
    same = [
        turn.outcome == written.get("outcome", turn.outcome)
        for turn, written in zip(rollout.turns, recorded, strict=False)
    ]
    if len(rollout.turns) != len(recorded) or rollout.outcome != expected or not all(same):
        turn = rollout.turns[-1 if all(same) else same.index(False)]
        raise ValueError(
            f"The rollout of {record['question']!r} has {len(recorded)} turns and ends as {expected!r}, but played "
            f"again it ends as {rollout.outcome!r} after {len(rollout.turns)}. It was made for another protocol; the "
            f"turn in question is {turn.text!r}, here {turn.outcome!r}."
        )
    return rollout


def record_reward(record: dict) -> float | None:
    """
    Reward of a recorded rollout: the one that is recorded, else exact match (mean over the objectives) if every turn is
    well formed, as [`~mempo_trl.rewards.exact_match_reward`]. `None` without golden answers.
    """
    if record.get("reward") is not None:
        return record["reward"]
    if not record.get("golden_answers"):
        return None
    golden_answers = normalize_golden_answers(record["golden_answers"])
    return statistics.fmean(score_answer(record["answer"], golden_answers)) * record["well_formed"]


def drop_reason(
    record: dict, min_reward: float | None = None, require_format: bool = False, max_tokens: int | None = None
) -> str | None:
    """
    Why a rollout is not used for the cold start.

    Args:
        record (`dict`):
            Record of [`~mempo_trl.runner.play_questions`].
        min_reward (`float`, *optional*):
            Lowest [`record_reward`]. A rollout that has none is dropped.
        require_format (`bool`, *optional*, defaults to `False`):
            Whether every turn has to be well formed.
        max_tokens (`int`, *optional*):
            Most tokens of a turn's prompt and completion, which is the length of the longest training sequence.

    Returns:
        `str` or `None`: A few words, or `None` if it is used.
    """
    if record["outcome"] == FAILED:
        return "failed"
    if require_format and not record["well_formed"]:
        return "not well formed"
    if min_reward is not None:
        reward = record_reward(record)
        if reward is None or reward < min_reward:
            return "reward too low"
    if max_tokens is not None and record["tokens_peak"] > max_tokens:
        return "too long"
    return None


def split_by_question(records: list[dict], dev_fraction: float, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """
    Set rollouts of some questions apart for the evaluation loss.

    Args:
        records (`list[dict]`):
            Rollouts of [`read_rollouts`].
        dev_fraction (`float`):
            Fraction of the questions, rounded, but at least one.
        seed (`int`, *optional*, defaults to `0`):
            Which ones.

    Returns:
        `tuple[list[dict], list[dict]]`: Rollouts to train on and the others; no question is in both.

    Raises:
        ValueError: If the fraction is not between 0 and 1, or leaves no question to train on.
    """
    if not 0 < dev_fraction < 1:
        raise ValueError(f"got dev_fraction={dev_fraction}, expected a fraction between 0 and 1, such as 0.05.")
    questions = list(dict.fromkeys(record["question"] for record in records))
    random.Random(seed).shuffle(questions)
    dev = set(questions[: max(1, round(dev_fraction * len(questions)))])
    if len(dev) >= len(questions):
        raise ValueError(
            f"dev_fraction={dev_fraction} leaves none of the {len(questions)} questions to train on; lower it, or give "
            "more rollouts."
        )
    train = [record for record in records if record["question"] not in dev]
    return train, [record for record in records if record["question"] in dev]


def sft_rows(
    records: Iterable[dict], protocol: Protocol, min_reward: float | None = None, max_length: int | None = None
) -> tuple[Dataset, Counter]:
    """
    SFT rows of recorded rollouts: one per training sequence, the same ids and masks that [`MemPOTrainer`] would train.

    Args:
        records (`Iterable[dict]`):
            Rollouts of [`read_rollouts`].
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Prompts and parsing as in training.
        min_reward (`float`, *optional*):
            Lowest [`record_reward`] of a rollout that is used.
        max_length (`int`, *optional*):
            Tokens above which a sequence is dropped: cut, it would lose its end, the turn itself.

    Returns:
        `tuple[Dataset, Counter]`: [`~datasets.Dataset`] with `input_ids`, and `labels` that are -100 where a token is
        not trained; and what was counted, in words.
    """
    rows, counts = [], Counter()
    for record in records:
        counts["rollouts read"] += 1
        if record.get("outcome") != FAILED:
            rollout = replay(record, protocol)
            # A rollout that was written by hand may lack these.
            played = {"outcome": rollout.outcome, "answer": rollout.answer, "well_formed": rollout.well_formed}
            record = record | played
        if (reason := drop_reason(record, min_reward)) is not None:
            counts[f"rollouts dropped: {reason}"] += 1
            continue
        counts["rollouts used"] += 1
        counts["rollouts whose last turn was cut"] += rollout.outcome == "truncated"
        for sequence in build_sequences(rollout, counts["rollouts used"] - 1):
            input_ids = sequence.prompt_ids + sequence.completion_ids
            counts["longest sequence in tokens"] = max(counts["longest sequence in tokens"], len(input_ids))
            if max_length is not None and len(input_ids) > max_length:
                counts["sequences dropped: too long"] += 1
                continue
            labels = [
                token_id if trained else IGNORE_INDEX
                for token_id, trained in zip(sequence.completion_ids, sequence.loss_mask, strict=True)
            ]
            counts["sequences"] += 1
            counts["tokens"] += len(input_ids)
            counts["trained tokens"] += sequence.num_trained
            rows.append({"input_ids": input_ids, "labels": [IGNORE_INDEX] * len(sequence.prompt_ids) + labels})
        counts["turns"] += len(rollout.turns)
    return Dataset.from_list(rows), counts


def scripted_rollout(row: dict, search: SearchTool) -> dict | None:
    """
    A rollout written by rule from the gold passages of a question, for a start without a teacher.

    It searches the title of each gold passage, keeps one sentence of each in its memory (the one with the answer where
    there is one), and answers. The tool responses are those of the real search.

    Args:
        row (`dict`):
            Row of [`~mempo_trl.load_questions`] with `supporting_titles`.
        search ([`~mempo_trl.SearchTool`]):
            The search tool of the run.

    Returns:
        `dict` or `None`: A rollout as in [`read_rollouts`], or `None` if a gold passage is not found by its title.
    """
    answers = [aliases[0] for aliases in row["golden_answers"]]
    turns, notes = [], []
    for title in row["supporting_titles"] or ():
        memory = f"<mem>\n{' '.join(notes)}\n</mem>\n" if notes else ""
        call = json.dumps({"name": search.name, "arguments": {"query": title}}, ensure_ascii=False)
        text = f"{memory}<think>\nI need to read about {title}.\n</think>\n<tool_call>\n{call}\n</tool_call>"
        passage = next((document for document in search.search(title) if document.title == title), None)
        if passage is None:
            return None
        turns.append({"completion": text, "outcome": "tool_call", "response": search(title)})
        notes.append(f"{title}: {_key_sentence(passage.text, row['golden_answers'])}")
    if not turns:
        return None
    answer = "; ".join(answers)
    memory = f"<mem>\n{' '.join(notes)}\n</mem>\n"
    text = f"{memory}<think>\nI know enough to answer.\n</think>\n<answer>{answer}</answer>"
    turns.append({"completion": text, "outcome": "answer", "response": None})
    kept = {name: row[name] for name in ("id", "dataset") if name in row}
    return {
        **kept,
        "question": row["question"],
        "golden_answers": row["golden_answers"],
        "outcome": "answer",
        "answer": answer,
        "turns": turns,
    }


def _key_sentence(text: str, golden_answers: list[list[str]], max_words: int = 30) -> str:
    """The sentence with an answer in it, else the first one; cut to a length that a memory can hold."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    aliases = [alias.lower() for objective in golden_answers for alias in objective]
    chosen = next((s for s in sentences if any(alias in s.lower() for alias in aliases)), sentences[0])
    return " ".join(chosen.split()[:max_words])
