"""What a result is made of, as hashes: two runs with equal hashes were asked the same."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id


NOT_OF_THE_RUN = (
    *("output_dir", "run_name", "resume_from_checkpoint", "ignore_data_skip", "local_rank", "deepspeed_plugin"),
    *("do_", "log", "num_completions_to_print", "disable_tqdm", "report_to", "project", "trackio", "debug"),
    *("save_", "load_best", "metric_for_best", "greater_is_better", "restore_callback", "push_", "hub_"),
    *("eval_", "per_device_eval", "num_generations_eval", "prediction_loss", "include_", "batch_eval", "ddp_timeout"),
    *("dataloader_", "skip_memory", "alarm", "stop_on_alarms", "vllm_server_", "torch_empty_cache"),
)
"""Settings of a training run, by the start of their names, that its weights don't depend on."""


def text_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells tokenizers apart that count tokens differently, wherever they are loaded from."""
    words = sorted(tokenizer.get_vocab().items())
    # The vocabulary does not tell how a text is cut into it.
    model = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    rules = json.loads(model) if tokenizer.is_fast else {"class": model}
    for name in ("padding", "truncation", "added_tokens"):  # set by calls, and part of the vocabulary
        rules.pop(name, None)
    return text_hash(json.dumps([words, rules], sort_keys=True))


def weights_stamp(name_or_path: str) -> str | None:
    """Names, sizes and times of the weights in a local folder as a hash: a model that was trained anew is another."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        return None
    files = sorted(file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    return text_hash(repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def without_secrets(value: Any) -> Any:
    """Settings for a file: of every URL in them the user, the query and the fragment are left out."""
    if isinstance(value, dict):
        return {name: without_secrets(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(part) for part in value]
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return str(httpx.URL(value).copy_with(userinfo=b"", query=None, fragment=None))
    return value


def training_settings(
    args: GRPOConfig,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset | IterableDataset,
) -> dict[str, Any]:
    """
    What a training run depends on, for its checkpoints.

    Args:
        args ([`~trl.GRPOConfig`]), model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]), tokenizer ([`~transformers.PreTrainedTokenizerBase`]), dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Those of the trainer.

    Returns:
        `dict`: `"data"` is what decides which question comes when, `"layout"` what half a generation batch hangs on,
        and `"generate_every"` the number of micro-batches from one generation batch to the next. Free of secrets.
    """
    generate_every = args.steps_per_generation * args.num_iterations
    questions = None  # a stream is not read to be hashed
    if isinstance(dataset, Dataset):
        columns = [name for name in ("question", "golden_answers") if name in dataset.column_names]
        parts = (json.dumps(batch, default=str) for batch in dataset.select_columns(columns).iter(1000))
        questions = text_hash("".join(map(text_hash, parts)))
    data = {
        "questions": questions,
        "seed": args.seed,
        "shuffle_dataset": args.shuffle_dataset,
        "num_generations": args.num_generations,
        "generation_batch_size": args.generation_batch_size,
        "steps_per_generation_batch": generate_every / args.gradient_accumulation_steps,
    }
    layout = {name: args.__dict__[name] for name in ("steps_per_generation", "num_iterations")}
    layout["num_processes"] = args.world_size
    others = {
        name: value
        for name, value in args.to_dict().items()
        if not name.startswith(NOT_OF_THE_RUN) and name not in data and name not in layout
    }
    model_id = get_config_model_id(model.config)
    adapters = {}
    if isinstance(model, PeftModel):
        adapter = model.peft_config[model.active_adapter].to_dict()
        adapters = {name: sorted(v) if isinstance(v, set) else v for name, v in adapter.items()}
    packages = ("mempo_trl", "torch", "transformers", "trl", "peft")
    return without_secrets(
        {
            "data": data,
            "layout": layout,
            "generate_every": generate_every,
            "model": {"name": model_id, "weights": weights_stamp(model_id), "adapter": adapters},
            "tokenizer": tokenizer_hash(tokenizer),
            "chat_template": text_hash(str(tokenizer.chat_template)),
            **json.loads(json.dumps(others, default=str)),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }
    )


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two settings, one text for each."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [
            text for key in keys for text in differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"`{name}` was {before!r} and is {now!r} now"]
