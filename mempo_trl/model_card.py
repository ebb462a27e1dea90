"""What MemPO changes in the model card that TRL writes, and adds to it."""

import re
import textwrap
from pathlib import Path

from .config import MemPOConfig


_SETTINGS = (
    "context",
    "max_turns",
    "num_generations",
    "learning_rate",
    "loss_type",
    "beta",
    "memory_advantage_weight",
    "memory_prob_threshold",
    "memory_token_filter",
    "memory_baseline",
    "memory_answer",
    "max_completion_length",
    "max_tool_response_length",
)
_METRICS = ("reward", "memory/", "rollout/", "tool/")
_LOAD = {
    "model": """\
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained("{model}")
        tokenizer = AutoTokenizer.from_pretrained("{model}")""",
    "adapter": """\
        from peft import AutoPeftModelForCausalLM
        from transformers import AutoTokenizer

        model = AutoPeftModelForCausalLM.from_pretrained("{model}")
        tokenizer = AutoTokenizer.from_pretrained("{model}")""",
    "adapter of a folder": """\
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base_model = AutoModelForCausalLM.from_pretrained("path/to/{base}")  # not on the Hub
        model = PeftModel.from_pretrained(base_model, "{model}")
        tokenizer = AutoTokenizer.from_pretrained("{model}")""",
}


def complete_model_card(
    path: str,
    args: MemPOConfig,
    log_history: list[dict],
    *,
    model_id: str,
    base_model: str,
    is_adapter: bool,
    system_prompt: str,
) -> None:
    """
    Correct the card where it does not fit an agent, and add the method, its settings and the last evaluation, so that
    a reader can load the agent, run it, and train it again.

    Args:
        path (`str`):
            The model card that TRL wrote.
        args ([`MemPOConfig`]):
            Configuration of the run.
        log_history (`list[dict]`):
            `TrainerState.log_history`.
        model_id (`str`):
            Repository on the Hub, or folder of the model.
        base_model (`str`):
            Repository or folder of the model that was trained, empty if it has none.
        is_adapter (`bool`):
            Whether the model is an adapter of the base model.
        system_prompt (`str`):
            The system prompt of the run. It is part of the card if it is not the default one.
    """
    card = Path(path)
    text = card.read_text(encoding="utf-8")
    in_folder = not base_model or Path(base_model).is_dir()
    base_name = Path(base_model).resolve().name if base_model else "base-model"
    if in_folder:  # TRL's card names base models of the Hub only
        base = f"`{base_name}`, a model in a local folder" if base_model else "a model without a name"
        text = text.replace("[None](https://huggingface.co/None)", base)
    kind = "model" if not is_adapter else "adapter of a folder" if in_folder else "adapter"
    load = textwrap.dedent(_LOAD[kind]).format(model=model_id, base=base_name)
    text = re.sub(
        r"## Quick start\n.*?(?=## Training procedure)",
        lambda _: _quick_start(load, args, model_id),
        text,
        flags=re.DOTALL,
    )
    section = _recipe(args, system_prompt) + _evaluation(log_history)
    marker = "### Framework versions"
    text = text.replace(marker, f"{section}{marker}", 1) if marker in text else f"{text}\n{section}"
    card.write_text(text, encoding="utf-8")


def _quick_start(load: str, args: MemPOConfig, model_id: str) -> str:
    options = {
        "context": args.context,
        "max_turns": args.max_turns,
        "max_completion_length": args.max_completion_length,
        "max_tool_response_length": args.max_tool_response_length,
        "system_prompt": None if args.system_prompt is None else "system_prompt.txt",
    }
    given = " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)
    return f"""\
## Quick start

```python
{load}
```

The model is a memory agent: it answers by searching in several turns. In each turn it writes a memory, and the next \
turn sees only the question, the last turn and its search result. A single generation is one turn; `mempo_trl` plays \
them, with the settings of the training:

```bash
mempo evaluate --model_name_or_path {model_id} --dataset_name questions.jsonl --corpus_path corpus.jsonl \\
    --output_dir evaluation {given}
```

"""


def _recipe(args: MemPOConfig, system_prompt: str) -> str:
    lines = [
        "### Recipe",
        "",
        "[MemPO](https://huggingface.co/papers/2603.00680) as it is in `mempo_trl`, with these settings:",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| `{name}` | {_cell(args.__dict__[name])} |" for name in _SETTINGS),
        "",
    ]
    if args.system_prompt is not None:
        lines += ["The system prompt (`system_prompt.txt`):", "", "````text", system_prompt, "````", ""]
    return "\n".join([*lines, ""])


def _evaluation(log_history: list[dict]) -> str:
    """The last evaluation; several data sets are evaluated at one step and logged one after the other."""
    entries = [entry for entry in log_history if any(key.startswith("eval_") for key in entry)]
    metrics = {}
    for entry in entries:
        if entry["step"] == entries[-1]["step"]:
            metrics |= {name.removeprefix("eval_"): value for name, value in entry.items()}
    rows = [
        f"| {name} | {value:.4f} |"
        for name, value in sorted(metrics.items())
        if isinstance(value, float) and any(part in name for part in _METRICS)
    ]
    if not rows:
        return ""
    head = [
        "### Evaluation",
        "",
        f"At step {entries[-1]['step']}, on the evaluation split given to the trainer:",
        "",
        "| metric | value |",
        "| --- | --- |",
    ]
    return "\n".join([*head, *rows, "", ""])


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
