import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from stub_search_servers import FAULTS, SearchServer

from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.http import DIALECTS, MAX_BATCH, HTTPRetriever, _read_document, _request
from mempo_trl.retrieval.json_client import _seconds
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.tools import NO_RESULTS, ToolError


QUICK = dict(timeout=5.0, retries=2, backoff=0.001, max_backoff=0.01)


def expected(query, top_k=2):
    return [Document(str(i), f"{query} {i}", f"Text {i}\nof {query}.", 1 / i) for i in range(1, top_k + 1)]


@pytest.fixture(params=DIALECTS)
def server(request):
    with SearchServer(request.param) as server:
        yield server


@pytest.fixture
def connect():
    """Makes retrievers and closes them."""
    made = []

    def connect(server, dialect="auto", **settings):
        made.append(HTTPRetriever(server.url, dialect, **{**QUICK, **settings}))
        server.requests.clear()
        return made[-1]

    yield connect
    for retriever in made:
        retriever.close()


def same(spoken, named):
    return spoken == named or {spoken, named} == {"search-r1", "asearcher"}


@pytest.mark.parametrize("named", ["auto", *DIALECTS])
def test_every_dialect_under_every_setting(server, connect, named):
    """A client gets the right passages, or one line that names the dialect to set."""
    if named == "auto" or same(server.dialect, named):
        retriever = connect(server, named)
        assert same(server.dialect, retriever.dialect)
        assert retriever.search(["a", "b", "c"], 2) == [expected("a"), expected("b"), expected("c")]
        assert retriever.search(["a"], 1) == [expected("a", 1)]
        return
    spoken = "search-r1" if server.dialect == "asearcher" else server.dialect
    with pytest.raises(ValueError) as error:
        connect(server, named)
    assert str(error.value) == (
        f"the server at {server.url}/ speaks the dialect {spoken!r}, not {named!r}; set search_dialect={spoken}."
    )


def test_requests_of_a_dialect(server, connect):
    """Several queries are one request where the dialect has it, equal ones are asked once, and scores always."""
    retriever = connect(server)
    found = retriever.search(["a", "b", "a"], 2)
    assert found == [expected("a"), expected("b"), expected("a")]
    if server.dialect == "skyrl":
        server.requests.sort(key=lambda request: request[1]["query"])
        bodies = [{"query": query, "topk": 2, "return_scores": True} for query in "ab"]
        assert [request[:2] for request in server.requests] == [("/retrieve", body) for body in bodies]
    elif server.dialect == "flashrag":
        body = {"query": ["a", "b"], "top_n": 2, "return_score": True}
        assert [request[:2] for request in server.requests] == [("/batch_search", body)]
    else:
        body = {"queries": ["a", "b"], "topk": 2, "return_scores": True}
        assert [request[:2] for request in server.requests] == [("/retrieve", body)]


def test_large_batch_is_split(server, connect):
    """A batch is sent in parts that a server takes, and put together in its order."""
    retriever = connect(server)
    queries = [f"query {i}" for i in range(MAX_BATCH + 3)]
    assert retriever.search(queries, 1) == [expected(query, 1) for query in queries]
    assert len(server.requests) == (len(queries) if server.dialect == "skyrl" else 2)


def test_nothing_found(server, connect):
    """An empty result is no error; a blank query finds nothing and is not sent; neither spoils a batch."""
    retriever = connect(server)
    assert retriever.search(["", "a", " \n"], 2) == [[], expected("a"), []]
    assert retriever.search([], 2) == retriever.search([""], 2)[1:] == []
    assert len(server.requests) == 1
    server.fault = "empty"
    assert retriever.search(["a", "b"], 2) == [[], []]
    assert retriever.search(["a"], 2) == [[]]
    assert SearchTool(retriever)("a") == NO_RESULTS
    assert retriever.counters["retries"] == retriever.counters["failures"] == 0


CAUSES = {
    "timeout": "no complete answer within 0.2 s",
    "500": "HTTP 500 Internal Server Error: Internal Server Error",
    "503": "HTTP 503 Service Unavailable: busy",
    "empty_body": "HTTP 200 with an empty body",
    "html": "the answer is not JSON: <html><body>Welcome to nginx!",
    "reset": "Error",
    "drip": "no complete answer within 0.2 s",
    "drip_headers": "no complete answer within 0.2 s",
    "wrong_count": "got 2 lists of results for 1 queries",
    "wrong_shape": "the index is being loaded",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(server, connect, fault):
    """Whatever goes wrong is tried again, and is an error that names address and cause, never an empty result."""
    retriever = connect(server)
    retriever._client._timeout = 0.2
    server.fault = fault
    if (fault, server.dialect) == ("wrong_count", "flashrag"):
        cause = "got other numbers of scores than of documents"  # a single search has no list per query
    else:
        cause = CAUSES[fault]
    with pytest.raises(ToolError) as error:
        retriever.search(["a"], 2)
    route = "search" if server.dialect == "flashrag" else "retrieve"
    assert str(error.value).startswith(f"the search at {server.url}/{route} failed after 3 attempts: ")
    assert cause in str(error.value) and "\n" not in str(error.value)
    assert error.value.__cause__ is error.value.__context__ is None
    assert len(server.requests) == 3
    counters = {name: retriever.counters[name] for name in ("retries", "failures")}
    assert counters == {"retries": 2, "failures": 1} and retriever.counters["seconds"] > 0


@pytest.mark.parametrize("fault", ["500", "503", "429", "502", "504", "empty_body", "html", "reset", "wrong_count"])
def test_fault_that_passes(server, connect, fault):
    """A search that fails twice and then succeeds gives its passages."""
    retriever = connect(server)
    server.faults = [fault, fault]
    assert retriever.search(["a", "b"], 2) == [expected("a"), expected("b")]
    assert retriever.counters["retries"] == 2 and retriever.counters["failures"] == 0


def test_some_calls_time_out(connect):
    """Three of eight calls that hang are made again; all eight searches succeed."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        retriever._client._timeout = 1.0
        server.faults = [None, "timeout", None, None, "timeout", None, "timeout", None]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: retriever.search([f"q{i}"], 2), range(8)))
        assert found == [[expected(f"q{i}")] for i in range(8)]
        assert retriever.counters["retries"] >= 3


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 307])
def test_refused_request_is_not_repeated(connect, status):
    """An answer that will not change is an error at once."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        server.fault = str(status)
        with pytest.raises(ToolError, match=f"failed after 1 attempt: HTTP {status} "):
            retriever.search(["a"], 2)
        assert len(server.requests) == 1


def test_part_of_a_batch_fails(connect):
    """A batch that is several requests fails as a whole when one of them does."""
    with SearchServer("skyrl") as server:
        retriever = connect(server, retries=0)
        server.faults = [None, "500"]
        with pytest.raises(ToolError, match="HTTP 500"):
            retriever.search(["a", "b", "c"], 2)


def test_retry_after(connect, monkeypatch):
    """The server's wish is followed as far as `max_backoff`."""
    waits = []
    with SearchServer("search-r1", retry_after="3600") as server:
        retriever = connect(server, backoff=0.0, max_backoff=0.05)
        wait = retriever._client._wait
        retriever._client._wait = lambda state: waits.append(wait(state)) or 0.0
        server.faults = ["503", "500"]
        retriever.search(["a"], 2)
    assert waits == [0.05, 0.0]


def test_retry_after_forms():
    """Seconds, a date, and nonsense."""
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100))
    assert _seconds("7") == 7.0 and 50 < _seconds(date) <= 100
    assert [_seconds(text) for text in ("", "-1", "nan", "inf", "soon", "Wed, 21 Oct 2015 07:28:00 GMT")] == [0.0] * 6


def test_total_timeout(connect):
    """All attempts together end in time, with the last cause."""
    with SearchServer("search-r1") as server:
        retriever = connect(server, retries=1000)
        retriever._client._timeout, retriever._client._total_timeout = 60.0, 0.3
        server.faults, server.fault = ["500"], "timeout"
        with pytest.raises(ToolError, match="no answer within 0.3 s, before that: HTTP 500"):
            retriever.search(["a"], 2)


def test_many_threads(server, connect):
    """64 threads at once each get the passages of their own queries, over few connections."""
    retriever = connect(server, max_connections=8, timeout=60.0)
    server.faults = ["500", "503", "reset"] * 3
    retriever._client._retries = 10
    barrier = threading.Barrier(64)

    def search(i):
        barrier.wait()
        return [retriever.search([f"{i} {j}", f"{i}"], 2) for j in range(2)]

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(search, range(64)))
    assert found == [[[expected(f"{i} {j}"), expected(f"{i}")] for j in range(2)] for i in range(64)]
    # Two queries, twice, by 64 threads, and the nine faults.
    assert len(server.requests) == 64 * 2 * (2 if server.dialect == "skyrl" else 1) + 9


@pytest.mark.parametrize("dialect", ["auto", "skyrl"])
@pytest.mark.parametrize("fault", ["503", "reset", "timeout"])
def test_server_that_is_not_ready(fault, dialect, connect):
    """A server that is busy or broken when the retriever is made is an error, and no other dialect."""
    with SearchServer("skyrl") as server:
        server.fault = fault
        with pytest.raises(ToolError, match="failed after 2 attempts"):
            connect(server, dialect, timeout=0.3, retries=1)
        server.fault, server.faults = None, [fault]
        assert connect(server, dialect, timeout=2.0).dialect == "skyrl"


def test_server_of_no_dialect(connect):
    """The error names what the server said to each dialect."""
    with SearchServer("search-r1") as server:
        server.fault = "wrong_shape"
        with pytest.raises(
            ToolError, match="speaks none of the dialects .*as search-r1: expected a JSON object with .result"
        ):
            connect(server)


def test_no_server():
    """A server that is not there is an error that names it."""
    with SearchServer("search-r1") as server:
        url = server.url
    with pytest.raises(ToolError, match=f"{url}/.* failed after 3 attempts: ConnectError"):
        HTTPRetriever(url, **QUICK)


def test_server_that_goes_away(connect):
    """A server that stops is an error of the search; the same retriever finds again when it is back."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        port = server.server_port
    with pytest.raises(ToolError, match="failed after 3 attempts: .*Error"):
        retriever.search(["a"], 2)
    with SearchServer("search-r1", port=port):
        assert retriever.search(["a"], 2) == [expected("a")]


@pytest.mark.parametrize("given", ["localhost:8000", "", "ftp://localhost", "http://", "http://[::1"])
def test_no_address(given):
    """What is no address is refused with the form of one."""
    with pytest.raises(ValueError, match="http://host:port"):
        HTTPRetriever(given)


def test_wrong_settings():
    """Wrong settings are named before anything is sent."""
    with pytest.raises(ValueError, match="`search_dialect` is 'google'; it must be one of 'auto', 'search-r1', "):
        HTTPRetriever("http://localhost:1", "google")
    for settings in ({"timeout": 0}, {"retries": -1}, {"max_connections": 0}, {"backoff": -1.0}):
        name, value = next(iter(settings.items()))
        with pytest.raises(ValueError, match=f"{name}={value}"):
            HTTPRetriever("http://localhost:1", **settings)


def test_wrong_arguments(connect):
    """A string for the list of queries, or no passages at all, is refused."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        with pytest.raises(TypeError, match="expected a list of queries"):
            retriever.search("a", 2)
        with pytest.raises(ValueError, match="top_k=0"):
            retriever.search(["a"], 0)


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/search", "/batch_search/", "/a/b", "/a/b/search"])
def test_route_in_the_address(path):
    """An address may have the route, as the clients of these servers want it, and a path before it."""
    with SearchServer("flashrag") as server:
        server.prefix = "/a/b" if path.startswith("/a/b") else ""
        retriever = HTTPRetriever(server.url + path, **QUICK)
        assert retriever.search(["a"], 2) == [expected("a")]
        retriever.close()


@pytest.mark.parametrize("health, found", [(None, None), ({"status": "ok"}, None), ({"corpus_hash": "abc"}, "abc")])
def test_corpus_hash(server, connect, health, found):
    """It is what the server tells, where it tells one."""
    server.health = health
    assert connect(server).corpus_hash == found


def test_unusual_queries(server, connect):
    """Quotes, newlines, other scripts and half of a surrogate pair reach the server; the latter as a question mark."""
    retriever = connect(server)
    for query in ('"a"\n\\', "里德学院", "x" * 5000, "\ud800"):
        retriever.search([query], 1)
        body = server.requests[-1][1]
        assert body.get("query", body.get("queries")) in ([query.replace("\ud800", "?")], query.replace("\ud800", "?"))


DOCUMENT = {"id": 7, "contents": '"T"\nx'}


@pytest.mark.parametrize(
    "item, document",
    [
        (DOCUMENT, Document("7", "T", "x")),
        ({"document": DOCUMENT}, Document("7", "T", "x")),
        ({"document": DOCUMENT, "score": None}, Document("7", "T", "x")),
        ({"document": DOCUMENT, "score": 2}, Document("7", "T", "x", 2.0)),
        ({"document": DOCUMENT, "score": float("nan")}, Document("7", "T", "x")),
        ({"id": "a", "title": "T", "text": "x", "contents": "c"}, Document("a", "T", "x")),
        ({"id": "a", "text": "x"}, Document("a", "", "x")),
        ({"contents": "no title"}, Document("", "", "no title")),
        ({"id": 1, "contents": "T\nx\ud800", "url": "u"}, Document("1", "T", "x?")),
        ({"id": 1, "title": None, "text": ""}, Document("1", "", "")),
    ],
)
def test_document_forms(item, document):
    """Bare and wrapped documents, with title and text or contents, with and without id and score."""
    assert _read_document(item) == document


WRONG = [None, [], "error: execution timed out", 3, {}, {"result": None}, {"result": {}}, {"result": []}]
WRONG += [{"result": [None]}, {"result": [["a"]]}, {"result": [[{"document": None}]]}, {"result": [[{"id": "1"}]]}]
WRONG += [{"result": [[{"contents": {}}]]}, {"result": [[], []]}, [[], [], []], [[[]], [[1]]], [None], [["a"]]]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("payload", WRONG)
def test_wrong_shapes(dialect, payload):
    """JSON that is not an answer to one query is an error, except that FlashRAG says "nothing found" as `[]`."""
    read = _request(dialect, ["a"], 2)[2]
    if dialect == "flashrag" and payload == []:
        assert read(payload) == [[]]
    else:
        with pytest.raises(ValueError):
            read(payload)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("counts", [[2], [0], [1], [2, 2], [0, 0], [1, 0], [2, 2, 2]])
def test_flashrag_with_and_without_scores(counts, scored):
    """Its pairs of documents and scores are told apart from two documents or two queries."""
    rows = [[{"id": i, "contents": f"T\n{i}"} for i in range(count)] for count in counts]
    numbers = [[0.5] * count for count in counts]
    payload = [rows, numbers] if scored else rows
    if len(counts) == 1:
        payload = [rows[0], numbers[0]] if scored else rows[0]
    score = 0.5 if scored else None
    found = _request("flashrag", ["q"] * len(counts), 2)[2](payload)
    assert found == [[Document(str(i), "T", str(i), score) for i in range(count)] for count in counts]


def test_secrets_stay_secret(connect, monkeypatch, caplog):
    """Credentials and the query of the address reach the server, but no message, log, repr or error."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SEARCH_PASSWORD", "pass/word-1")
    with SearchServer("search-r1") as server:
        url = server.url.replace("//", "//me:${SEARCH_PASSWORD}@") + "/retrieve?token=sesame-2&x=1"
        retriever = HTTPRetriever(url, **QUICK)
        assert retriever.search(["a"], 2) == [expected("a")]
        path, _, headers = server.requests[-1]
        assert path == "/retrieve?token=sesame-2&x=1"
        assert headers["Authorization"] == "Basic bWU6cGFzcy93b3JkLTE="
        server.echo = "denied: token sesame-2, pass/word-1, pass%2Fword-1, bWU6cGFzcy93b3JkLTE="
        server.fault = "403"
        with pytest.raises(ToolError, match=r"/retrieve failed after 1 attempt: HTTP 403 .*token \*\*\*") as error:
            retriever.search(["a"], 2)
        server.fault = "reset"
        with pytest.raises(ToolError) as reset:
            retriever.search(["a"], 2)
        texts = [str(error.value), str(reset.value), repr(retriever), retriever.url, caplog.text]
        retriever.close()
    assert "HTTP Request: POST" in caplog.text
    for secret in ("sesame-2", "pass/word-1", "pass%2Fword-1", "bWU6cGFzcy93b3JkLTE="):
        assert not any(secret in text for text in texts), secret


def test_missing_variable():
    """A placeholder without its variable is named."""
    with pytest.raises(ValueError, match="environment variable NO_SUCH_VARIABLE, which is not set"):
        HTTPRetriever("http://me:${NO_SUCH_VARIABLE}@localhost:1")


def test_fork(connect):
    """A process that was forked off says that the retriever is not its own, instead of waiting for ever."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        child = os.fork()
        if child == 0:
            try:
                retriever.search(["a"], 2)
            except RuntimeError as error:
                os._exit(7 if "fork" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert retriever.search(["a"], 2) == [expected("a")]


def test_closed_retriever(connect):
    """A closed retriever says so, and may be closed again."""
    with SearchServer("search-r1") as server:
        retriever = connect(server)
        retriever.close()
        retriever.close()
        with pytest.raises(RuntimeError, match="closed"):
            retriever.search(["a"], 2)
