"""Search over HTTP: one client for the four dialects that the retrieval servers of search agents speak."""

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import httpx

from ..tools import ToolError
from .document import Document, split_contents
from .json_client import Failure, JSONClient, fill_placeholders, gather, shown


DIALECTS = ("search-r1", "skyrl", "flashrag", "asearcher")
"""ASearcher's server takes and, asked for scores, gives the same as Search-R1's: either name serves for both."""

MAX_BATCH = 64  # queries in one request: servers bound the size of a request
PROBE = "test"


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
        results = await gather(calls)
        return [documents for result in results for documents in result]

    def _route(self, route: str) -> httpx.URL:
        return self._base.copy_with(path=self._base.path.rstrip("/") + route)

    async def _find_dialect(self, given: str) -> str:
        if given == "auto":
            return await self._client.retry(self._probe_all, self.url)
        failures = []

        async def probe() -> str:
            try:
                return await self._probe(given)
            except Failure as failure:
                failures.append(failure)
                raise

        try:
            return await self._client.retry(probe, self.url)
        except ToolError as error:
            if not (failures and failures[-1].answered):
                raise
            try:
                spoken = await self._probe_all()
            except Failure:
                raise error from None
            raise ValueError(
                f"the server at {self.url} speaks the dialect {spoken!r}, not {given!r}; set search_dialect={spoken}."
            ) from None

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
