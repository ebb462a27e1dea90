"""Tests of the accounting of a step's wall time, on clocks that only move when the work says so."""

import asyncio
import threading

import pytest
import torch
from conftest import GivenMemoryRewards, ScriptedTrainer, build, call, dataset, script_of
from transformers import TrainerCallback

from mempo_trl.timing import StepTimer, device_clock, within


ANSWER = ["<think>a</think>" + call("Anna"), "<mem>cat</mem><think>b</think><answer>cat</answer>"]
OTHER = ["<think>a</think>" + call("Ben"), "<mem>dog</mem><think>b</think><answer>dog</answer>"]


class Clock:
    """Stands still until time is spent."""

    def __init__(self):
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def test_phases_add_up():
    """Every moment of a step belongs to one phase, the innermost one, whatever the nesting."""
    clock = Clock()
    timer = StepTimer(["a", "b", "c", "unused"], clock)
    clock.spend(100)  # before the step
    timer.start("a")
    clock.spend(1)
    with timer.phase("b"):
        clock.spend(2)
        with timer.phase("c"):
            clock.spend(4)
            with timer.phase("c"):
                clock.spend(8)
        clock.spend(16)
        with pytest.raises(ValueError), timer.phase("c"):
            clock.spend(32)
            raise ValueError
        clock.spend(64)
    timer.switch("c")
    clock.spend(128)
    seconds = timer.stop()
    # a: 1; b: 2 + 16 + 64; c: 4 + 8 + 32 + 128.
    assert seconds == {"a": 1, "b": 82, "c": 172, "unused": 0, "search_exposed": 0}


def test_nothing_counts_outside_of_a_step():
    """Phases and searches of an evaluation belong to no step, neither to the one before nor to the one after."""
    clock = Clock()
    timer = StepTimer(["a", "b"], clock)
    timer.start("a")
    clock.spend(1)
    assert timer.stop() == {"a": 1, "b": 0, "search_exposed": 0}
    with timer.phase("b"), timer.searching():
        clock.spend(10)
    timer.start("a")
    clock.spend(2)
    assert timer.stop() == {"a": 2, "b": 0, "search_exposed": 0}


def test_a_step_that_failed_is_dropped():
    """A step that raised never ends; the next one starts from zero."""
    clock = Clock()
    timer = StepTimer(["a", "b"], clock)
    timer.start("a")
    clock.spend(5)
    timer.start("b")
    clock.spend(3)
    assert timer.stop() == {"a": 0, "b": 3, "search_exposed": 0}


def test_search_is_exposed_where_no_turn_is_generated():
    """Searches that overlap are counted once, and not while a turn is generated; a failed one ends as well."""
    clock = Clock()
    timer = StepTimer(["a"], clock)

    async def play():
        gate = asyncio.Event()

        async def wait(seconds: float) -> float:
            await gate.wait()
            clock.spend(seconds)
            return seconds

        async def fail() -> None:
            clock.spend(1)
            raise ValueError

        first = asyncio.ensure_future(within(timer.searching, wait)(2))
        second = asyncio.ensure_future(within(timer.searching, wait)(4))
        await asyncio.sleep(0)  # both are being searched
        clock.spend(8)
        with timer.generating():
            clock.spend(16)
        clock.spend(32)
        gate.set()
        assert await asyncio.gather(first, second) == [2, 4]
        clock.spend(64)
        with pytest.raises(ValueError):
            await within(timer.searching, fail)()
        clock.spend(128)

    timer.start("a")
    asyncio.run(play())
    seconds = timer.stop()
    # 8 and 32 before the first search ends, its 2, the 4 of the second, and the failed one: without the 16 of a turn.
    assert seconds == {"a": 8 + 16 + 32 + 2 + 4 + 64 + 1 + 128, "search_exposed": 8 + 32 + 2 + 4 + 1}


def test_clock_of_a_cpu_moves_on():
    """The clock of a device is a clock, also where there is nothing to wait for."""
    clock = device_clock(torch.device("cpu"))
    assert clock() <= clock()


class SlowTrainer(ScriptedTrainer):
    """Every kind of work takes its own number of seconds on a clock of its own."""

    def __init__(self, *args, clock, **kwargs):
        super().__init__(*args, **kwargs)
        self.clock = clock
        self._timer._clock = clock
        self.turns = 0

    def get_batch_samples(self, *args, **kwargs):
        self.clock.spend(1000)  # logging, evaluation and checkpoints, which lie between the steps
        return super().get_batch_samples(iter_rows(args[0], self.clock), *args[1:], **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        self.clock.spend(10)
        self.turns += 1
        return super()._generate_single_turn(*args, **kwargs)

    def _logps_by_length(self, *args, **kwargs):
        self.clock.spend(0.5 if torch.is_grad_enabled() else 0.25)
        return super()._logps_by_length(*args, **kwargs)


def iter_rows(rows, clock):
    """Rows that take 0.125 s each batch."""
    for batch in rows:
        clock.spend(0.125)
        yield batch


class SlowCallback(TrainerCallback):
    """An optimiser that takes its time, and an evaluation between the steps."""

    def __init__(self, clock):
        self.clock = clock

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clock.spend(2)

    def on_evaluate(self, args, state, control, **kwargs):
        self.clock.spend(5000)


class SlowScores(GivenMemoryRewards):
    """Memory rewards that take their time."""

    def __init__(self, clock, rewards):
        super().__init__(rewards)
        self.clock = clock

    def on_rollouts_end(self, *args, **kwargs):
        self.clock.spend(5)
        super().on_rollouts_end(*args, **kwargs)


def slow_run(folder, tmp_path, clock, **kwargs):
    def search(query: str) -> str:
        """
        Searches.

        Args:
            query: What to search for.
        """
        clock.spend(3)
        return "nothing new"

    def reward(completions, **kwargs):
        clock.spend(7)
        return [float(i) for i in range(len(completions))]

    trainer = build(
        folder,
        tmp_path,
        script_of(ANSWER, OTHER),
        lambda *args, **kwargs: SlowTrainer(*args, clock=clock, **kwargs),
        tools=[search],
        reward_funcs=[reward],
        callbacks=[SlowScores(clock, [[None, 1.0], [None, 0.0]]), SlowCallback(clock)],
        data=dataset(16),
        **kwargs,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_times_of_a_run(logging_steps, short_folder, tmp_path):
    """
    The parts are seconds per optimiser step, add up to it, and neither evaluation nor the time between steps is in
    them: two steps per generation batch, so that every other step only trains.
    """
    clock = Clock()
    trainer = slow_run(
        short_folder,
        tmp_path,
        clock,
        steps_per_generation=2,
        max_steps=4,
        logging_steps=logging_steps,
        eval_dataset=dataset(2),
        eval_strategy="steps",
        eval_steps=1,
        beta=0.1,
    )
    logs = [log for log in trainer.state.log_history if "time/rollout" in log]
    parts = ["rollout", "memory_scoring", "logps", "train", "other"]
    # A generation batch has 4 rollouts of 2 turns: 2 batches of turns of 10 s, and 4 searches of 3 s, which advance
    # the clock one after the other. The old policy (2 steps per generation batch) and the reference: 2 forwards of
    # 0.25 s. Every step: a forward of 0.5 s and an optimiser of 2 s, and its rows 0.125 s. Rewards take 7 s.
    generating = {"rollout": 32, "memory_scoring": 5, "logps": 0.5, "train": 2.5, "other": 7.125, "search_exposed": 12}
    training = {"rollout": 0, "memory_scoring": 0, "logps": 0, "train": 2.5, "other": 0.125, "search_exposed": 0}
    if logging_steps == 1:
        expected = [generating, training] * 2
    else:
        expected = [{name: (generating[name] + training[name]) / 2 for name in generating}] * 2
    assert [{name: log[f"time/{name}"] for name in generating} for log in logs] == expected
    # What is not in a step: 1000 s before each of 4 steps, and evaluations.
    total = logging_steps * sum(log[f"time/{name}"] for log in logs for name in parts)
    assert total == 2 * 47.125 + 2 * 2.625
    assert {name for log in logs for name in log if name.startswith("time/")} == {
        f"time/{name}" for name in generating
    }
    assert not any(name.startswith("eval_time/") for log in trainer.state.log_history for name in log)


def test_parts_that_do_not_apply_are_left_out(short_folder, tmp_path):
    """With λ = 0 there is no memory scoring; what other rollout callbacks take is no part of it."""
    trainer = slow_run(short_folder, tmp_path, Clock(), memory_advantage_weight=0.0)
    log = trainer.state.log_history[0]
    names = {name for name in log if name.startswith("time/")}
    assert names == {"time/rollout", "time/logps", "time/train", "time/other", "time/search_exposed"}
    # 2 rollouts of 2 turns: two batches of 10 s and two searches of 3 s.
    assert log["time/rollout"] == 26 and log["time/search_exposed"] == 6 and log["time/other"] == 7.125
