"""What every benchmark ends with: a table on the terminal and a JSON file that says what was measured where."""

import importlib.metadata
import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from trl.scripts.utils import get_git_commit_hash


def print_table(title: str, rows: list[dict]) -> None:
    """One line per row, with the first row's keys as columns."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def write_report(path: str | os.PathLike, settings: dict, rows: list[dict], **more) -> None:
    """
    Write the JSON file of a benchmark.

    Args:
        path (`str` or `os.PathLike`):
            Where it goes.
        settings (`dict`):
            Arguments of the run.
        rows (`list[dict]`):
            The table.
        more:
            Further figures, such as ratios.
    """
    packages = ("mempo_trl", "torch", "transformers", "trl", "peft")
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": get_git_commit_hash("mempo_trl"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "settings": settings,
        "rows": rows,
        **more,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
