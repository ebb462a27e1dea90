"""Searches of many clients as batches of one retriever, and passages by their title or id."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from ..tools import DaemonThreads, ToolError
from .document import Document, Retriever


logger = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """More queries are waiting than the server was told to keep."""


@dataclass(eq=False, slots=True)
class _Waiting:
    queries: list[str]
    top_k: int
    answer: asyncio.Future


class SearchQueue:
    """
    Turns concurrent searches into batches: what arrives while a search runs is searched together in the next one.

    Args:
        retriever ([`Retriever`]):
            Where to search. It is called in a thread of its own, one call at a time.
        max_queue (`int`):
            Highest number of queries that wait.
        max_batch (`int`):
            Highest number of queries of one call. A longer request is searched by itself.
    """

    def __init__(self, retriever: Retriever, max_queue: int, max_batch: int):
        self.retriever = retriever
        self.max_queue = max_queue
        self.max_batch = max_batch
        self.length = 0
        self.queries = 0
        self.batches = 0
        self._waiting: deque[_Waiting] = deque()
        self._threads = DaemonThreads()
        self._worker: asyncio.Task | None = None

    async def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        As [`Retriever.search`], together with the queries of others.

        Raises:
            `QueueFullError`: Too many queries wait already.
        """
        if self.length + len(queries) > self.max_queue:
            raise QueueFullError(
                f"{self.length} queries are waiting and the queue takes {self.max_queue}; try again later or start the "
                "server with a larger `max_queue`."
            )
        waiting = _Waiting(queries, top_k, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.length += len(queries)
        self.queries += len(queries)
        # A worker that ends with the queue belongs to no event loop in between, and needs no shutdown.
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.answer

    async def _work(self) -> None:
        while self._waiting:
            groups: dict[int, list[_Waiting]] = {}
            for waiting in self._take():
                groups.setdefault(waiting.top_k, []).append(waiting)
            for top_k, group in groups.items():
                queries = [waiting.queries for waiting in group]
                self.batches += 1
                outcomes = await asyncio.wrap_future(self._threads.submit(partial(self._search, queries, top_k)))
                for waiting, outcome in zip(group, outcomes, strict=True):
                    if waiting.answer.done():  # Its client has gone.
                        continue
                    if isinstance(outcome, Exception):
                        waiting.answer.set_exception(outcome)
                    else:
                        waiting.answer.set_result(outcome)

    def _take(self) -> list[_Waiting]:
        taken, size = [], 0
        while self._waiting and (not taken or size + len(self._waiting[0].queries) <= self.max_batch):
            waiting = self._waiting.popleft()
            self.length -= len(waiting.queries)
            if not waiting.answer.done():
                taken.append(waiting)
                size += len(waiting.queries)
        return taken

    def _search(self, requests: list[list[str]], top_k: int) -> list[list[list[Document]] | Exception]:
        """For each request its results, or why there are none."""
        queries = [query for request in requests for query in request]
        try:
            results = self.retriever.search(queries, top_k)
            if len(results) != len(queries):
                raise RuntimeError(f"the retriever gave {len(results)} results for {len(queries)} queries.")
        except ToolError as error:
            logger.error("%s", error)
            return [error] * len(requests)
        except Exception as error:
            if len(requests) == 1:
                logger.exception("a search of %d queries failed", len(queries))
                return [error]
            # One bad query must not fail the requests that happened to be batched with it.
            return [outcome for request in requests for outcome in self._search([request], top_k)]
        ends = list(accumulate(len(request) for request in requests))
        return [results[end - len(request) : end] for request, end in zip(requests, ends, strict=True)]


class Pages:
    """
    Finds the passages of a title or an id. The first search reads the whole corpus and keeps 32 bytes a passage.

    Args:
        documents (`Sequence[Document]`):
            Passages of the corpus.
    """

    def __init__(self, documents: Sequence[Document]):
        self.documents = documents
        self._lock = threading.Lock()
        self._hashes: np.ndarray | None = None  # (2, N), titles and ids, each sorted
        self._rows: np.ndarray | None = None  # (2, N)

    def find(self, name: str) -> list[Document]:
        """All passages with this title, else the passage with this id, in the order of the corpus."""
        with self._lock:
            if self._hashes is None:
                self._build()
        if not name:
            return []
        by_title = [document for document in self._candidates(0, name) if document.title == name]
        return by_title or [document for document in self._candidates(1, name) if document.id == name]

    def _candidates(self, column: int, name: str) -> list[Document]:
        start, end = (np.searchsorted(self._hashes[column], hash(name), side) for side in ("left", "right"))
        return [self.documents[int(row)] for row in self._rows[column, start:end]]

    def _build(self) -> None:
        hashes = np.empty((2, len(self.documents)), dtype=np.int64)
        for row, document in enumerate(self.documents):
            hashes[:, row] = hash(document.title), hash(document.id)
        self._rows = np.argsort(hashes, axis=1, kind="stable")
        self._hashes = np.take_along_axis(hashes, self._rows, axis=1)
