"""Checkpoints: what one holds, which one a run can go on from, and whether it is still the same run."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from .provenance import differences


logger = get_logger(__name__)

MANIFEST = "mempo_checkpoint.json"
"""What a checkpoint holds and how it came about. Only the trainer's state is written after it."""

SENTINEL = "checkpoint-is-incomplete.txt"
"""What transformers keeps in a checkpoint while it saves it on SIGTERM (`enable_jit_checkpoint`)."""


def write_manifest(folder: str | os.PathLike, settings: dict[str, Any], micro_step: int) -> None:
    """
    Write down what a checkpoint holds.

    Args:
        folder (`str` or `PathLike`):
            The checkpoint, with all files but the trainer's state.
        settings (`dict`):
            What the run depends on ([`~mempo_trl.provenance.training_settings`]).
        micro_step (`int`):
            Micro-batches of all steps that were made.
    """
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, SENTINEL)
    }
    manifest = {"micro_step": micro_step, "settings": settings, "files": files}
    Path(folder, MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """
    Read what a checkpoint holds, and check that it is there.

    Args:
        folder (`str` or `PathLike`):
            The checkpoint.

    Returns:
        `dict`: What [`write_manifest`] wrote.

    Raises:
        ValueError: If the checkpoint is not complete; the message names what is missing.
    """
    folder = Path(folder)
    contents = []
    # The state comes last and starts with a brace: cut anywhere, it is no JSON.
    for name in (MANIFEST, TRAINER_STATE_NAME):
        try:
            contents.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(folder)!r} is no complete checkpoint: {name!r} can't be read ({type(error).__name__}). Saving it "
                "was interrupted, or it was saved with `save_only_model`."
            ) from None
    for name, size in contents[0]["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise ValueError(
                f"{str(folder)!r} is no complete checkpoint: {name!r} had {size} bytes when it was saved, and "
                f"{'is missing' if found is None else f'has {found}'} now."
            )
    return contents[0]


def find_checkpoint(resume_from_checkpoint: str | os.PathLike | bool | None, output_dir: str) -> str | None:
    """
    The checkpoint that a run goes on from.

    Args:
        resume_from_checkpoint (`str`, `PathLike` or `bool`, *optional*):
            A folder, or `True` for the last complete checkpoint of the output folder. `"true"` and `"false"`, as a
            command line gives them, are the same as the booleans.
        output_dir (`str`):
            Where the checkpoints are.

    Returns:
        `str` or `None`: A complete checkpoint, or `None` to start anew.

    Raises:
        ValueError: If there is none, or the one that is asked for is not complete.
    """
    asked = resume_from_checkpoint
    if isinstance(asked, str) and asked.lower() in ("true", "false"):
        asked = asked.lower() == "true"
    if not asked:
        return None
    if asked is not True:
        read_manifest(asked)
        return os.fspath(asked)
    folders = sort_checkpoints(output_dir)
    for folder in reversed(folders):
        try:
            read_manifest(folder)
        except ValueError as error:
            logger.warning(f"{error} The one before it is tried.")
        else:
            return folder
    raise ValueError(
        f"`resume_from_checkpoint` is True, but {output_dir!r} holds no complete checkpoint ({len(folders)} in all). "
        "Leave it out to start anew."
    )


def in_generation_batch(manifest: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved between two steps on one generation batch."""
    return manifest["micro_step"] % manifest["settings"]["generate_every"] != 0


def check_same_run(manifest: dict[str, Any], settings: dict[str, Any], checkpoint: str, data_skip: bool) -> None:
    """
    Check that a run goes on as what it was.

    Other settings are allowed, and named in a warning: to lower a learning rate is a reason to resume. What decides
    which questions come next is not: some would be left out and others asked again, without a sign of it.

    Args:
        manifest (`dict`):
            What [`read_manifest`] gives.
        settings (`dict`):
            The same settings as they are now.
        checkpoint (`str`):
            The checkpoint, for the message.
        data_skip (`bool`):
            Whether the run goes on where it was in the data (not `ignore_data_skip`).

    Raises:
        ValueError: If it can't go on there.
    """
    before = manifest["settings"]
    settings = json.loads(json.dumps(settings))  # as they come back from the file
    if data_skip and (changes := differences(before["data"], settings["data"])):
        raise ValueError(
            f"{checkpoint!r} can't be resumed, because the order of the questions is another: {'; '.join(changes)}. "
            "Set this back; or start a new run from its weights (`model_name_or_path`); or go on from the first "
            "question, with `ignore_data_skip`."
        )
    changes = differences(before["layout"], settings["layout"])
    if data_skip and changes and in_generation_batch(manifest):
        raise ValueError(
            f"{checkpoint!r} was saved in the middle of a generation batch, which only the same processes can go on "
            f"with: {'; '.join(changes)}. Set this back; or resume from a checkpoint at the end of one (every "
            f"{before['generate_every']} micro-batches); or go on from the first question, with `ignore_data_skip`."
        )
    if changes := differences(before, settings):
        logger.warning(f"{checkpoint!r} is resumed with other settings: {'; '.join(changes)}.")


def save_generation_batch(inputs: list[dict[str, torch.Tensor]], path: str | os.PathLike) -> None:
    """Write the micro-batches of a generation batch."""
    # Parts of one tensor: safetensors takes no shared memory.
    tensors = {f"{i}.{name}": t.clone().contiguous() for i, part in enumerate(inputs) for name, t in part.items()}
    save_file(tensors, path)


def load_generation_batch(path: str | os.PathLike, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Read what [`save_generation_batch`] wrote."""
    inputs: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():  # which takes no "cpu:0" for a device
        number, _, name = key.partition(".")
        inputs.setdefault(int(number), {})[name] = tensor.to(device)
    return [inputs[number] for number in sorted(inputs)]
