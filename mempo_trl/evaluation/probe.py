"""What an agent keeps: where the golden answer occurs in documents, memories and answers, and where it is lost."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import ANSWER_TEMPLATE
from ..data.cold_start import replay
from ..memory_reward import MemoryRewardCallback
from ..protocol import Protocol
from ..rewards import NORMALIZERS, exact_match, split_answers
from ..rollout import Rollout
from ..runner import FAILED, row_id


DEFINITIONS = {
    "holds": "a text holds an answer if the normalised words of one of its aliases stand in the normalised text one after "
    "the other; for aliases with Chinese, Japanese or Korean characters, if the alias is part of the text",
    "in_documents": "objectives whose golden answer a tool response holds",
    "in_memory": "objectives whose golden answer a memory holds",
    "in_last_memory": "objectives whose golden answer the last memory of the rollout holds",
    "in_answer": "objectives whose golden answer their part of the final answer holds",
    "right": "objectives with an exact match",
    "lost": "objectives whose golden answer was in the memory or the tool response of a turn, not in the memory of the turn "
    "after it (nor in the answer, where that turn gives one), and in no memory, tool response or answer later on",
    "lost_by_turn": "the turn whose memory does not hold it any more, from 1",
    "guess": "memories that hold a part of the rollout's own final answer which neither the question nor any tool response "
    "before them holds",
    "unsupported_answers": "answered objectives whose part of the final answer no tool response and no question holds",
    "skipped_objectives": "objectives with the answer yes, no or noanswer, which texts hold by chance; in none of the "
    "figures",
}
"""What the figures of [`probe_texts`] mean."""

_YES_NO = {"", "yes", "no", "noanswer"}
_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")


def holds(text: str, answers: Sequence[str]) -> bool:
    """
    Whether a normalised text holds one of the normalised answers, as whole words.

    Args:
        text (`str`):
            Normalised text.
        answers (`Sequence[str]`):
            Normalised answers. An empty one is held by no text.
    """
    # No spaces separate the words of these scripts, so there are no whole words to look for.
    return any(answer in text if _CJK.search(answer) else f" {answer} " in f" {text} " for answer in answers if answer)


def probe_objective(
    documents: list[str], memories: list[str], answer: str, aliases: list[str], answered: bool
) -> dict[str, Any]:
    """
    Follow the golden answer of one objective through the turns of a rollout.

    Args:
        documents (`list[str]`):
            Normalised tool response of each turn, empty where there is none.
        memories (`list[str]`):
            Normalised memory of each turn, empty where there is none.
        answer (`str`):
            Normalised part of the final answer.
        aliases (`list[str]`):
            Normalised golden answers.
        answered (`bool`):
            Whether the last turn gives an answer.

    Returns:
        `dict[str, Any]`: `found_turn` and `lost_turn` (from 1, `None` where it was not), and the flags that
        [`DEFINITIONS`] explains.
    """
    in_documents = [holds(text, aliases) for text in documents]
    in_memory = [holds(text, aliases) for text in memories]
    in_answer = holds(answer, aliases)
    lost_turn, held = None, False
    for turn, (found, kept) in enumerate(zip(in_documents, in_memory, strict=True), start=1):
        kept = kept or (answered and turn == len(documents) and in_answer)
        if kept or found:
            # A search of the same turn may find again what its memory lost.
            lost_turn = None
        elif held:
            lost_turn = turn
        held = kept or found
    with_memory = [kept for kept, text in zip(in_memory, memories, strict=True) if text]
    return {
        "in_documents": any(in_documents),
        "in_memory": any(in_memory),
        "in_last_memory": bool(with_memory) and with_memory[-1],
        "in_answer": in_answer,
        "found_turn": in_documents.index(True) + 1 if any(in_documents) else None,
        "lost_turn": lost_turn,
    }


def probe_rollout(record: dict, normalizer: str = "squad") -> dict[str, Any]:
    """
    Where the golden answers of one rollout occur.

    Args:
        record (`dict`):
            A rollout as on disk, with golden answers.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            How texts are normalised before they are compared.

    Returns:
        `dict[str, Any]`: `objectives` with the result of [`probe_objective`] each (`None` for a yes/no question), the
        number of `memories`, and the turns (from 1) whose memory states a guess.
    """
    normalize = NORMALIZERS[normalizer]
    golden, turns = record["golden_answers"], record["turns"]
    # What a bad call or a failed search is answered with is no document.
    documents = [
        normalize(turn["response"])
        if turn.get("response") and turn["outcome"] == "tool_call" and turn.get("tool_error") is None
        else ""
        for turn in turns
    ]
    memories = [normalize(turn.get("memory") or "") for turn in turns]
    question = normalize(record["question"])
    given_answer = record.get("answer")  # a rollout that failed has none
    answers = split_answers(given_answer, len(golden))
    objectives: list[dict | None] = []
    claimed = []
    for answer, aliases in zip(answers, golden, strict=True):
        wanted = [normalize(alias) for alias in aliases]
        if set(wanted) <= _YES_NO:
            objectives.append(None)
            continue
        given = normalize(answer)
        result = probe_objective(documents, memories, given, wanted, given_answer is not None)
        result["right"] = exact_match(answer, aliases, normalizer) == 1.0
        result["unsupported"] = None
        if given not in _YES_NO:
            result["unsupported"] = not any(holds(text, [given]) for text in (question, *documents))
            if not holds(question, [given]):
                claimed.append(given)
        objectives.append(result)
    guesses = [
        index + 1
        for index, memory in enumerate(memories)
        if any(
            holds(memory, [given]) and not any(holds(text, [given]) for text in documents[:index]) for given in claimed
        )
    ]
    return {
        "id": row_id(record),
        "sample": record.get("sample", 0),
        "outcome": record["outcome"],
        "objectives": objectives,
        "memories": sum(turn.get("memory") is not None for turn in turns),
        "guess_turns": guesses,
    }


def probe_texts(records: Sequence[dict], normalizer: str = "squad") -> dict[str, Any]:
    """
    What the texts of rollouts tell about their memories. No model is needed.

    Args:
        records (`Sequence[dict]`):
            Rollouts as on disk, with golden answers.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            How texts are normalised before they are compared.

    Returns:
        `dict[str, Any]`: Shares that [`DEFINITIONS`] explains, and the `rollouts` one by one. A share without anything
        to take it of is `None`.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"got normalizer {normalizer!r}, expected one of {sorted(NORMALIZERS)}.")
    missing = next((record for record in records if not record.get("golden_answers")), None)
    if missing is not None:
        raise ValueError(f"The rollout of {missing['question']!r} has no `golden_answers` to look for.")
    rollouts = [probe_rollout(record, normalizer) for record in records]
    every = [objective for rollout in rollouts for objective in rollout["objectives"]]
    objectives = [objective for objective in every if objective is not None]
    found = [objective for objective in objectives if objective["in_documents"]]
    claims = [objective for objective in objectives if objective["unsupported"] is not None]
    memories = sum(rollout["memories"] for rollout in rollouts)
    lost = Counter(objective["lost_turn"] for objective in found if objective["lost_turn"] is not None)
    flags = ("in_documents", "in_memory", "in_last_memory", "in_answer", "right")
    return {
        "normalizer": normalizer,
        "num_rollouts": len(rollouts),
        "num_objectives": len(objectives),
        "skipped_objectives": len(every) - len(objectives),
        **{name: _share(sum(objective[name] for objective in objectives), len(objectives)) for name in flags},
        "found_objectives": len(found),
        "of_found": {
            **{name: _share(sum(objective[name] for objective in found), len(found)) for name in flags[1:]},
            "lost": _share(sum(lost.values()), len(found)),
            "lost_by_turn": {str(turn): lost[turn] for turn in sorted(lost)},
        },
        "unsupported_answers": _share(sum(objective["unsupported"] for objective in claims), len(claims)),
        "memories": memories,
        "guess": _share(sum(len(rollout["guess_turns"]) for rollout in rollouts), memories),
        "rollouts": rollouts,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass
class ProbeScoring:
    """How the answer probabilities of a probe are taken: of all answer tokens, against the full history (the paper)."""

    answer_template: str = ANSWER_TEMPLATE
    memory_baseline: str = "history"
    memory_answer: str = "joint"
    memory_token_filter: str = "none"
    memory_prob_threshold: float = 0.0


def probe_probabilities(
    records: Sequence[dict],
    *,
    protocol: Protocol,
    scorer: Callable,
    tokenizer: PreTrainedTokenizerBase,
    answer_template: str = ANSWER_TEMPLATE,
    batch_size: int = 32,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """
    How well a model predicts the golden answer after each memory, and after the whole history.

    Args:
        records (`Sequence[dict]`):
            Rollouts as on disk, with golden answers. Those that failed are left out.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            The one that they were played with.
        scorer (`Callable`):
            Scores continuations ([`~mempo_trl.scoring.RowScorer`]).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer of the model.
        answer_template (`str`, *optional*):
            Continuation whose answer is scored, with one `{answer}`. Defaults to that of the published code.
        batch_size (`int`, *optional*, defaults to `32`):
            Rollouts that are scored at the same time.
        on_batch (`Callable`, *optional*):
            Called with the number of rollouts of each batch, for a progress bar.

    Returns:
        `dict[str, Any]`: `by_turn`, with the means of `P_mem`, `P_full` and `R_M` over the rollouts that have a memory in
        that turn, the settings, and `rollouts` with the values of each turn.
    """
    settings = ProbeScoring(answer_template)
    callback = MemoryRewardCallback()
    played = [record for record in records if record["outcome"] != FAILED and record["turns"]]
    values: dict[int, list[tuple[float, float, float]]] = {}
    rollouts = []
    for start in range(0, len(played), batch_size):
        batch = played[start : start + batch_size]
        replayed: list[Rollout] = [replay(record, protocol) for record in batch]
        callback.on_rollouts_end(
            settings, None, None, rollouts=replayed, scorer=scorer, processing_class=tokenizer
        )  # fmt: skip
        for record, rollout in zip(batch, replayed, strict=True):
            turns = []
            for number, turn in enumerate(rollout.turns, start=1):
                turns.append({"P_mem": turn.p_mem, "P_full": turn.p_full, "R_M": turn.memory_reward})
                if turn.memory_reward is not None:
                    values.setdefault(number, []).append((turn.p_mem, turn.p_full, turn.memory_reward))
            rollouts.append({"id": row_id(record), "sample": record.get("sample", 0), "turns": turns})
        if on_batch is not None:
            on_batch(len(batch))
    by_turn = {
        str(number): {"memories": len(rows)}
        | {
            name: statistics.fmean(row[k] for row in rows) for k, name in enumerate(("P_mem", "P_full", "R_M"))
        }
        for number, rows in sorted(values.items())
    }  # fmt: skip
    return {
        "settings": vars(settings),
        "num_rollouts": len(played),
        "left_out": len(records) - len(played),
        "by_turn": by_turn,
        "rollouts": rollouts,
    }


def table_rows(probe: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, and what it is a share of, for a table of [`probe_texts`]."""

    def percent(value: float | None) -> str:
        return "none" if value is None else f"{100 * value:.1f}%"

    every, found = f"{probe['num_objectives']} objectives", f"{probe['found_objectives']} found in documents"
    rows = [
        (name, percent(probe[name]), every)
        for name in ("in_documents", "in_memory", "in_last_memory", "in_answer", "right")
    ]
    rows += [
        (f"{name}, if found", percent(probe["of_found"][name]), found)
        for name in ("in_memory", "in_last_memory", "in_answer", "right", "lost")
    ]
    rows += [(f"lost in turn {turn}", str(count), found) for turn, count in probe["of_found"]["lost_by_turn"].items()]
    rows.append(("memories with a guess", percent(probe["guess"]), f"{probe['memories']} memories"))
    rows.append(("answers in no document", percent(probe["unsupported_answers"]), "objectives answered"))
    for turn, row in probe.get("probabilities", {}).get("by_turn", {}).items():
        told = f"{row['P_mem']:.4f}, {row['P_full']:.4f}, {row['R_M']:+.4f}"
        rows.append((f"turn {turn}: P_mem, P_full, R_M", told, f"{row['memories']} memories"))
    return rows
