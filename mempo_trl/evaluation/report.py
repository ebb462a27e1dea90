"""The report of an evaluation: who played, on which questions, how, and the figures of what came out."""

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.scripts.utils import get_git_commit_hash

from ..protocol import Protocol
from ..provenance import text_hash, tokenizer_hash, without_secrets
from ..runner import in_order, row_id
from .metrics import TOKENS_COUNTED, latency, summarize_by_dataset, summarize_by_objectives


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
