"""`mempo evaluate`: exact match, F1 and token cost of an agent over a file of questions."""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from peft import PeftModel
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel, set_seed
from trl import ModelConfig

from mempo_trl import load_questions
from mempo_trl.comb import choose_scorer
from mempo_trl.config import ANSWER_TEMPLATE
from mempo_trl.endpoints import ChatGenerator, CompletionsGenerator
from mempo_trl.evaluation.metrics import rollout_figures
from mempo_trl.evaluation.probe import DEFINITIONS, probe_probabilities, probe_texts
from mempo_trl.evaluation.probe import table_rows as probe_rows
from mempo_trl.evaluation.report import (
    COLUMNS,
    figure,
    figure_interval,
    make_report,
    table_rows,
    write_report,
    write_text,
)
from mempo_trl.generation import TransformersEngine, eos_token_ids
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.provenance import text_hash, tokenizer_hash, weights_stamp, without_secrets
from mempo_trl.runner import FAILED, check_resumable, in_order, play_questions, read_records
from mempo_trl.scripts.arguments import (
    PlayArguments,
    RetrievalArguments,
    load_agent,
    load_generation_config,
    load_tokenizer,
    make_search_tool,
)
from mempo_trl.scripts.recipes import RecipeParser
from mempo_trl.tools import Toolbox


@dataclass(kw_only=True)
class EvaluateArguments(PlayArguments):
    """
    What to evaluate, and how; the rest is in [`~mempo_trl.scripts.arguments.PlayArguments`].

    Args:
        output_dir (`str`):
            Folder for `rollouts.jsonl`, `evaluation.json` and `evaluation.md`. An evaluation that was killed goes on
            there.
        dataset_name (`str`, *optional*):
            Questions: a JSON, JSONL, Parquet or CSV file, or a data set on the Hub. Without it, `probe_memory` reads
            the rollouts that are in `output_dir`.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"test"`):
            Configuration and split of a data set on the Hub.
        max_questions (`int`, *optional*):
            Only the first so many questions.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start anew instead of going on with what is in `output_dir`.
        probe_memory (`bool`, *optional*, defaults to `False`):
            Say what the memories keep: `probe.json`, with answer probabilities if the model is here.
        answer_template (`str`, *optional*):
            Continuation whose answer these probabilities are of, as in `mempo train`.

        > Agent

        server_url (`list[str]`, *optional*):
            URLs of vLLM servers that run the model, instead of running it here. `model_name_or_path` still names the
            tokenizer.
        chat_url (`list[str]`, *optional*):
            URLs of an OpenAI-compatible chat endpoint instead. Tokens are counted with the tokenizer of
            `model_name_or_path`.
        server_model (`str`, *optional*):
            Name of the model on the server. Defaults to `model_name_or_path`.
        api_key_env (`str`, *optional*):
            Environment variable that holds the server's API key.

        > Report

        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of the figures in the table, `"squad"` or `"words"`. The JSON has both.
        save_prompts (`bool`, *optional*, defaults to `True`):
            Whether `rollouts.jsonl` holds the text of every prompt.
    """

    output_dir: str = field(metadata={"help": "Folder for the rollouts and the report; a killed run goes on there."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Questions: a JSON, JSONL, Parquet or CSV file, or a Hub data set. Without it, probe_memory reads "
            "the rollouts that are in output_dir."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="test", metadata={"help": "Split of a Hub data set."})
    max_questions: int | None = field(default=None, metadata={"help": "Only the first so many questions."})
    overwrite: bool = field(default=False, metadata={"help": "Start anew instead of going on in output_dir."})
    probe_memory: bool = field(
        default=False,
        metadata={"help": "Say what the memories keep (probe.json), with probabilities if the model is here."},
    )
    answer_template: str = field(
        default=ANSWER_TEMPLATE,
        metadata={"help": "Continuation whose answer these probabilities are of, as in mempo train."},
    )

    server_url: list[str] | None = field(
        default=None, metadata={"help": "URLs of vLLM servers that run the model, instead of running it here."}
    )
    chat_url: list[str] | None = field(
        default=None, metadata={"help": "URLs of an OpenAI-compatible chat endpoint instead."}
    )
    server_model: str | None = field(
        default=None, metadata={"help": "Name of the model on the server. Defaults to model_name_or_path."}
    )
    api_key_env: str | None = field(
        default=None, metadata={"help": "Environment variable that holds the server's API key."}
    )

    normalizer: str = field(
        default="squad",
        metadata={"help": "Normaliser of the figures in the table.", "choices": ["squad", "words"]},
    )
    save_prompts: bool = field(
        default=True, metadata={"help": "Whether rollouts.jsonl holds the text of every prompt."}
    )


def main(args: EvaluateArguments, model_args: ModelConfig, retrieval_args: RetrievalArguments) -> dict:
    """Evaluate, print the table and write the files."""
    folder = Path(args.output_dir)
    rollouts = folder / "rollouts.jsonl"
    if args.dataset_name is None:
        if not args.probe_memory:
            raise ValueError("Give the questions as `dataset_name`, or `--probe_memory` to look at finished rollouts.")
        if not rollouts.is_file():
            raise FileNotFoundError(f"There is no {str(rollouts)!r} to probe. Give the folder of an evaluation.")
        return write_probe(folder, probe_texts(read_records(rollouts), args.normalizer))
    check_arguments(args, model_args)
    start = time.perf_counter()
    tokenizer = load_tokenizer(model_args)
    if args.chat_template_path is not None:
        tokenizer.chat_template = load_chat_template(args.chat_template_path)
    questions = load_questions(args.dataset_name, args.dataset_config, args.dataset_split).to_list()
    questions = questions[: args.max_questions]
    before = []
    if rollouts.is_file() and not args.overwrite:
        before = read_records(rollouts)
        check_resumable(before, questions, args.num_samples, folder)
        before = [record for record in before if record["outcome"] != FAILED]  # failed ones are played again
    # Batches of a resumed run hold other rollouts: with the same seed a sample could repeat one that is there.
    set_seed(int(np.random.SeedSequence([args.seed, len(before)]).generate_state(1)[0]) if before else args.seed)

    search = make_search_tool(retrieval_args, tokenizer)
    remote = args.server_url or args.chat_url
    model, max_prompt_length = (None, args.max_prompt_length) if remote else load_agent(args, model_args)
    protocol = Protocol(
        tokenizer,
        Toolbox([search]),
        context=args.context,
        system_prompt=args.system_prompt,
        eos_token_ids=eos_token_ids(
            load_generation_config(model_args) if remote else model.generation_config, tokenizer
        ),
        max_tool_response_length=args.max_tool_response_length,
    )
    agent = {
        "model": model_args.model_name_or_path,
        "model_revision": model_args.model_revision,
        "base_model": model.active_peft_config.base_model_name_or_path if isinstance(model, PeftModel) else None,
        "server_model": (args.server_model or model_args.model_name_or_path) if remote else None,
        "corpus_hash": search.retriever.corpus_hash,
    }
    retrieval = without_secrets(asdict(retrieval_args))
    played = {
        **agent,
        "weights": None if remote else weights_stamp(model_args.model_name_or_path),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "chat_template_hash": text_hash(tokenizer.chat_template),
        "dtype": model_args.dtype,
        "temperature": args.temperature,
        "max_completion_length": args.max_completion_length,
        "seed": args.seed,
        # Servers may move while an evaluation goes on.
        "retrieval": {name: value for name, value in retrieval.items() if name not in ("search_url", "search_cache_dir")},
    }  # fmt: skip
    with tqdm(total=len(questions) * args.num_samples, initial=len(before), desc="Rollouts") as bar:
        running = Running(args.normalizer)
        for record in before:
            running.add(record)

        def on_record(record: dict) -> None:
            running.add(record)
            so_far = dict(em=f"{running.exact_match:.3f}", tokens=f"{running.tokens:.0f}", failed=running.failed)
            bar.set_postfix(so_far, refresh=False)
            bar.update()

        play_questions(
            questions,
            protocol=protocol,
            output_file=rollouts,
            max_turns=args.max_turns,
            **make_sampler(args, model, protocol, agent["server_model"]),
            batch_size=args.batch_size,
            num_samples=args.num_samples,
            max_prompt_length=max_prompt_length,
            settings=played,
            overwrite=args.overwrite,
            prompts=args.save_prompts,
            on_record=on_record,
        )
    records = read_records(rollouts)
    left_out = ("output_dir", "overwrite", "probe_memory", "answer_template", "save_prompts")
    report = make_report(
        records,
        rows=questions,
        agent=agent,
        protocol=protocol,
        settings={name: value for name, value in asdict(args).items() if name not in left_out},
        retrieval=retrieval,
        normalizer=args.normalizer,
        seed=args.seed,
        seconds=round(time.perf_counter() - start, 2),
    )
    write_report(folder, report)
    print_table(report)
    if args.probe_memory:
        records = in_order(records, questions)
        probe = probe_texts(records, args.normalizer)
        if model is not None:
            probe["probabilities"] = score_memories(records, protocol, model, args.answer_template)
        write_probe(folder, probe)
    return report


def check_arguments(args: EvaluateArguments, model_args: ModelConfig) -> None:
    """Refuse what can't be evaluated before anything is loaded."""
    if args.server_url is not None and args.chat_url is not None:
        raise ValueError("Give one of `server_url` and `chat_url`.")
    if args.server_model is not None and not (args.server_url or args.chat_url):
        raise ValueError(f"`server_model` is {args.server_model!r}; give the URL where it is as `server_url`.")
    if model_args.model_name_or_path is None:
        raise ValueError("Give the model as `model_name_or_path`; for a model on a server it names the tokenizer.")
    if args.answer_template.count("{answer}") != 1:
        raise ValueError(f"`answer_template` is {args.answer_template!r}; it must contain '{{answer}}' exactly once.")
    if args.max_questions is not None and args.max_questions < 1:
        raise ValueError(f"`max_questions` is {args.max_questions}, expected at least 1.")
    args.check()


def make_sampler(
    args: EvaluateArguments, model: PreTrainedModel | None, protocol: Protocol, server_model: str | None
) -> dict:
    """What the turns are sampled with, as arguments of `play_questions`."""
    shared = {"max_completion_length": args.max_completion_length, "temperature": args.temperature}
    if model is not None:
        return {"engine": TransformersEngine(model, protocol.tokenizer, **shared)}
    shared |= {"max_concurrency": args.batch_size, "api_key_env": args.api_key_env}
    if args.chat_url is not None:
        return {"generator": ChatGenerator(args.chat_url, server_model, protocol=protocol, **shared)}
    shared |= {"eos_token_ids": protocol.eos_token_ids, "seed": args.seed}
    return {"generator": CompletionsGenerator(args.server_url, server_model, **shared)}


def score_memories(records: list[dict], protocol: Protocol, model: PreTrainedModel, answer_template: str) -> dict:
    """Answer probabilities after the memories, with a progress bar."""
    tokenizer = protocol.tokenizer
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    scorer = choose_scorer(model, "auto")(model, pad_id)
    with tqdm(total=len(records), desc="Scoring") as bar:
        return probe_probabilities(
            records,
            protocol=protocol,
            scorer=scorer,
            tokenizer=tokenizer,
            answer_template=answer_template,
            on_batch=bar.update,
        )


INTERVALS = ("exact_match", "f1", "tokens_total_mean")
"""Columns of the table that have room for an interval in 80 columns; the files have all."""


class Running:
    """Exact match and tokens of the rollouts so far."""

    def __init__(self, normalizer: str):
        self.key = f"exact_match_{normalizer}"
        self.count = self.failed = self.right = self.cost = 0

    def add(self, record: dict) -> None:
        """Count a rollout."""
        figures = rollout_figures(record)
        self.count += 1
        self.right += figures[self.key]
        self.failed += record["outcome"] == FAILED
        self.cost += figures["tokens_total"] or 0

    @property
    def exact_match(self) -> float:
        return self.right / self.count

    @property
    def tokens(self) -> float:
        return self.cost / max(1, self.count - self.failed)


def print_table(report: dict) -> None:
    """One line per group of rollouts."""
    every = report["results"]["all"]
    title = f"normaliser: {every['normalizer']}; in the second line 95% intervals"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = [name for name in COLUMNS if name != "pass_at_n" or every["num_samples"] > 1]
    table.add_column("", overflow="fold")
    for column in ("rollouts", *(COLUMNS[name] for name in columns)):
        table.add_column(column.replace(" ", "\n"), justify="right")
    for name, row in table_rows(report):
        cells = [
            f"{figure(row[column])}\n{figure_interval(row, column)}" if column in INTERVALS else figure(row[column])
            for column in columns
        ]
        table.add_row(name, str(row["num_rollouts"]), *cells)
    Console(markup=False, highlight=False, emoji=False).print(table)
    if every["failures"]:
        print(f"{every['failures']} rollouts failed and count as wrong. The same command plays them again.")


def write_probe(folder: Path, probe: dict) -> dict:
    """Write `probe.json` and print its table."""
    report = {"definitions": DEFINITIONS, **probe}
    write_text(folder / "probe.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    title = f"what memories keep (normaliser: {probe['normalizer']})"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column, justify in (("", "left"), ("value", "right"), ("of", "left")):
        table.add_column(column, justify=justify)
    for row in probe_rows(probe):
        table.add_row(*row)
    Console(markup=False, highlight=False, emoji=False).print(table)
    return report


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((EvaluateArguments, ModelConfig, RetrievalArguments), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
