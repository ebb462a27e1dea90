"""Values of a configuration that can't be right, ours and those of its parents."""

import dataclasses
import functools
import math
import types
import typing
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig, TrainingArguments


AT_LEAST_ONE = (
    *("max_turns", "memory_scoring_max_tokens", "max_tokens_per_microbatch", "max_tool_response_length"),
    *("max_prompt_length", "max_completion_length", "num_generations", "num_generations_eval", "pad_to_multiple_of"),
    *("steps_per_generation", "generation_batch_size", "num_iterations", "ref_model_sync_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
)
POSITIVE = (
    *("tool_timeout", "temperature", "repetition_penalty", "off_policy_mask_threshold"),
    *("sapo_temperature_neg", "sapo_temperature_pos"),
)
NOT_NEGATIVE = ("tool_retries", "beta", "epsilon", "epsilon_high", "delta", "learning_rate", "weight_decay")
FRACTIONS = (
    *("memory_prob_threshold", "max_tool_error_rate"),
    *("top_p", "min_p", "top_entropy_quantile", "ref_model_mixup_alpha"),
)
LARGEST = {
    "max_turns": (10_000, "each rollout keeps a slot per turn"),
    "memory_advantage_weight": (1e6, "advantages are 32 bit numbers"),
}
CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
"""Fields of the parent that it reads only after the first rollouts."""

WITHOUT_EFFECT = {
    "label_smoothing_factor": "the loss has no labels to smooth; leave it at 0.0",
    "data_seed": "questions are drawn with `seed`; set that",
    "train_sampling_strategy": "questions are drawn in groups, in the order of `shuffle_dataset` and `seed`; leave it",
}
"""Fields of the parents that a trainer of TRL's GRPO would ignore without a word."""

GENERATION_KWARGS = {
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length", "min_length"), "set `max_completion_length`"),
    **dict.fromkeys(("num_return_sequences", "n"), "set `num_generations`"),
    "temperature": "set `temperature`, which the log-probabilities are computed with as well",
    "eos_token_id": "the tokenizer and the model's generation config say what ends a turn",
    "pad_token_id": "set the tokenizer's pad token",
    "stop_strings": "a turn ends with an end-of-turn token; what follows an action is ignored anyway",
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), "only the ids are read"),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "detokenize"), "the trainer sets it"),
}
"""What `generation_kwargs` can't change, with the remedy."""


def choose(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, choices))}.")


@functools.cache
def field_types(kind: type) -> dict[str, set]:
    """The types that the annotation of each field of a dataclass names, without their parameters."""
    found = {}
    # Not `Field.type`: `HfArgumentParser` takes the `None` out of it when it makes an argument of a field.
    for name, annotation in typing.get_type_hints(kind).items():
        is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
        parts = typing.get_args(annotation) if is_union else (annotation,)
        found[name] = {typing.get_origin(part) or part for part in parts}
    return found


def check_values(args: TrainingArguments) -> None:
    """
    Check that numbers are numbers and in their range, and that switches are switches, for the fields of all parents.

    Python compares a text with a number only when it meets both, which can be hours later, and a text such as `"false"`
    counts as true.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Arguments whose `__post_init__` has not run yet.

    Raises:
        ValueError: With the field, its value and what it has to be.
    """
    for field in dataclasses.fields(args):
        value, allowed = args.__dict__[field.name], field_types(type(args))[field.name]
        if value is field.default or (value is None and type(None) in allowed):
            continue
        if allowed <= {bool, type(None)} and not isinstance(value, bool):
            raise ValueError(f"`{field.name}` is {value!r}; it must be True or False, in YAML true or false.")
        if allowed & {int, float} and not isinstance(value, str if str in allowed else ()):
            _check_number(field.name, value, whole=float not in allowed, switch=bool in allowed)
    if args.num_generations is None:
        raise ValueError("`num_generations` is None; it must be a number, the rollouts per question.")
    pad = args.pad_to_multiple_of
    if isinstance(pad, str) and pad.lower() not in ("auto", "none", "null") and not pad.isdecimal():
        raise ValueError(f"`pad_to_multiple_of` is {pad!r}; it must be a whole number, 'auto' or 'none'.")
    values = {name: value for name, value in args.__dict__.items() if isinstance(value, Real)}
    for names, holds, text in (
        (AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (POSITIVE, lambda value: value > 0, "a positive number"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
        (FRACTIONS, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ):
        for name in names:
            if name in values and not holds(values[name]):
                raise ValueError(f"`{name}` is {values[name]}; it must be {text}.")
    for name, (largest, reason) in LARGEST.items():
        if name in values and values[name] > largest:
            raise ValueError(f"`{name}` is {values[name]}; it must be at most {largest:g}, since {reason}.")


def _check_number(name: str, value: Any, whole: bool, switch: bool) -> None:
    if isinstance(value, bool) and not switch:
        raise ValueError(f"`{name}` is {value}; it must be a number.")
    if isinstance(value, str):
        raise ValueError(f"`{name}` is the text {value!r}; it must be a number. Write it without quotes.")
    if not isinstance(value, Real):
        raise ValueError(f"`{name}` is {value!r}; it must be a number.")
    if math.isnan(value):
        raise ValueError(f"`{name}` is {value}; it must be a number.")
    if whole and not isinstance(value, Integral):
        raise ValueError(
            f"`{name}` is {value}; it must be a whole number, such as {round(value) if abs(value) < 1e9 else 1}."
        )


def check_options(args: TrainingArguments) -> None:
    """
    Check the options of the parents that fail only after the first rollouts, or that have no effect here.

    Args:
        args ([`~trl.GRPOConfig`]):
            Arguments whose `__post_init__` has run.

    Raises:
        ValueError: With the field, its value and the remedy.
    """
    for name, choices in CHOICES.items():
        choose(name, args.__dict__[name], choices)
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, remedy in WITHOUT_EFFECT.items():
        if args.__dict__[name] != defaults[name]:
            raise ValueError(f"`{name}` is {args.__dict__[name]!r}, which has no effect: {remedy}.")
    for name in ("model_init_kwargs", "chat_template_kwargs", "generation_kwargs"):
        if not isinstance(args.__dict__[name], dict | None):
            raise ValueError(f"`{name}` is {args.__dict__[name]!r}; it must be a mapping, or a JSON object as text.")
    for name, value in (args.generation_kwargs or {}).items():
        if name in GENERATION_KWARGS:
            raise ValueError(
                f"`generation_kwargs` sets {name!r} to {value!r}, which it can't: {GENERATION_KWARGS[name]}."
            )
        if not args.use_vllm and name not in GenerationConfig().to_dict():
            raise ValueError(
                f"`generation_kwargs` has {name!r}, which transformers' `GenerationConfig` does not know."
            )
    if args.top_p == 0:
        raise ValueError(f"`top_p` is {args.top_p}, which keeps no token; it must be above 0, and 1.0 to keep all.")
    if args.top_k < (-1 if args.use_vllm else 0):
        raise ValueError(f"`top_k` is {args.top_k}; it must be 0 (off) or more. Retrieval has `retrieval_top_k`.")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"`seed` is {args.seed}; it must be between 0 and 2**32 - 1.")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(f"`max_steps` is {args.max_steps}; it must be at least 1, or -1 to go by `num_train_epochs`.")
    if args.max_steps == -1 and args.num_train_epochs <= 0:
        raise ValueError(f"`num_train_epochs` is {args.num_train_epochs}; it must be above 0, or set `max_steps`.")
    if not isinstance(args.reward_weights, list | None):
        raise ValueError(
            f"`reward_weights` is {args.reward_weights!r}; give a list with a number per reward function."
        )
    for i, weight in enumerate(args.reward_weights or []):
        _check_number(f"reward_weights[{i}]", weight, whole=False, switch=False)
    if args.pad_to_multiple_of is not None and args.pad_to_multiple_of < 1:
        raise ValueError(f"`pad_to_multiple_of` is {args.pad_to_multiple_of}; it must be at least 1, or None.")
    for name in ("dispatch_batches", "split_batches"):
        if vars(args.accelerator_config)[name]:
            raise ValueError(
                f"`accelerator_config` sets {name!r}, which would tear the groups of a question apart; leave it out."
            )
    if args.sync_ref_model and args.beta == 0:
        raise ValueError("`sync_ref_model` is True but with `beta` = 0.0 there is no reference; set `beta` above 0.")
