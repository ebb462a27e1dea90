"""`mempo train`: train an agent with MemPO."""

import argparse
import importlib
import os
import sys
from dataclasses import dataclass, field

from transformers import TrainerCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from mempo_trl import MemPOConfig, MemPOTrainer, load_questions
from mempo_trl.rewards import REWARD_FUNCS
from mempo_trl.scripts.arguments import (
    RetrievalArguments,
    is_adapter,
    load_model,
    load_tokenizer,
    make_search_tool,
    parse_launched,
)
from mempo_trl.scripts.recipes import RecipeParser


@dataclass
class TrainArguments:
    """
    What to train on.

    Args:
        dataset_name (`str`):
            Questions: a JSON, JSONL, Parquet or CSV file, or a data set on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Its split for training.
        eval_dataset_name (`str`, *optional*):
            Questions for the evaluation during training (with `eval_strategy`). Defaults to `dataset_name`.
        dataset_test_split (`str`, *optional*, defaults to `"test"`):
            Split of a data set on the Hub for it.
        reward_funcs (`list[str]`, *optional*):
            Reward functions by name, or as dotted import paths. Defaults to exact match times well-formedness.
        callbacks (`list[str]`, *optional*):
            Callbacks as dotted import paths of their classes, which are called without arguments. A
            [`MemoryRewardCallback`] replaces the default one.
    """

    dataset_name: str = field(metadata={"help": "Questions: a JSON, JSONL, Parquet or CSV file, or a Hub data set."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split of a Hub data set for training."})
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Questions for the evaluation during training. Defaults to dataset_name."}
    )
    dataset_test_split: str = field(default="test", metadata={"help": "Split of a Hub data set for evaluation."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Reward functions: {', '.join(REWARD_FUNCS)}, or dotted import paths. Defaults to "
            "exact match times well-formedness."
        },
    )
    callbacks: list[str] | None = field(
        default=None,
        metadata={
            "help": "Callbacks: dotted import paths of their classes, which are called without arguments. A "
            "MemoryRewardCallback replaces the default one."
        },
    )


def import_name(path: str, kind: str, remedy: str):
    """What a dotted path names (the working directory counts). The errors say what kind of thing it should be."""
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"There is no {kind} {path!r}. {remedy}")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)  # not `vars`: transformers loads its names late
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that the module itself needs
            raise
        raise ModuleNotFoundError(
            f"There is no module {module!r} for the {kind} {path!r}. Start in the folder that has it, or install it."
        ) from error
    if found is None:
        raise ValueError(f"The module {module!r} has no {kind} {name!r}. {remedy}")
    return found


def load_reward_func(name: str):
    """A reward function by its name, or imported by its dotted path."""
    if name in REWARD_FUNCS:
        return REWARD_FUNCS[name]
    return import_name(name, "reward function", f"Use one of {sorted(REWARD_FUNCS)} or a dotted path.")


def load_callback(path: str) -> TrainerCallback:
    """A callback of the class that a dotted path names."""
    remedy = "Give the dotted path of a subclass of `transformers.TrainerCallback`: 'my_module.MyCallback'."
    callback = import_name(path, "callback", remedy)
    if not (isinstance(callback, type) and issubclass(callback, TrainerCallback)):
        raise ValueError(f"The callback {path!r} is {callback!r}. {remedy}")
    return callback()


def main(
    script_args: TrainArguments,
    training_args: MemPOConfig,
    model_args: ModelConfig,
    retrieval_args: RetrievalArguments,
) -> None:
    """Train, save, and push if asked to."""
    # Before anything is loaded, so that a wrong name is an error at once.
    reward_funcs = None if script_args.reward_funcs is None else list(map(load_reward_func, script_args.reward_funcs))
    callbacks = list(map(load_callback, script_args.callbacks or []))
    tokenizer = load_tokenizer(model_args, training_args.trust_remote_code)
    train_dataset = load_questions(
        script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split
    )
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = load_questions(
            script_args.eval_dataset_name or script_args.dataset_name,
            script_args.dataset_config,
            script_args.dataset_test_split,
        )
    goes_on = is_adapter(model_args)  # an adapter is trained further as it is; a new one comes on top of a full model
    if goes_on:
        model = load_model(model_args, trainable=True, trust_remote_code=training_args.trust_remote_code)
    else:
        model = model_args.model_name_or_path
        training_args.model_init_kwargs = {
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype or "auto",
            **(training_args.model_init_kwargs or {}),
        }
    trainer = MemPOTrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
        tools=[make_search_tool(retrieval_args, tokenizer)],
        quantization_config=None if goes_on else get_quantization_config(model_args),
        peft_config=None if goes_on else get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        # The Hub refuses a card that names a file as its data set.
        on_hub = not os.path.exists(script_args.dataset_name)
        trainer.push_to_hub(dataset_name=script_args.dataset_name if on_hub else None)
        trainer.accelerator.print(f"Model pushed to {trainer.hub_model_id}.")
    trainer.end()


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((TrainArguments, MemPOConfig, ModelConfig, RetrievalArguments), prog=prog)


if __name__ == "__main__":
    main(*parse_launched(make_parser()))
