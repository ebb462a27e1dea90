"""`mempo collect`: write cold-start rollouts from the gold passages of questions."""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm
from transformers import AutoTokenizer
from trl import TrlParser

from mempo_trl import load_questions
from mempo_trl.data.cold_start import scripted_rollout
from mempo_trl.scripts.arguments import RetrievalArguments, make_search_tool


@dataclass
class CollectArguments:
    """
    Which rollouts to write.

    Args:
        dataset_name (`str`):
            Questions with `supporting_titles`: a JSON, JSONL, Parquet or CSV file, or a data set on the Hub.
        output_file (`str`):
            JSON Lines file with one rollout per line, for `mempo sft`.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"train"`):
            Configuration and split of a data set on the Hub.
        max_rollouts (`int`, *optional*):
            Stop after so many rollouts.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer that counts `max_passage_tokens`.
    """

    dataset_name: str = field(metadata={"help": "Questions with supporting_titles: a file, or a Hub data set."})
    output_file: str = field(metadata={"help": "JSON Lines file with one rollout per line, for mempo sft."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    max_rollouts: int | None = field(default=None, metadata={"help": "Stop after so many rollouts."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Tokenizer that counts max_passage_tokens."}
    )


def main(args: CollectArguments, retrieval_args: RetrievalArguments) -> None:
    """Write the rollouts and say how many questions gave one."""
    questions = load_questions(args.dataset_name, args.dataset_config, args.dataset_split)
    if "supporting_titles" not in questions.column_names:
        raise ValueError(
            f"{args.dataset_name!r} has no column `supporting_titles`, from which scripted rollouts are made; its "
            f"columns after conversion are {questions.column_names}."
        )
    name = args.tokenizer_name_or_path
    search = make_search_tool(retrieval_args, None if name is None else AutoTokenizer.from_pretrained(name))
    path = Path(args.output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = tried = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in tqdm(questions, desc="Questions"):
            if written == args.max_rollouts:
                break
            tried += 1
            rollout = scripted_rollout(row, search)
            if rollout is not None:
                file.write(json.dumps(rollout, ensure_ascii=False) + "\n")
                written += 1
    print(f"{written} rollouts of {tried} questions in {path}; the others have a gold passage that is not found.")


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return TrlParser((CollectArguments, RetrievalArguments), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
