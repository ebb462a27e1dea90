"""
The names of TRL, transformers, PEFT and accelerate that this package relies on beyond what they promise, private ones among
them: what to look at when one of them changes. `parent_names.py` finds them in the source.
"""

import importlib
import inspect
from importlib.metadata import version

import pytest
import torch
import trl
from accelerate.commands.launch import launch_command_parser
from conftest import RecordedTrainer, config, dataset, search
from packaging.version import Version
from parent_names import LIBRARIES, attributes_of, deep_imports, parent_names, private_names
from peft import LoraConfig, PromptTuningConfig
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from trl.trainer.utils import nanstd, shuffle_sequence_dict, split_tensor_dict

from mempo_trl import MemPOTrainer


# Methods of the trainer that ours override or call, with the signature that the code is written for.
METHODS = {
    "_calculate_rewards": "(self, inputs, prompts, completions, completion_ids_list)",
    "_compute_loss": "(self, model, inputs)",
    "_generate": "(self, prompts)",
    "_generate_and_score_completions": "(self, inputs)",
    "_generate_single_turn": "(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False)",
    "_get_grad_norm": "(self, model, grad_norm=None)",
    "_get_output_dir": "(self, trial)",
    "_get_per_token_logps_and_entropies": (
        "(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, "
        "compute_aux_loss=False, pixel_values=None, image_grid_thw=None, num_images=None, pixel_attention_mask=None, "
        "spatial_shapes=None, num_tiles=None, image_sizes=None, token_type_ids=None, mm_token_type_ids=None, "
        "image_position_ids=None)"
    ),
    "_get_train_sampler": "(self, dataset=None)",
    "_load_optimizer_and_scheduler": "(self, checkpoint)",
    "_name": None,
    "_paper": None,
    "_prepare_inputs": "(self, generation_batch)",
    "_run_epoch": (
        "(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)"
    ),
    "_save_checkpoint": "(self, model, trial)",
    "_save_rng_state": "(self, output_dir)",
    "_set_signature_columns_if_needed": "(self)",
    "_tag_names": None,
    "add_callback": "(self, callback)",
    "create_model_card": "(self, model_name=None, dataset_name=None, tags=None)",
    "evaluate": "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device)",
    "is_world_process_zero": "(self)",
    "train": "(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)",
}

# Attributes that the trainer sets and ours read or set as well.
ATTRIBUTES = [
    *("_buffered_inputs", "_last_loaded_step", "_metrics", "_signature_columns", "_step", "_tokenizer", "accelerator"),
    *("args", "beta", "callback_handler", "control", "current_gradient_accumulation_steps", "eos_token_ids"),
    *("generation_config", "hub_model_id", "importance_sampling_level", "is_fsdp_enabled", "loss_type"),
    *("mask_truncated_completions", "max_completion_length", "model", "model_wrapped", "multi_objective_aggregation"),
    *("num_generations", "num_generations_eval", "reward_func_names", "reward_weights", "scale_rewards", "state"),
    *("train_dataset", "use_vllm", "vllm_generation"),
]

# What is imported from below the top of a library, with the signature of a function.
IMPORTS = {
    "accelerate.commands.launch.launch_command": "(args)",
    "accelerate.commands.launch.launch_command_parser": "(subparsers=None)",
    "accelerate.logging.get_logger": "(name, log_level=None)",
    "accelerate.state.AcceleratorState": None,
    "accelerate.utils.DistributedType": None,
    "accelerate.utils.broadcast_object_list": "(object_list, from_process=0)",
    "accelerate.utils.gather_object": "(object)",
    "transformers.cache_utils.DynamicLayer": None,
    "transformers.trainer.TRAINER_STATE_NAME": None,
    "transformers.trainer_utils.PREFIX_CHECKPOINT_DIR": None,
    "transformers.trainer_utils.SaveStrategy": None,
    "transformers.trainer_utils.sort_checkpoints": (
        "(output_dir, checkpoint_prefix='checkpoint', use_mtime=False, best_model_checkpoint=None)"
    ),
    "transformers.utils.chat_template_utils.DocstringParsingException": None,
    "transformers.utils.chat_template_utils.TypeHintParsingException": None,
    "transformers.utils.find_adapter_config_file": None,
    "transformers.utils.get_json_schema": "(func)",
    "trl.cli.accelerate_config.resolve_accelerate_config_argument": "(launch_args)",
    "trl.distributed.DistributedBackend": None,
    "trl.scripts.utils.get_git_commit_hash": "(package_name)",
    "trl.trainer.utils.get_config_model_id": "(config)",
    "trl.trainer.utils.nanstd": "(tensor, dim=None, keepdim=False)",
}

# Private names of other objects, with a check that they are what the code takes them for.
PRIVATE = {
    "_VALID_DICT_FIELDS": lambda: "chat_template_kwargs" in GRPOConfig._VALID_DICT_FIELDS,
    "_get_default_store": lambda: callable(torch.distributed.distributed_c10d._get_default_store),
    "_option_string_actions": lambda: "--num_processes" in launch_command_parser()._option_string_actions,
    "_supports_sdpa": lambda: LlamaForCausalLM._supports_sdpa is True,
}

USED_METHODS, USED_ATTRIBUTES = parent_names(GRPOTrainer)
SPLITTING = {split_tensor_dict: "(tensor_dict, num_chunks)", shuffle_sequence_dict: "(seq_dict)"}


def bare_signature(function) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def library_of(thing) -> str:
    """Name and version of the library that a function or class comes from."""
    library = thing.__module__.split(".")[0]
    return f"{library} {version(library)}" if library in LIBRARIES else library


def test_version():
    """The pin of `pyproject.toml`: another minor version has to be read before it is allowed."""
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17"), (
        f"TRL is {trl.__version__}; this package is written for 1.16. Read the changes of the names in this file first."
    )


@pytest.mark.parametrize(
    ("used", "known"),
    [
        (USED_METHODS, METHODS),
        (USED_ATTRIBUTES, ATTRIBUTES),
        (deep_imports(), IMPORTS),
        (private_names(), PRIVATE),
    ],
    ids=["methods", "attributes", "imports", "private names"],
)
def test_every_used_name_has_a_contract(used, known):
    """
    What the package and the tests use beyond the public interface, found in their source, is in the tables of this file
    and nothing else is: a name that comes in new needs its row, and one that is no longer used, or that the library has
    no more, loses it.
    """
    new = {name: places for name, places in used.items() if name not in known}
    assert not new, f"These names of a library have no contract yet; add rows for them: {new}"
    gone = sorted(set(known) - set(used))
    assert not gone, (
        f"Nothing uses these names any more, or the library has lost them; look for them, then drop: {gone}"
    )


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    """Each method takes what we give it, in this order; one of transformers may take more after that."""
    places = ", ".join(dict.fromkeys(USED_METHODS[name]))
    assert name in dir(GRPOTrainer), f"TRL {trl.__version__}: `GRPOTrainer` has no `{name}` any more. Adapt {places}."
    if METHODS[name] is None:
        return
    method = vars(GRPOTrainer).get(name) or inspect.getattr_static(GRPOTrainer, name)
    expected, actual = METHODS[name], bare_signature(method)
    same = (
        actual == expected if library_of(method).startswith("trl") else actual.startswith(expected.removesuffix(")"))
    )
    assert same, (
        f"{library_of(method)} changed `{method.__qualname__}`: it was {expected}, it is {actual}. Adapt {places}, then "
        "this table."
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name):
    """The trainer sets each attribute under this name."""
    assert name in attributes_of(GRPOTrainer), (
        f"TRL {trl.__version__} and transformers {version('transformers')} set no `GRPOTrainer.{name}` any more. Adapt "
        f"{', '.join(dict.fromkeys(USED_ATTRIBUTES.get(name, ['nothing'])))}."
    )


@pytest.mark.parametrize("name", IMPORTS)
def test_imports(name):
    """Each is where we import it from, and takes what we give it."""
    module, _, name_in_module = name.rpartition(".")
    library = f"{name.split('.')[0]} {version(name.split('.')[0])}"
    names = vars(importlib.import_module(module))
    places = ", ".join(deep_imports()[name])
    assert name_in_module in names, f"{library} has no `{name}` any more. Adapt {places}."
    if IMPORTS[name] is not None:
        actual = bare_signature(names[name_in_module])
        assert actual == IMPORTS[name], f"{library} changed `{name}` to {actual}. Adapt {places}, then this table."


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names(name):
    """Each is there and is what we take it for."""
    assert PRIVATE[name](), f"`{name}` is something else now. Adapt {', '.join(private_names()[name])}."


@pytest.mark.parametrize("function", SPLITTING, ids=lambda function: function.__qualname__)
def test_splitting_of_a_generation_batch(function):
    """What TRL does with the rows of a generation batch between our two hooks."""
    assert bare_signature(function) == SPLITTING[function], f"TRL {trl.__version__} changed `{function.__name__}`."


def test_results_of_the_log_probabilities():
    """`_get_per_token_logps_and_entropies` is passed through; its first result is the log-probabilities."""
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "return logps, entropies, aux_loss" in source, "its results changed; see `MemPOTrainer._compute_loss`"


def test_parser_of_recipes():
    """`TrlParser` keeps what `mempo_trl/scripts/recipes.py` and `mempo_trl/cli.py` ask of it."""
    signature = bare_signature(TrlParser.parse_args_and_config)
    assert signature == (
        "(self, args=None, return_remaining_strings=False, fail_with_unknown_args=True, "
        "separate_remaining_strings=False)"
    ), f"TRL {trl.__version__} changed `TrlParser.parse_args_and_config` to {signature}."
    assert TrlParser((ModelConfig,)).dataclass_types == [ModelConfig]


def test_reference_of_an_adapter():
    """With an adapter to train further, TRL's reference is a copy named "ref" of the adapter "default"."""
    source = inspect.getsource(GRPOTrainer)
    for line in ('default_config = model.peft_config["default"]', 'model.add_adapter("ref", default_config)'):
        assert line in source, f"TRL {trl.__version__} makes the reference in another way; see `check_model`: {line}"


def test_names_of_peft():
    """What is asked of PEFT's configurations and models, beside its documented functions."""
    config, prompts = LoraConfig(), PromptTuningConfig(num_virtual_tokens=1)
    assert (config.is_prompt_learning, prompts.is_prompt_learning) == (False, True)
    assert (config.inference_mode, config.task_type) == (False, None)
    assert LoraConfig(task_type="CAUSAL_LM").task_type == "CAUSAL_LM"


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
