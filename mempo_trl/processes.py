"""What the processes of a run owe each other: the cause of a failure reaches all of them, and none waits for ever."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from .config import MemPOConfig


logger = get_logger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.5
"""How often a process looks for a failure of another one."""

GRACE_SECONDS = 15.0
"""Time in which a process leaves by itself when another one has failed, and in which the others take note of a failure
before the launcher ends them."""


class ProcessFailure(RuntimeError):
    """Another process failed; the message names it and the cause."""


class FailureWatch:
    """
    Context manager around work that all processes do together. If it raises on one process, every other process ends as
    well, in bounded time and with the cause, instead of waiting in a collective operation for the one that is gone.

    The cause travels beside the collective operations, over the key-value store of the process group, where a thread
    looks for it. The others log it and take it up in the error with which they leave. One that can't leave, because it
    waits in a collective operation, is ended with exit status 1. On a single process it does nothing.

    It can be entered several times, also within itself, by all processes alike.
    """

    def __init__(self):
        self._depth = 0
        self._uses = 0
        self._lock = threading.RLock()

    def __enter__(self) -> "FailureWatch":
        self._depth += 1
        if self._depth == 1:
            self._thread = None
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._start()
        return self

    def _start(self) -> None:
        self._uses += 1
        self._store = dist.PrefixStore(f"mempo/{self._uses}", dist.distributed_c10d._get_default_store())
        self._rank, self._others = dist.get_rank(), dist.get_world_size() - 1
        self._known: str | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mempo-failure-watch", daemon=True)
        self._thread.start()

    def __exit__(self, exception_type, error, traceback) -> None:
        self._depth -= 1
        if self._depth > 0 or self._thread is None:
            return
        if isinstance(error, ProcessFailure):
            # The other process is about to announce it.
            _wait_for(self._take_note)
        elif error is not None:
            self._announce(f"{type(error).__name__}: {error}")
        self._left.set()
        self._thread.join()
        if self._known is not None and not isinstance(error, ProcessFailure):
            raise ProcessFailure(self._known) from error

    def _watch(self) -> None:
        while not self._left.wait(POLL_SECONDS):
            if self._take_note():
                if not self._left.wait(GRACE_SECONDS):
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _announce(self, cause: str) -> None:
        """Tell the others, and give them time to take note: the launcher ends them as soon as this process ends."""
        try:
            first = self._store.compare_set("failure", "", f"{self._rank} {cause}").decode()
            if first.startswith(f"{self._rank} "):
                _wait_for(lambda: self._store.add("noted", 0) >= self._others)
            else:
                self._take_note()
        except RuntimeError:  # the store has ended with the process that held it: there is nobody left to tell
            pass

    def _take_note(self) -> bool:
        """Whether another process has failed. The first time it is logged and acknowledged."""
        with self._lock:
            if self._known is not None:
                return True
            try:
                if not self._store.check(["failure"]):
                    return False
                process, cause = self._store.get("failure").decode().split(" ", 1)
                if int(process) == self._rank:
                    return False
                self._known = f"Process {process} failed: {cause}"
                logger.error(self._known, main_process_only=False)
                self._store.add("noted", 1)
                return True
            except RuntimeError:  # as above; the launcher sees to processes that are gone without a word
                return False


def on_all_processes(work: Callable[[], T]) -> T:
    """
    Do some work on every process, and end on all of them if it fails on one. Collective; the work itself is not.

    Without this the others would wait in their next collective until it times out, and only the log of the one that
    failed would say why.

    Args:
        work (`Callable`):
            What to do.

    Returns:
        `Any`: What it returned on this process.

    Raises:
        ProcessFailure: If it raised on another process; the message has the cause. Where it raised, that error rises.
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
            raise ProcessFailure(f"Process {index} failed: {cause}")
    return result


def check_tool_timeout(args: MemPOConfig, num_processes: int) -> None:
    """
    Check that the other processes, which wait for the rollouts of this one, don't give up before it gives up a tool.

    Args:
        args ([`MemPOConfig`]):
            With `tool_timeout`, `tool_retries` and `ddp_timeout`.
        num_processes (`int`):
            Processes of the run.

    Raises:
        ValueError: If they do.
    """
    seconds = args.tool_timeout * (args.tool_retries + 1) + 2**args.tool_retries - 1
    if num_processes > 1 and seconds >= args.ddp_timeout:
        raise ValueError(
            f"A tool call may take {seconds:g} s (`tool_timeout` {args.tool_timeout:g}, `tool_retries` "
            f"{args.tool_retries}), but the other processes wait only `ddp_timeout` = {args.ddp_timeout} s. Lower the "
            "first two, or raise `ddp_timeout`."
        )


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + GRACE_SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 10)
