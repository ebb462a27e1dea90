"""The processes of a run: an error on one of them is an error on all."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object


T = TypeVar("T")


def on_all_processes(work: Callable[[], T]) -> T:
    """
    Do some work on every process, and end on all of them if it fails on one. Collective, but `work` itself need not be.

    Without this the others would wait in their next collective until it times out, and only the log of the one that
    failed would say why.

    Args:
        work (`Callable`):
            What to do.

    Returns:
        `Any`: What it returned on this process.

    Raises:
        RuntimeError: If it raised on another process; the message has the cause. Where it raised, that error rises.
    """
    result = error = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    causes = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for index, cause in enumerate(causes):
        if cause is not None:
            raise RuntimeError(f"Process {index} failed: {cause}")
    return result
