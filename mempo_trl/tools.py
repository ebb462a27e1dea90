"""The tools that the model may call: their schemas, the check of a call, and the call itself."""

import asyncio
import inspect
import logging
import queue
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from .inputs import check_tools


logger = logging.getLogger(__name__)

NO_RESULTS = "No results found for this query."
"""What a search tool returns when it worked and found nothing. It is counted as `tool/empty_frac`, never as an error."""
MAX_CONCURRENCY = 64
"""Calls of blocking tools that are under way at the same time, those that hang not counted."""
MAX_HANGING = 256
"""Calls that were given up and have not returned, above which no further call is made."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@|(?<=\w)\?[^\s'\"<>)\]]*=[^\s'\"<>)\]]*")


class ToolError(RuntimeError):
    """A tool could not do its work (network, time-out, empty body): retried, then told to the model as such."""


@dataclass(frozen=True)
class ToolResult:
    """
    What came of one tool call.

    Args:
        text (`str`):
            Text for the model: what the tool returned, or an honest sentence that it failed.
        error (`str`, *optional*):
            Last cause when the call failed for good.
        seconds (`float`, *optional*, defaults to `0.0`):
            Time from the call to the result, retries included.
    """

    text: str
    error: str | None = None
    seconds: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether the tool worked and found nothing."""
        return self.error is None and self.text == NO_RESULTS


def tool_name(tool: Callable) -> str:
    """Name under which the model calls `tool`: a function's own name, or the `name` attribute of a callable object."""
    return tool.__name__ if inspect.isroutine(tool) else tool.name


def tool_schema(tool: Callable) -> dict:
    """
    JSON schema of a tool, made by transformers' `get_json_schema` from its signature and docstring.

    Args:
        tool (`Callable`):
            A typed, documented function, or an object with a `name` and such a `__call__`.

    Returns:
        `dict`: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    Raises:
        ValueError: If its types or its docstring do not say what it takes.
    """
    try:
        schema = get_json_schema(tool if inspect.isroutine(tool) else tool.__call__)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"The tool {tool_name(tool)!r} has no schema: {error}. Give each parameter a type (`query: str`) and the "
            "docstring a first sentence and an `Args:` section that describes each, in Google's form."
        ) from None
    schema["function"]["name"] = tool_name(tool)
    return schema


def _validator(schema: dict) -> Validator:
    """Checks the arguments of a tool: nothing unknown, and `null` where `get_json_schema` allows it."""
    parameters = schema["function"]["parameters"]
    properties = {}
    for name, value in parameters["properties"].items():
        if value.get("nullable") and "type" in value:
            types = value["type"] if isinstance(value["type"], list) else [value["type"]]
            value = {**value, "type": [*types, "null"]}
        properties[name] = value
    checked = {**parameters, "properties": properties, "additionalProperties": False}
    validator_type = validator_for(checked)
    validator_type.check_schema(checked)
    return validator_type(checked)


def _shorten(text: str) -> str:
    """Both ends of a text that quotes the model: a long argument is not repeated to it whole."""
    return text if len(text) <= 200 else f"{text[:100]}…{text[-100:]}"


def plain_text(text: str) -> str:
    """
    Foreign text as a tokenizer and a terminal can take it: half of a surrogate pair becomes `?`, every line break a
    line feed, and every other control character, such as the escape of a terminal's commands, a space.
    """
    text = text.encode(errors="replace").decode()
    return _CONTROL.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))


def _cause_of(error: BaseException) -> str:
    """One line about an error, for logs and records: not too long, and without what a URL may hold of secrets."""
    try:
        text = f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # an error of the user's whose text can't be made
        text = type(error).__name__
    text = _CREDENTIALS.sub(lambda match: "?***" if match[0][0] == "?" else "***@", " ".join(plain_text(text).split()))
    return text if len(text) <= 500 else f"{text[:500]}…"


def as_text(result: Any) -> str:
    """What a tool returned, as text for the model; raises a [`ToolError`] where it is none."""
    if isinstance(result, (type(None), bytes, bytearray, memoryview, Awaitable, Iterator)):
        if inspect.iscoroutine(result):
            result.close()
        raise ToolError(f"the tool returned {type(result).__name__} instead of text")
    text = plain_text(result if isinstance(result, str) else str(result))
    if not text.strip():
        raise ToolError("the tool returned an empty text")
    return text


# What a tool raises is handed over as a value: some exceptions (`StopIteration`, `CancelledError`, `SystemExit`) mean
# something else to an event loop.


def _attempt(tool: Callable, arguments: dict, read: Callable) -> tuple[Any, BaseException | None]:
    try:
        return read(tool(**arguments)), None
    except BaseException as error:
        return None, error


async def _attempt_async(tool: Callable, arguments: dict, read: Callable) -> tuple[Any, BaseException | None]:
    try:
        return read(await tool(**arguments)), None
    except BaseException as error:
        return None, error


class DaemonThreads:
    """
    Threads for blocking calls, as many as there are at the same time. Unlike those of `concurrent.futures` they are
    daemons, so that one that hangs keeps no process from ending.

    Args:
        idle_seconds (`float`, *optional*, defaults to `60.0`):
            Time without a call after which a thread ends.
    """

    def __init__(self, idle_seconds: float = 60.0):
        self.idle_seconds = idle_seconds
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a job which nobody has given them yet

    def submit(self, function: Callable) -> Future:
        """Call a function in a thread that is idle, or in a new one."""
        job = (Future(), function)
        if self._idle.acquire(blocking=False):
            self._jobs.put(job)
        else:
            threading.Thread(target=self._work, args=(job,), name="mempo-tool", daemon=True).start()
        return job[0]

    def _work(self, job: tuple[Future, Callable]) -> None:
        while True:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, function
            self._idle.release()
            try:
                job = self._jobs.get(timeout=self.idle_seconds)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                job = self._jobs.get()  # it was promised to this thread just now


class _EventLoop:
    """
    The event loop of async tools, in a thread of its own. It outlives a generation batch, so that a tool can keep its
    connections, and where a tool blocks it, nothing but async tools waits.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="mempo-async-tools", daemon=True).start()
            return self._loop

    def abandon(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Leave a loop that a tool blocks; `False` if that was done before."""
        with self._lock:
            if self._loop is not loop:
                return False
            self._loop = None
            return True


_threads = DaemonThreads()
_event_loop = _EventLoop()


async def _answer_of(future: Future, seconds: float) -> Any:
    """The result of what runs in another thread; `None` if it takes too long, whatever it does with a cancellation."""
    waiter = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait([waiter], timeout=seconds)
        return waiter.result() if done else None
    finally:
        waiter.cancel()


class Toolbox:
    """
    The tools of a run.

    Blocking tools run in threads, async ones in an event loop of their own. A call that takes too long is given up; if
    it doesn't even return, its thread is replaced, up to `MAX_HANGING` of them. Then further calls fail with the name
    of the call that hangs longest.

    Args:
        tools (`list[Callable]`):
            Plain typed functions or callables in TRL's convention, sync or async.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which one attempt of a call is given up.
        retries (`int`, *optional*, defaults to `2`):
            Further attempts after a failed one, with exponential back-off and jitter from one second up.

    Raises:
        ValueError: If there is no tool, if two have the same name, or if one has no name, no types or no docstring.
    """

    def __init__(self, tools: list[Callable], timeout: float = 60.0, retries: int = 2):
        check_tools(tools)
        self.tools = {tool_name(tool): tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(
                f"Two tools have the same name: {[tool_name(tool) for tool in tools]}. Rename one of them."
            )
        self.schemas = [tool_schema(tool) for tool in tools]
        self.timeout = timeout
        self.retries = retries
        # `jsonschema.validate` would check the schema again in every call, which takes longer than the rest of a turn.
        self._validators = {schema["function"]["name"]: _validator(schema) for schema in self.schemas}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._hanging: dict[Future, tuple[str, float]] = {}  # calls that were given up, and since when they run

    def check(self, name: Any, arguments: Any) -> str | None:
        """
        Check a call before it is made.

        Args:
            name (`Any`):
                The `name` that the model wrote.
            arguments (`Any`):
                The `arguments` that the model wrote.

        Returns:
            `str` or `None`: What is wrong, in words for the model, or `None` if the call can be made.
        """
        if not isinstance(name, str) or name not in self.tools:
            return f"there is no tool named {_shorten(repr(name))}; the tools are {', '.join(self.tools)}"
        if not isinstance(arguments, dict):
            return f"`arguments` must be a JSON object, not {_shorten(repr(arguments))}"
        error = best_match(self._validators[name].iter_errors(arguments))
        return None if error is None else f"wrong arguments for {name}: {_shorten(error.message)}"

    async def call(self, name: str, arguments: dict, attempt: Callable | None = None) -> ToolResult:
        """
        Call a tool. A failure never raises: after the last retry it becomes a result that says so.

        Args:
            name (`str`):
                Name of a tool.
            arguments (`dict`):
                Arguments that passed [`~Toolbox.check`].
            attempt (`Callable`, *optional*):
                `await attempt(name, arguments)`, called as often as needed. Defaults to [`~Toolbox.attempt`].

        Returns:
            [`ToolResult`]
        """
        start = time.perf_counter()
        for number in range(self.retries + 1):
            text, cause = await (attempt or self.attempt)(name, arguments)
            if text is not None:
                return ToolResult(text, seconds=time.perf_counter() - start)
            logger.info("Tool %s failed (attempt %d of %d): %s", name, number + 1, self.retries + 1, cause)
            if number < self.retries:
                await asyncio.sleep(2**number * random.uniform(0.5, 1.0))
        text = f"The call of {name} could not be made because of a technical problem. This does not mean that nothing exists."
        return ToolResult(text, error=cause, seconds=time.perf_counter() - start)

    async def attempt(
        self, name: str, arguments: dict, tool: Callable | None = None, read: Callable[[Any], Any] = as_text
    ) -> tuple[Any, str | None]:
        """
        Call a tool once. It is the user's code: whatever it does, the rollout goes on.

        Args:
            name (`str`):
                Name of a tool.
            arguments (`dict`):
                Its arguments.
            tool (`Callable`, *optional*):
                What is called. Defaults to the tool of that name.
            read (`Callable`, *optional*, defaults to [`as_text`]):
                Makes the result of what was returned.

        Returns:
            `tuple`: The result, or `None` and the cause.
        """
        hanging = list(self._hanging.values())
        if len(hanging) >= MAX_HANGING:
            call, since = hanging[0]
            return None, (
                f"{len(hanging)} calls hang, for {time.monotonic() - since:.0f} s the oldest, {call}; no further call "
                "is made. Give the tool a time-out of its own."
            )
        tool, start = tool or self.tools[name], time.monotonic()
        if inspect.iscoroutinefunction(tool if inspect.isroutine(tool) else tool.__call__):
            loop = _event_loop.get()
            future = asyncio.run_coroutine_threadsafe(_attempt_async(tool, arguments, read), loop)
            answer = await _answer_of(future, self.timeout)
            if answer is None:
                alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, True), loop)
                if not await _answer_of(alive, min(self.timeout, 5.0)) and _event_loop.abandon(loop):
                    self._note_hanging(alive, name, arguments, start)
        else:
            async with self._thread_slots():
                start = time.monotonic()
                future = _threads.submit(partial(_attempt, tool, arguments, read))
                answer = await _answer_of(future, self.timeout)
            if answer is None:
                self._note_hanging(future, name, arguments, start)
        if answer is None:
            return None, f"no answer within {self.timeout:g} s"
        result, error = answer
        return result, None if error is None else _cause_of(error)

    def _thread_slots(self) -> asyncio.Semaphore:
        # A semaphore belongs to an event loop, of which every generation batch has its own.
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._slots = asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENCY)
        return self._slots

    def _note_hanging(self, future: Future, name: str, arguments: dict, start: float) -> None:
        self._hanging[future] = (call := f"{name}({_shorten(repr(arguments))})", start)
        future.add_done_callback(lambda future: self._hanging.pop(future, None))
        count = len(self._hanging)
        if count and count & (count - 1) == 0:  # 1, 2, 4, …: not a line per call
            logger.warning(
                "%d calls of tools have not returned %g s after they were made, the last of them %s. At %d no further "
                "call is made; give the tool a time-out of its own.",
                count,
                self.timeout,
                call,
                MAX_HANGING,
            )
