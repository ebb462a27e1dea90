"""`mempo evaluate`: exact match, F1 and token cost of an agent over a file of questions."""

import argparse
import importlib.metadata
import re
import time
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import set_seed
from trl import ModelConfig, TrlParser
from trl.scripts.utils import get_git_commit_hash

from mempo_trl import load_questions
from mempo_trl.evaluation import (
    TransformersEngine,
    run_agent,
    summarize,
    summarize_by_objectives,
    write_evaluation,
)
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.scripts.arguments import RetrievalArguments, load_model, load_tokenizer, make_search_tool
from mempo_trl.tools import Toolbox


@dataclass
class EvaluateArguments:
    """
    What to evaluate, and how.

    Args:
        dataset_name (`str`):
            Questions: a JSON, JSONL, Parquet or CSV file, or a data set on the Hub.
        output_dir (`str`):
            Folder for `evaluation.json` and `rollouts.jsonl`.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"test"`):
            Configuration and split of a data set on the Hub.
        max_questions (`int`, *optional*):
            Only the first so many questions.
        context (`str`, *optional*, defaults to `"memory"`):
            What a turn sees: `"memory"` or `"full"`.
        max_turns (`int`, *optional*, defaults to `16`):
            Turns after which a rollout without an answer ends.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Tokens after which a turn is cut.
        max_tool_response_length (`int`, *optional*):
            Tokens after which a tool response is cut.
        system_prompt (`str`, *optional*), chat_template_path (`str`, *optional*):
            As in `mempo train`.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; 0 is greedy.
        batch_size (`int`, *optional*, defaults to `64`):
            Rollouts that are played at the same time.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of the figures in the table, `"squad"` or `"words"`. The JSON has both.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
    """

    dataset_name: str = field(metadata={"help": "Questions: a JSON, JSONL, Parquet or CSV file, or a Hub data set."})
    output_dir: str = field(metadata={"help": "Folder for evaluation.json and rollouts.jsonl."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="test", metadata={"help": "Split of a Hub data set."})
    max_questions: int | None = field(default=None, metadata={"help": "Only the first so many questions."})
    context: str = field(
        default="memory", metadata={"help": "What a turn sees: 'memory' or 'full'.", "choices": ["memory", "full"]}
    )
    max_turns: int = field(default=16, metadata={"help": "Turns after which a rollout without an answer ends."})
    max_completion_length: int = field(default=512, metadata={"help": "Tokens after which a turn is cut."})
    max_tool_response_length: int | None = field(
        default=None, metadata={"help": "Tokens after which a tool response is cut."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "As in mempo train."})
    chat_template_path: str | None = field(default=None, metadata={"help": "As in mempo train."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    batch_size: int = field(default=64, metadata={"help": "Rollouts that are played at the same time."})
    normalizer: str = field(
        default="squad",
        metadata={"help": "Normaliser of the figures in the table.", "choices": ["squad", "words"]},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})


def main(args: EvaluateArguments, model_args: ModelConfig, retrieval_args: RetrievalArguments) -> dict:
    """Evaluate, print the table and write the files."""
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    if args.chat_template_path is not None:
        tokenizer.chat_template = load_chat_template(args.chat_template_path)
    questions = load_questions(args.dataset_name, args.dataset_config, args.dataset_split).to_list()
    questions = questions[: args.max_questions]
    toolbox = Toolbox([make_search_tool(retrieval_args, tokenizer)])
    model = load_model(model_args, trainable=False).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    engine = TransformersEngine(model, tokenizer, args.max_completion_length, args.temperature)
    protocol = Protocol(
        tokenizer,
        toolbox,
        context=args.context,
        system_prompt=args.system_prompt,
        eos_token_ids=engine.eos_token_ids,
        max_tool_response_length=args.max_tool_response_length,
    )
    max_length = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if max_length is not None and args.max_completion_length >= max_length:
        raise ValueError(
            f"`max_completion_length` is {args.max_completion_length}, but the model takes {max_length} tokens in all; "
            "lower it."
        )
    done = []
    start = time.perf_counter()
    with tqdm(total=len(questions), desc="Questions") as bar:

        def on_batch(rollouts) -> None:
            done.extend(rollouts)
            running = summarize(done, args.normalizer)
            bar.set_postfix(em=f"{running['exact_match']:.3f}", tokens=f"{running['tokens_total_mean']:.0f}")
            bar.update(len(rollouts))

        rollouts = run_agent(
            questions,
            protocol=protocol,
            engine=engine,
            max_turns=args.max_turns,
            batch_size=args.batch_size,
            max_prompt_length=None if max_length is None else max_length - args.max_completion_length,
            on_batch=on_batch,
        )
    figures = summarize_by_objectives(rollouts, args.normalizer)
    report = {
        "model": model_args.model_name_or_path,
        "settings": asdict(args),
        "retrieval": asdict(retrieval_args),
        "tokens_counted": "prompt and completion of every turn, system prompt and question included",
        "seconds": round(time.perf_counter() - start, 2),
        "commit": get_git_commit_hash("mempo_trl"),
        "versions": {name: importlib.metadata.version(name) for name in ("mempo_trl", "transformers", "torch", "trl")},
        "results": figures,
    }
    write_evaluation(args.output_dir, report, rollouts)
    print_table(figures)
    return report


def print_table(figures: dict[str, dict]) -> None:
    """One line per number of objectives."""
    table = Table(title=f"normaliser: {figures['all']['normalizer']}")
    columns = ("exact_match", "f1", "format_ok_frac", "tokens_total_mean", "tokens_peak_mean", "turns_mean")
    for column in ("objectives", "rollouts", *columns):
        table.add_column(re.sub("_(mean|frac)$", "", column).replace("_", "\n"), justify="right")
    for name, row in figures.items():
        table.add_row(
            name, str(row["num_rollouts"]), *(f"{row[c]:.3f}" if row[c] < 10 else f"{row[c]:.0f}" for c in columns)
        )
    Console().print(table)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return TrlParser((EvaluateArguments, ModelConfig, RetrievalArguments), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
