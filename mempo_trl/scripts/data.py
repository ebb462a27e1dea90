"""`mempo data`: load, clean, filter and compose questions, and write them as JSON Lines."""

import argparse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from trl import ModelConfig

from mempo_trl import load_questions
from mempo_trl.data.closed_book import answer_without_search
from mempo_trl.data.objectives import compose_objectives, deduplicate
from mempo_trl.data.questions import write_questions
from mempo_trl.generation import TransformersEngine
from mempo_trl.rewards import score_answer
from mempo_trl.scripts.arguments import load_model, load_tokenizer
from mempo_trl.scripts.recipes import RecipeParser


@dataclass
class DataArguments:
    """
    Which questions to read, and what to make of them.

    Args:
        dataset_name (`str`):
            Questions: JSON, JSONL, Parquet or CSV files, or data sets on the Hub, separated by commas.
        output_file (`str`):
            JSON Lines file to write.

        > Reading

        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"train"`):
            Configuration and split of the data sets on the Hub.
        question_column (`str`, *optional*), answers_column (`str`, *optional*):
            Columns, or dotted paths, of rows that are not recognised.
        drop_bad_rows (`bool`, *optional*, defaults to `False`):
            Drop and count rows that give no question, instead of stopping at the first one.

        > Choosing

        sources (`str`, *optional*):
            Sources to take, separated by commas: the `dataset` or `data_source` of the rows, else the name of the file
            or data set. By default all, in the order of their names.
        exclude (`str`, *optional*):
            Files of held-out questions, separated by commas. None of their questions is taken.
        filter_model (`str`, *optional*):
            Model; questions that it answers without searching are dropped.
        filter_batch_size (`int`, *optional*, defaults to `32`):
            Questions that the model answers at the same time.

        > Composing

        objectives (`int`, *optional*, defaults to `1`):
            Objectives per question, from the sources in turn. 1 keeps the questions as they are.
        num_questions (`int`, *optional*):
            Questions to write; by default as many as there can be.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the choice and the order.
    """

    dataset_name: str = field(
        metadata={"help": "Questions: JSON, JSONL, Parquet or CSV files, or Hub data sets, separated by commas."}
    )
    output_file: str = field(metadata={"help": "JSON Lines file to write."})

    # Reading
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub data sets."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the Hub data sets."})
    question_column: str | None = field(
        default=None, metadata={"help": "Column, or dotted path, of the question in rows that are not recognised."}
    )
    answers_column: str | None = field(
        default=None, metadata={"help": "Column, or dotted path, of the answers in rows that are not recognised."}
    )
    drop_bad_rows: bool = field(
        default=False,
        metadata={"help": "Drop and count rows that give no question, instead of stopping at the first one."},
    )

    # Choosing
    sources: str | None = field(
        default=None,
        metadata={
            "help": "Sources to take, separated by commas: the dataset or data_source of the rows, else the name of "
            "the file or data set. By default all, in the order of their names."
        },
    )
    exclude: str | None = field(
        default=None,
        metadata={
            "help": "Files of held-out questions, separated by commas. None of their questions is taken, alone or as "
            "an objective."
        },
    )
    filter_model: str | None = field(
        default=None,
        metadata={
            "help": "Model; questions that it answers without searching are dropped. Its answers are kept in "
            "OUTPUT_FILE.answers.jsonl, so that a run that was killed goes on."
        },
    )
    filter_batch_size: int = field(default=32, metadata={"help": "Questions that the model answers at the same time."})

    # Composing
    objectives: int = field(
        default=1,
        metadata={"help": "Objectives per question, from the sources in turn. 1 keeps the questions as they are."},
    )
    num_questions: int | None = field(
        default=None, metadata={"help": "Questions to write; by default as many as there can be."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the choice and the order."})


def main(args: DataArguments) -> None:
    """Write the questions, and print what was read, dropped and made."""
    rows_by_source, read = read_sources(args)
    held_out = [row for name in split_names(args.exclude) for row in load_questions(name)]
    kept, dropped = deduplicate(rows_by_source, held_out)
    if args.filter_model is not None:
        kept, answered = drop_answered(kept, args)
        dropped += answered
    rows, unused = compose_objectives(kept, args.objectives, args.num_questions, args.seed)
    write_questions(args.output_file, rows)

    console = Console(markup=False, highlight=False, emoji=False)
    console.print(read)
    console.print(count_table(rows_by_source, dropped + unused))
    made = "question" if len(rows) == 1 else "questions"
    console.print(
        f"{len(rows)} {made} with {args.objectives} objective{'s' * (args.objectives > 1)} in {args.output_file}.\n"
        "Checked: no question comes twice, every objective has an answer, and load_questions reads what was written.",
        soft_wrap=True,
    )


def split_names(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def read_sources(args: DataArguments) -> tuple[dict[str, list[dict]], Table]:
    """The rows of each source that was asked for, and a table of what was read."""
    rows_by_source: dict[str, list[dict]] = {}
    table = Table("read from", "questions", "bad rows", title="files")
    for name in split_names(args.dataset_name):
        bad = Counter() if args.drop_bad_rows else None
        questions = load_questions(
            name, args.dataset_config, args.dataset_split, args.question_column, args.answers_column, bad
        )
        table.add_row(
            name, str(len(questions)), ", ".join(f"{count} {reason}" for reason, count in (bad or {}).items()) or "0"
        )
        path = Path(name)
        for row in questions.to_list():
            row = {column: value for column, value in row.items() if value is not None}
            row.setdefault("dataset", path.stem if path.is_file() else path.name)
            rows_by_source.setdefault(row["dataset"], []).append(row)
    sources = split_names(args.sources) or sorted(rows_by_source)
    missing = [source for source in sources if source not in rows_by_source]
    if missing:
        found = ", ".join(f"{len(rows)} of {source}" for source, rows in sorted(rows_by_source.items()))
        raise ValueError(f"There are no questions of {', '.join(missing)}; give `sources` among those found: {found}.")
    return {source: rows_by_source[source] for source in sources}, table


def drop_answered(rows_by_source: dict[str, list[dict]], args: DataArguments) -> tuple[dict[str, list[dict]], Counter]:
    """Drop the questions all of whose objectives the model answers without searching."""
    model_args = ModelConfig(model_name_or_path=args.filter_model, dtype="auto")
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, trainable=False).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    questions = [row["question"] for rows in rows_by_source.values() for row in rows]
    answers = answer_without_search(
        questions,
        TransformersEngine(model, tokenizer, max_completion_length=32, temperature=0),
        tokenizer,
        args.filter_model,
        f"{args.output_file}.answers.jsonl",
        args.filter_batch_size,
    )
    answer_to = dict(zip(questions, answers, strict=True))
    kept, dropped = {}, Counter()
    for source, rows in rows_by_source.items():
        kept[source] = [
            row for row in rows if not all(score_answer(answer_to[row["question"]], row["golden_answers"]))
        ]
        dropped[source, "answered without search"] = len(rows) - len(kept[source])
    return kept, dropped


def count_table(rows_by_source: dict[str, list[dict]], dropped: Counter) -> Table:
    """How many questions each source had, and what became of them."""
    reasons = list(dict.fromkeys(reason for _, reason in dropped))
    table = Table(title="questions")
    for column in ("source", "read", *reasons, "used"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, rows in rows_by_source.items():
        counts = [dropped[source, reason] for reason in reasons]
        table.add_row(source, str(len(rows)), *map(str, counts), str(len(rows) - sum(counts)))
    return table


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((DataArguments,), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
