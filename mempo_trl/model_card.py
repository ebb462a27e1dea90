"""What MemPO adds to the model card that TRL writes."""

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
    "memory_credit",
    "max_completion_length",
    "max_tool_response_length",
)


def append_to_model_card(path: str, args: MemPOConfig, log_history: list[dict]) -> None:
    """
    Add the method, its settings and the last evaluation to a model card, so that a reader can rerun it.

    Args:
        path (`str`):
            The model card that TRL wrote.
        args ([`MemPOConfig`]):
            Configuration of the run.
        log_history (`list[dict]`):
            `TrainerState.log_history`.
    """
    lines = [
        "## Memory agent",
        "",
        "The model answers questions by searching in several turns. In each turn it writes a memory, and the next turn "
        "sees only the question, the last turn and its search result. It was trained with "
        "[MemPO](https://huggingface.co/papers/2603.00680) in `mempo_trl`.",
        "",
        "### Recipe",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| `{name}` | {_cell(args.__dict__[name])} |" for name in _SETTINGS),
        "",
    ]
    evaluations = [
        (entry["step"], {k: v for k, v in entry.items() if k.startswith("eval_") and isinstance(v, float)})
        for entry in log_history
        if any(key.startswith("eval_") for key in entry)
    ]
    if evaluations:
        step, metrics = evaluations[-1]
        lines += [
            "### Evaluation",
            "",
            f"At step {step}, on the evaluation split given to the trainer:",
            "",
            "| metric | value |",
            "| --- | --- |",
            *(f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in sorted(metrics.items())),
            "",
        ]
    card = Path(path)
    text = card.read_text(encoding="utf-8")
    section = "\n".join(lines)
    marker = "### Framework versions"
    card.write_text(
        text.replace(marker, f"{section}\n{marker}", 1) if marker in text else f"{text}\n{section}", encoding="utf-8"
    )


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
