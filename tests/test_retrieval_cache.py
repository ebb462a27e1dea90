import json
import logging
import multiprocessing
import os
import pickle
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mempo_trl.retrieval.cache import CachedRetriever
from mempo_trl.retrieval.document import Document
from mempo_trl.tools import ToolError


class Retriever:
    """Finds one passage per query, notes what it was asked, and fails or waits on demand."""

    def __init__(self, corpus_hash=None):
        self.corpus_hash = corpus_hash
        self.asked = []
        self.error = None
        self.empty = False
        self.started = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def search(self, queries, top_k):
        self.asked.append((queries, top_k))
        self.started.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return [[] if self.empty else passages(query, top_k) for query in queries]


def passages(query, top_k=2):
    return [Document(str(i), f"About {query} 里德", f"text {i}\n\ud800", 1 / (i + 1)) for i in range(top_k - 1)] + [
        Document("last", "", "")
    ]


@pytest.fixture
def retriever():
    return Retriever()


@pytest.fixture
def open_cache(tmp_path):
    """Opens caches in one folder and closes them."""
    opened = []

    def open_cache(retriever, source="test", **settings):
        opened.append(CachedRetriever(retriever, tmp_path / "cache", source, **settings))
        return opened[-1]

    yield open_cache
    for cached in opened:
        cached.close()


def test_hits(retriever, open_cache):
    """A query is searched once, exactly what was found comes back, also in the next run, and hits are counted."""
    cached = open_cache(retriever)
    assert cached.search(["a", "b", "a"], 2) == [passages("a"), passages("b"), passages("a")]
    assert cached.search(["b", "c"], 2) == [passages("b"), passages("c")]
    assert cached.search([], 2) == []
    assert retriever.asked == [(["a", "b"], 2), (["c"], 2)]
    assert cached.counters == {"hits": 2, "misses": 3, "errors": 0}
    again = open_cache(retriever)
    assert again.search(["c", "a"], 2) == [passages("c"), passages("a")]
    assert len(retriever.asked) == 2 and again.counters == {"hits": 2, "misses": 0, "errors": 0}


def test_key(open_cache):
    """Another number of passages, way of searching or corpus is another search."""
    first = Retriever("hash")
    open_cache(first).search(["a"], 2)
    assert open_cache(first).search(["a"], 3) == [passages("a", 3)]
    assert len(first.asked) == 2
    for other, source in ((Retriever("hash"), "another"), (Retriever("other"), "test"), (Retriever(None), "test")):
        open_cache(other, source).search(["a"], 2)
        assert len(other.asked) == 1
    same = Retriever("hash")
    assert open_cache(same).search(["a"], 2) == [passages("a")]
    assert same.asked == [] and open_cache(same).corpus_hash == "hash"


def test_only_what_was_found_is_kept(retriever, open_cache):
    """Failures rise and are made again; so are searches that found nothing."""
    cached = open_cache(retriever)
    retriever.error = ToolError("no answer")
    for _ in range(2):
        with pytest.raises(ToolError, match="no answer"):
            cached.search(["a", "b"], 2)
    retriever.error, retriever.empty = None, True
    assert cached.search(["a"], 2) == cached.search(["a"], 2) == [[]]
    retriever.empty = False
    assert cached.search(["a"], 2) == [passages("a")]
    assert len(retriever.asked) == 5


def test_equal_queries_in_flight(retriever, open_cache):
    """64 threads with the same query and some of their own search it once."""
    cached = open_cache(retriever)
    retriever.go.clear()
    barrier = threading.Barrier(65)

    def search(i):
        barrier.wait()
        return cached.search(["same", f"own {i % 4}"], 2)

    with ThreadPoolExecutor(64) as pool:
        futures = [pool.submit(search, i) for i in range(64)]
        barrier.wait()
        assert retriever.started.wait(60)
        retriever.go.set()
        found = [future.result() for future in futures]
    assert found == [[passages("same"), passages(f"own {i % 4}")] for i in range(64)]
    asked = [query for queries, _ in retriever.asked for query in queries]
    assert sorted(asked) == ["own 0", "own 1", "own 2", "own 3", "same"]
    assert cached.counters == {"hits": 123, "misses": 5, "errors": 0}
    assert cached._in_flight == {}


@pytest.mark.parametrize("error", [ToolError("no answer"), KeyboardInterrupt()])
def test_failure_in_flight(retriever, open_cache, error):
    """Who waits for a search of another thread gets its error, and later searches are made again."""
    cached = open_cache(retriever)
    retriever.go.clear()
    retriever.error = error
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached.search, ["a"], 2)
        assert retriever.started.wait(60)
        second = pool.submit(cached.search, ["a"], 2)
        retriever.go.set()
        for future in (first, second):
            assert type(future.exception(60)) is type(error)
    retriever.error = None
    assert cached.search(["a"], 2) == [passages("a")]


def _rank(folder, rank, results):
    retriever = Retriever()
    cached = CachedRetriever(retriever, folder, "test")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: cached.search([f"q{(i + 5 * rank) % 20}"], 2), range(20)))
    right = all(found[i] == [passages(f"q{(i + 5 * rank) % 20}")] for i in range(20))
    results.put((right, cached.counters))


def test_processes_share_a_cache(tmp_path, retriever):
    """Ranks that write to one cache at the same time all get the right passages, and the next run searches nothing."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(tmp_path / "cache", rank, results)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for _ in ranks:
        right, counters = results.get(timeout=60)
        assert right and counters["errors"] == 0 and counters["hits"] + counters["misses"] == 20
    for rank in ranks:
        rank.join(60)
    cached = CachedRetriever(retriever, tmp_path / "cache", "test")
    assert cached.search([f"q{i}" for i in range(20)], 2) == [passages(f"q{i}") for i in range(20)]
    assert retriever.asked == []
    cached.close()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_corrupt_at_the_start(retriever, open_cache, tmp_path, caplog):
    """A cache that is no database is left out with one warning that names folder and remedy."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.db").write_bytes(b"no database, but long enough to look like one" * 100)
    cached = open_cache(retriever)
    for _ in range(2):
        assert cached.search(["a"], 2) == [passages("a")]
    assert len(retriever.asked) == 2 and cached.counters["errors"] == 1
    [warning] = warnings_of(caplog)
    assert str(tmp_path / "cache") in warning and "`search_cache_dir`" in warning and "DatabaseError" in warning


def test_corrupt_in_a_run(retriever, open_cache, tmp_path, caplog):
    """A cache that breaks while it is used is given up after a few failures; all searches succeed."""
    cached = open_cache(retriever)
    cached.search(["a"], 2)
    database = sqlite3.connect(tmp_path / "cache" / "cache.db")
    database.execute("DROP TABLE Cache")
    database.commit()
    database.close()
    for i in range(20):
        assert cached.search([f"q{i}"], 2) == [passages(f"q{i}")]
    assert len(warnings_of(caplog)) == 1 and cached.counters["errors"] == 5


@pytest.mark.parametrize(
    "value", ["", "{", "{}", "[]", "[[1]]", "3", '[["a", "b", "c", 1, 2]]', None, 7, b"\xff", pickle.dumps([])]
)
def test_corrupt_value(retriever, open_cache, value):
    """A value that is no list of passages is searched again and replaced."""
    cached = open_cache(retriever)
    cached.search(["a"], 2)
    [key] = list(cached._cache)
    cached._cache.set(key, value)
    assert cached.search(["a"], 2) == cached.search(["a"], 2) == [passages("a")]
    assert len(retriever.asked) == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_results_is_not_cached(open_cache, count):
    """A retriever that answers with too few or too many lists fails the search, and none of them is kept."""

    class Wrong(Retriever):
        def search(self, queries, top_k):
            return [passages("other", top_k)] * count

    with pytest.raises(ToolError, match=f"Wrong gave {count} lists of passages for 2 queries"):
        open_cache(Wrong()).search(["a", "b"], 2)
    right = Retriever()
    assert open_cache(right).search(["a", "b"], 2) == [passages("a"), passages("b")]
    assert right.asked == [(["a", "b"], 2)]


def test_nothing_is_unpickled(retriever, open_cache, tmp_path):
    """A pickle that someone put into the cache is not loaded, but replaced."""
    cached = open_cache(retriever)
    cached.search(["a"], 2)
    [key] = list(cached._cache)

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    cached._cache.set(key, Attack())
    assert cached.search(["a"], 2) == [passages("a")]
    assert not (tmp_path / "attacked").exists() and cached.counters["errors"] == 1
    assert cached._cache.get(key).startswith('[["0", ')


def test_locked(retriever, open_cache, tmp_path, caplog):
    """A cache that another process has locked for writing is still read, and searches go on without being kept."""
    cached = open_cache(retriever, timeout=0.01)
    cached.search(["a"], 2)
    database = sqlite3.connect(tmp_path / "cache" / "cache.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    for i in range(3):
        assert cached.search([f"q{i}", "a"], 2) == [passages(f"q{i}"), passages("a")]
    assert cached.counters["errors"] == 3 and warnings_of(caplog) == []
    database.execute("ROLLBACK")
    assert cached.search(["q0"], 2) == cached.search(["q0"], 2)
    assert len(retriever.asked) == 5 and cached.counters["errors"] == 3
    database.execute("BEGIN IMMEDIATE")
    for i in range(10, 20):
        cached.search([f"q{i}"], 2)
    assert cached.counters["errors"] == 8 and len(warnings_of(caplog)) == 1
    database.close()


def test_size_is_bounded(retriever, open_cache, tmp_path):
    """The oldest results go when the cache is full."""
    cached = open_cache(retriever, size_limit=1 << 20)
    retriever.search = lambda queries, top_k: [[Document("0", query, "x" * 50_000)] for query in queries]
    for i in range(60):
        cached.search([f"q{i}"], 1)
    files = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.val"))
    assert 0 < files < 1.2 * (1 << 20)
    assert cached.search(["q59"], 1) and cached.counters == {"hits": 1, "misses": 60, "errors": 0}


def test_folder_that_cannot_be(retriever, tmp_path):
    """A path that is a file is an error at once."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file"):
        CachedRetriever(retriever, tmp_path / "file", "test")


def test_wrong_arguments(retriever, open_cache):
    """A string for the list of queries is refused; a retriever with the wrong number of results as well."""
    cached = open_cache(retriever)
    with pytest.raises(TypeError, match="expected a list of queries"):
        cached.search("a", 2)
    retriever.search = lambda queries, top_k: []
    with pytest.raises(ToolError):
        cached.search(["a"], 2)
    assert cached._in_flight == {} and json.dumps(cached.counters)
