"""Where the wall time of an optimiser step goes: each moment of it belongs to one phase."""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


class StepTimer:
    """
    Sorts the time from [`~StepTimer.start`] to [`~StepTimer.stop`] into phases. Exactly one phase runs at any moment,
    an inner one instead of the outer one, so that their seconds add up to the whole. Outside of a step, as in an
    evaluation, nothing is counted.

    Args:
        phases (`Iterable[str]`):
            Names of the phases.
        clock (`Callable`, *optional*, defaults to `time.perf_counter`):
            Seconds since some moment.
    """

    def __init__(self, phases: Iterable[str], clock: Callable[[], float] = time.perf_counter):
        self._phases = list(phases)
        self._clock = clock
        self._current: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}
        self._running = {"searches": 0, "generations": 0}
        self._exposed = 0.0
        self._exposed_since: float | None = None

    def start(self, phase: str) -> None:
        """Begin a step in this phase. What a step that never ended has counted is dropped."""
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._exposed = 0.0
        self._current, self._since = phase, self._clock()

    def stop(self) -> dict[str, float]:
        """End the step: seconds of each phase, and `search_exposed`, which is a part of another phase."""
        self.switch(None)
        return {**self._seconds, "search_exposed": self._exposed}

    def switch(self, phase: str | None) -> None:
        """Go on in another phase, if a step runs."""
        if self._current in (None, phase):
            return
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._current, self._since = phase, now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase that ends with its block; the one around it then goes on."""
        outer = self._current
        self.switch(name)
        try:
            yield
        finally:
            if outer is not None:
                self.switch(outer)

    def searching(self) -> AbstractContextManager[None]:
        """While a tool is called. Time in which no turn is generated meanwhile is exposed."""
        return self._count("searches")

    def generating(self) -> AbstractContextManager[None]:
        """While turns are generated."""
        return self._count("generations")

    @contextmanager
    def _count(self, kind: str) -> Iterator[None]:
        self._running[kind] += 1
        self._note_exposure()
        try:
            yield
        finally:
            self._running[kind] -= 1
            self._note_exposure()

    def _note_exposure(self) -> None:
        exposed = self._running["searches"] > 0 and self._running["generations"] == 0
        if exposed == (self._exposed_since is not None):
            return
        now = self._clock()
        if not exposed:
            self._exposed += now - self._exposed_since
        self._exposed_since = now if exposed else None


def step_phases(args) -> list[str]:
    """Phases of a step under these arguments, a [`~mempo_trl.MemPOConfig`]."""
    phases = ["rollout", "logps", "train", "other"]
    if args.memory_advantage_weight > 0:
        phases.append("memory_scoring")
    if args.use_vllm and args.vllm_mode == "server":
        phases.append("sync")
    return phases


def device_clock(device: torch.device) -> Callable[[], float]:
    """
    A clock that is read when the device has done what it was told, so that a phase pays for its own kernels. Most
    phases end by reading their results anyway; the wait is new for the old and reference log-probabilities and for the
    optimiser.
    """

    def clock() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock


def within(
    context: Callable[[], AbstractContextManager], function: Callable[..., Awaitable]
) -> Callable[..., Awaitable]:
    """An async function each call of which runs in a context of its own, such as [`~StepTimer.searching`]."""

    async def wrapped(*args, **kwargs) -> Any:
        with context():
            return await function(*args, **kwargs)

    return wrapped


class TimingCallback(TrainerCallback):
    """
    Ends a step of a [`StepTimer`] and notes its seconds as `time/<phase>`, also those of phases that did not run, so
    that their means over the logged steps are seconds per step.

    Args:
        timer ([`StepTimer`]):
            Started with the reading of the step's rows.
        metrics (`dict[str, list[float]]`):
            Where to append.
    """

    def __init__(self, timer: StepTimer, metrics: dict[str, list[float]]):
        self.timer = timer
        self.metrics = metrics

    def on_step_begin(self, args, state, control, **kwargs):
        self.timer.switch("train")

    def on_step_end(self, args, state, control, **kwargs):
        for name, seconds in self.timer.stop().items():
            self.metrics[f"time/{name}"].append(seconds)
