"""One HTML page of a run's or an evaluation's rollouts, which needs nothing but a browser (`mempo view`)."""

import base64
import gzip
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..data.objectives import normalize_golden_answers
from ..parsing import parse_turn
from ..rewards import NORMALIZERS, score_answer


logger = logging.getLogger(__name__)

VIEWER = Path(__file__).parent
STYLES = ("page.css", "rollout.css")
SCRIPTS = ("text.js", "data.js", "dom.js", "list.js", "plot.js", "turn.js", "rollout.js", "app.js")
CHUNK_BYTES = 400_000
"""Rollouts are compressed together up to this size: a browser unpacks so much in a few milliseconds."""

LONG = 300
"""Characters of a question or answer that the list holds; the rollout itself has all of it."""

# Larger than all the rest together, and shown nowhere.
_NOT_SHOWN = ("prompt_ids", "completion_ids", "logps", "mem_rewards_idx_list")


@dataclass(frozen=True)
class Report:
    """
    What [`write_report`] wrote.

    Args:
        path (`Path`):
            The page.
        num_rollouts (`int`):
            Rollouts in it.
        num_found (`int`):
            Rollouts in the files.
        num_broken (`int`):
            Lines that are no JSON, such as the last one of a killed run. They are left out.
        num_replaced (`int`):
            Rollouts that were played again, in an evaluation; the newest of each is in the page.
        num_bytes (`int`):
            Size of the page.
    """

    path: Path
    num_rollouts: int
    num_found: int
    num_broken: int
    num_replaced: int
    num_bytes: int


def find_rollouts(path: str | os.PathLike) -> tuple[list[Path], dict[str, Any]]:
    """
    Find the rollouts of a run.

    Args:
        path (`str` or `Path`):
            A training output folder (its `rollouts/*.jsonl`), an evaluation folder (`rollouts.jsonl`,
            `evaluation.json`), a folder of JSONL files, or a JSONL file.

    Returns:
        `tuple[list[Path], dict]`: The files in order, and what `evaluation.json` says if there is one.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If the folder holds both, or `evaluation.json` is no JSON object.
    """
    path = Path(path)
    if path.is_file():
        files, folder = [path], path.parent if path.name == "rollouts.jsonl" else None
    elif path.is_dir():
        evaluated, trained = path / "rollouts.jsonl", sorted((path / "rollouts").glob("*.jsonl"))
        if evaluated.is_file() and trained:
            raise ValueError(
                f"{path} holds the rollouts of a training (`rollouts/`) and of an evaluation (`rollouts.jsonl`); name "
                "one of the two."
            )
        files = [evaluated] if evaluated.is_file() else trained or sorted(path.glob("*.jsonl"))
        folder = path
    else:
        raise FileNotFoundError(f"{path} does not exist; give a training or evaluation folder, or a JSONL file.")
    if not files:
        raise FileNotFoundError(
            f"{path} holds no rollouts; expected `rollouts/*.jsonl` (training), `rollouts.jsonl` (evaluation) or "
            "other `*.jsonl` in it."
        )
    return files, _read_evaluation(folder)


def write_report(
    path: str | os.PathLike, output_file: str | os.PathLike | None = None, max_rollouts: int = 10_000
) -> Report:
    """
    Write the page. The rollouts are read one after the other and never held together.

    Args:
        path (`str` or `Path`):
            See [`find_rollouts`].
        output_file (`str` or `Path`, *optional*):
            The page. Defaults to `view.html` in the folder, or to the JSONL file's name with `.html`.
        max_rollouts (`int`, *optional*, defaults to `10_000`):
            Highest number of rollouts. Of more, so many are taken, evenly spread over the files, and the page says so.

    Returns:
        [`Report`]

    Raises:
        ValueError: If a line is JSON but no rollout, or no line is a rollout.
    """
    if max_rollouts < 1:
        raise ValueError(f"got `max_rollouts={max_rollouts}`, expected at least 1.")
    path = Path(path)
    files, evaluation = find_rollouts(path)
    if output_file is None:
        output_file = path / "view.html" if path.is_dir() else path.with_suffix(".html")
    output_file = Path(output_file)
    if output_file.is_dir():
        raise ValueError(f"got `output_file={str(output_file)!r}`, which is a folder; name a file in it.")
    settings = evaluation.get("settings")
    normalizer = settings.get("normalizer") if isinstance(settings, dict) else None
    normalizer = normalizer if normalizer in NORMALIZERS else "squad"
    num_found = sum(1 for _ in _lines(files))
    step = max(1.0, num_found / max_rollouts)
    wanted = {int(i * step) for i in range(min(num_found, max_rollouts))}

    index, num_broken, num_replaced = [], 0, 0
    places: dict[tuple, int] = {}
    with tempfile.TemporaryFile() as packed:
        chunks = _ChunkWriter(packed)
        for number, (file, line_number, line) in enumerate(_lines(files)):
            if number not in wanted:
                continue
            try:
                # `NaN` and `Infinity`, which Python writes and a browser refuses, become null.
                record = json.loads(line, parse_constant=lambda name: None)
            except ValueError:
                num_broken += 1
                logger.warning(f"{file}:{line_number} is no JSON and is left out.")
                continue
            if not isinstance(record, dict) or not isinstance(record.get("turns"), list):
                raise ValueError(
                    f"{file}:{line_number} holds no rollout: it has no list of `turns`. Give the rollouts that `mempo "
                    "train`, `evaluate` or `collect` wrote."
                )
            body = _body(record, normalizer)
            chunk, position = chunks.write(_dump(body))
            entry = _entry(body) | {"chunk": chunk, "position": position}
            key = (file, record.get("id"), record.get("sample"))
            # In an evaluation the newest of a question and sample counts, as where it failed before; training says its
            # step, and may well play a question twice.
            if None in key or record.get("step") is not None or key not in places:
                places[key] = len(index)
                index.append(entry)
            else:
                index[places[key]] = entry
                num_replaced += 1
        chunks.flush()
        if not index:
            raise ValueError(f"{path} holds no rollout: {num_broken} of its {num_found} lines are no JSON.")
        about = {
            "path": str(path),
            "files": len(files),
            "num_rollouts": len(index),
            "num_found": num_found,
            "num_broken": num_broken,
            "num_replaced": num_replaced,
            "normalizer": normalizer,
            "evaluation": evaluation,
        }
        num_bytes = _write_page(output_file, about, index, packed)
    return Report(output_file, len(index), num_found, num_broken, num_replaced, num_bytes)


def _read_evaluation(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / "evaluation.json").is_file():
        return {}
    path = folder / "evaluation.json"
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); remove it to see the rollouts alone.") from error
    if not isinstance(evaluation, dict):
        raise ValueError(f"{path} is no JSON object; remove it to see the rollouts alone.")
    return evaluation


def _lines(files: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    for file in files:
        with open(file, "rb") as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield file, number, line


def _body(record: dict[str, Any], normalizer: str) -> dict[str, Any]:
    """The rollout as the page shows it: what older files lack is made from the text where it can be."""
    turns = [_turn(turn) for turn in record["turns"] if isinstance(turn, dict)]
    body = {key: value for key, value in record.items() if value is not None} | {"turns": turns}
    answer = record.get("answer")
    answer = answer if isinstance(answer, str) else None
    try:
        golden_answers = normalize_golden_answers(record.get("golden_answers"))
    except ValueError:  # none are known
        golden_answers = []
    body["golden_answers"] = golden_answers
    if golden_answers:
        body["scores"] = score_answer(answer, golden_answers, "em", normalizer)
    return body


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in turn.items() if key not in _NOT_SHOWN and value is not None}
    completion = turn.get("completion")
    if isinstance(completion, str) and not {"memory", "think", "call"} <= turn.keys():
        # Written by `mempo collect`, or before a key was there. Any tool and any arguments are right here.
        parsed = parse_turn(completion, lambda name, arguments: None)
        for key, block in (("memory", parsed.memory), ("think", parsed.think)):
            if key not in turn and block is not None:
                shown[key] = completion[block.inner_start : block.inner_end]
        if "call" not in turn and parsed.outcome == "tool_call":
            shown["call"] = {"name": parsed.name, "arguments": parsed.arguments}
    markers = turn.get("mem_rewards_idx_list")
    if isinstance(markers, list) and any(markers):
        # 1 at the first token of the memory block and 2 at its last; a block of a single token has only the 1.
        first = markers.index(1) if 1 in markers else markers.index(2)
        last = markers.index(2) if 2 in markers else first
        shown["memory_tokens"] = [first, last + 1]
    return shown


def _entry(body: dict[str, Any]) -> dict[str, Any]:
    """What the list, its filters and its sorting know of a rollout."""
    shared = ("id", "outcome", "dataset", "step", "mode", "sample", "reward", "tokens_total", "scores")
    entry = {key: body[key] for key in shared if key in body}
    for key in ("question", "answer"):
        if isinstance(body.get(key), str):
            entry[key] = body[key][:LONG]
    entry["golden"] = [alias[:LONG] for aliases in body["golden_answers"] for alias in aliases[:3]]
    entry["objectives"] = len(body["golden_answers"])
    entry["turns"] = len(body["turns"])
    rewards = [turn.get("R_M") for turn in body["turns"]]
    if any(reward is not None for reward in rewards):
        entry["R_M"] = [None if reward is None else round(reward, 4) for reward in rewards]
    return entry


def _dump(value: Any) -> bytes:
    # Half of a surrogate pair, which JSON can spell, is no text for a browser either.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _pack(data: bytes) -> bytes:
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0))


class _ChunkWriter:
    """Packs bodies into `<script>` elements of about `CHUNK_BYTES` unpacked: base64 has no character that HTML reads."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.number = 0
        self._bodies: list[bytes] = []
        self._size = 0

    def write(self, body: bytes) -> tuple[int, int]:
        """Add a body; returns the number of its chunk and its position there."""
        if self._bodies and self._size + len(body) > CHUNK_BYTES:
            self.flush()
        self._bodies.append(body)
        self._size += len(body)
        return self.number, len(self._bodies) - 1

    def flush(self) -> None:
        """Write the chunk that was begun."""
        self.file.write(b'<script type="text/plain" id="chunk-%d">' % self.number)
        self.file.write(_pack(b"\n".join(self._bodies)))
        self.file.write(b"</script>\n")
        self.number, self._bodies, self._size = self.number + 1, [], 0


def _write_page(path: Path, about: dict, index: list[dict], packed: BinaryIO) -> int:
    """Head, index, program, and then the bodies, so that the list is there before the page has been read to its end."""
    style = "".join((VIEWER / name).read_text(encoding="utf-8") for name in STYLES)
    program = "".join((VIEWER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    program = f'"use strict";\n(() => {{\n{program}}})();\n'
    # Nothing may be loaded from anywhere, nothing runs but this very program, and no text can become markup.
    policy = (
        f"default-src 'none'; style-src '{_sha256(style)}'; script-src '{_sha256(program)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    template = (VIEWER / "page.html").read_text(encoding="utf-8")
    head, rest = template.replace("{{policy}}", policy).split("{{style}}")
    before, rest = rest.split("{{data}}")
    between, rest = rest.split("{{program}}")
    before_chunks, end = rest.split("{{chunks}}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "wb") as file:
        file.write((head + style + before).encode())
        file.write(b'<script type="text/plain" id="about">' + _pack(_dump(about)) + b"</script>\n")
        file.write(b'<script type="text/plain" id="index">' + _pack(_dump(index)) + b"</script>\n")
        file.write((between + program + before_chunks).encode())
        packed.seek(0)
        shutil.copyfileobj(packed, file)
        file.write(end.encode())
    os.replace(unfinished, path)
    return path.stat().st_size


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
