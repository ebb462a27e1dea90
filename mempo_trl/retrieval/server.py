"""One HTTP server for the dialects in which search agents ask for passages, over any [`Retriever`]."""

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import socket
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Annotated

from ..tools import ToolError
from .document import Document, Retriever
from .search_queue import Pages, QueueFullError, SearchQueue


try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse
    from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
    from pydantic_core import PydanticCustomError
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise ImportError(
        f"`mempo serve` needs FastAPI and uvicorn ({error}); run `pip install mempo_trl[serve]`."
    ) from error


logger = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}
SEARCH_SECONDS = 60.0
"""Time that a search may take, waiting included. Clients have given it up by then."""
BODY_SECONDS = 30.0
"""Time that the body of a request may take to arrive."""
MAX_CONNECTIONS = 4096
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the latency histogram in seconds."""


class Metrics:
    """Counters of a server since its start, in Prometheus' text format."""

    def __init__(self):
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds = 0.0
        self.buckets = [0] * (len(LATENCY_BUCKETS) + 1)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[path, status] += 1
        self.seconds += seconds
        self.buckets[bisect_left(LATENCY_BUCKETS, seconds)] += 1

    def render(self, queue: SearchQueue) -> str:
        """The text of `/metrics`."""
        errors = sum(count for (_, status), count in self.requests.items() if status >= 500)
        lines = ["# HELP mempo_requests_total Requests answered.", "# TYPE mempo_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'mempo_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, text, value in (
            ("mempo_errors_total", "counter", "Requests answered with a status of 500 or above.", errors),
            ("mempo_queries_total", "counter", "Queries that were not refused.", queue.queries),
            ("mempo_batches_total", "counter", "Calls of the retriever.", queue.batches),
            ("mempo_queue_length", "gauge", "Queries that wait.", queue.length),
        ):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        name = "mempo_request_seconds"
        lines += [f"# HELP {name} Time from a request to the end of its answer.", f"# TYPE {name} histogram"]
        counts = list(accumulate(self.buckets))
        for bound, count in zip((*LATENCY_BUCKETS, "+Inf"), counts, strict=True):
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        lines += [f"{name}_sum {self.seconds:.6f}", f"{name}_count {counts[-1]}"]
        return "\n".join(lines) + "\n"


class _Watch:
    """ASGI middleware: bounds the body of a request and the time it takes to come, counts and logs the request."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str], max_body_size: int):
        self.app = app
        self.metrics = metrics
        self.paths = paths
        self.max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, size, complete = time.perf_counter(), 500, 0, False

        async def receive_bounded() -> Message:
            nonlocal size, complete
            seconds = None if complete else max(0.0, start + BODY_SECONDS - time.perf_counter())
            try:
                message = await asyncio.wait_for(receive(), seconds)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} s.") from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.max_body_size:
                raise HTTPException(413, f"the body is longer than {self.max_body_size} bytes; send fewer queries.")
            return message

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive_bounded, send_watched)
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.observe(path, status, seconds)
            if logger.isEnabledFor(logging.INFO):
                client = "-" if scope.get("client") is None else scope["client"][0]
                logger.info("%s %s %s %d %.1f ms", client, scope["method"], path, status, 1000 * seconds)


class Passage(BaseModel):
    id: str
    title: str
    text: str
    contents: str = Field(description="The title in double quotes, a newline, and the text.")
    url: str = Field(description="What `/access` takes: the title, or the id of a passage without one.")


class Hit(BaseModel):
    document: Passage
    score: float | None


class RetrieveAnswer(BaseModel):
    result: list[list[Hit]] | list[list[Passage]]


class Page(BaseModel):
    url: str
    title: str
    contents: str


class AccessAnswer(BaseModel):
    result: list[Page | None]


class Health(BaseModel):
    status: str
    format: str | None
    corpus_hash: str | None
    num_documents: int | None
    versions: dict[str, str]


class Problem(BaseModel):
    detail: str


def _passage(document: Document) -> dict:
    return {
        "id": document.id,
        "title": document.title,
        "text": document.text,
        "contents": f'"{document.title}"\n{document.text}',
        "url": document.title or document.id,
    }


def _page(url: str, documents: list[Document]) -> dict | None:
    if not documents:
        return None
    title = documents[0].title
    return {"url": url, "title": title, "contents": "\n".join([f'"{title}"', *(page.text for page in documents)])}


def _json(content: dict | list) -> Response:
    # `JSONResponse` would do the same after FastAPI's encoder walked through every passage.
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


def _as_int(value: object) -> object:
    # In JSON 3.0 is an integer, which a strict model would refuse along with "3" and true.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_query(query: str) -> str:
    if not query.strip():
        raise PydanticCustomError("empty_query", "the query is empty; send a search string")
    return query


def _problem(request: Request, error: RequestValidationError) -> JSONResponse:
    """One readable line, as `detail` is a string in every other answer; 400 for an empty query as FlashRAG has it."""
    problems = error.errors()
    lines = []
    for problem in problems[:3]:
        if problem["type"] == "json_invalid":
            lines.append(f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][1]}")
        elif isinstance(problem["input"], bytes):
            lines.append("the body is not marked as JSON; send the header `Content-Type: application/json`")
        else:
            place = ".".join(str(part) for part in problem["loc"][1:]) or "body"
            # In ASCII: the input may hold half of a surrogate pair, which no answer could carry.
            lines.append(f"{place}: {problem['msg']}, got {ascii(problem['input'])[:100]}")
    empty = all(problem["type"] in ("empty_query", "too_short") for problem in problems)
    return JSONResponse({"detail": "; ".join(lines)}, status_code=400 if empty else 422)


def make_app(
    retriever: Retriever,
    *,
    documents: Sequence[Document] | None = None,
    index_format: str | None = None,
    corpus_hash: str | None = None,
    default_top_k: int = 3,
    max_top_k: int = 100,
    max_queue: int = 4096,
    max_batch: int = 256,
    max_query_length: int = 8192,
    max_body_size: int = 16 * 2**20,
) -> FastAPI:
    """
    Makes the application: `/retrieve` as Search-R1, SkyRL and ASearcher ask it, FlashRAG's `/search` and
    `/batch_search`, ASearcher's `/access`, and `/health` and `/metrics`.

    Args:
        retriever ([`Retriever`]):
            Where to search.
        documents (`Sequence[Document]`, *optional*):
            Passages of the corpus, for `/access`, which knows no page without them.
        index_format (`str`, *optional*), corpus_hash (`str`, *optional*):
            What `/health` tells of the index.
        default_top_k (`int`, *optional*, defaults to `3`):
            Passages per query where the request does not say.
        max_top_k (`int`, *optional*, defaults to `100`):
            Highest number of passages per query that a request may ask for.
        max_queue (`int`, *optional*, defaults to `4096`):
            Highest number of queries that wait, and of one request; above it a request is answered with 503.
        max_batch (`int`, *optional*, defaults to `256`):
            Highest number of queries, of several requests, that are searched together.
        max_query_length (`int`, *optional*, defaults to `8192`):
            Highest number of characters of a query.
        max_body_size (`int`, *optional*, defaults to 16 MiB):
            Highest number of bytes of a request.

    Returns:
        `fastapi.FastAPI`: The application.
    """
    for name, value in (("max_top_k", max_top_k), ("max_queue", max_queue), ("max_batch", max_batch)):
        if value < 1:
            raise ValueError(f"got {name}={value}, expected at least 1.")
    if not 1 <= default_top_k <= max_top_k:
        raise ValueError(f"got default_top_k={default_top_k}, expected 1 to max_top_k={max_top_k}.")
    queue, metrics = SearchQueue(retriever, max_queue, max_batch), Metrics()
    pages = None if documents is None else Pages(documents)

    AnyQuery = Annotated[str, Field(max_length=max_query_length)]
    schema = {"type": "string", "maxLength": max_query_length, "pattern": r"\S"}
    Query = Annotated[AnyQuery, AfterValidator(_check_query), WithJsonSchema(schema)]
    count = Annotated[int, Field(ge=1, le=max_top_k)]
    TopK = Annotated[count | None, BeforeValidator(_as_int), Field(description=f"null means {default_top_k}")]

    class Body(BaseModel):
        model_config = ConfigDict(strict=True)

    class RetrieveBody(Body):
        model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["queries"]}, {"required": ["query"]}]})
        queries: list[AnyQuery] = Field(default=None, max_length=max_queue, json_schema_extra=_without_default)
        query: Query = Field(default=None, json_schema_extra=_without_default)
        topk: TopK = None
        return_scores: bool = False

        @model_validator(mode="after")
        def check(self):
            if (self.queries is None) == (self.query is None):
                raise PydanticCustomError("queries", "send either `queries`, a list of strings, or `query`, a string")
            return self

    class SearchBody(Body):
        query: Query
        top_n: TopK = None
        return_score: bool = False

    class BatchSearchBody(Body):
        query: list[AnyQuery] = Field(min_length=1, max_length=max_queue)
        top_n: TopK = None
        return_score: bool = False

    class AccessBody(Body):
        urls: list[AnyQuery] = Field(max_length=max_queue)

    async def search(queries: list[str], top_k: int | None) -> list[list[Document]]:
        # A model's empty query finds nothing; it must not fail the other rollouts of its batch.
        asked = [query for query in queries if query.strip()]
        if not asked:
            return [[] for _ in queries]
        searching = asyncio.ensure_future(queue.search(asked, top_k or default_top_k))
        try:
            await asyncio.wait([searching], timeout=SEARCH_SECONDS)
        finally:
            slow = searching.cancel()
        if slow:
            raise HTTPException(503, f"the search took longer than {SEARCH_SECONDS:g} s.", RETRY_AFTER)
        try:
            found = iter(searching.result())
        except (QueueFullError, ToolError) as error:
            raise HTTPException(503, str(error), RETRY_AFTER) from error
        except Exception as error:
            raise HTTPException(
                500, f"the search failed with {type(error).__name__}; see the server's log."
            ) from error
        return [next(found) if query.strip() else [] for query in queries]

    app = FastAPI(
        title="mempo serve", version=version("mempo_trl"), exception_handlers={RequestValidationError: _problem}
    )
    refused = {
        400: {"model": Problem, "description": "An empty query, or a body that is not JSON."},
        408: {"model": Problem, "description": "The body did not arrive in time."},
        413: {"model": Problem, "description": "The body is too large."},
        422: {"model": Problem, "description": "A value of the wrong type or out of bounds."},
    }
    failed = {
        500: {"model": Problem, "description": "The search failed."},
        503: {"model": Problem, "description": "The queue is full, the backend slow or away: try again."},
    }

    @app.post("/retrieve", response_model=RetrieveAnswer, responses=refused | failed)
    async def retrieve(body: RetrieveBody):
        """Search-R1 (`queries`), SkyRL (`query`) and ASearcher (`return_scores` false: passages without a wrapper)."""
        results = await search([body.query] if body.queries is None else body.queries, body.topk)
        if body.return_scores:
            return _json(
                {"result": [[{"document": _passage(d), "score": d.score} for d in found] for found in results]}
            )
        return _json({"result": [[_passage(d) for d in found] for found in results]})

    @app.post(
        "/search", response_model=list[Passage] | list[list[Passage] | list[float | None]], responses=refused | failed
    )
    async def search_one(body: SearchBody):
        """FlashRAG, one query: its passages, or with `return_score` the list of them and the list of their scores."""
        [found] = await search([body.query], body.top_n)
        passages = [_passage(d) for d in found]
        return _json([passages, [d.score for d in found]] if body.return_score else passages)

    @app.post(
        "/batch_search",
        response_model=list[list[Passage]] | list[list[list[Passage]] | list[list[float | None]]],
        responses=refused | failed,
    )
    async def batch_search(body: BatchSearchBody):
        """FlashRAG, several queries: as `/search`, with a list per query in place of each passage and score."""
        results = await search(body.query, body.top_n)
        passages = [[_passage(d) for d in found] for found in results]
        return _json([passages, [[d.score for d in found] for found in results]] if body.return_score else passages)

    @app.post("/access", response_model=AccessAnswer, responses=refused)
    async def access(body: AccessBody):
        """ASearcher: the passages of a title, or of an id, as one page."""
        if pages is None:
            return _json({"result": [None for _ in body.urls]})
        found = await asyncio.to_thread(lambda: [_page(url, pages.find(url)) for url in body.urls])
        return _json({"result": found})

    @app.get("/health", response_model=Health)
    async def health():
        return {
            "status": "ok",
            "format": index_format,
            "corpus_hash": corpus_hash,
            "num_documents": None if documents is None else len(documents),
            "versions": {name: version(name) for name in ("mempo_trl", "bm25s", "fastapi", "uvicorn")},
        }

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus():
        return PlainTextResponse(metrics.render(queue))

    app.add_middleware(_Watch, metrics=metrics, paths={r.path for r in app.routes}, max_body_size=max_body_size)
    return app


def _without_default(schema: dict) -> None:
    """The key may be left out, but `null` is no value of it."""
    schema.pop("default", None)


def bind(host: str, port: int, allow_remote: bool = False) -> socket.socket:
    """
    Takes an address before the index is loaded, so that one that is in use is known at once.

    Args:
        host (`str`):
            Address to bind.
        port (`int`):
            Port; 0 takes a free one.
        allow_remote (`bool`, *optional*, defaults to `False`):
            Whether the address may be one that other machines reach.

    Returns:
        `socket.socket`: The socket, which refuses connections until it listens.

    Raises:
        `ValueError`: The address is not of the loopback device and `allow_remote` is not set.
        `OSError`: The address cannot be taken.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not (is_loopback or allow_remote):
        raise ValueError(
            f"got host={host!r}, which other machines can reach, and the server asks nobody who they are; pass "
            "`--allow_remote` if that is meant, or keep 127.0.0.1."
        )
    # asyncio sets TCP_NODELAY only on sockets that name the protocol; without it every answer waits 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot serve on {host}, port {port} ({error.strerror}); choose another."
        ) from error
    return listener


def run_server(app: FastAPI, listener: socket.socket, log_file: str | os.PathLike | None = None) -> None:
    """
    Serves until SIGINT or SIGTERM, then answers what has been asked and returns.

    Args:
        app (`fastapi.FastAPI`):
            Application of [`make_app`].
        listener (`socket.socket`):
            Socket of [`bind`].
        log_file (`str` or `os.PathLike`, *optional*):
            File for one line per request and for errors, which go to the terminal without it.
    """
    # A terminal that prints a line per request slows every search down.
    handler = logging.StreamHandler() if log_file is None else logging.FileHandler(log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for log in (logging.getLogger("mempo_trl.retrieval"), logging.getLogger("uvicorn")):
        log.addHandler(handler)
        log.setLevel(logging.WARNING if log_file is None else logging.INFO)
        log.propagate = False
    # Rollouts pause for minutes between two searches; a connection that is closed meanwhile costs a retry.
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=300,
        timeout_graceful_shutdown=30,
    )
    # Or every so many requests a full garbage collection would walk through the corpus while all clients wait.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
