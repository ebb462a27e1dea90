"""Questions with one or several objectives: their answers, their repetitions, and how they are composed."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from ..rewards import REWARD_ARGUMENTS, normalize_squad, normalize_words


_WRITTEN_LIST = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)


class BadRow(ValueError):
    """
    A row that gives no question.

    Args:
        reason (`str`):
            The kind of fault, the same for all rows that have it.
        message (`str`):
            What is wrong with this row, and what to do.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def _alias_text(alias: Any) -> str:
    if alias is None:
        return ""
    if not isinstance(alias, (str, int, float)):
        raise BadRow(
            "answers of an unknown form",
            f"{alias!r} is no answer; give a text, a list of aliases, or a list of such lists.",
        )
    if isinstance(alias, float) and alias.is_integer():  # a column of integers with gaps is read as floats
        alias = int(alias)
    return str(alias).strip()


def _aliases(value: Any) -> list[str]:
    """One objective's aliases from one answer or a list of them, each once; numbers become text."""
    aliases = value if isinstance(value, (list, tuple)) else [value]
    return [alias for alias in dict.fromkeys(map(_alias_text, aliases)) if alias]


def normalize_golden_answers(value: Any) -> list[list[str]]:
    """
    Golden answers as objectives x aliases. Empty and repeated aliases are dropped.

    Args:
        value (`Any`):
            One answer, a list of aliases of one objective, or a list of such lists.

    Returns:
        `list[list[str]]`

    Raises:
        BadRow: If there is no objective, or an objective without a non-empty answer.
    """
    several = isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value)
    objectives = [_aliases(part) for part in value] if several else [_aliases(value)]
    if not all(objectives):
        raise BadRow(
            "no answers",
            f"`golden_answers` is {value!r}; each objective needs at least one answer. Drop the row.",
        )
    return objectives


def golden_answers_of(row: Mapping[str, Any], required: bool = True) -> list[list[str]] | None:
    """Golden answers of a training row as objectives x aliases; `None` where they are missing and not required."""
    if not required and not row.get("golden_answers"):
        return None
    return normalize_golden_answers(row.get("golden_answers"))


def check_row(row: Mapping[str, Any], name: str, needs_answers: bool) -> None:
    """
    Check a row.

    Args:
        row (`Mapping`):
            The row.
        name (`str`):
            What the message calls it.
        needs_answers (`bool`):
            Whether `golden_answers` are needed.

    Raises:
        ValueError: If it has no question or no answer.
    """
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{name} has the question {question!r}; it must be a text.")
    if not needs_answers:
        return
    try:
        objectives = normalize_golden_answers(row.get("golden_answers"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for alias in (alias for aliases in objectives for alias in aliases):
        if _WRITTEN_LIST.fullmatch(alias):
            raise ValueError(
                f"{name} has the answer {alias!r}, a list that was written as text (as CSV files do), which no answer "
                "would ever equal. Read it with `json.loads` or `ast.literal_eval` first."
            )


def check_dataset(dataset: Dataset | IterableDataset, name: str, needs_answers: bool) -> list[str]:
    """
    Check that a data set can be trained on or evaluated, before anything is loaded.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            The data set. Only the first row of an iterable one is looked at.
        name (`str`):
            Argument that it came with, for the message.
        needs_answers (`bool`):
            Whether `golden_answers` are needed (for the default reward or the memory reward).

    Returns:
        `list[str]`: Names of its columns.

    Raises:
        ValueError: If it is no data set, if a column is missing or has the name of something else that reward functions
            get, or if a row has no question or no answer.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"`{name}` is a `{type(dataset).__name__}`; pass a `datasets.Dataset`, such as one split of a `DatasetDict`, or "
            "`Dataset.from_list(rows)`."
        )
    if isinstance(dataset, IterableDataset):
        columns = dataset.column_names or list(next(iter(dataset), {}))
        rows = dataset.take(1)
    else:
        columns, rows = dataset.column_names, dataset
    needed = ["question", "golden_answers"] if needs_answers else ["question"]
    missing = [column for column in needed if column not in columns]
    if missing:
        raise ValueError(
            f"`{name}` has no column {' and no column '.join(map(repr, missing))}; its columns are {sorted(columns)}. "
            "Rename them, or convert known data sets with `mempo_trl.load_questions`."
        )
    if "image" in columns or "images" in columns:
        raise ValueError(f"`{name}` has an image column; images are not supported. Remove it.")
    taken = [column for column in columns if column in REWARD_ARGUMENTS]
    if taken:
        raise ValueError(
            f"`{name}` has the column {', '.join(map(repr, taken))}, a name under which reward functions get something "
            "else. Rename or remove it."
        )
    if not isinstance(rows, IterableDataset):
        rows = rows.select_columns(needed)
    for number, row in enumerate(rows):
        check_row(row, f"Row {number} of `{name}`", needs_answers)
    return list(columns)


def question_key(question: str) -> str:
    """What two questions have in common that differ only in case, punctuation and white space."""
    return normalize_words(question) or question.strip()


def separate_questions(row: Mapping[str, Any]) -> list[str]:
    """
    Keys of the questions of a row, one per objective.

    Args:
        row (`Mapping`):
            Row with `question` and `golden_answers`. Without `objectives`, as in MEM1's files, the question is split
            where that gives as many parts as there are objectives.

    Returns:
        `list[str]`: As of [`~mempo_trl.data.objectives.question_key`].
    """
    if row.get("objectives"):
        return [question_key(objective["question"]) for objective in row["objectives"]]
    parts = row["question"].split("; ")
    return list(map(question_key, parts if len(parts) == len(row["golden_answers"]) else [row["question"]]))


def deduplicate(
    rows_by_source: Mapping[str, list[dict]], held_out: Iterable[Mapping[str, Any]] = ()
) -> tuple[dict[str, list[dict]], Counter]:
    """
    Drop questions that come again, that are held out, or whose answers the default reward can never find right.

    Questions are compared without case, punctuation and white space. Of two with the same text the one in the source
    that comes first is kept; the order of the rows of a source makes no difference.

    Args:
        rows_by_source (`dict[str, list[dict]]`):
            Rows of [`~mempo_trl.load_questions`].
        held_out (`Iterable[Mapping]`, *optional*):
            Rows none of whose questions, as a whole or as an objective, may be kept.

    Returns:
        `tuple[dict[str, list[dict]], Counter]`: The rows of each source in an order of their own, and how many were
        dropped by `(source, reason)`.
    """
    forbidden = {key for row in held_out for key in (question_key(row["question"]), *separate_questions(row))}
    kept, dropped, seen = {}, Counter(), set()
    for source, rows in rows_by_source.items():
        kept[source] = []
        keyed = [(question_key(row["question"]), row) for row in rows]
        # Of equal questions the one with gold passages comes first.
        keyed.sort(key=lambda pair: (pair[0], not pair[1].get("supporting_titles"), json.dumps(pair[1])))
        for key, row in keyed:
            if key in forbidden or not forbidden.isdisjoint(separate_questions(row)):
                dropped[source, "held out"] += 1
            elif key in seen:
                dropped[source, "repeated"] += 1
            elif not all(any(map(normalize_squad, aliases)) for aliases in row["golden_answers"]):
                dropped[source, "answer is only an article or punctuation"] += 1
            else:
                seen.add(key)
                kept[source].append(row)
    return kept, dropped


def compose_objectives(
    rows_by_source: Mapping[str, list[dict]], k: int, num_questions: int | None = None, seed: int = 0
) -> tuple[list[dict], Counter]:
    """
    Compose questions of `k` objectives from single questions, none of which is used twice.

    The objectives of a question come from the sources in turn, so that `k=2` of HotpotQA and NQ gives one of each. Their
    texts are joined as in MEM1: each ends with a question mark, and `"; "` stands between them. Semicolons also
    separate the answers, so that aliases with a semicolon are dropped. The result does not depend on the order of the
    rows, and a smaller `num_questions` gives the first ones of a larger one.

    Args:
        rows_by_source (`dict[str, list[dict]]`):
            Rows of [`~mempo_trl.load_questions`] without repetitions, as from
            [`~mempo_trl.data.objectives.deduplicate`].
        k (`int`):
            Objectives per question. With 1 the rows of all sources are shuffled and stay as they are, whatever number
            of objectives they have; only an id that is missing or not unique is replaced.
        num_questions (`int`, *optional*):
            Questions to make; by default as many as there can be.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the choice and the order.

    Returns:
        `tuple[list[dict], Counter]`: Questions with `objectives` (`id`, `dataset`, `question`, `golden_answers` and
        `supporting_titles` of each), and how many rows were not used by `(source, reason)`.

    Raises:
        ValueError: If a question comes twice, or if so many questions can't be made.
    """
    sources = list(rows_by_source)
    if k < 1 or not sources or (k > 1 and k < len(sources)):
        raise ValueError(
            f"{k} objectives can't be taken from the {len(sources)} sources {sources}; name as many sources as there "
            "are objectives, or fewer."
        )
    for key, count in Counter(
        question_key(row["question"]) for rows in rows_by_source.values() for row in rows
    ).items():
        if count > 1:
            raise ValueError(f"The question {key!r} comes {count} times; drop repetitions with `deduplicate` first.")
    unused, pools = Counter(), {}
    for source, rows in rows_by_source.items():
        shuffled = sorted(rows, key=lambda row: question_key(row["question"]))
        random.Random(f"{seed} {source}").shuffle(shuffled)
        pools[source] = []
        for row in shuffled:
            try:
                pools[source].append({"dataset": source, **row} if k == 1 else _objective(row, source))
            except BadRow as error:
                unused[source, error.reason] += 1
    turns = [sources[i % len(sources)] for i in range(k)]  # which source gives each objective
    possible = sum(map(len, pools.values())) if k == 1 else min(len(pools[s]) // turns.count(s) for s in sources)
    count = possible if num_questions is None else num_questions
    if not 0 < count <= possible:
        available = ", ".join(f"{len(pool)} of {source}" for source, pool in pools.items())
        raise ValueError(
            f"{count} questions with {k} objectives were asked for, but {possible} can be made from {available}; "
            "lower the number, or give more questions."
        )
    if k == 1:
        mixed = [(source, row) for source, pool in pools.items() for row in pool]
        random.Random(f"{seed}").shuffle(mixed)
        unused.update((source, "left over") for source, _ in mixed[count:])
        return _with_unique_ids([row for _, row in mixed[:count]]), unused
    left = {source: iter(pool) for source, pool in pools.items()}
    composed = [_compose([next(left[source]) for source in turns]) for _ in range(count)]
    unused.update((source, "left over") for source, pool in left.items() for _ in pool)
    return composed, unused


def _question_id(prefix: str | int, question: str) -> str:
    return f"{prefix}-{hashlib.sha256(question.encode()).hexdigest()[:16]}"


def _with_unique_ids(rows: list[dict]) -> list[dict]:
    """Rows with a new id where there is none or several rows share it (`train_0` is in all of FlashRAG's sets)."""
    ids = Counter(row.get("id") for row in rows)
    return [
        row if row.get("id") and ids[row["id"]] == 1 else {**row, "id": _question_id(row["dataset"], row["question"])}
        for row in rows
    ]


def _objective(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A row as an objective; a [`BadRow`] if it can't be one."""
    if len(row["golden_answers"]) > 1:
        raise BadRow("several objectives", f"{row['question']!r} is composed already.")
    given = row["golden_answers"][0]
    aliases = [alias for alias in given if ";" not in alias]
    if len(aliases) < len(given) and not any(map(normalize_squad, aliases)):
        raise BadRow("semicolon in the answer", f"{given!r} can't be told from the answers to several questions.")
    question = row["question"].strip()
    return {
        "id": row.get("id"),
        "dataset": row.get("dataset") or source,
        "question": question if question.endswith(("?", "？")) else f"{question}?",
        "golden_answers": aliases,
        "supporting_titles": row.get("supporting_titles"),
    }


def _compose(objectives: list[dict[str, Any]]) -> dict[str, Any]:
    """One question from several objectives."""
    question = "; ".join(objective["question"] for objective in objectives)
    titles = [objective["supporting_titles"] for objective in objectives]
    known = {} if None in titles else {"supporting_titles": list(dict.fromkeys(sum(titles, [])))}
    return {
        "id": _question_id(len(objectives), question),
        "dataset": "+".join(dict.fromkeys(objective["dataset"] for objective in objectives)),
        "question": question,
        "golden_answers": [objective["golden_answers"] for objective in objectives],
        **known,
        "objectives": objectives,
    }
