"""Play many questions into a file, one record per rollout: what a killed run has finished, the next one skips."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .generation import BatchGenerator, GenerationError, Generator, run_in_event_loop
from .monitoring import rollout_record
from .protocol import Protocol
from .provenance import differences
from .rollout import play


FAILED = "failed"
"""Outcome of a rollout that could not be played to its end, since no turn could be had. It is played anew on resume."""


def row_id(row: dict) -> str:
    """Id of a question: its own, else one that is made from its text."""
    if row.get("id") is not None:
        return str(row["id"])
    return hashlib.sha256(row["question"].encode()).hexdigest()[:16]


def read_records(path: str | os.PathLike) -> list[dict]:
    """
    Read the records that [`play_questions`] wrote: one per question and sample, the newest.

    Args:
        path (`str` or `PathLike`):
            The file. Half a line at its end, as a killed run leaves it, is left out.

    Returns:
        `list[dict]`: In the order in which the rollouts were finished.

    Raises:
        ValueError: If a line is no record; the message names it.
    """
    records: dict[tuple[str, int], dict] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                key = record["id"], record["sample"]
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {str(path)!r} is not a rollout of `play_questions` ({error!r})."
                ) from None
            records.pop(key, None)
            records[key] = record
    return list(records.values())


def play_questions(
    rows: Iterable[dict],
    *,
    protocol: Protocol,
    output_file: str | os.PathLike,
    max_turns: int,
    generator: Generator | None = None,
    engine: Callable | None = None,
    batch_size: int = 64,
    num_samples: int = 1,
    max_prompt_length: int | None = None,
    max_failures: int = 10,
    settings: dict[str, Any] | None = None,
    overwrite: bool = False,
    prompts: bool = False,
    on_record: Callable[[dict], None] | None = None,
) -> None:
    """
    Play every question `num_samples` times and append the record of each rollout to a file as soon as it is finished.

    What the file has already is not played again; failed rollouts are. The settings are kept beside it, in
    `<output_file>.settings.json`.

    Args:
        rows (`Iterable[dict]`):
            Rows of [`~mempo_trl.load_questions`]. `id` and `dataset` go into the records; an id is made from the
            question where there is none.
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Prompts, tools and parsing.
        output_file (`str` or `PathLike`):
            JSON Lines file of [`~mempo_trl.monitoring.rollout_record`]s with `id`, `dataset`, `sample` and `seconds`,
            and `usage` where a server counts tokens. Only one process may write to it.
        max_turns (`int`):
            Turns after which a rollout without an answer ends.
        generator ([`~mempo_trl.generation.Generator`], *optional*):
            Samples the turns; it plays all rollouts in one run.
        engine (`Callable`, *optional*):
            Engine of a [`~mempo_trl.generation.BatchGenerator`] instead, such as
            [`~mempo_trl.generation.TransformersEngine`].
        batch_size (`int`, *optional*, defaults to `64`):
            Rollouts that an engine plays at the same time.
        num_samples (`int`, *optional*, defaults to `1`):
            Rollouts per question.
        max_prompt_length (`int`, *optional*):
            Tokens above which the next prompt does not fit.
        max_failures (`int`, *optional*, defaults to `10`):
            Rollouts that may fail one after another, none succeeding between them, before all is stopped.
        settings (`dict`, *optional*):
            What else the rollouts depend on, such as model, corpus and temperature. A run with other settings does not
            go on in the same file. They must be JSON, and free of secrets.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start anew instead of going on.
        prompts (`bool`, *optional*, defaults to `False`):
            Whether the records hold the text of every prompt.
        on_record (`Callable`, *optional*):
            `on_record(record)`, called for each rollout of this run once it is on disk.

    Raises:
        ValueError: If two rows have the same id, or the file is of other settings or questions; nothing is played.
        GenerationError: If there is nothing to generate with, after `max_failures`, or if every rollout failed and the
            file has none that is finished.
    """
    if (generator is None) == (engine is None):
        raise ValueError("Give one of `generator` and `engine`.")
    questions: dict[str, dict] = {}
    for row in rows:
        if questions.setdefault(row_id(row), row) is not row:
            raise ValueError(
                f"Two questions have the id {row_id(row)!r}: {questions[row_id(row)]['question']!r} and "
                f"{row['question']!r}. Drop one, or give them an `id` of their own."
            )
    settings = {
        "context": protocol.context,
        "system_prompt": protocol.system_prompt,
        "max_tool_response_length": protocol.max_tool_response_length,
        "max_turns": max_turns,
        "max_prompt_length": max_prompt_length,
        **(settings or {}),
    }
    before = _open_output(Path(output_file), settings, overwrite)
    for (name, _), record in before.items():
        if name in questions and questions[name]["question"] != record["question"]:
            raise ValueError(
                f"The question with the id {name!r} is {questions[name]['question']!r}, but {record['question']!r} in "
                f"{str(output_file)!r}. Choose another output file, or overwrite it."
            )
    finished = {key for key, record in before.items() if record["outcome"] != FAILED}
    jobs = [(name, i) for name in questions for i in range(num_samples) if (name, i) not in finished]
    jobs.sort(key=lambda job: job in before)  # those that failed come last, since they may fail again
    failures = 0

    async def play_job(name: str, sample: int) -> dict:
        row, start = questions[name], time.perf_counter()
        rollout = error = None
        try:
            rollout = await play(
                row["question"],
                row["golden_answers"],
                protocol=protocol,
                generator=generator,
                call_tool=protocol.toolbox.call,
                max_turns=max_turns,
                max_prompt_length=max_prompt_length,
            )
        except GenerationError as raised:
            error = str(raised)
        extra = {"id": name, "dataset": row.get("dataset"), "sample": sample}
        extra["seconds"] = round(time.perf_counter() - start, 3)
        if (usage := generator.usage()) is not None:
            extra["usage"] = usage
        if rollout is not None:
            return rollout_record(rollout, tokenizer=protocol.tokenizer if prompts else None, **extra)
        asked = {"question": row["question"], "golden_answers": row["golden_answers"]}
        return {**extra, **asked, "outcome": FAILED, "error": error, "turns": []}

    async def play_and_write(name: str, sample: int) -> None:
        nonlocal failures
        record = await play_job(name, sample)
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        if on_record is not None:
            on_record(record)
        failures = failures + 1 if record["outcome"] == FAILED else 0
        if failures == max_failures or (failures == len(jobs) and not finished):
            raise GenerationError(
                f"The last {failures} rollouts failed, the last one with: {record['error']} What is finished is in "
                f"{str(output_file)!r}; the same call goes on from there."
            )

    def run(batch: list[tuple[str, int]]) -> None:
        # Seeds come from a number that belongs to the rollout, not to its place in this run, so that no sample of a
        # question gets the seed that another one had in a run before.
        numbers = [int.from_bytes(hashlib.sha256(f"{job}".encode()).digest()[:6], "big") for job in batch]
        run_in_event_loop(generator.run([play_and_write(*job) for job in batch], numbers))

    with open(output_file, "a", encoding="utf-8") as file:
        if engine is None and jobs:
            run_in_event_loop(generator.check())
            run(jobs)
        elif engine is not None:
            for start in range(0, len(jobs), batch_size):
                generator = BatchGenerator(engine, engine.max_completion_length, engine.eos_token_ids)
                run(jobs[start : start + batch_size])


def _open_output(path: Path, settings: dict[str, Any], overwrite: bool) -> dict[tuple[str, int], dict]:
    """Make the file ready to be appended to, and give the records that are in it."""
    settings = json.loads(json.dumps(settings))  # as they come back from the file
    beside = path.with_name(path.name + ".settings.json")
    remedy = "Choose another output file, or overwrite it."
    if overwrite or not path.exists() or path.stat().st_size == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        unfinished = beside.with_name(beside.name + ".tmp")
        unfinished.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(unfinished, beside)
        path.touch()
        return {}
    if not beside.exists():
        raise ValueError(f"{str(path)!r} exists, and {str(beside)!r}, which says how it was made, does not. {remedy}")
    before = json.loads(beside.read_text(encoding="utf-8"))
    if changes := differences(before, settings):
        raise ValueError(f"{str(path)!r} was made with other settings: {'; '.join(changes)}. {remedy}")
    with open(path, "rb+") as file:  # without half a line at the end
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return {(record["id"], record["sample"]): record for record in read_records(path)}


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
