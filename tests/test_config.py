"""The configuration: defaults of the paper, and combinations that cannot work are refused by name."""

import dataclasses

import pytest
from conftest import config
from transformers import HfArgumentParser
from trl import GRPOConfig

from mempo_trl import MemPOConfig
from mempo_trl.config import ANSWER_TEMPLATE, LOSS_TYPES


OWN_FIELDS = [
    field
    for field in dataclasses.fields(MemPOConfig)
    if field.name not in {parent.name for parent in dataclasses.fields(GRPOConfig)}
]


def test_defaults(tmp_path):
    """
    The paper's: 16 rollouts per question, learning rate 1e-6, at most 16 turns, τ = 0.5, KL, one weight per rollout; the
    memory reward is the one that docs/results.md found best.
    """
    args = MemPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert (args.num_generations, args.learning_rate, args.max_turns) == (16, 1e-6, 16)
    assert (args.memory_advantage_weight, args.memory_prob_threshold) == (0.3, 0.5)
    assert (args.beta, args.loss_type, args.context) == (0.001, "grpo", "memory")
    assert (args.memory_token_filter, args.memory_baseline, args.memory_answer) == ("none", "previous", "objectives")
    assert args.answer_template == ANSWER_TEMPLATE
    # One group fills a generation batch on one process: 8 per device, 2 micro-batches.
    assert args.generation_batch_size == 16


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("context", "last", "'memory', 'full'"),
        ("loss_type", "ppo", "'grpo'"),
        ("memory_token_filter", "soft", "'independent', 'joint', 'history', 'none'"),
        ("memory_baseline", "none", "'history', 'previous'"),
        ("memory_answer", "all", "'joint', 'objectives'"),
        ("max_turns", 0, "at least 1"),
        ("memory_scoring_max_tokens", 0, "at least 1"),
        ("max_tool_response_length", 0, "at least 1"),
        ("max_prompt_length", -5, "at least 1"),
        ("tool_timeout", 0.0, "a positive number"),
        ("tool_retries", -1, "0 or more"),
        ("memory_advantage_weight", -0.5, "Use 0.0"),
        ("memory_prob_threshold", 1.5, "between 0 and 1"),
        ("memory_prob_threshold", -0.1, "between 0 and 1"),
        ("max_tool_error_rate", 2.0, "between 0 and 1"),
        ("answer_template", "<answer></answer>", "'{answer}' exactly once"),
        ("answer_template", "{answer} {answer}", "'{answer}' exactly once"),
        ("max_tool_calling_iterations", 3, "max_turns"),
    ],
)
def test_impossible_values_are_refused(field, value, remedy, tmp_path):
    """Each message names the field, the value that was given, and what to do."""
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{field: value})
    for part in (f"`{field}`", str(value), remedy):
        assert part in str(error.value)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_of_the_parent(loss_type, tmp_path):
    """Every loss type that is offered can be configured."""
    assert config(tmp_path, loss_type=loss_type).loss_type == loss_type


def test_boundary_values_are_allowed(tmp_path):
    """The ends of the ranges have a meaning: τ = 0 keeps all tokens, λ = 0 scores nothing, rate 1 never stops."""
    args = config(
        tmp_path,
        memory_prob_threshold=0.0,
        memory_advantage_weight=0.0,
        max_tool_error_rate=1.0,
        tool_retries=0,
        max_turns=1,
        max_prompt_length=None,
    )
    assert args.max_turns == 1 and args.max_prompt_length is None


def test_parser_reads_every_field(tmp_path):
    """Each field can be given on the command line, and its help text can be printed."""
    parser = HfArgumentParser(MemPOConfig)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {f"--{field.name}" for field in OWN_FIELDS} <= flags
    parser.format_help()
    (args,) = parser.parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            *("--use_cpu", "--bf16", "false", "--report_to", "none"),
            *("--context", "full", "--memory_advantage_weight", "0.3", "--memory_token_filter", "joint"),
            *("--max_prompt_length", "512", "--log_rollouts", "false"),
        ]
    )
    assert (args.context, args.memory_advantage_weight, args.memory_token_filter) == ("full", 0.3, "joint")
    assert (args.max_prompt_length, args.log_rollouts) == (512, False)


def test_fields_are_documented_twice_in_one_order():
    """The class docstring and the help texts cover the same fields in the same order."""
    doc = MemPOConfig.__doc__
    positions = [doc.find(f"\n        {field.name} (`") for field in OWN_FIELDS]
    assert -1 not in positions and positions == sorted(positions)
    assert all(field.metadata["help"] for field in OWN_FIELDS)


def test_changed_defaults_are_listed():
    """Every default that differs from the parent's is named in the note of the docstring."""
    parents = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    changed = [
        field.name
        for field in dataclasses.fields(MemPOConfig)
        if field.name in parents and field.default != parents[field.name].default
    ]
    assert changed
    for name in changed:
        assert f"> - `{name}`: Defaults to" in MemPOConfig.__doc__
