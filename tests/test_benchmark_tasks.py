"""The commands of a study: which run, which run again, and what becomes of those of a study that ends early."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY


sys.path.insert(0, str(REPOSITORY / "benchmarks"))
try:
    tasks = importlib.import_module("tasks")
finally:
    sys.path.remove(str(REPOSITORY / "benchmarks"))


def task_of(folder: Path, name: str, code: str = "pass", needs=(), recipes=()):
    return tasks.Task(name, folder / name, ("-c", code), tuple(needs), tuple(recipes), seconds=1.0)


def run_all(folder: Path, *todo, jobs: int = 2, **kwargs) -> list[str]:
    with tasks.only_study(folder) as lock:
        return [task.name for task in tasks.run_tasks(todo, jobs, lock, **kwargs)]


def note(folder: Path, name: str) -> str:
    """Code that notes that it ran."""
    return f"open({str(folder / 'ran')!r}, 'a').write({name!r})"


def ran(folder: Path) -> str:
    """The notes since the last time."""
    text = (folder / "ran").read_text() if (folder / "ran").exists() else ""
    (folder / "ran").unlink(missing_ok=True)
    return text


def test_what_is_finished_is_not_run_again(tmp_path):
    """Tasks run after what they need; a second study runs nothing, and one that lost a task runs that one alone."""
    first = task_of(tmp_path, "a", note(tmp_path, "a"))
    second = task_of(tmp_path, "b", note(tmp_path, "b"), [first])
    third = task_of(tmp_path, "c", note(tmp_path, "c"), [second])
    finished = []
    assert run_all(tmp_path, first, second, third, on_done=lambda task: finished.append(task.name)) == []
    assert ran(tmp_path) == "abc" and finished == ["a", "b", "c"]
    assert run_all(tmp_path, first, second, third) == [] and ran(tmp_path) == ""
    (third.folder / "done.json").unlink()  # as if it had been killed
    (third.folder / "half").write_text("of an interrupted run")
    assert run_all(tmp_path, first, second, third) == [] and ran(tmp_path) == "c"
    assert not (third.folder / "half").exists()


def test_commands_have_one_thread(tmp_path):
    """What a command prints is in its log, and it runs with one thread, or as many as it is given."""
    task = task_of(tmp_path, "a", "import os; print(os.environ['OMP_NUM_THREADS'])")
    run_all(tmp_path, task)
    assert (task.folder / "log.txt").read_text() == "1\n"
    (task.folder / "done.json").unlink()
    run_all(tmp_path, task, threads=3)
    assert (task.folder / "log.txt").read_text() == "3\n"


def test_commands_hold_the_lock(tmp_path):
    """A command that a killed study leaves behind keeps the lock: it has inherited the open file."""
    code = (
        "import os\n"
        f"lock = os.stat({str(tmp_path / 'lock')!r})\n"
        "def is_lock(fd):\n"
        "    try: return os.path.samestat(os.fstat(fd), lock)\n"
        "    except OSError: return False\n"
        "assert any(is_lock(fd) for fd in range(3, 256))"
    )
    assert run_all(tmp_path, task_of(tmp_path, "a", code)) == []


def test_tasks_run_at_the_same_time(tmp_path):
    """With two jobs two tasks run together: each waits for the file of the other."""
    code = (
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, {!r})\n"
        "mine.touch()\n"
        "end = time.monotonic() + 60\n"
        "while not other.exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(not other.exists())"
    )
    x, y = str(tmp_path / "x"), str(tmp_path / "y")
    todo = [task_of(tmp_path, "a", code.format((x, y))), task_of(tmp_path, "b", code.format((y, x)))]
    assert run_all(tmp_path, *todo, jobs=2) == []


def test_a_failure_stops_only_what_needs_it(tmp_path, capsys):
    """The rest goes on, the failure is named with its log, and the next study tries it again."""
    bad = task_of(tmp_path, "bad", f"open({str(tmp_path / 'there')!r})")
    needs_it = task_of(tmp_path, "late", note(tmp_path, "l"), [bad])
    good = task_of(tmp_path, "good", note(tmp_path, "g"))
    assert run_all(tmp_path, bad, needs_it, good) == ["bad"]
    assert ran(tmp_path) == "g" and f"bad: FAILED, see {bad.folder / 'log.txt'}" in capsys.readouterr().out
    assert "FileNotFoundError" in (bad.folder / "log.txt").read_text()
    (tmp_path / "there").touch()
    assert run_all(tmp_path, bad, needs_it, good) == [] and ran(tmp_path) == "l"


def test_results_of_another_state_are_refused(tmp_path):
    """Another command, another recipe, or a cold start that was made anew: nothing is run, the folder is named."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: 1")
    start = task_of(tmp_path, "start")
    task = task_of(tmp_path, "run", recipes=[recipe], needs=[start])
    run_all(tmp_path, start, task)
    with pytest.raises(ValueError, match=r"run' was made from another state: `command` was .*'pass'.* is .*'1'"):
        run_all(
            tmp_path, task_of(tmp_path, "new", note(tmp_path, "n")), task_of(tmp_path, "run", "1", [start], [recipe])
        )
    assert ran(tmp_path) == ""
    recipe.write_text("a: 2")
    with pytest.raises(ValueError, match="`recipes` was"):
        run_all(tmp_path, start, task)
    recipe.write_text("a: 1")
    (start.folder / "done.json").unlink()
    with pytest.raises(ValueError, match="`needs` was"):
        run_all(tmp_path, start, task)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupted_study_ends_its_commands(tmp_path):
    """Whatever ends the study ends the commands in work, with what they started; they are not finished."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid.part')!r}, 'w').write(str(child.pid))\n"
        f"import os; os.rename({str(tmp_path / 'pid.part')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)"
    )
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)"
    long = task_of(tmp_path, "long", code)

    def interrupt(task):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path, long, task_of(tmp_path, "short", wait), on_done=interrupt)
    end = time.monotonic() + 60
    while alive(int((tmp_path / "pid").read_text())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(int((tmp_path / "pid").read_text())) and long.read_done() is None


def test_one_study_at_a_time(tmp_path):
    """A folder in which a study, or a command that one left behind, is at work, is refused with the processes."""
    with tasks.only_study(tmp_path) as lock:
        with pytest.raises(ValueError, match=rf"of the processes {os.getpid()}\).* still at work"):
            run_all(tmp_path)
        left = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=(lock.fileno(),), start_new_session=True
        )
    try:
        with pytest.raises(ValueError, match="still at work"):
            run_all(tmp_path)
    finally:
        left.kill()
        left.wait()
    assert run_all(tmp_path) == []
