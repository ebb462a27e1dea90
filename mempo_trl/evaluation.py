"""The agent of an evaluation, and the report of what it did."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.scripts.utils import get_git_commit_hash

from .metrics import TOKENS_COUNTED, latency, summarize_by_dataset, summarize_by_objectives
from .protocol import Protocol
from .runner import row_id


def model_eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a turn: the tokenizer's, and those that the model declares (as [`~trl.GRPOTrainer`] takes them)."""
    return eos_token_ids(model.generation_config, tokenizer)


def eos_token_ids(generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """As [`model_eos_token_ids`], for a model that is not loaded here."""
    declared = generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({tokenizer.eos_token_id, *declared})


class TransformersEngine:
    """
    Samples batches of turns with `model.generate`, for [`~mempo_trl.generation.BatchGenerator`].

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The agent.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        max_completion_length (`int`):
            Tokens after which a turn is cut.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; 0 is greedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_completion_length: int,
        temperature: float = 1.0,
    ):
        self.model = model
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.eos_token_ids = model_eos_token_ids(model, tokenizer)
        self.max_completion_length = max_completion_length
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.generation_config = GenerationConfig(
            max_new_tokens=max_completion_length,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.eos_token_ids,
            repetition_penalty=1.0,  # as in training; the model's own (1.05 for Qwen2.5-Instruct) would count here
            **(sampling if temperature > 0 else {"do_sample": False}),
        )

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], idle: bool = False) -> tuple[list[list[int]], None]:
        """
        Sample one turn for each prompt.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            idle (`bool`, *optional*, defaults to `False`):
                Ignored.

        Returns:
            `tuple[list[list[int]], None]`: Sampled ids up to the first end-of-turn id, and no log-probabilities.
        """
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        output = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=self.generation_config,
        )
        completions = []
        for ids in output[:, width:].tolist():
            end = next((k for k, token_id in enumerate(ids) if token_id in self.eos_token_ids), len(ids) - 1)
            completions.append(ids[: end + 1])
        return completions, None


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


def check_resumable(
    records: Iterable[dict], rows: Sequence[dict], num_samples: int, folder: str | os.PathLike
) -> None:
    """
    Check that rollouts on disk are a part of what is asked for, so that the figures are of all that lies there.

    Raises:
        ValueError: If there are others.
    """
    wanted = {row_id(row) for row in rows}
    surplus = sum(record["id"] not in wanted or record["sample"] >= num_samples for record in records)
    if surplus:
        raise ValueError(
            f"{str(folder)!r} holds {surplus} rollouts of other questions or more samples than are asked for now "
            f"({len(rows)} questions, {num_samples} samples of each). Choose another `output_dir`, or `--overwrite`."
        )


def in_order(records: Iterable[dict], rows: Sequence[dict]) -> list[dict]:
    """Records in the order of their questions and samples, whatever order they were finished in."""
    place = {row_id(row): number for number, row in enumerate(rows)}
    return sorted(records, key=lambda record: (place[record["id"]], record["sample"]))


def make_report(
    records: Sequence[dict],
    *,
    rows: Sequence[dict],
    agent: dict[str, Any],
    protocol: Protocol,
    settings: dict[str, Any],
    retrieval: dict[str, Any],
    normalizer: str = "squad",
    seed: int = 0,
    seconds: float | None = None,
) -> dict[str, Any]:
    """
    Everything that is known of an evaluation, for `evaluation.json`.

    The figures are made of the records alone, so that an evaluation which was killed and went on has those of one that
    was not; what depends on the clock is under `timing`.

    Args:
        records (`Sequence[dict]`):
            The rollouts, one per question and sample, in any order.
        rows (`Sequence[dict]`):
            The questions.
        agent (`dict`):
            Who played: `model`, `base_model` of an adapter, `server_model`, …
        protocol ([`~mempo_trl.protocol.Protocol`]):
            The prompts and the tokenizer.
        settings (`dict`), retrieval (`dict`):
            The arguments of the run.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of the figures in the tables.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.
        seconds (`float`, *optional*):
            Time of this run.

    Returns:
        `dict[str, Any]`
    """
    records = in_order(records, rows)
    questions = [[row_id(row), row["question"], row["golden_answers"]] for row in rows]
    usage = [record["usage"] for record in records if record.get("usage") is not None]
    tokenizer = protocol.tokenizer
    return {
        **agent,
        "tokenizer": tokenizer.name_or_path,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "system_prompt": protocol.system_prompt,
        "chat_template_hash": text_hash(tokenizer.chat_template),
        "questions": {"num": len(rows), "hash": text_hash(json.dumps(questions, ensure_ascii=False))},
        "settings": without_secrets(settings),
        "retrieval": without_secrets(retrieval),
        "tokens_counted": TOKENS_COUNTED,
        "commit": get_git_commit_hash("mempo_trl"),
        "versions": {
            name: importlib.metadata.version(name) for name in ("mempo_trl", "transformers", "torch", "trl", "peft")
        },
        "results": summarize_by_objectives(records, normalizer, seed),
        "results_by_dataset": summarize_by_dataset(records, normalizer, seed),
        "server_usage": {name: sum(counts[name] for counts in usage) for name in usage[0]} if usage else None,
        "timing": {"seconds": seconds, **latency(records)},
    }


def write_report(folder: str | os.PathLike, report: dict[str, Any]) -> None:
    """Write `evaluation.json` and `evaluation.md`, each in one go."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "evaluation.md", markdown(report))
    write_text(folder / "evaluation.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


COLUMNS = {
    "exact_match": "exact match",
    "f1": "F1",
    "pass_at_n": "pass@n",
    "format_ok_frac": "format",
    "tokens_total_mean": "tokens total",
    "tokens_peak_mean": "tokens peak",
    "turns_mean": "turns",
}
"""Figures of a table, with the words above them."""


def table_rows(report: dict[str, Any]) -> list[tuple[str, dict]]:
    """A name for each group of rollouts, and its figures: all, by number of objectives, and by set."""
    groups = [("all" if name == "all" else f"k = {name}", row) for name, row in report["results"].items()]
    if len(groups) == 2:  # one number of objectives is all of them
        groups.pop()
    sets = list(report["results_by_dataset"].items())
    return groups + (sets if len(sets) > 1 else [])


def figure(value: float | None) -> str:
    """A figure as text: three decimals below 10, none above."""
    return "none" if value is None else f"{value:.3f}" if value < 10 else f"{value:.0f}"


def figure_interval(row: dict[str, Any], name: str) -> str:
    """The 95% interval of a figure as text."""
    return "–".join("none" if end is None else f"{end:.{0 if end >= 10 else 2}f}" for end in row["ci95"][name])


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    every, settings, retrieval = report["results"]["all"], report["settings"], report["retrieval"]
    facts = {
        "model": report["model"],
        "base model": report.get("base_model"),
        "model on the server": report.get("server_model"),
        "tokenizer": f"{report['tokenizer']} ({report['tokenizer_hash']})",
        "chat template": report["chat_template_hash"],
        "questions": f"{settings['dataset_name']}: {report['questions']['num']} ({report['questions']['hash']})",
        "samples per question": every["num_samples"],
        "context": settings["context"],
        "temperature": settings["temperature"],
        "max turns": settings["max_turns"],
        "max completion length": settings["max_completion_length"],
        "retrieval top k": retrieval["retrieval_top_k"],
        "corpus hash": report.get("corpus_hash"),
        "normaliser": every["normalizer"],
        "seed": settings["seed"],
        "commit": report["commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    lines = ["# Evaluation", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    lines += [
        "",
        "## Results",
        "",
        f"| | questions | rollouts | {' | '.join(COLUMNS.values())} | searches | failures |",
    ]
    lines.append("| --- |" + " ---: |" * (len(COLUMNS) + 4))
    for name, row in table_rows(report):
        cells = [f"{figure(row[column])} ({figure_interval(row, column)})" for column in COLUMNS]
        lines.append(
            f"| {name} | {row['num_questions']} | {row['num_rollouts']} | {' | '.join(cells)} | "
            f"{figure(row['searches_mean'])} | {row['failures']} |"
        )
    lines += ["", "In brackets the 95% interval of a bootstrap over questions. Exact match and F1 are means over "
              "objectives first; pass@n is the exact match of the best sample of a question.", ""]  # fmt: skip
    lines += ["| | squad | words |", "| --- | ---: | ---: |"]
    for name, label in (("exact_match", "exact match"), ("f1", "F1")):
        lines.append(f"| {label} | {figure(every[f'{name}_squad'])} | {figure(every[f'{name}_words'])} |")
    lines += ["", "| tokens per rollout | mean | what is counted |", "| --- | ---: | --- |"]
    for name, told in report["tokens_counted"].items():
        if name in every and name != "failures":
            lines.append(f"| {name.removesuffix('_mean')} | {figure(every[name])} | {told} |")
    outcomes = ", ".join(f"{name} {count}" for name, count in every["outcomes"].items() if count)
    lines += ["", f"Outcomes: {outcomes}. Searches that failed: {every['tool_errors']}. "
              f"{report['tokens_counted']['failures'].capitalize()}.", "", "## System prompt", "", "```text",
              report["system_prompt"], "```"]  # fmt: skip
    return "\n".join(lines) + "\n"
