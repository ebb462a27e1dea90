"""The names of TRL that this package relies on, private ones among them: what to look at when TRL changes."""

import inspect

import pytest
import torch
import trl
from conftest import RecordedTrainer, config, dataset, search
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.trainer.utils import get_config_model_id, nanstd, shuffle_sequence_dict, split_tensor_dict

from mempo_trl import MemPOTrainer


# What we override or call, with the signature that the code is written for.
SIGNATURES = {
    GRPOTrainer._generate_and_score_completions: "(self, inputs)",
    GRPOTrainer._generate: "(self, prompts)",
    GRPOTrainer._generate_single_turn: (
        "(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False)"
    ),
    GRPOTrainer._calculate_rewards: "(self, inputs, prompts, completions, completion_ids_list)",
    GRPOTrainer._compute_loss: "(self, model, inputs)",
    GRPOTrainer._prepare_inputs: "(self, generation_batch)",
    GRPOTrainer._set_signature_columns_if_needed: "(self)",
    GRPOTrainer.create_model_card: "(self, model_name=None, dataset_name=None, tags=None)",
    get_config_model_id: "(config)",
    nanstd: "(tensor, dim=None, keepdim=False)",
    split_tensor_dict: "(tensor_dict, num_chunks)",
    shuffle_sequence_dict: "(seq_dict)",
    resolve_accelerate_config_argument: "(launch_args)",
}


def bare_signature(function) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_version():
    """The pin of `pyproject.toml`: another minor version has to be read before it is allowed."""
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17"), (
        f"TRL is {trl.__version__}; this package is written for 1.16. Read the changes of the names in this file first."
    )


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function):
    """Each function takes what we give it, in this order."""
    expected, actual = SIGNATURES[function], bare_signature(function)
    assert actual == expected, (
        f"TRL {trl.__version__} changed `{function.__qualname__}`: it was {expected}, it is {actual}. Adapt what "
        "overrides or calls it in `mempo_trl`, then this table."
    )


def test_logps_and_entropies():
    """`_get_per_token_logps_and_entropies` is passed through; its first result is the log-probabilities."""
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:7] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ], f"TRL {trl.__version__} changed `_get_per_token_logps_and_entropies`: {parameters}"
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "return logps, entropies, aux_loss" in source, "its results changed; see `MemPOTrainer._compute_loss`"


def test_generate_returns_eight_things():
    """`_generate` returns eight values in this order, and its caller unpacks them by the same names."""
    names = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert f"return {names}" in inspect.getsource(GRPOTrainer._generate), (
        f"TRL {trl.__version__} returns something else from `_generate` than {names}; see `MemPOTrainer._generate`."
    )


CONSTRUCTOR = [
    "self",
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
    "tools",
    "rollout_func",
    "environment_factory",
]


def test_constructor():
    """Our constructor takes the parent's arguments; a new one has to be passed on or refused."""
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters)
    assert theirs == CONSTRUCTOR, (
        f"TRL {trl.__version__} changed the arguments of `GRPOTrainer`: "
        f"{sorted(set(theirs) ^ set(CONSTRUCTOR))} are new or gone. Pass them on in `MemPOTrainer.__init__`."
    )
    assert list(inspect.signature(MemPOTrainer.__init__).parameters) == CONSTRUCTOR


@pytest.mark.parametrize(
    "name",
    [
        *("num_generations", "num_generations_eval", "max_completion_length", "steps_per_generation", "loss_type"),
        *(
            "beta",
            "scale_rewards",
            "mask_truncated_completions",
            "max_tool_calling_iterations",
            "chat_template_kwargs",
        ),
        *("use_vllm", "vllm_max_model_length", "use_bias_correction_kl", "importance_sampling_level"),
        *("trust_remote_code", "model_init_kwargs", "disable_tqdm", "generation_batch_size", "temperature"),
    ],
)
def test_configuration_fields(name):
    """The fields of `GRPOConfig` that are read by name."""
    assert name in GRPOConfig.__dataclass_fields__, f"TRL {trl.__version__} has no `GRPOConfig.{name}` any more"


def test_loss_types():
    """The loss types whose weights we know; a new one of TRL has to be understood before it is offered."""
    known = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for loss_type in known:
        assert f'"{loss_type}"' in source, f"TRL {trl.__version__} has no loss type {loss_type!r} any more"
    for line in (
        'if self.loss_type in ["grpo", "sapo"]:',
        "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
        "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        "loss = (per_token_loss * mask).sum(-1).mean()",
        "per_token_kl = per_token_kl * coef_1",
    ):
        assert line in source, (
            f"TRL {trl.__version__} reduces a loss in another way; see `mempo_trl/sequences.py`: {line}"
        )


@pytest.fixture(scope="module")
def trained(short_folder, tmp_path_factory):
    trainer = RecordedTrainer(
        model=short_folder,
        args=config(tmp_path_factory.mktemp("run"), beta=0.1, steps_per_generation=2, per_device_train_batch_size=1),
        train_dataset=dataset(),
        tools=[search],
        script=lambda number, turn: "<answer>cat</answer>" if number else "<answer>dog</answer>",
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "name",
    [
        *("eos_token_ids", "_tokenizer", "_metrics", "_signature_columns", "reward_weights", "generation_config"),
        *("num_generations", "num_generations_eval", "max_completion_length", "scale_rewards", "loss_type", "beta"),
        *("use_vllm", "mask_truncated_completions", "current_gradient_accumulation_steps", "callback_handler"),
        *("importance_sampling_level", "accelerator", "state", "control"),
    ],
)
def test_attributes(name, trained):
    """The attributes that we read or set on the parent."""
    assert name in vars(trained), f"TRL {trl.__version__} has no `GRPOTrainer.{name}` any more"


def test_types_of_attributes(trained):
    """Metrics are lists per mode and name, end-of-turn ids a list of ints, and the generation config has a length."""
    assert set(trained._metrics) == {"train", "eval"}
    assert trained._metrics["train"].default_factory is list
    assert all(isinstance(token_id, int) for token_id in trained.eos_token_ids)
    assert trained.generation_config.max_new_tokens == trained.max_completion_length
    assert trained.reward_weights.tolist() == [1.0]


def test_keys_of_the_inputs(trained):
    """What `_generate_and_score_completions` puts into the inputs and `_compute_loss` reads there."""
    inputs = trained.inputs_seen[0]
    keys = "prompt_ids prompt_mask completion_ids completion_mask advantages num_items_in_batch tool_mask"
    for key in [*keys.split(), "ref_per_token_logps", "old_per_token_logps"]:
        assert key in inputs, f"TRL {trl.__version__} does not name {key!r} in the inputs of the loss any more"
    # Two-dimensional advantages are what the memory credit rests on.
    assert inputs["advantages"].shape == inputs["completion_ids"].shape
    assert "if advantages.dim() == 1:" in inspect.getsource(GRPOTrainer._compute_loss)


def test_split_drops_the_remainder():
    """Why sequences are padded to a multiple of `steps_per_generation`: TRL loses the rest without a word."""
    chunks = split_tensor_dict({"x": torch.arange(7), "scalar": torch.tensor(3)}, 2)
    assert [chunk["x"].tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5]], (
        f"TRL {trl.__version__} splits 7 rows in another way; see `padded_count`"
    )
    assert [chunk["scalar"].item() for chunk in chunks] == [3, 3]
    shuffled = shuffle_sequence_dict({"a": torch.arange(5), "b": torch.arange(5) * 10})
    assert torch.equal(shuffled["a"] * 10, shuffled["b"])


def test_nanstd_is_the_estimator_of_the_outcome():
    """Bessel's correction, NaN left out, NaN for a single value."""
    nan = float("nan")
    # 1, 2, 4: mean 7 / 3, squares 16 / 9 + 1 / 9 + 25 / 9 = 42 / 9, divided by 2: 2.333333, root 1.527525.
    actual = nanstd(torch.tensor([[1.0, nan, 2.0, 4.0], [5.0, nan, nan, nan]]), dim=1)
    assert actual[0].item() == pytest.approx(1.527525, abs=1e-6) and actual[1].isnan()
    # The ε that the memory advantages share with the outcome.
    assert "(std_rewards + 1e-4)" in inspect.getsource(GRPOTrainer._generate_and_score_completions)
