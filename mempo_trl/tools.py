"""The tools that the model may call: their schemas, the check of a call, and the call itself."""

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema
from transformers.utils import get_json_schema


logger = logging.getLogger(__name__)

NO_RESULTS = "No results found for this query."
"""What a search tool returns when it worked and found nothing. It is counted as `tool/empty_frac`, never as an error."""


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
    """
    schema = get_json_schema(tool if inspect.isroutine(tool) else tool.__call__)
    schema["function"]["name"] = tool_name(tool)
    return schema


def _checked_schema(schema: dict) -> dict:
    """A tool's parameters as `jsonschema` checks them: nothing unknown, and `null` where `get_json_schema` allows it."""
    parameters = schema["function"]["parameters"]
    properties = {}
    for name, value in parameters["properties"].items():
        if value.get("nullable") and "type" in value:
            types = value["type"] if isinstance(value["type"], list) else [value["type"]]
            value = {**value, "type": [*types, "null"]}
        properties[name] = value
    return {**parameters, "properties": properties, "additionalProperties": False}


def _shorten(text: str) -> str:
    """Both ends of a text that quotes the model: a long argument is not repeated to it whole."""
    return text if len(text) <= 200 else f"{text[:100]}…{text[-100:]}"


class Toolbox:
    """
    The tools of a run.

    Args:
        tools (`list[Callable]`):
            Plain typed functions or callables in TRL's convention, sync or async.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which one attempt of a call is given up.
        retries (`int`, *optional*, defaults to `2`):
            Further attempts after a failed one, with exponential back-off and jitter from one second up.

    Raises:
        ValueError: If there is no tool, or if two tools have the same name.
    """

    def __init__(self, tools: list[Callable], timeout: float = 60.0, retries: int = 2):
        if not tools:
            raise ValueError("`tools` is empty; pass at least one tool, for example `tools=[SearchTool(retriever)]`.")
        self.tools = {tool_name(tool): tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(
                f"Two tools have the same name: {[tool_name(tool) for tool in tools]}. Rename one of them."
            )
        self.schemas = [tool_schema(tool) for tool in tools]
        self.timeout = timeout
        self.retries = retries
        self._parameters = {schema["function"]["name"]: _checked_schema(schema) for schema in self.schemas}
        # An executor of our own: the event loop's default one is joined when the loop closes, so that one hanging
        # tool would hold the trainer back.
        self._executor = ThreadPoolExecutor(max_workers=64, thread_name_prefix="mempo-tool")

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
        try:
            jsonschema.validate(arguments, self._parameters[name])
        except jsonschema.ValidationError as error:
            return f"wrong arguments for {name}: {_shorten(error.message)}"
        return None

    async def call(self, name: str, arguments: dict) -> ToolResult:
        """
        Call a tool. A failure never raises: after the last retry it becomes a result that says so.

        Args:
            name (`str`):
                Name of a tool.
            arguments (`dict`):
                Arguments that passed [`~Toolbox.check`].

        Returns:
            [`ToolResult`]
        """
        start = time.perf_counter()
        for attempt in range(self.retries + 1):
            try:
                text = await asyncio.wait_for(self._call_once(name, arguments), self.timeout)
                return ToolResult(text, seconds=time.perf_counter() - start)
            # A tool is the user's code and may raise anything; whatever it is, the rollout goes on and it is counted.
            except Exception as error:
                # A tool's own time-out says more, such as the address; the one of `wait_for` has no message.
                timed_out = isinstance(error, asyncio.TimeoutError) and not str(error)
                cause = f"no answer within {self.timeout:g} s" if timed_out else f"{type(error).__name__}: {error}"
                logger.info("Tool %s failed (attempt %d of %d): %s", name, attempt + 1, self.retries + 1, cause)
            if attempt < self.retries:
                await asyncio.sleep(2**attempt * random.uniform(0.5, 1.0))
        text = f"The call of {name} could not be made because of a technical problem. This does not mean that nothing exists."
        return ToolResult(text, error=cause, seconds=time.perf_counter() - start)

    async def _call_once(self, name: str, arguments: dict) -> str:
        tool = self.tools[name]
        if inspect.iscoroutinefunction(tool if inspect.isroutine(tool) else tool.__call__):
            result = await tool(**arguments)
        else:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._executor, lambda: tool(**arguments))
        if isinstance(result, (bytes, type(None))):
            raise ToolError(f"the tool returned {type(result).__name__} instead of text")
        text = result if isinstance(result, str) else str(result)
        text = text.encode(errors="replace").decode()  # half of a surrogate pair is no text for a tokenizer
        if not text.strip():
            raise ToolError("the tool returned an empty text")
        return text
