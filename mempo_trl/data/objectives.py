"""Questions: from the rows of existing data sets to `question` and `golden_answers`."""

import os
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset


ANSWER_COLUMNS = ("golden_answers", "answers", "answer", "reward_model")


def _aliases(value: Any) -> list[str]:
    """One objective's aliases from one answer or a list of them; numbers become text, empty ones are dropped."""
    aliases = value if isinstance(value, (list, tuple)) else [value]
    for alias in aliases:
        if not isinstance(alias, (str, int, float, type(None))):
            raise ValueError(f"{alias!r} is no answer; give a text, a list of aliases, or a list of such lists.")
    return [str(alias) for alias in aliases if alias is not None and str(alias).strip()]


def normalize_golden_answers(value: Any) -> list[list[str]]:
    """
    Golden answers as objectives x aliases.

    Args:
        value (`Any`):
            One answer, a list of aliases of one objective, or a list of such lists.

    Returns:
        `list[list[str]]`

    Raises:
        ValueError: If there is no objective, or an objective without a non-empty answer.
    """
    several = isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value)
    objectives = [_aliases(part) for part in value] if several else [_aliases(value)]
    if not all(objectives):
        raise ValueError(f"`golden_answers` is {value!r}; each objective needs at least one answer. Drop the row.")
    return objectives


def normalize_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    Convert a row of a known data set.

    Known are: `golden_answers` (FlashRAG, and this project's own), `answers` (a list of aliases), `answer` with
    optional `answer_aliases` (HotpotQA, 2Wiki, MuSiQue), and `reward_model.ground_truth.target` (Search-R1; MEM1 with
    a list per objective). The question is `question`, or else the text after the last `Question: ` or
    `Answer the following questions: ` of a Search-R1 or MEM1 prompt. Several questions may come as a list.

    Args:
        row (`Mapping`):
            A row.

    Returns:
        `dict`: `question`, `golden_answers`, and the row's `id`, `dataset` and `supporting_titles` where it has them.

    Raises:
        ValueError: If the row has no known form; the message lists its columns.
    """
    question = row.get("question")
    if question is None and row.get("prompt"):
        text = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        for marker in ("Question: ", "Answer the following questions: "):
            if marker in text:
                question = text.rsplit(marker, 1)[1].strip()
    if row.get("golden_answers") is not None:
        answers = row["golden_answers"]
    elif row.get("answers") is not None:
        answers = row["answers"]
    elif row.get("answer") is not None:
        answers = row["answer"]
        if row.get("answer_aliases"):
            answers = _aliases(answers) + _aliases(row["answer_aliases"])
    elif row.get("reward_model") is not None:
        truth = row["reward_model"]["ground_truth"]
        answers = truth["target"] if isinstance(truth, Mapping) else truth
    else:
        answers = None
    if question is None or answers is None:
        missing = "question" if question is None else "answers"
        raise ValueError(
            f"No {missing} found in a row with the columns {sorted(row)}. Give a `question` column and one of "
            f"{', '.join(ANSWER_COLUMNS)}."
        )
    if not isinstance(question, str):
        question = "; ".join(question)
    kept = {name: row[name] for name in ("id", "dataset", "supporting_titles") if row.get(name) is not None}
    return {**kept, "question": question, "golden_answers": normalize_golden_answers(answers)}


def load_questions(name_or_path: str, config: str | None = None, split: str = "train") -> Dataset:
    """
    Load questions from a JSON, JSONL, Parquet or CSV file, or from a Hub data set, and convert their rows.

    Args:
        name_or_path (`str`):
            A file, or a data set on the Hub or in a folder.
        config (`str`, *optional*):
            Configuration of a data set.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a data set; a file has only one.

    Returns:
        [`~datasets.Dataset`]: With `question` and `golden_answers`, objectives x aliases.

    Raises:
        ValueError: If a row can't be converted; the message names its number and the columns found.
    """
    extension = os.path.splitext(name_or_path)[1].lower()
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}.get(extension)
    if kind is not None:
        if not os.path.isfile(name_or_path):
            raise FileNotFoundError(f"There is no question file {name_or_path!r}.")
        if os.path.getsize(name_or_path) == 0:  # `load_dataset` fails on it without a word
            raise ValueError(f"{name_or_path!r} holds no questions.")
        dataset = load_dataset(kind, data_files=name_or_path, split="train")
    else:
        dataset = load_dataset(name_or_path, config, split=split)
    rows = []
    for number, row in enumerate(dataset):
        try:
            rows.append(normalize_row(row))
        except ValueError as error:
            raise ValueError(f"Row {number} of {name_or_path!r}: {error}") from None
    if not rows:
        raise ValueError(f"{name_or_path!r} holds no questions.")
    columns = dict.fromkeys(name for row in rows for name in row)  # `from_list` would look at the first row only
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def golden_answers_of(row: Mapping[str, Any], required: bool = True) -> list[list[str]] | None:
    """Golden answers of a training row as objectives x aliases; `None` where they are missing and not required."""
    if not required and not row.get("golden_answers"):
        return None
    return normalize_golden_answers(row.get("golden_answers"))


def check_dataset(dataset: Dataset | IterableDataset, name: str, needs_answers: bool) -> None:
    """
    Check that a data set can be trained on or evaluated, before anything is loaded.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            The data set. Only the first row of an iterable one is looked at.
        name (`str`):
            Argument that it came with, for the message.
        needs_answers (`bool`):
            Whether `golden_answers` are needed (for the default reward or the memory reward).

    Raises:
        ValueError: If a column is missing, or if a row has no question or no answer.
    """
    if isinstance(dataset, IterableDataset):
        columns = dataset.column_names or list(next(iter(dataset)))
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
    if not isinstance(rows, IterableDataset):
        rows = rows.select_columns(needed)
    for number, row in enumerate(rows):
        if not isinstance(row["question"], str) or not row["question"].strip():
            raise ValueError(f"Row {number} of `{name}` has the question {row['question']!r}; it must be a text.")
        if needs_answers:
            try:
                normalize_golden_answers(row["golden_answers"])
            except ValueError as error:
                raise ValueError(f"Row {number} of `{name}`: {error}") from None
