"""`mempo sft`: cold start by supervised fine-tuning on rollouts."""

import argparse
import itertools
from dataclasses import dataclass, field

from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from mempo_trl.data.cold_start import read_rollouts, sft_rows
from mempo_trl.evaluation import model_eos_token_ids
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.scripts.arguments import is_adapter, load_model, load_tokenizer, parse_launched
from mempo_trl.tools import Toolbox


@dataclass
class SFTArguments:
    """
    What to train on.

    Args:
        rollouts (`list[str]`):
            Files with one rollout per line: scripted, collected from a teacher, or written by training or evaluation.
        eval_rollouts (`list[str]`, *optional*):
            The same for the evaluation loss.
        context (`str`, *optional*, defaults to `"memory"`):
            As in `mempo train`.
        system_prompt (`str`, *optional*):
            As in `mempo train`.
        max_tool_response_length (`int`, *optional*):
            As in `mempo train`.
    """

    rollouts: list[str] = field(metadata={"help": "Files with one rollout per line."})
    eval_rollouts: list[str] | None = field(default=None, metadata={"help": "The same for the evaluation loss."})
    context: str = field(default="memory", metadata={"help": "As in mempo train.", "choices": ["memory", "full"]})
    system_prompt: str | None = field(default=None, metadata={"help": "As in mempo train."})
    max_tool_response_length: int | None = field(default=None, metadata={"help": "As in mempo train."})


def main(script_args: SFTArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    """Train, save, and push if asked to."""
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

    def rows(paths: list[str]):
        dataset = sft_rows(itertools.chain.from_iterable(map(read_rollouts, paths)), protocol)
        if len(dataset) == 0:
            raise ValueError(f"There are no rollouts in {', '.join(map(repr, paths))}.")
        longest = max(map(len, dataset["input_ids"]))
        if training_args.max_length is not None and longest > training_args.max_length:
            raise ValueError(
                f"`max_length` is {training_args.max_length}, but the longest sequence has {longest} tokens and would "
                "lose its end, the turn itself. Raise `max_length`, or lower `max_tool_response_length`."
            )
        return dataset

    train_dataset = rows(script_args.rollouts)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=rows(script_args.eval_rollouts) if script_args.eval_rollouts else None,
        processing_class=tokenizer,
        peft_config=None if is_adapter(model_args) else get_peft_config(model_args),
    )
    longest = max(map(len, train_dataset["input_ids"]))
    trainer.accelerator.print(f"{len(train_dataset)} sequences, the longest of {longest} tokens.")
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return TrlParser((SFTArguments, SFTConfig, ModelConfig), prog=prog)


if __name__ == "__main__":
    main(*parse_launched(make_parser()))
