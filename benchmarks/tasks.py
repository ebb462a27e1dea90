"""Commands that need one another, some at a time: what is finished is not run again, what was interrupted starts anew."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from trl.scripts.utils import get_git_commit_hash

from mempo_trl.provenance import text_hash


DONE = "done.json"
"""Lies in the folder of a task that is finished, and says by which command, from what, and in which time."""

LOG = "log.txt"


@dataclass(frozen=True)
class Task:
    """
    A command with a folder of its own.

    Args:
        name (`str`):
            What it is called.
        folder (`Path`):
            Where its output goes. It is emptied before the command is run.
        command (`tuple[str, ...]`):
            Arguments of the Python interpreter.
        needs (`tuple[Task, ...]`, *optional*):
            What has to be finished before.
        recipes (`tuple[Path, ...]`, *optional*):
            Files that the command reads: with another content they make it another task.
        seconds (`float`, *optional*, defaults to `0.0`):
            How long it will probably take.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    needs: tuple["Task", ...] = ()
    recipes: tuple[Path, ...] = ()
    seconds: float = 0.0

    def read_done(self) -> dict | None:
        """
        What is written down about this task where it is finished, else `None`.

        Raises:
            ValueError: If the folder holds the output of another command, or of other inputs.
        """
        try:
            done = json.loads((self.folder / DONE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        for what, value in self._identity().items():
            if done[what] != value:
                raise ValueError(
                    f"{str(self.folder)!r} was made from another state: `{what}` was {done[what]!r} and is {value!r} now. "
                    "Give another output folder, or remove this one to make it anew."
                )
        return done

    def write_done(self, seconds: float) -> None:
        """Write down that the task is finished."""
        done = self._identity() | {
            "seconds": round(seconds, 1),
            "finished": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            "commit": get_git_commit_hash("mempo_trl"),
        }
        part = self.folder / f"{DONE}.part"
        part.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
        part.replace(self.folder / DONE)

    def _identity(self) -> dict:
        needs = {task.name: done["finished"] for task in self.needs if (done := task.read_done()) is not None}
        recipes = {str(path): text_hash(path.read_text(encoding="utf-8")) for path in self.recipes}
        return {"command": list(self.command), "needs": needs, "recipes": recipes}


@contextmanager
def only_study(folder: Path) -> Iterator[TextIO]:
    """
    Hold the lock of an output folder. Commands inherit it, so that a study which was killed with `kill -9` is not taken
    up again while one of its commands still writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pids = " ".join((folder / "lock").read_text(encoding="utf-8").split())
            raise ValueError(
                f"A study or one of its commands (of the processes {pids}) is still at work in {str(folder)!r}. Wait for "
                "it, or end it."
            ) from None
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)
        yield lock


def run_tasks(
    tasks: Sequence[Task],
    jobs: int,
    lock: TextIO,
    on_done: Callable[[Task], None] = lambda task: None,
    threads: int = 1,
) -> list[Task]:
    """
    Run what is not finished, in the given order as far as the needs allow, `jobs` commands at a time.

    Args:
        tasks (`Sequence[Task]`):
            The tasks; those that one needs come before it.
        jobs (`int`):
            Commands at a time.
        lock (`TextIO`):
            What [`only_study`] gave.
        on_done (`Callable`, *optional*):
            Called with each task that has just finished.
        threads (`int`, *optional*, defaults to `1`):
            Threads of each command.

    Returns:
        `list[Task]`: Those that failed. What needs one of them is not run, everything else is.

    Raises:
        ValueError: If a folder holds the output of another command, before anything is run.
    """
    finished = {task.name for task in tasks if task.read_done() is not None}
    waiting = [task for task in tasks if task.name not in finished]
    total, failed = len(waiting), []
    left = sum(task.seconds for task in waiting)
    running: dict[subprocess.Popen, tuple[Task, float]] = {}
    try:
        while True:
            for process, (task, start) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[process]
                seconds, left = time.monotonic() - start, left - task.seconds
                if process.returncode == 0:
                    task.write_done(seconds)
                    finished.add(task.name)
                    on_done(task)
                else:
                    failed.append(task)
                done = total - len(waiting) - len(running)
                outcome = f"{seconds:.0f} s" if process.returncode == 0 else f"FAILED, see {task.folder / LOG}"
                print(
                    f"[{done}/{total}, about {left / jobs / 60:.0f} minutes left] {task.name}: {outcome}", flush=True
                )
            ready = [task for task in waiting if all(needed.name in finished for needed in task.needs)]
            for task in ready[: jobs - len(running)]:
                waiting.remove(task)
                running[_start(task, lock, threads)] = task, time.monotonic()
            if not running:
                return failed
            time.sleep(0.1)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            process.wait()


def _start(task: Task, lock: TextIO, threads: int) -> subprocess.Popen:
    """Start a command with so many threads, in a process group that can be ended as a whole."""
    shutil.rmtree(task.folder, ignore_errors=True)
    task.folder.mkdir(parents=True)
    of_threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with open(task.folder / LOG, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *task.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **of_threads, "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )
    print(process.pid, file=lock, flush=True)
    return process
