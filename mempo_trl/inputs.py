"""What a trainer is given: models, data sets, reward functions and tools, checked before any weight is loaded."""

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl.trainer.utils import get_config_model_id

from .data.objectives import check_dataset
from .rewards import REWARD_ARGUMENTS, REWARD_FUNCS


if TYPE_CHECKING:
    from .protocol import Protocol


def check_model(model: "str | PreTrainedModel | PeftModel", peft_config: PeftConfig | None, beta: float) -> None:
    """
    Check the model and the adapter that a trainer is given.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to put on it.
        beta (`float`):
            KL coefficient.

    Raises:
        TypeError: If one of them is something else.
        ValueError: If they can't be trained, or not with this method; the message says why and what to do.
    """
    if not isinstance(model, str | PreTrainedModel | PeftModel):
        raise TypeError(f"`model` is a `{type(model).__name__}`; pass a name or path as `str`, or a loaded model.")
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise TypeError(f"`peft_config` is a `{type(peft_config).__name__}`; pass for example a `peft.LoraConfig`.")
    configs = [] if peft_config is None else [peft_config]
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "`model` has an adapter and `peft_config` asks for another. Leave `peft_config` out to train the "
                "adapter further, or merge it first (`model.merge_and_unload()`)."
            )
        configs += model.peft_config.values()
        if beta > 0 and "default" not in model.peft_config:
            raise ValueError(
                f"The adapter of `model` is named {', '.join(map(repr, model.peft_config))}; with `beta` > 0 TRL looks "
                "for 'default' to make the reference. Load it without `adapter_name`, or set `beta` to 0.0."
            )
    for config in configs:
        if config.is_prompt_learning:
            raise ValueError(
                f"The adapter is a `{type(config).__name__}`: virtual tokens before the prompt are not supported by the "
                "memory scoring. Use an adapter on the weights, such as `peft.LoraConfig`."
            )
        if config is peft_config and config.inference_mode:
            raise ValueError(
                "`peft_config.inference_mode` is True, so that nothing would be trained; set it to False."
            )
        if config.task_type not in (None, "CAUSAL_LM"):
            raise ValueError(f"The adapter's `task_type` is {config.task_type!r}; MemPO needs 'CAUSAL_LM'.")
    if isinstance(model, str):
        return
    if beta > 0 and not configs and not get_config_model_id(model.config):
        raise ValueError(
            "With `beta` > 0 the reference is loaded from where `model` came from, but this one came from nowhere. Save "
            "it and load it from there, pass `peft_config`, or set `beta` to 0.0."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"`model` is a `{type(model).__name__}`, an encoder-decoder; pass a causal language model.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of `model` is trainable. Load an adapter with `is_trainable=True`, or call "
            "`model.requires_grad_(True)`."
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> None:
    """
    Check that a tokenizer can end a turn and, once there is a model, that the model knows all its ids.

    Raises:
        ValueError: With the name of the tokenizer and the remedy.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no eos token, so that no turn could end. Set "
            "`tokenizer.eos_token` to the token that ends a turn in its chat template."
        )
    if model is None:
        return
    rows, largest = model.get_input_embeddings().weight.size(0), max(tokenizer.get_vocab().values())
    # With ZeRO-3 a process holds none of the embedding's rows.
    if 0 < rows <= largest:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has ids up to {largest}, but the model embeds {rows}: it belongs "
            "to another model. Use the model's own, or call `model.resize_token_embeddings(len(tokenizer))`."
        )


def check_reward_funcs(reward_funcs: Any, reward_weights: list[float] | None, columns: list[str]) -> None:
    """
    Check reward functions before the first rollouts are played for them.

    Args:
        reward_funcs (`RewardFunc` or `list[RewardFunc]`):
            As the trainer is given them.
        reward_weights (`list[float]`, *optional*):
            Their weights.
        columns (`list[str]`):
            Columns of the data set, which they get as arguments.

    Raises:
        ValueError: If there is none, if one can't be called with what it will get, or if the weights are not as many.
    """
    reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty; leave it out for exact match, or give at least one function.")
    if reward_weights is not None and len(reward_weights) != len(reward_funcs):
        raise ValueError(
            f"`reward_weights` has {len(reward_weights)} numbers for {len(reward_funcs)} reward functions; give one each."
        )
    names = dict.fromkeys(REWARD_ARGUMENTS) | {
        column: None for column in columns if column not in ("prompt", "completion")
    }
    for function in reward_funcs:
        if isinstance(function, str) and function in REWARD_FUNCS:
            raise ValueError(
                f"`reward_funcs` has {function!r}, a name for recipes; pass `mempo_trl.rewards.{function}` itself."
            )
        if isinstance(function, str):
            continue  # a reward model, as TRL has it
        if not isinstance(function, Callable):
            raise ValueError(f"`reward_funcs` has {function!r}; a reward function is called with the rollouts.")
        if isinstance(function, PreTrainedModel):
            continue
        try:
            inspect.signature(function).bind(**names)
        except TypeError as error:
            raise ValueError(
                f"The reward function {function!r} can't be called with {', '.join(names)}: {error}. Add `**kwargs` to "
                "its parameters."
            ) from None


def check_number_of_rows(args: TrainingArguments, datasets: dict[str, Dataset | IterableDataset]) -> None:
    """
    Check that there are enough questions for a generation batch, and that groups fill the batches of the evaluation.

    TRL drops what does not fill a generation batch: with too few questions a training would end before its first step,
    as if it were done.

    Args:
        args ([`~trl.GRPOConfig`]):
            The arguments of the run.
        datasets (`dict[str, Dataset | IterableDataset]`):
            The data sets by the argument that they came with, `"train_dataset"` first.

    Raises:
        ValueError: With both numbers and the remedy.
    """
    needed = args.generation_batch_size // args.num_generations
    for name, dataset in datasets.items():
        is_train = name == "train_dataset"
        if isinstance(dataset, Dataset) and len(dataset) < (needed if is_train else 1):
            raise ValueError(
                f"`{name}` has {len(dataset)} rows"
                + (
                    f", but a generation batch takes {needed} questions (`generation_batch_size` "
                    f"{args.generation_batch_size} / `num_generations` {args.num_generations}), and what does not fill "
                    "one is dropped. Give more questions, or lower `per_device_train_batch_size` or "
                    "`steps_per_generation`."
                    if is_train
                    else ". Give it some, or leave it out."
                )
            )
    num_generations = args.num_generations_eval or args.num_generations
    batch = args.per_device_eval_batch_size * args.world_size
    if len(datasets) > 1 and batch % num_generations:
        raise ValueError(
            f"`per_device_eval_batch_size` {args.per_device_eval_batch_size} on {args.world_size} processes is no multiple "
            f"of the {num_generations} rollouts per question; change it or `num_generations_eval`."
        )


def check_data(
    train_dataset: Any, eval_dataset: Any, args: TrainingArguments, reward_funcs: Any, needs_answers: bool
) -> dict[str, Dataset | IterableDataset]:
    """
    Check the data sets that a trainer is given, and the reward functions that get their columns.

    Args:
        train_dataset (`Any`), eval_dataset (`Any`), reward_funcs (`Any`):
            As the trainer is given them.
        args ([`~trl.GRPOConfig`]):
            The arguments of the run.
        needs_answers (`bool`):
            Whether `golden_answers` are needed.

    Returns:
        `dict[str, Dataset | IterableDataset]`: The data sets by the argument that they came with.

    Raises:
        ValueError: With what is wrong and the remedy.
    """
    datasets = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        datasets |= {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    elif eval_dataset is not None:
        datasets["eval_dataset"] = eval_dataset
    for name, dataset in datasets.items():
        check_reward_funcs(reward_funcs, args.reward_weights, check_dataset(dataset, name, needs_answers))
    check_number_of_rows(args, datasets)
    return datasets


def room_for_prompts(args: TrainingArguments, config: PretrainedConfig, served_length: int | None) -> int | None:
    """
    Tokens that a prompt may have.

    Args:
        args ([`MemPOConfig`]):
            The arguments of the run.
        config ([`~transformers.PretrainedConfig`]):
            Configuration of the model.
        served_length (`int`, *optional*):
            Context of the vLLM servers.

    Returns:
        `int`, *optional*: `max_prompt_length` or, without it, the model's context minus `max_completion_length`.

    Raises:
        ValueError: If that leaves no room.
    """
    if args.max_prompt_length is not None:
        return args.max_prompt_length
    max_length = config.get_text_config().to_dict().get("max_position_embeddings")
    if args.use_vllm and args.vllm_max_model_length is not None:
        max_length = args.vllm_max_model_length
    max_length = min(filter(None, (max_length, served_length)), default=None)
    if max_length is None:
        return None
    if args.max_completion_length >= max_length:
        raise ValueError(
            f"`max_completion_length` is {args.max_completion_length}, but the model takes {max_length} tokens in all; "
            "lower it."
        )
    return max_length - args.max_completion_length


def check_loaded(
    model: "PreTrainedModel | PeftModel",
    protocol: "Protocol",
    args: TrainingArguments,
    datasets: dict[str, Dataset | IterableDataset],
    served_length: int | None,
) -> int | None:
    """
    Check what can be checked only with the model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Makes the prompts.
        args ([`MemPOConfig`]):
            The arguments of the run.
        datasets (`dict[str, Dataset | IterableDataset]`):
            The data sets by the argument that they came with.
        served_length (`int`, *optional*):
            Context of the vLLM servers.

    Returns:
        `int`, *optional*: Tokens that a prompt may have.

    Raises:
        ValueError: If the tokenizer is of another model, if a question does not fit, or if an option does not go with
            the way in which the processes share the model.
    """
    check_tokenizer(protocol.tokenizer, model)
    max_prompt_length = room_for_prompts(args, model.config, served_length)
    check_question_lengths(datasets, protocol, max_prompt_length)
    distributed_type = AcceleratorState().distributed_type
    if args.recompute_forwards and distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError(
            f"`recompute_forwards` doesn't work with {distributed_type.value}, which gathers weights around each forward. "
            "Lower `per_device_train_batch_size` or use `gradient_checkpointing` instead."
        )
    return max_prompt_length


def check_question_lengths(
    datasets: dict[str, Dataset | IterableDataset], protocol: "Protocol", max_prompt_length: int | None
) -> None:
    """
    Check that the first prompt of every question fits.

    Args:
        datasets (`dict[str, Dataset | IterableDataset]`):
            The data sets by the argument that they came with; iterable ones are not read.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Makes the prompts.
        max_prompt_length (`int`, *optional*):
            Tokens that a prompt may have.

    Raises:
        ValueError: With the row, the length of its prompt and the remedy.
    """
    if max_prompt_length is None:
        return
    room = max_prompt_length - len(protocol.prefix_ids("q"))
    for name, dataset in datasets.items():
        for number, question in enumerate(dataset["question"] if isinstance(dataset, Dataset) else ()):
            if 2 * len(question.encode(errors="replace")) < room:  # so short that it needs no tokenizing
                continue
            length = len(protocol.prefix_ids(question))
            if length > max_prompt_length:
                raise ValueError(
                    f"The prompt of row {number} of `{name}` has {length} tokens, of which {length - max_prompt_length} "
                    f"are too many for `max_prompt_length` = {max_prompt_length} (by default the model's context minus "
                    "`max_completion_length`). Drop the row, or shorten the system prompt or `max_completion_length`."
                )


def check_tools(tools: Any) -> None:
    """
    Check tools before their schemas are made of them.

    Args:
        tools (`list[Callable]`):
            As the user gives them.

    Raises:
        ValueError: If it is no list, if it is empty, or if a tool can't be called by its name with named arguments.
    """
    if not isinstance(tools, list | tuple):
        raise ValueError(f"`tools` is {tools!r}; pass a list, such as `tools=[SearchTool(retriever)]`.")
    if not tools:
        raise ValueError("`tools` is empty; pass at least one tool, for example `tools=[SearchTool(retriever)]`.")
    for tool in tools:
        if isinstance(tool, type):
            raise ValueError(f"The tool {tool!r} is a class; pass an object of it.")
        if not isinstance(tool, Callable):
            raise ValueError(f"The tool {tool!r} can't be called; pass a function, or an object with `__call__`.")
        name = tool.__name__ if inspect.isroutine(tool) else getattr(tool, "name", None)
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,64}", name):
            raise ValueError(
                f"The tool {tool!r} has the name {name!r}; a model calls it by letters, digits, `_` and `-`. Give the "
                "function or the object's `name` attribute such a name."
            )
        call = tool if inspect.isroutine(tool) else tool.__call__
        if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
            raise ValueError(f"The tool {name!r} is a generator; it must return its text at once.")
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(
                    f"The tool {name!r} has the parameter `{parameter}`, which is {parameter.kind.description}; a model "
                    "gives its arguments by name. Name each of them."
                )
