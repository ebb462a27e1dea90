"""Search over HTTP: one client for the four dialects that the retrieval servers of search agents speak."""

import asyncio
import base64
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
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from ..tools import ToolError
from .document import Document, split_contents


logger = logging.getLogger(__name__)

DIALECTS = ("search-r1", "skyrl", "flashrag", "asearcher")
"""ASearcher's server takes and, asked for scores, gives the same as Search-R1's: either name serves for both."""

MAX_BATCH = 64  # queries in one request: servers bound the size of a request
PROBE = "test"
OVERLOADED = (408, 425, 429, 502, 503, 504)  # the server may well do what it was asked, only not now
T = TypeVar("T")


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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_connections)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
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
        text = " ".join(text.split())
        return text if len(text) <= 300 else f"{text[:300]}…"


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


def check_search(queries: list[str], top_k: int) -> list[str]:
    """Checks the arguments of a search; the queries as they can be sent, which half of a surrogate pair can't."""
    if isinstance(queries, str):
        raise TypeError(f"got the string {queries!r}, expected a list of queries; pass [query].")
    if top_k < 1:
        raise ValueError(f"got top_k={top_k}, expected at least 1.")
    return [query.encode(errors="replace").decode() for query in queries]


class HTTPRetriever:
    r"""
    Searches with a retrieval server. It is reached when the retriever is made, so that a wrong address or dialect fails
    at once. Searches may run in several threads at the same time.

    Documents come with `title` and `text` or with `contents` (see [`split_contents`]), bare or as
    `{"document": {...}, "score": ...}`, with or without scores. A blank query finds nothing and is not sent.

    Args:
        url (`str`):
            Address of the server, such as `"http://localhost:8000"`, with or without the route. Credentials and the
            query are never shown, and `${NAME}` in them stands for an environment variable:
            `"http://user:${PASSWORD}@host"`.
        dialect (`str`, *optional*, defaults to `"auto"`):
            How the server is spoken to, found out with `"auto"`:

            - `"search-r1"` and `"asearcher"`: `POST /retrieve` with `queries`
            - `"skyrl"`: `POST /retrieve` with one `query`
            - `"flashrag"`: `POST /search` with one `query`, `POST /batch_search` with several
        **settings:
            Keyword arguments of [`JSONClient`]: time-outs, retries, connections.

    Attributes:
        corpus_hash (`str` or `None`):
            Content hash of the corpus, if the server tells it on `GET /health`.
        counters (`dict`):
            `requests`, `retries`, `failures` (requests that failed for good) and `seconds` in requests, so far.

    Raises:
        [`ToolError`]: The server does not answer.
        ValueError: If the address is none, or if the server speaks another dialect than the one given.

    Example:

    ```python
    >>> retriever = HTTPRetriever("http://localhost:8000")
    >>> retriever.search(["Who wrote The Trial?"], top_k=3)
    ```
    """

    def __init__(self, url: str, dialect: str = "auto", **settings):
        if dialect not in ("auto", *DIALECTS):
            raise ValueError(
                f"`search_dialect` is {dialect!r}; it must be one of 'auto', {', '.join(map(repr, DIALECTS))}."
            )
        self._base, headers, secrets = _read_url(url)
        self.url = shown(self._base)
        self._client = JSONClient(headers=headers, secrets=secrets, **settings)
        self.counters = self._client.counters
        try:
            self.dialect = self._client.run(self._find_dialect(dialect))
            self.corpus_hash = self._client.run(self._find_corpus_hash())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best passages of each query.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages, the best first. An empty list means that nothing was
            found.

        Raises:
            [`ToolError`]: The search could not be made. The message names the address and the last cause.
        """
        queries = check_search(queries, top_k)
        asked = [query for query in dict.fromkeys(queries) if query.strip()]
        found = dict(zip(asked, self._client.run(self._search_all(asked, top_k)), strict=True))
        return [found.get(query, [])[:top_k] for query in queries]

    async def _search_all(self, queries: list[str], top_k: int) -> list[list[Document]]:
        size = 1 if self.dialect == "skyrl" else MAX_BATCH
        calls = []
        for start in range(0, len(queries), size):
            route, body, read = _request(self.dialect, queries[start : start + size], top_k)
            calls.append(self._client.send("POST", self._route(route), body, read))
        # All are waited for, so that none goes on after the search has failed.
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [documents for result in results for documents in result]

    def _route(self, route: str) -> httpx.URL:
        return self._base.copy_with(path=self._base.path.rstrip("/") + route)

    async def _find_dialect(self, given: str) -> str:
        if given == "auto":
            return await self._client.retry(self._probe_all, self.url)
        try:
            await self._client.retry(partial(self._probe, given), self.url)
        except ToolError as error:
            try:
                spoken = await self._probe_all()
            except Failure:
                raise error from None
            raise ValueError(
                f"the server at {self.url} speaks the dialect {spoken!r}, not {given!r}; set search_dialect={spoken}."
            ) from None
        return given

    async def _probe(self, dialect: str) -> str:
        route, body, read = _request(dialect, [PROBE], 1)
        await self._client.attempt("POST", self._route(route), body, read)
        return dialect

    async def _probe_all(self) -> str:
        failures = {}
        for dialect in ("search-r1", "skyrl", "flashrag"):
            try:
                return await self._probe(dialect)
            except Failure as failure:
                if not failure.answered:
                    raise
                failures[dialect] = failure
        causes = "; ".join(f"as {dialect}: {failure}" for dialect, failure in failures.items())
        raise Failure(
            f"the server speaks none of the dialects {', '.join(DIALECTS)} ({causes})",
            retry=any(failure.retry for failure in failures.values()),
        )

    async def _find_corpus_hash(self) -> str | None:
        def read(payload: Any) -> str | None:
            found = payload.get("corpus_hash") if isinstance(payload, dict) else None
            return found if isinstance(found, str) else None

        try:
            return await self._client.attempt("GET", self._route("/health"), None, read)
        except Failure:  # most servers have no such route
            return None


def _read_url(given: str) -> tuple[httpx.URL, dict[str, str], list[str]]:
    """The address of the server without route and credentials, the header that carries these, and what to keep secret."""
    filled, secrets = fill_placeholders(given, "`search_url`", partial(quote, safe=""))
    hint = "give the address of the server as http://host:port."
    try:
        url = httpx.URL(filled)
    except httpx.InvalidURL:
        raise ValueError(f"`search_url` is no address; {hint}") from None  # it is not quoted: it may hold a password
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"`search_url` has the scheme {url.scheme!r} and the host {url.host!r}; {hint}")
    headers = {}
    if url.userinfo:
        token = base64.b64encode(unquote(url.userinfo.decode()).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        secrets += [token, url.password]
    secrets += [value for _, value in url.params.multi_items()]
    path = url.path.rstrip("/")
    for route in ("/retrieve", "/batch_search", "/search"):
        path = path.removesuffix(route)
    url = url.copy_with(path=path or "/", userinfo=b"", fragment=None)
    return url, headers, [secret for secret in secrets if len(secret) > 3]


def _request(dialect: str, queries: list[str], top_k: int) -> tuple[str, dict, Callable[[Any], list[list[Document]]]]:
    """Route and body of a request, and the reader of its answer. Scores are always asked for: pitfall in every server."""

    def read_result(payload: Any) -> list[list[Document]]:
        if not isinstance(payload, dict) or "result" not in payload:
            raise ValueError('expected a JSON object with "result"')
        return _read_lists(payload["result"], None, len(queries))

    def read_one(payload: Any) -> list[list[Document]]:
        pair = isinstance(payload, list) and len(payload) == 2 and all(isinstance(part, list) for part in payload)
        documents, scores = payload if pair else (payload, None)
        return _read_lists([documents], [scores] if pair else None, 1)

    def read_batch(payload: Any) -> list[list[Document]]:
        # Two lists are documents and scores, or the documents of two queries: only the former hold a list per query.
        pair = (
            isinstance(payload, list)
            and len(payload) == 2
            and all(
                isinstance(part, list) and len(part) == len(queries) and all(isinstance(item, list) for item in part)
                for part in payload
            )
        )
        documents, scores = payload if pair else (payload, None)
        return _read_lists(documents, scores, len(queries))

    if dialect == "skyrl":
        return "/retrieve", {"query": queries[0], "topk": top_k, "return_scores": True}, read_result
    if dialect == "flashrag" and len(queries) == 1:
        return "/search", {"query": queries[0], "top_n": top_k, "return_score": True}, read_one
    if dialect == "flashrag":
        return "/batch_search", {"query": queries, "top_n": top_k, "return_score": True}, read_batch
    return "/retrieve", {"queries": queries, "topk": top_k, "return_scores": True}, read_result


def _read_lists(results: Any, scores: Any, num_queries: int) -> list[list[Document]]:
    if not isinstance(results, list) or not all(isinstance(items, list) for items in results):
        raise ValueError("expected a list of results for each query")
    if len(results) != num_queries:
        raise ValueError(f"got {len(results)} lists of results for {num_queries} queries")
    if scores is None:
        return [[_read_document(item) for item in items] for items in results]
    if [len(row) for row in scores] != [len(items) for items in results]:
        raise ValueError("got other numbers of scores than of documents")
    return [[_read_document(*pair) for pair in zip(*row, strict=True)] for row in zip(results, scores, strict=True)]


def _read_document(item: Any, score: Any = None) -> Document:
    if isinstance(item, dict) and "document" in item:
        item, score = item["document"], item.get("score")
    if not isinstance(item, dict):
        raise ValueError("expected each document to be a JSON object")
    if item.get("text") is not None:
        title, text = item.get("title"), item["text"]
    elif item.get("contents") is not None:
        title, text = None, as_text(item["contents"])
        if "\n" in text:
            title, text = split_contents(text)
    else:
        raise ValueError(f'expected each document to have "text" or "contents", got one with {sorted(item)}')
    known = isinstance(score, (int, float)) and math.isfinite(score)
    return Document(as_text(item.get("id")), as_text(title), as_text(text), float(score) if known else None)


def as_text(value: Any) -> str:
    """A field of a document as text that can be encoded; a number is written out and `None` is empty."""
    if isinstance(value, (list, dict)):
        raise ValueError(f"expected the fields of a document to be texts, got a {type(value).__name__}")
    return "" if value is None else str(value).encode(errors="replace").decode()
