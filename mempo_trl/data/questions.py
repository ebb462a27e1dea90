"""Questions: from files and data sets in use to rows of `question` and `golden_answers`."""

import ast
import io
import json
import os
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset

from .objectives import BadRow, normalize_golden_answers, question_key, separate_questions


ANSWER_COLUMNS = (
    "golden_answers",
    "answers",
    "answer",
    "reward_model.ground_truth.target",
    "reward_model.ground_truth",
)
"""Where known data sets have their answers, in the order in which they are looked for."""

EXTRA_ALIAS_COLUMNS = ("answer_aliases", "aug_answer")
ID_COLUMNS = ("id", "_id", "qid", "question_id")
DATASET_COLUMNS = ("dataset", "data_source")

SEVERAL_QUESTIONS_MARKER = "Answer the following questions: "
QUESTION_MARKERS = ("Question: ", SEVERAL_QUESTIONS_MARKER)
ANSWER_SEPARATOR = "<|answer_split|>"
NO_ANSWER = "<unk>"
"""What TriviaQA's test split has in place of an answer."""


def _parse_literal(text: str) -> Any:
    """The value of a list or dict as Python or NumPy print it: CSV files hold `['a' 'b']` and `array(['a'])`."""
    tokens, previous = [], None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # NumPy separates items by a space. Python would read two texts side by side as one.
        ends_item = previous is not None and (
            previous.type in (tokenize.STRING, tokenize.NUMBER) or previous.string in (")", "]", "}")
        )
        if ends_item and (
            token.type in (tokenize.STRING, tokenize.NUMBER, tokenize.NAME) or token.string in ("[", "{")
        ):
            tokens.append((tokenize.OP, ","))
        tokens.append((token.type, token.string))
        previous = previous if token.type == tokenize.NL else token
    tree = ast.parse(tokenize.untokenize(tokens).strip(), mode="eval")

    class WithoutArrays(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if isinstance(node.func, ast.Name) and node.func.id == "array" and node.args:
                return self.visit(node.args[0])
            return node

    return ast.literal_eval(WithoutArrays().visit(tree))


def _decode(value: Any) -> Any:
    """A value as plain lists, dicts, texts and numbers; `None` where a cell is empty."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and value != value:  # how pandas says that nothing is there
        return None
    if isinstance(value, (list, tuple)):
        return [_decode(part) if isinstance(part, (list, tuple, np.ndarray, np.generic)) else part for part in value]
    if not isinstance(value, str):
        return value
    text = value.strip()
    if (text[:1], text[-1:]) not in (("[", "]"), ("{", "}")):
        return value
    try:
        decoded = json.loads(text)
    except ValueError:
        try:
            decoded = _parse_literal(text)
        except (SyntaxError, ValueError, TypeError, RecursionError, tokenize.TokenError):
            if "'" in text or '"' in text:
                raise BadRow(
                    "list that can't be read", f"{value!r} looks like a list, but can't be read; write it as JSON."
                ) from None
            return value  # a text in brackets
    return decoded if isinstance(decoded, (list, dict)) else value


def _nest(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its flat columns, such as `answer.value`, as nested ones."""
    nested: dict[str, Any] = {name: value for name, value in row.items() if "." not in name}
    for name, value in row.items():
        place, rest = nested, name
        while "." in rest:
            head, tail = rest.split(".", 1)
            if not isinstance(place.setdefault(head, {}), dict):
                break
            place, rest = place[head], tail
        if rest not in place:
            place[rest] = value
    return nested


def _find(row: Mapping[str, Any], path: str) -> Any:
    """The value of a dotted path."""
    if path in row:
        return _decode(row[path])
    head, dot, tail = path.partition(".")
    inner = _decode(row.get(head))
    return _find(inner, tail) if dot and isinstance(inner, Mapping) else None


def _find_first(row: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    """The value of the first column that is filled; an empty text if there is nothing but empty texts."""
    values = [value for path in paths if (value := _find(row, path)) is not None]
    return next(
        (value for value in values if not isinstance(value, str) or value.strip()), values[0] if values else None
    )


def _column_names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of the columns, nested ones as dotted paths."""
    names = []
    for name, value in row.items():
        nested = isinstance(value, Mapping) and value
        names += _column_names(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return sorted(names)


def _question_text(value: Any) -> str | None:
    """The question from a text, a list of questions, or a prompt of chat messages."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        from_user = [message for message in value if message.get("role") == "user"] or value
        value = from_user[-1].get("content")
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "; ".join(part.strip() for part in value)
    return value.strip() if isinstance(value, str) and value.strip() else None


def _after_marker(text: str) -> str | None:
    """What follows the last `Question: ` of a Search-R1 prompt, or the list of questions of a MEM1 prompt."""
    question = None
    for marker in QUESTION_MARKERS:
        if marker in text:
            question = text.rsplit(marker, 1)[1].strip()
    return question


def _truth(value: Any) -> Any:
    """Answers from TriviaQA's dict, and from a text with DeepResearcher's separator; all else as it is."""
    if isinstance(value, Mapping) and "value" in value and "aliases" in value:
        aliases = _decode(value["aliases"]) or []
        more = _decode(value.get("normalized_aliases")) or []
        return [alias for alias in (value["value"], *aliases, *more) if alias != NO_ANSWER]
    if isinstance(value, str) and ANSWER_SEPARATOR in value:
        return value.split(ANSWER_SEPARATOR)
    return value


def _supporting_titles(row: Mapping[str, Any]) -> list[str] | None:
    """Titles of the gold passages, each once: given, or from `supporting_facts` (HotpotQA) or `paragraphs` (MuSiQue)."""
    titles = _find(row, "supporting_titles")
    if titles is None:
        facts = _find(row, "supporting_facts") or _find(row, "metadata.supporting_facts")
        if isinstance(facts, Mapping):
            titles = _decode(facts.get("title"))
        elif isinstance(facts, list) and all(isinstance(fact, list) and fact for fact in facts):
            titles = [fact[0] for fact in facts]
    if titles is None and row.get("answerable") is not False:  # else a gold passage was taken away
        paragraphs = _find(row, "paragraphs")
        if isinstance(paragraphs, list) and all(isinstance(paragraph, Mapping) for paragraph in paragraphs):
            hops = _find(row, "question_decomposition") or []
            order = [hop.get("paragraph_support_idx") for hop in hops]
            gold = [paragraph for paragraph in paragraphs if paragraph.get("is_supporting")]
            gold.sort(key=lambda paragraph: order.index(paragraph["idx"]) if paragraph.get("idx") in order else -1)
            titles = [paragraph["title"] for paragraph in gold] or None
    return None if titles is None else list(dict.fromkeys(map(str, titles)))


def normalize_row(
    row: Mapping[str, Any], question_column: str | None = None, answers_column: str | None = None
) -> dict[str, Any]:
    """
    Convert a row of a known data set.

    Known are the rows of FlashRAG (`golden_answers`, also this project's own), HotpotQA, 2Wiki and MuSiQue (`answer`,
    `answer_aliases`), NQ-open (`answer`, a list), TriviaQA (`answer` with `value` and `aliases`), ASearcher (`answer`,
    `aug_answer`), Search-R1 and MEM1 (`reward_model.ground_truth.target`; MEM1 with a list per objective), MemSearcher
    and DeepResearcher (`reward_model.ground_truth`), and those with a list `answers`. Columns may be nested, flat
    (`reward_model.ground_truth.target`) or texts that hold a list or JSON, as in CSV files. The question is `question`,
    or else the text after the last `Question: ` or `Answer the following questions: ` of `prompt`. Several questions
    may come as a list.

    Args:
        row (`Mapping`):
            A row.
        question_column (`str`, *optional*), answers_column (`str`, *optional*):
            Columns, or dotted paths, of a row that is not known. A prompt of chat messages may be the question column.

    Returns:
        `dict`: `question`, `golden_answers`, and the row's `id`, `dataset`, `supporting_titles` and `objectives` where
        it has them.

    Raises:
        BadRow: If the row has no known form, with the columns found and the arguments that name the right ones; or if
            its question or its answers are missing or can't be read.
    """
    row = _nest(row)
    prompt = _question_text(_find(row, "prompt"))
    # Rows of several questions may still have the columns of the first one.
    if prompt is not None and SEVERAL_QUESTIONS_MARKER in prompt and not (question_column or answers_column):
        truth = _find_first(row, ANSWER_COLUMNS[-2:])
        question = None if truth is None else _after_marker(prompt)
    else:
        truth = question = None
    if question is None:
        question = _question_text(_find(row, question_column or "question"))
        if question_column is not None and question is not None:
            question = _after_marker(question) or question
        elif question is None and prompt is not None:
            question = _after_marker(prompt)
    if truth is None:
        truth = _truth(_find_first(row, ANSWER_COLUMNS if answers_column is None else (answers_column,)))
        extra = [] if answers_column is not None else [_find(row, name) for name in EXTRA_ALIAS_COLUMNS]
        for aliases in filter(None, extra):
            given = truth if isinstance(truth, list) else [] if truth is None else [truth]
            truth = given + (aliases if isinstance(aliases, list) else [aliases])
    if question is None or truth is None:
        missing, flag, known = (
            ("question", "--question_column", "question, prompt")
            if question is None
            else ("answers", "--answers_column", ", ".join(ANSWER_COLUMNS))
        )
        columns = _column_names(row)
        raise BadRow(
            f"no {missing}",
            f"No {missing} found in a row with the columns {columns}. Known columns are {known} (in `prompt`, what "
            f"follows the last {' or '.join(map(repr, QUESTION_MARKERS))}). Name another one with {flag}; dotted "
            "paths are allowed.",
        )
    kept = {}
    for name, columns in (("id", ID_COLUMNS), ("dataset", DATASET_COLUMNS)):
        value = _find_first(row, columns)
        if value not in (None, ""):
            kept[name] = str(value)
    titles = _supporting_titles(row)
    if titles is not None:
        kept["supporting_titles"] = titles
    if row.get("objectives") is not None:
        kept["objectives"] = _decode(row["objectives"])
    return {**kept, "question": question, "golden_answers": normalize_golden_answers(truth)}


def _read_json(path: str) -> Iterator[Any]:
    """Rows of JSON Lines, or of a JSON list, alone or under `data`."""
    with open(path, encoding="utf-8-sig") as file:
        if not path.lower().endswith(".jsonl"):
            try:
                content = json.load(file)
            except ValueError:
                file.seek(0)  # JSON Lines under another name
            else:
                if isinstance(content, Mapping) and isinstance(content.get("data"), list):
                    content = content["data"]
                yield from content if isinstance(content, list) else [content]
                return
        for line in file:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    yield BadRow("no JSON", f"it is no JSON ({error}).")


def _read_rows(name_or_path: str, config: str | None, split: str) -> Iterator[Any]:
    """
    Rows as they are. Files are not read by `load_dataset`, which guesses types: it would give 7 for the answer `007` of
    a CSV file, and a time stamp for the date `1987-01-02` of a JSON file.
    """
    extension = os.path.splitext(name_or_path)[1].lower()
    if extension in (".json", ".jsonl", ".parquet", ".csv"):
        if not os.path.isfile(name_or_path):
            raise FileNotFoundError(f"There is no question file {name_or_path!r}.")
        if os.path.getsize(name_or_path) == 0:
            return
        if extension == ".csv":
            with pd.read_csv(name_or_path, dtype=str, keep_default_na=False, chunksize=10_000) as chunks:
                for chunk in chunks:
                    yield from chunk.to_dict("records")
        elif extension == ".parquet":
            for batch in pq.ParquetFile(name_or_path).iter_batches(batch_size=1_000):
                yield from batch.to_pylist()
        else:
            yield from _read_json(name_or_path)
    elif os.path.isfile(name_or_path):
        raise ValueError(
            f"{name_or_path!r} has the extension {extension!r}; questions are read from .jsonl, .json, .parquet and "
            ".csv files."
        )
    else:
        yield from load_dataset(name_or_path, config, split=split)


def load_questions(
    name_or_path: str,
    config: str | None = None,
    split: str = "train",
    question_column: str | None = None,
    answers_column: str | None = None,
    dropped: Counter | None = None,
) -> Dataset:
    """
    Load questions from a JSON, JSONL, Parquet or CSV file, or from a Hub data set, and convert their rows as
    [`~mempo_trl.data.questions.normalize_row`] does.

    Args:
        name_or_path (`str`):
            A file, or a data set on the Hub or in a folder.
        config (`str`, *optional*):
            Configuration of a data set.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a data set; a file has only one.
        question_column (`str`, *optional*), answers_column (`str`, *optional*):
            Columns, or dotted paths, of rows that are not known.
        dropped (`Counter`, *optional*):
            Counts rows that give no question, by reason. Without it, such a row is an error.

    Returns:
        [`~datasets.Dataset`]: With `question` and `golden_answers`, objectives x aliases, and where known `id`,
        `dataset`, `supporting_titles` and `objectives`.

    Raises:
        ValueError: If a row can't be converted; the message names its number (from 0) and the columns found.
    """
    rows, first_error = [], None
    for number, row in enumerate(_read_rows(name_or_path, config, split)):
        try:
            if isinstance(row, BadRow):
                raise row
            if not isinstance(row, Mapping):
                raise BadRow("no object", f"it is {row!r}, but must be an object with named columns.")
            rows.append(normalize_row(row, question_column, answers_column))
        except BadRow as error:
            located = ValueError(f"Row {number} of {name_or_path!r}: {error}")
            if dropped is None:
                raise located from None
            dropped[error.reason] += 1
            first_error = first_error or located
    if not rows:
        raise first_error or ValueError(f"{name_or_path!r} holds no questions.")
    columns = dict.fromkeys(name for row in rows for name in row)  # `from_list` would look at the first row only
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def write_questions(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """
    Check questions and write them as JSON Lines. The file appears complete or not at all.

    Args:
        path (`str` or `Path`):
            File to write; its name ends in `.jsonl`.
        rows (`list[dict]`):
            Questions in the form of [`~mempo_trl.load_questions`].

    Raises:
        ValueError: If a question comes twice, alone or as an objective, or if [`~mempo_trl.load_questions`] would read
            something else than was written.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"The output file is {str(path)!r}; give it a name that ends in .jsonl.")
    twice = [key for key, count in Counter(key for row in rows for key in _written_keys(row)).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} questions come more than once, such as {twice[0]!r}; drop the repetitions.")
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}.unfinished.jsonl")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for row, loaded in zip(rows, load_questions(str(unfinished)), strict=True):
            loaded = {name: value for name, value in loaded.items() if value is not None}
            if loaded != row:
                raise ValueError(f"The question {row} would be read as {loaded}.")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _written_keys(row: Mapping[str, Any]) -> set[str]:
    """The objectives of a composed question; any other question as a whole."""
    return set(separate_questions(row)) if row.get("objectives") else {question_key(row["question"])}
