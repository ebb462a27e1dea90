"""Requests that carry JSON: time-outs, retries, counters, and no secret in any message."""

import asyncio
import json
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from ..tools import ToolError, plain_text


logger = logging.getLogger(__name__)

OVERLOADED = (408, 425, 429, 502, 503, 504)  # the server may well do what it was asked, only not now
T = TypeVar("T")
ssl_context = cache(httpx.create_ssl_context)  # one for all clients: reading the certificates takes a while


def fill_placeholders(text: str, where: str, encode: Callable[[str], str] = str) -> tuple[str, list[str]]:
    """
    Replaces each `${NAME}` by the environment variable of this name.

    Args:
        text (`str`):
            Text with placeholders.
        where (`str`):
            What the text is, for the error.
        encode (`Callable`, *optional*):
            What is done to a value before it is put in.

    Returns:
        `tuple[str, list[str]]`: The text filled, and the values that were put in: secrets.

    Raises:
        `ValueError`: A variable is not set, or its value can't be sent in a header.
    """
    secrets = []

    def value(match: re.Match) -> str:
        found = os.environ.get(match[1], "").strip()
        if not found:
            raise ValueError(f"{where} needs the environment variable {match[1]}, which is not set; set it.")
        if not (found.isascii() and found.isprintable()):
            # Said here because the error of the HTTP library would quote the value.
            raise ValueError(
                f"{where}: the environment variable {match[1]} holds characters that no header can carry."
            )
        secrets.append(found)
        return encode(found)

    return re.sub(r"\$\{(\w+)\}", value, text), secrets


class Failure(Exception):
    """
    One attempt that failed.

    Args:
        cause (`str`):
            What happened, without secrets.
        retry (`bool`, *optional*, defaults to `True`):
            Whether the same request may succeed later.
        answered (`bool`, *optional*, defaults to `True`):
            Whether the server dealt with the request, so that the failure says something about the request.
        retry_after (`float`, *optional*, defaults to `0.0`):
            Seconds that the server asks to wait.
    """

    def __init__(self, cause: str, *, retry: bool = True, answered: bool = True, retry_after: float = 0.0):
        super().__init__(cause)
        self.retry = retry
        self.answered = answered
        self.retry_after = retry_after


class JSONClient:
    """
    Sends requests and reads JSON, with time-outs, retries and counters. Any number of threads may use it at once: their
    requests run in one event loop, in a thread of its own, over one pool of connections.

    Args:
        timeout (`float`, *optional*, defaults to `30.0`):
            Seconds that one attempt may take as a whole, so that a server that drips bytes is given up as well.
        retries (`int`, *optional*, defaults to `3`):
            Further attempts after one that failed without an answer or with one that may be better later.
        total_timeout (`float`, *optional*, defaults to `55.0`):
            Seconds that all attempts and waits of one request may take; less than `tool_timeout`, which knows no cause.
        backoff (`float`, *optional*, defaults to `0.5`):
            Seconds of the first wait at most; it doubles with each attempt, and a random part of it is waited.
        max_backoff (`float`, *optional*, defaults to `10.0`):
            Longest wait in seconds, also where the server asks for a longer one.
        max_connections (`int`, *optional*, defaults to `64`):
            Requests that are under way at the same time.
        headers (`dict[str, str]`, *optional*):
            Headers of every request.
        secrets (`list[str]`, *optional*):
            Texts that no message may hold.
    """

    def __init__(
        self,
        *,
        timeout: float = 30.0,
        retries: int = 3,
        total_timeout: float = 55.0,
        backoff: float = 0.5,
        max_backoff: float = 10.0,
        max_connections: int = 64,
        headers: dict[str, str] | None = None,
        secrets: list[str] | None = None,
    ):
        if not (timeout > 0 and total_timeout > 0 and max_connections > 0):
            raise ValueError(
                f"got timeout={timeout}, total_timeout={total_timeout} and max_connections={max_connections}, expected "
                "all above 0."
            )
        if not (retries >= 0 and backoff >= 0 and max_backoff >= 0):
            raise ValueError(
                f"got retries={retries}, backoff={backoff} and max_backoff={max_backoff}, expected none below 0."
            )
        self.counters = {"requests": 0, "retries": 0, "failures": 0, "seconds": 0.0}
        self._timeout = timeout
        self._retries = retries
        self._total_timeout = total_timeout
        self._max_backoff = max_backoff
        self._backoff = wait_random_exponential(multiplier=backoff, max=max_backoff)
        self._slots = asyncio.Semaphore(max_connections)
        forms = [form for text in secrets or [] for form in (text, quote(text, safe=""), json.dumps(text)[1:-1])]
        self._secrets = sorted(set(forms), key=len, reverse=True)
        # Time-outs are ours, and a request that waits for a connection waits for its slot instead.
        # Idle connections are dropped before a server does it, uvicorn after 5 s, just when they are used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_connections, keepalive_expiry=3.0)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=ssl_context())
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mempo-http", daemon=True).start()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def close(self) -> None:
        """Closes the connections."""
        if self._stop.alive:
            self.run(self._client.aclose())
            self._stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of this client from any thread and waits for its result."""
        if os.getpid() != self._process or not self._stop.alive:
            coroutine.close()
            raise RuntimeError(
                "this client is closed, or was made before a fork; make one in the process that uses it."
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt as well: nothing goes on searching behind the caller's back
            future.cancel()
            raise

    async def send(self, method: str, url: httpx.URL, body: dict | None, read: Callable[[Any], T]) -> T:
        """
        Sends a request until it succeeds, as often as the settings allow.

        Args:
            method (`str`):
                `"GET"`, whose body goes into the query of the URL, or another one.
            url (`httpx.URL`):
                Address. Its query is sent but never shown.
            body (`dict`, *optional*):
                JSON object to send.
            read (`Callable`):
                Makes the result of the JSON that came back, and raises a `ValueError` where it is not what was asked for.

        Returns:
            What `read` returns.

        Raises:
            [`ToolError`]: It failed for good. The message names the address and the last cause.
        """
        return await self.retry(partial(self.attempt, method, url, body, read), shown(url))

    async def retry(self, attempt: Callable[[], Coroutine[Any, Any, T]], where: str) -> T:
        """Repeats an attempt that raises a [`Failure`]; the last one becomes a [`ToolError`] that names `where`."""
        attempts, last = 1, None

        def before_sleep(state: RetryCallState) -> None:
            nonlocal attempts, last
            attempts, last = state.attempt_number + 1, state.outcome.exception()
            self.counters["retries"] += 1
            logger.info("Attempt %d at %s failed: %s", state.attempt_number, where, last)

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Failure) and error.retry),
            stop=stop_after_attempt(self._retries + 1) | stop_before_delay(self._total_timeout),
            wait=self._wait,
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            return await asyncio.wait_for(retrying(attempt), self._total_timeout)
        except Failure as failure:
            cause = str(failure)
        except asyncio.TimeoutError:
            cause = f"no answer within {self._total_timeout:g} s" + (f", before that: {last}" if last else "")
        self.counters["failures"] += 1
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        # Outside of the handlers, because a chained error of the HTTP library could show a secret.
        raise ToolError(f"the search at {where} failed after {tries}: {cause}")

    async def attempt(self, method: str, url: httpx.URL, body: dict | None, read: Callable[[Any], T]) -> T:
        """Sends a request once, see [`~JSONClient.send`]; raises a [`Failure`]."""
        if method == "GET":
            url = url.copy_merge_params(body or {})
            body = None
        async with self._slots:
            self.counters["requests"] += 1
            start, failure = time.perf_counter(), None
            try:
                # httpx logs addresses. The query may hold a key, so it goes past the address.
                request = self._client.build_request(
                    method, url.copy_with(query=None), json=body, extensions={"target": url.raw_path}
                )
                response = await asyncio.wait_for(self._client.send(request), self._timeout)
            except asyncio.TimeoutError:
                failure = Failure(f"no complete answer within {self._timeout:g} s", answered=False)
            except httpx.HTTPError as error:
                failure = Failure(self._clean(f"{type(error).__name__}: {error}"), answered=False)
            finally:
                self.counters["seconds"] += time.perf_counter() - start
        if failure is not None:
            raise failure
        status = response.status_code
        if not response.is_success:
            cause = f"HTTP {status} {response.reason_phrase}: {self._clean(response.text) or '(empty body)'}"
            raise Failure(
                cause,
                retry=status == 500 or status in OVERLOADED,
                answered=status not in OVERLOADED,
                retry_after=_seconds(response.headers.get("Retry-After", "")),
            )
        if not response.content.strip():
            raise Failure(f"HTTP {status} with an empty body")
        try:
            payload = json.loads(response.content)
        except (ValueError, RecursionError):
            raise Failure(f"the answer is not JSON: {self._clean(response.text)}") from None
        try:
            return read(payload)
        except ValueError as error:
            raise Failure(self._clean(f"{error}; the answer: {response.text}")) from None

    def _wait(self, state: RetryCallState) -> float:
        asked = min(state.outcome.exception().retry_after, self._max_backoff)
        return max(asked, self._backoff(state))

    def _clean(self, text: str) -> str:
        """The beginning of a text that came back, in one line and without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = " ".join(plain_text(text).split())
        return text if len(text) <= 300 else f"{text[:300]}…"


async def gather(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls, or the first error, once all have ended: none goes on after the search has failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def shown(url: httpx.URL) -> str:
    """An address without credentials, query and fragment."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


def _seconds(retry_after: str) -> float:
    """The value of `Retry-After`, seconds or a date, as seconds from now."""
    try:
        return max(0.0, float(retry_after)) if math.isfinite(float(retry_after)) else 0.0
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())
