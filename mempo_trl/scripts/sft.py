"""`mempo sft`: cold start by supervised fine-tuning on rollouts."""

import argparse
from collections import Counter
from dataclasses import dataclass, field

from datasets import Dataset
from rich.console import Console
from rich.table import Table
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from mempo_trl.data.cold_start import read_rollouts, sft_rows, split_by_question
from mempo_trl.generation import model_eos_token_ids
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.scripts.arguments import is_adapter, load_model, load_tokenizer, parse_launched
from mempo_trl.scripts.recipes import RecipeParser
from mempo_trl.tools import Toolbox


@dataclass
class SFTArguments:
    """
    What to train on.

    Args:
        rollouts (`list[str]`):
            Files with one rollout per line: scripted, collected from a teacher, or written by training or evaluation.
            Several files are a mixture.
        eval_rollouts (`list[str]`, *optional*):
            The same for the evaluation loss.
        dev_fraction (`float`, *optional*):
            Fraction of the questions whose rollouts are set apart for the evaluation loss, instead of `eval_rollouts`.
        min_reward (`float`, *optional*):
            Lowest reward of a rollout that is used: the recorded one, else exact match if every turn is well formed.
        context (`str`, *optional*, defaults to `"memory"`):
            As in `mempo train`.
        system_prompt (`str`, *optional*):
            As in `mempo train`.
        max_tool_response_length (`int`, *optional*):
            As in `mempo train`.
    """

    rollouts: list[str] = field(metadata={"help": "Files with one rollout per line."})
    eval_rollouts: list[str] | None = field(default=None, metadata={"help": "The same for the evaluation loss."})
    dev_fraction: float | None = field(
        default=None,
        metadata={"help": "Fraction of the questions whose rollouts are set apart for the evaluation loss."},
    )
    min_reward: float | None = field(
        default=None,
        metadata={
            "help": "Lowest reward of a rollout that is used: the recorded one, else exact match if every turn is well "
            "formed."
        },
    )
    context: str = field(default="memory", metadata={"help": "As in mempo train.", "choices": ["memory", "full"]})
    system_prompt: str | None = field(default=None, metadata={"help": "As in mempo train."})
    max_tool_response_length: int | None = field(default=None, metadata={"help": "As in mempo train."})


def main(script_args: SFTArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    """Train, save, and push if asked to."""
    if script_args.eval_rollouts and script_args.dev_fraction is not None:
        raise ValueError("Give one of `eval_rollouts` and `dev_fraction`.")
    rollouts = _read(script_args.rollouts)
    eval_rollouts = _read(script_args.eval_rollouts or [])
    if script_args.dev_fraction is not None:
        rollouts, eval_rollouts = split_by_question(rollouts, script_args.dev_fraction, training_args.seed)
    tokenizer = load_tokenizer(model_args, training_args.trust_remote_code)
    if training_args.chat_template_path is not None:
        tokenizer.chat_template = load_chat_template(training_args.chat_template_path)
        training_args.chat_template_path = None
    model = load_model(model_args, trainable=True, trust_remote_code=training_args.trust_remote_code)
    protocol = Protocol(
        tokenizer,
        Toolbox([SearchTool(retriever=None)]),  # only its schema is used: the responses are recorded
        context=script_args.context,
        system_prompt=script_args.system_prompt,
        eos_token_ids=model_eos_token_ids(model, tokenizer),
        max_tool_response_length=script_args.max_tool_response_length,
    )

    def rows(records: list[dict], name: str) -> tuple[Dataset, Counter]:
        dataset, counts = sft_rows(records, protocol, script_args.min_reward, training_args.max_length)
        if len(dataset) == 0:
            raise ValueError(
                f"There is nothing left to {name} on: {_in_words(counts)}. `max_length` is {training_args.max_length} "
                f"and `min_reward` is {script_args.min_reward}."
            )
        return dataset, counts

    train_dataset, counts = rows(rollouts, "train")
    reports, eval_dataset = {"train": counts}, None
    if eval_rollouts:
        eval_dataset, reports["evaluation"] = rows(eval_rollouts, "evaluate")
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=None if is_adapter(model_args) else get_peft_config(model_args),
    )
    if trainer.accelerator.is_main_process:
        print_reports(reports, training_args.max_length)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if eval_dataset is not None:
        loss = trainer.evaluate()["eval_loss"]
        trainer.accelerator.print(f"eval_loss at the end: {loss:.4f} over {len(eval_dataset)} sequences.")
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()


def _read(paths: list[str]) -> list[dict]:
    records = []
    for path in paths:
        of_file = list(read_rollouts(path))
        if not of_file:
            raise ValueError(f"There are no rollouts in {path!r}.")
        records += of_file
    return records


def _in_words(counts: Counter) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def print_reports(reports: dict[str, Counter], max_length: int | None) -> None:
    """What is trained and evaluated on, and what was left out."""
    table = Table(title="rollouts for SFT")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    for row in dict.fromkeys(name for counts in reports.values() for name in counts):
        table.add_row(row, *(f"{counts[row]:,}" for counts in reports.values()))
    Console(markup=False, highlight=False, emoji=False).print(table)
    dropped = sum(counts["sequences dropped: too long"] for counts in reports.values())
    if dropped:
        print(
            f"{dropped} sequences have more than `max_length` = {max_length} tokens and are left out. Raise it to "
            f"{max(counts['longest sequence in tokens'] for counts in reports.values())}, or lower "
            "`max_tool_response_length`."
        )


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((SFTArguments, SFTConfig, ModelConfig), prog=prog)


if __name__ == "__main__":
    main(*parse_launched(make_parser()))
