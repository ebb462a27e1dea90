"""Generators: from prompt ids to sampled ids, one request at a time for a rollout, in batches for the model."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .processes import ProcessFailure


if TYPE_CHECKING:
    from .rollout import Rollout


class GenerationError(RuntimeError):
    """A turn could not be sampled, for good: its rollout fails. What to do about the other rollouts is the caller's."""


@dataclass(frozen=True)
class Generation:
    """
    What was sampled for one request.

    Args:
        ids (`list[int]`):
            Sampled ids, with the id that ended the turn. May be empty.
        logps (`list[float]`, *optional*):
            Log-probability of each id under the sampling policy, where the engine reports it.
        finish_reason (`str`, *optional*, defaults to `"stop"`):
            `"stop"`, or `"length"` when the turn was cut by `max_completion_length`.
    """

    ids: list[int]
    logps: list[float] | None = None
    finish_reason: str = "stop"


class Generator:
    """What [`~mempo_trl.rollout.play`] asks for its turns."""

    max_concurrency: int | None = None
    """Rollouts that [`~Generator.run`] plays at the same time; `None` for all."""

    on_rollout: Callable[[], None] | None = None
    """Called by [`~Generator.run`] after each rollout, for a progress bar."""

    async def generate(self, prompt_ids: list[int], rollout: "Rollout | None" = None) -> Generation:
        """
        Sample one turn.

        Args:
            prompt_ids (`list[int]`):
                Token ids of the whole prompt.
            rollout ([`~mempo_trl.rollout.Rollout`], *optional*):
                The rollout so far, for a generator that works on messages. Most ignore it.

        Returns:
            [`Generation`]
        """
        raise NotImplementedError

    async def run(self, rollouts: list[Coroutine], numbers: list[int] | None = None) -> list[Any]:
        """
        Play rollouts that take their turns from this generator, each at its own pace.

        Args:
            rollouts (`list[Coroutine]`):
                Calls of [`~mempo_trl.rollout.play`], not yet awaited.
            numbers (`list[int]`, *optional*):
                A number per rollout from which its seeds are derived. Defaults to counting on, over all runs of this
                generator.

        Returns:
            `list`: Their results, in order. If one raises, the others are cancelled and its exception rises.
        """
        results = [None] * len(rollouts)
        waiting = iter(zip(range(len(rollouts)), rollouts, numbers or [None] * len(rollouts), strict=True))

        async def work() -> None:
            for i, rollout, number in waiting:
                results[i] = await self._play(rollout, number)
                if self.on_rollout is not None:
                    self.on_rollout()

        count = len(rollouts) if self.max_concurrency is None else min(self.max_concurrency, len(rollouts))
        workers = [asyncio.ensure_future(work()) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for _, rollout, _ in waiting:  # what has not begun
                rollout.close()
        return results

    async def _play(self, rollout: Coroutine, number: int | None) -> Any:
        return await rollout

    async def check(self) -> None:
        """
        Find out whether there is anything to generate with, before a long run.

        Raises:
            GenerationError: If a server can't be reached or refuses the API key; the message names it and the cause.
        """

    def usage(self) -> dict[str, int] | None:
        """Tokens that a server has counted for the rollout in whose coroutine this is called; `None` without one."""


class ReplayGenerator(Generator):
    """
    Gives written turns instead of sampled ones, whatever the prompt: scripted rollouts become training sequences by
    being played like any other.

    Args:
        turns (`list[Generation]`):
            The turns in order.
    """

    def __init__(self, turns: list[Generation]):
        self._turns = iter(turns)

    async def generate(self, prompt_ids: list[int], rollout: "Rollout | None" = None) -> Generation:
        return next(self._turns)


class BatchGenerator(Generator):
    """
    Runs the requests of all live rollouts as one batch per turn: a turn barrier.

    It is collective. Each round starts with one reduction over the processes, and every process then calls
    `generate_batch` once, those without a request with a dummy prompt, until no process has a request left. A rollout
    that raises on one process ends the round on all of them. An engine that raises leaves at once, since it may have
    left the others in a collective operation of its own; [`~mempo_trl.processes.FailureWatch`] tells them.

    Args:
        generate_batch (`Callable`):
            `generate_batch(prompts, idle) -> (ids, logps)`: `list[list[int]]` to sampled ids and their
            log-probabilities (or `None`), one entry per prompt. `idle` says that all prompts are dummies.
        max_completion_length (`int`):
            Length at which the engine cuts a turn, in tokens.
        eos_token_ids (`list[int]`):
            Ids that end a turn. A turn of full length that doesn't end in one of them was cut.
        reduce_max (`Callable`, *optional*):
            `reduce_max(values) -> values`: element-wise maximum over processes. Defaults to a single process.
        gather (`Callable`, *optional*):
            `gather(value) -> values`: the values of all processes. Defaults to a single process.
        dummy_prompt (`list[int]`, *optional*):
            Prompt for a process without a request.
        equal_counts (`bool`, *optional*, defaults to `False`):
            Fill up with dummy prompts so that all processes send equally many, as engines that gather prompts demand.
        on_turn (`Callable`, *optional*):
            `on_turn(live, total)`, called before each batch, for a progress bar.
    """

    def __init__(
        self,
        generate_batch: Callable[[list[list[int]], bool], tuple[list[list[int]], list[list[float]] | None]],
        max_completion_length: int,
        eos_token_ids: list[int],
        reduce_max: Callable[[list[int]], list[int]] | None = None,
        gather: Callable[[Any], list] | None = None,
        dummy_prompt: list[int] | None = None,
        equal_counts: bool = False,
        on_turn: Callable[[int, int], None] | None = None,
    ):
        self.generate_batch = generate_batch
        self.max_completion_length = max_completion_length
        self.eos_token_ids = eos_token_ids
        self.reduce_max = reduce_max or (lambda values: values)
        self.gather = gather or (lambda value: [value])
        self.dummy_prompt = dummy_prompt or [eos_token_ids[0]]
        self.equal_counts = equal_counts
        self.on_turn = on_turn
        self._requests: list[tuple[asyncio.Task, list[int], asyncio.Future]] = []
        self._live = 0
        self._has_logps: bool | None = None  # whether the engine reports log-probabilities, once it is known
        self._all_waiting = asyncio.Event()

    async def generate(self, prompt_ids: list[int], rollout: "Rollout | None" = None) -> Generation:
        future = asyncio.get_running_loop().create_future()
        self._requests.append((asyncio.current_task(), prompt_ids, future))
        self._check_barrier()
        return await future

    def _check_barrier(self) -> None:
        if len(self._requests) == self._live:
            self._all_waiting.set()

    async def _track(self, rollout: Awaitable) -> Any:
        try:
            return await rollout
        finally:
            self._live -= 1
            self._check_barrier()

    async def run(self, rollouts: list[Coroutine], numbers: list[int] | None = None) -> list[Any]:
        """
        Play rollouts that take their turns from this generator.

        Args:
            rollouts (`list[Coroutine]`):
                Calls of [`~mempo_trl.rollout.play`], not yet awaited. May be empty on some processes.
            numbers (`list[int]`, *optional*):
                Ignored: the engine has one random state for all rollouts.

        Returns:
            `list`: Their results, in order.

        Raises:
            ProcessFailure: On every process, if a rollout raised on another one; the message names the cause. Where it
                was raised, the original error rises.
        """
        self._live = len(rollouts)
        self._all_waiting = asyncio.Event()
        tasks = [asyncio.ensure_future(self._track(rollout)) for rollout in rollouts]
        self._check_barrier()
        try:
            while True:
                await self._all_waiting.wait()
                error = next((task.exception() for task in tasks if task.done() and task.exception()), None)
                width, failed = self.reduce_max([len(self._requests), int(error is not None)])
                if failed:
                    causes = self.gather(None if error is None else f"{type(error).__name__}: {error}")
                    if error is not None:
                        raise error
                    process, cause = next((i, cause) for i, cause in enumerate(causes) if cause is not None)
                    raise ProcessFailure(f"A rollout failed on process {process}: {cause}")
                if width == 0:
                    return [task.result() for task in tasks]
                if self.on_turn is not None:
                    self.on_turn(len(self._requests), len(tasks))
                # In the order of the rollouts, not in that in which their tools were done: a seed gives one run.
                requests, self._requests = sorted(self._requests, key=lambda request: tasks.index(request[0])), []
                if self._live:
                    self._all_waiting.clear()
                self._generate(requests, width if self.equal_counts else max(1, len(requests)))
        finally:
            for task in tasks:
                task.cancel()

    def _generate(self, requests: list[tuple[asyncio.Task, list[int], asyncio.Future]], count: int) -> None:
        prompts = [prompt_ids for _, prompt_ids, _ in requests]
        ids, logps = self.generate_batch(prompts + [self.dummy_prompt] * (count - len(prompts)), not prompts)
        if len(ids) != count:
            raise RuntimeError(f"The engine returned {len(ids)} completions for {count} prompts.")
        if not requests:
            return
        if self._has_logps not in (None, logps is not None):
            raise RuntimeError("The engine returned log-probabilities for some turns of a batch and none for others.")
        self._has_logps = logps is not None
        if logps is not None and len(logps) != count:
            raise RuntimeError(
                f"The engine returned log-probabilities of {len(logps)} completions for {count} prompts."
            )
        for i, (_, _, future) in enumerate(requests):
            cut = len(ids[i]) >= self.max_completion_length and ids[i][-1] not in self.eos_token_ids
            turn_logps = None
            if logps is not None:
                given = 0 if logps[i] is None else len(logps[i])
                if given != len(ids[i]):
                    raise RuntimeError(f"The engine returned {given} log-probabilities for {len(ids[i])} tokens.")
                # TRL's client of vLLM gives `None` where the server's log-probability was NaN.
                turn_logps = [math.nan if logp is None else logp for logp in logps[i] or []]
            future.set_result(Generation(ids[i], turn_logps, "length" if cut else "stop"))


def model_eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a turn: the tokenizer's, and those that the model declares (as [`~trl.GRPOTrainer`] takes them)."""
    return eos_token_ids(model.generation_config, tokenizer)


def eos_token_ids(generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """As [`model_eos_token_ids`], for a model that is not loaded here."""
    declared = generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({tokenizer.eos_token_id, *declared})


class TransformersEngine:
    """
    Samples batches of turns with `model.generate`, for [`~mempo_trl.generation.BatchGenerator`].

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The agent.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        max_completion_length (`int`):
            Tokens after which a turn is cut.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; 0 is greedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_completion_length: int,
        temperature: float = 1.0,
    ):
        self.model = model
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.eos_token_ids = model_eos_token_ids(model, tokenizer)
        self.max_completion_length = max_completion_length
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.generation_config = GenerationConfig(
            max_new_tokens=max_completion_length,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.eos_token_ids,
            repetition_penalty=1.0,  # as in training; the model's own (1.05 for Qwen2.5-Instruct) would count here
            **(sampling if temperature > 0 else {"do_sample": False}),
        )

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], idle: bool = False) -> tuple[list[list[int]], None]:
        """
        Sample one turn for each prompt.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            idle (`bool`, *optional*, defaults to `False`):
                Ignored.

        Returns:
            `tuple[list[list[int]], None]`: Sampled ids up to the first end-of-turn id, and no log-probabilities.
        """
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        output = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=self.generation_config,
        )
        completions = []
        for ids in output[:, width:].tolist():
            end = next((k for k, token_id in enumerate(ids) if token_id in self.eos_token_ids), len(ids) - 1)
            completions.append(ids[: end + 1])
        return completions, None


def run_in_event_loop(coroutine: Coroutine) -> Any:
    """
    Run a coroutine to its end: in this thread, or in one of its own where an event loop runs already (a notebook).

    Args:
        coroutine (`Coroutine`):
            What to run.

    Returns:
        `Any`: Its result.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> Any:
        if device is not None:  # the current device belongs to the thread
            torch.cuda.set_device(device)
        return asyncio.run(coroutine)

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(run).result()
