"""Results of searches on disk, shared by the threads and processes of a run and by the runs after it."""

import hashlib
import json
import logging
import os
import pickle
import sqlite3
import threading
from concurrent.futures import Future
from pathlib import Path

import diskcache

from ..tools import ToolError
from .document import Document, Retriever


logger = logging.getLogger(__name__)

FORMAT = "mempo_trl.search/1"
FAILURES = 5  # in a row, after which a run goes on without its cache

# What a cache that is corrupt, locked, full or gone raises.
_ERRORS = (sqlite3.Error, diskcache.Timeout, OSError, ValueError, TypeError, pickle.UnpicklingError)


class _TextDisk(diskcache.Disk):
    """Reads no pickles: whoever can write into the folder could run code with one."""

    def get(self, key, raw):
        if not raw:
            raise ValueError("the cache holds a pickled key")
        return super().get(key, raw)

    def fetch(self, mode, filename, value, read):
        if mode == diskcache.core.MODE_PICKLE:
            raise ValueError("the cache holds a pickled value")
        return super().fetch(mode, filename, value, read)


class CachedRetriever:
    """
    Looks into a cache on disk before it searches. Queries that are being searched by another thread are waited for
    instead of being searched again.

    Only what was found is kept: no failures, and no empty results either, because an engine that throttles may give
    those. A cache that can't be read or written is left out with a warning; the searches go on.

    Args:
        retriever ([`Retriever`]):
            Where to search.
        folder (`str` or `os.PathLike`):
            Folder of the cache, on a local disk: SQLite needs file locks, which network file systems often lack.
        source (`str`):
            What tells this way of searching from every other, such as the address of the server or the settings of the
            index. With the corpus hash, the query and `top_k` it is what a result is found by.
        size_limit (`int`, *optional*, defaults to 4 GiB):
            Bytes above which the oldest results are removed.
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds to wait for a locked cache.

    Attributes:
        counters (`dict`):
            `hits` (queries answered without a search), `misses` (queries searched) and `errors` of the cache, so far.

    Example:

    ```python
    >>> retriever = CachedRetriever(WebRetriever("serper"), "cache", source="serper")
    ```
    """

    def __init__(
        self,
        retriever: Retriever,
        folder: str | os.PathLike,
        source: str,
        *,
        size_limit: int = 4 << 30,
        timeout: float = 5.0,
    ):
        self.retriever = retriever
        self.folder = Path(folder)
        self.source = source
        self.counters = {"hits": 0, "misses": 0, "errors": 0}
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future] = {}
        self._failures_in_a_row = 0
        self._cache = None
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._cache = diskcache.Cache(str(folder), timeout=timeout, disk=_TextDisk, size_limit=size_limit)
        except _ERRORS as error:
            self._failures_in_a_row = FAILURES - 1
            self._failed(error)

    @property
    def corpus_hash(self) -> str | None:
        """Content hash of the corpus, if the retriever knows it."""
        return self.retriever.corpus_hash

    def close(self) -> None:
        """Closes the files of the cache."""
        if self._cache is not None:
            self._cache.close()

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best passages of each query, see [`Retriever`].

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages, the best first.
        """
        if isinstance(queries, str):
            raise TypeError(f"got the string {queries!r}, expected a list of queries; pass [query].")
        keys = {query: self._key(query, top_k) for query in queries}
        futures, own = {}, {}
        with self._lock:
            for query, key in keys.items():
                if key not in self._in_flight:
                    own[query] = self._in_flight[key] = Future()
                futures[query] = self._in_flight[key]
        try:
            self._find(own, keys, top_k)
        except BaseException as error:
            for future in own.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            with self._lock:
                for query in own:
                    del self._in_flight[keys[query]]
        # Those of other threads come last: their owners wait for nobody before they search.
        found = {query: future.result() for query, future in futures.items()}
        with self._lock:
            self.counters["hits"] += len(queries) - len(own)
        return [list(found[query]) for query in queries]

    def _find(self, own: dict[str, Future], keys: dict[str, str], top_k: int) -> None:
        """Sets the results of the queries that are ours, from the disk or from a search."""
        missing = []
        for query, future in own.items():
            documents = self._read(keys[query])
            if documents is None:
                missing.append(query)
            else:
                future.set_result(documents)
        with self._lock:
            self.counters["hits"] += len(own) - len(missing)
            self.counters["misses"] += len(missing)
        if not missing:
            return
        results = self.retriever.search(missing, top_k)
        if len(results) != len(missing):  # before any of them is written under the wrong query
            name = type(self.retriever).__name__
            raise ToolError(f"{name} gave {len(results)} lists of passages for {len(missing)} queries")
        for query, documents in zip(missing, results, strict=True):
            if documents:
                self._write(keys[query], documents)
            own[query].set_result(documents)

    def _key(self, query: str, top_k: int) -> str:
        parts = [FORMAT, self.source, self.corpus_hash, query, top_k]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read(self, key: str) -> list[Document] | None:
        cache = self._cache  # another thread may give it up meanwhile
        if cache is None:
            return None
        try:
            value = cache.get(key)
            # Nothing empty was ever written, so what reads as empty is damaged.
            return None if value is None else [Document(*fields) for fields in json.loads(value)] or None
        except _ERRORS as error:
            self._failed(error)
            return None

    def _write(self, key: str, documents: list[Document]) -> None:
        cache = self._cache
        if cache is None:
            return
        rows = [[document.id, document.title, document.text, document.score] for document in documents]
        try:
            cache.set(key, json.dumps(rows))
        except _ERRORS as error:
            self._failed(error)
        else:
            # Not after a read: where only writing fails, each search would wait for the lock in vain.
            self._failures_in_a_row = 0

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self.counters["errors"] += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES:
                self._cache = None
                cause = f"{type(error).__name__}: {error}"
                logger.warning(
                    "The search cache in %s can't be used (%s): searches go on without it. Give another "
                    "`search_cache_dir`, or remove the folder.",
                    self.folder,
                    cause,
                )
