import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from mempo_trl.retrieval import server
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.search_queue import Pages
from mempo_trl.retrieval.server import bind, make_app
from mempo_trl.scripts.serve import ServeArguments
from mempo_trl.tools import ToolError


DOCUMENTS = [
    Document("d0", "Franz Kafka", "A writer from Prague."),
    Document("d1", "Prague", "The capital."),
    Document("d2", "", "untitled"),
    Document("d3", "Prague", "Second passage of the page."),
    Document("d4", "d1", "A title that is another passage's id."),
]
PASSAGE = {
    "id": "d0",
    "title": "Franz Kafka",
    "text": "A writer from Prague.",
    "contents": '"Franz Kafka"\nA writer from Prague.',
    "url": "Franz Kafka",
}


class EchoRetriever:
    """Finds for each query one passage that repeats it; the gate holds a search up until it is set."""

    def __init__(self):
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()

    def search(self, queries, top_k):
        assert self.gate.wait(timeout=60)
        self.calls.append((list(queries), top_k))
        if "down" in queries:
            raise ToolError("no answer from http://backend: reset")
        if "bad" in queries:
            raise KeyError("secret")
        return [[Document(f"id of {query}", "", f"{query} {top_k}", 1.0)] for query in queries]


def exchange(app, *requests):
    """Answers of the application, in this process, to requests (path, body) that are sent together."""

    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(send(client, *request) for request in requests))

    async def send(client, path, body=None):
        if body is None:
            return await client.get(path)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"Content-Type": "application/json"})

    return asyncio.run(run())


def post(app, path, body):
    return exchange(app, (path, body))[0]


@pytest.fixture(scope="module")
def app():
    retriever = BM25Retriever.from_corpus(DOCUMENTS)
    return make_app(
        retriever, documents=DOCUMENTS, index_format="a format", corpus_hash=retriever.corpus_hash, max_top_k=5
    )


def test_search_r1(app):
    """`queries` with scores: one inner list per query, hits in a wrapper; a null `topk` is the default."""
    answer = post(app, "/retrieve", {"queries": ["kafka", "nowhere"], "topk": 1, "return_scores": True})
    assert answer.status_code == 200
    [[hit], nothing] = answer.json()["result"]
    assert hit["document"] == PASSAGE and hit["score"] > 0 and nothing == []
    body = {"queries": ["prague"], "topk": None, "return_scores": True}
    assert len(post(app, "/retrieve", body).json()["result"][0]) == 3
    assert post(app, "/retrieve", {"queries": ["kafka"], "topk": 1.0}).status_code == 200
    assert post(app, "/retrieve", {"queries": [], "topk": 3, "return_scores": True}).json() == {"result": []}


def test_skyrl(app):
    """`query`, a string: the same route and shape, with one inner list."""
    [[hit]] = post(app, "/retrieve", {"query": "kafka", "topk": 3, "return_scores": True}).json()["result"]
    assert hit["document"] == PASSAGE and set(hit) == {"document", "score"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_asearcher(app, count):
    """`return_scores` false, or left out: bare documents for every number of queries, two included."""
    for extra in ({"return_scores": False}, {}):
        result = post(app, "/retrieve", {"queries": ["kafka"] * count, "topk": 3, **extra}).json()["result"]
        assert result == [[PASSAGE]] * count


def test_asearcher_access(app):
    """A title gives all its passages as one page, before an id of the same name; what is unknown is null."""
    result = post(app, "/access", {"urls": ["Prague", "d0", "d1", "d2", "nowhere", ""]}).json()["result"]
    assert result[0] == {
        "url": "Prague",
        "title": "Prague",
        "contents": '"Prague"\nThe capital.\nSecond passage of the page.',
    }
    assert [page and page["title"] for page in result] == ["Prague", "Franz Kafka", "d1", "", None, None]
    assert post(make_app(EchoRetriever()), "/access", {"urls": ["x"]}).json() == {"result": [None]}


def test_pages_with_equal_hashes(monkeypatch):
    """Names are compared, not only their hashes."""
    monkeypatch.setattr("mempo_trl.retrieval.search_queue.hash", lambda name: 7, raising=False)
    pages = Pages(DOCUMENTS)
    assert [document.id for document in pages.find("Prague")] == ["d1", "d3"]
    assert pages.find("nowhere") == []


def test_flashrag(app):
    """`/search` and `/batch_search`: bare documents, or documents and scores beside each other."""
    assert post(app, "/search", {"query": "kafka", "top_n": 5, "return_score": False}).json() == [PASSAGE]
    documents, scores = post(app, "/search", {"query": "kafka", "top_n": 5, "return_score": True}).json()
    assert documents == [PASSAGE] and len(scores) == 1
    body = {"query": ["nowhere", "kafka"], "top_n": 5, "return_score": False}
    assert post(app, "/batch_search", body).json() == [[], [PASSAGE]]
    documents, batch_scores = post(app, "/batch_search", {**body, "return_score": True}).json()
    assert documents == [[], [PASSAGE]] and batch_scores == [[], scores]


def test_health(app):
    """The state names the index and the versions."""
    health = exchange(app, ("/health",))[0].json()
    assert (health["status"], health["format"], health["num_documents"]) == ("ok", "a format", 5)
    assert health["corpus_hash"] == BM25Retriever.from_corpus(DOCUMENTS).corpus_hash
    assert set(health["versions"]) >= {"mempo_trl", "fastapi"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/retrieve", {}, 422, "either `queries`"),
        ("/retrieve", {"queries": ["x"], "query": "x"}, 422, "either `queries`"),
        ("/retrieve", {"queries": "x"}, 422, "queries: Input should be a valid list, got 'x'"),
        ("/retrieve", {"queries": None}, 422, "queries"),
        ("/retrieve", {"queries": [3]}, 422, "queries.0: Input should be a valid string, got 3"),
        ("/retrieve", {"queries": ["\ud800"]}, 422, r"got '\ud800'"),
        ("/retrieve", {"queries": ["x"] * 9}, 422, "at most 8"),
        ("/retrieve", {"queries": ["x" * 51]}, 422, "at most 50 characters"),
        ("/retrieve", {"query": "x", "topk": 0}, 422, "topk"),
        ("/retrieve", {"query": "x", "topk": 101}, 422, "topk: Input should be less than or equal to 100, got 101"),
        ("/retrieve", {"query": "x", "topk": "3"}, 422, "topk"),
        ("/retrieve", {"query": "x", "topk": True}, 422, "topk"),
        ("/retrieve", {"query": "x", "return_scores": "yes"}, 422, "return_scores"),
        ("/retrieve", {"query": " \n"}, 400, "the query is empty"),
        ("/search", {"query": ""}, 400, "the query is empty"),
        ("/search", {"query": ["x"]}, 422, "query"),
        ("/batch_search", {"query": []}, 400, "query"),
        ("/batch_search", {"query": "x"}, 422, "query"),
        ("/access", {"urls": "x"}, 422, "urls"),
        ("/retrieve", [], 422, "dictionary"),
        ("/retrieve", b"{", 422, "the body is not JSON"),
        ("/retrieve", b"\xff", 400, "body"),
        ("/retrieve", b'{"query": "x", "topk": ' + b"9" * 200 + b"}", 422, "topk"),
        ("/retrieve", b" " * 1001, 413, "longer than 1000 bytes"),
        ("/nowhere", {}, 404, ""),
    ],
)
def test_refused(path, body, status, message):
    """A request that is not right is answered with one line that says why, and never searched."""
    retriever = EchoRetriever()
    answer = post(make_app(retriever, max_queue=8, max_query_length=50, max_body_size=1000), path, body)
    assert answer.status_code == status
    assert message in answer.json()["detail"]
    assert not retriever.calls


def test_empty_query_among_others():
    """An empty query in a list finds nothing and leaves the others alone; it is not searched."""
    retriever = EchoRetriever()
    result = post(make_app(retriever), "/retrieve", {"queries": ["", "a", " ", "b"], "topk": 1}).json()["result"]
    assert [[passage["text"] for passage in found] for found in result] == [[], ["a 1"], [], ["b 1"]]
    assert retriever.calls == [(["a", "b"], 1)]


def test_batches():
    """What arrives during a search is searched in one call per `top_k`, and every answer belongs to its request."""
    retriever = EchoRetriever()
    bodies = [{"queries": [f"{i}", f"{i}'"], "topk": 1 + i % 2} for i in range(16)]
    answers = exchange(make_app(retriever), *(("/retrieve", body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        texts = [passage["text"] for [passage] in answer.json()["result"]]
        assert texts == [f"{query} {body['topk']}" for query in body["queries"]]
    assert len(retriever.calls) < 6 and max(len(queries) for queries, _ in retriever.calls) > 8
    small = EchoRetriever()
    exchange(make_app(small, max_batch=4), *(("/retrieve", body) for body in bodies))
    assert all(len(queries) <= 4 for queries, _ in small.calls)


def test_failing_search():
    """A backend that is away is a 503 to try again; another error is a 500, for the request that caused it only."""
    app = make_app(EchoRetriever())
    down = post(app, "/search", {"query": "down"})
    assert (down.status_code, down.headers["Retry-After"]) == (503, "1")
    assert down.json() == {"detail": "no answer from http://backend: reset"}
    requests = [("/search", {"query": query}) for query in ("a", "bad", "b", "c", "bad")]
    assert [answer.status_code for answer in exchange(app, *requests)] == [200, 500, 200, 200, 500]
    bad = post(app, "/search", {"query": "bad"})
    assert "KeyError" in bad.json()["detail"] and "secret" not in bad.text
    assert post(app, "/search", {"query": "a"}).status_code == 200


def test_wrong_number_of_results():
    """A retriever that loses a result is an error: the answers could belong to other queries."""
    retriever = EchoRetriever()
    search = retriever.search
    retriever.search = lambda queries, top_k: search(queries, top_k)[1:]
    assert post(make_app(retriever), "/batch_search", {"query": ["a", "b"]}).status_code == 500


def test_full_queue():
    """With the queue full a request is refused with 503 and Retry-After; those in it are answered, and then new ones."""
    retriever = EchoRetriever()
    app = make_app(retriever, max_queue=2)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            retriever.gate.clear()
            running = asyncio.create_task(client.post("/search", json={"query": "running"}))
            await until(lambda: client.get("/metrics"), "mempo_batches_total 1\n")
            waiting = [asyncio.create_task(client.post("/search", json={"query": f"{i}"})) for i in range(2)]
            await until(lambda: client.get("/metrics"), "mempo_queue_length 2\n")
            refused = await asyncio.wait_for(client.post("/search", json={"query": "too many"}), timeout=30)
            retriever.gate.set()
            accepted = [await task for task in (running, *waiting)]
            return refused, accepted, await client.post("/search", json={"query": "later"})

    async def until(get, text):
        deadline = time.monotonic() + 60
        while text not in (await get()).text:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    refused, accepted, later = asyncio.run(run())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "`max_queue`" in refused.json()["detail"]
    assert [answer.json()[0]["text"] for answer in accepted] == ["running 3", "0 3", "1 3"]
    assert later.status_code == 200


def test_slow_search(monkeypatch):
    """A search that takes too long is answered with 503, and its queries leave the queue."""
    monkeypatch.setattr(server, "SEARCH_SECONDS", 0.2)
    retriever = EchoRetriever()
    app = make_app(retriever, max_queue=2)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            retriever.gate.clear()
            slow = await asyncio.gather(*(client.post("/search", json={"query": f"{i}"}) for i in range(2)))
            retriever.gate.set()
            monkeypatch.setattr(server, "SEARCH_SECONDS", 60)
            return slow, [await client.post("/search", json={"query": f"again {i}"}) for i in range(3)]

    slow, again = asyncio.run(run())
    for answer in slow:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["detail"] == "the search took longer than 0.2 s."
    assert [answer.json()[0]["text"] for answer in again] == ["again 0 3", "again 1 3", "again 2 3"]


def test_slow_body(monkeypatch):
    """A body that drips in holds its request open for a limited time."""
    monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
    app = make_app(EchoRetriever())

    async def body():
        yield b'{"que'
        await asyncio.sleep(60)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/search", content=body(), headers=headers)

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["detail"]) == (408, "the body did not arrive within 0.2 s.")


def test_client_that_goes_away():
    """A request that is given up leaves the others their answers, and the queue its room."""
    retriever = EchoRetriever()
    app = make_app(retriever, max_queue=3)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            retriever.gate.clear()
            tasks = [asyncio.create_task(client.post("/search", json={"query": f"{i}"})) for i in range(3)]
            await asyncio.sleep(0.05)
            tasks[1].cancel()
            await asyncio.sleep(0)
            retriever.gate.set()
            await asyncio.gather(tasks[0], tasks[2])
            metrics = (await client.get("/metrics")).text
            return [tasks[0].result(), tasks[2].result()], metrics

    answers, metrics = asyncio.run(run())
    assert [answer.json()[0]["text"] for answer in answers] == ["0 3", "2 3"]
    assert "mempo_queue_length 0\n" in metrics


def test_metrics():
    """The counters say what happened, and an unknown path makes no series of its own."""
    app = make_app(EchoRetriever())
    for path, body in [
        ("/batch_search", {"query": ["a", "b"]}),
        ("/search", {"query": "bad"}),
        ("/search", {"query": ""}),
        ("/" + "x" * 9, {}),
    ]:
        post(app, path, body)
    text = exchange(app, ("/metrics",))[0].text
    for line in (
        'mempo_requests_total{path="/batch_search",status="200"} 1',
        'mempo_requests_total{path="/search",status="400"} 1',
        'mempo_requests_total{path="/search",status="500"} 1',
        'mempo_requests_total{path="other",status="404"} 1',
        "mempo_errors_total 1",
        "mempo_queries_total 3",
        "mempo_batches_total 2",
        "mempo_queue_length 0",
        'mempo_request_seconds_bucket{le="+Inf"} 4',
        "mempo_request_seconds_count 4",
    ):
        assert f"{line}\n" in text
    assert "xxx" not in text


@pytest.mark.parametrize("settings", [{"max_queue": 0}, {"max_batch": 0}, {"default_top_k": 101}, {"max_top_k": 0}])
def test_settings(settings):
    """Settings that no request could meet are refused with their name and value."""
    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_app(EchoRetriever(), **settings)


def test_addresses():
    """Loopback addresses are free to use, others need the flag, and a port in use is named at once."""
    for host in ("127.0.0.1", "localhost", "127.1.2.3"):
        bind(host, 0).close()
    for host in ("0.0.0.0", "", "::", "example.org", "192.168.0.1"):
        with pytest.raises(ValueError, match="--allow_remote"):
            bind(host, 0)
    bind("0.0.0.0", 0, allow_remote=True).close()
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1, port {port} .*choose another"):
            bind("127.0.0.1", port)
    with pytest.raises(ValueError, match="exactly one"):
        ServeArguments()
    with pytest.raises(ValueError, match="exactly one"):
        ServeArguments(corpus_path="a", index_path="b")


schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(EchoRetriever(), max_queue=8, max_query_length=50))


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_openapi(case):
    """The server keeps to its description: statuses, shapes, and what it accepts and refuses."""
    case.call_and_validate()


class Served:
    """`mempo serve` in a process of its own."""

    def __init__(self, corpus, log_file, port=0, *arguments):
        command = [sys.executable, "-m", "mempo_trl.cli", "serve", "--corpus_path", str(corpus), "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--log_file", str(log_file), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert "http://127.0.0.1:" in line, self.process.stderr.read()
        self.port = int(line.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, how):
        self.process.send_signal(how)
        return self.process.communicate(timeout=60)


@pytest.mark.slow
def test_served_under_load(tmp_path):
    """
    64 clients get the answers to their own queries; a client that leaves in the middle disturbs nobody; after kill -9
    a server on the same port answers again; SIGTERM ends it; the log has the requests and the terminal has none.
    """
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": f"p{i}", "title": f"Title {i}", "text": f"word{i} shared"} for i in range(640)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    served = Served(corpus, tmp_path / "serve.log")
    try:

        def ask(client):
            with httpx.Client(timeout=60, verify=False) as http:
                for i in range(client, 640, 64):
                    body = {"queries": [f"word{i}"], "topk": 1 + i % 3, "return_scores": True}
                    [[hit]] = http.post(f"{served.url}/retrieve", json=body).raise_for_status().json()["result"]
                    assert hit["document"]["id"] == f"p{i}"

        body = json.dumps({"queries": ["shared"] * 100}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with ThreadPoolExecutor(64) as pool:
            clients = [pool.submit(ask, i) for i in range(64)]
            for content in (body, body[:10]):
                with socket.create_connection(("127.0.0.1", served.port)) as leaving:
                    leaving.sendall(head.encode() + content)
            for client in clients:
                client.result()
        assert httpx.get(f"{served.url}/health").json()["num_documents"] == 640
        served.stop(signal.SIGKILL)
        served = Served(corpus, tmp_path / "serve.log", served.port)
        ask(5)
        stdout, stderr = served.stop(signal.SIGTERM)
        assert served.process.returncode in (0, -signal.SIGTERM)
        assert "retrieve" not in stdout + stderr and "Traceback" not in stderr
        log = (tmp_path / "serve.log").read_text()
        assert log.count("POST /retrieve 200") >= 640 and "word" not in log
    finally:
        served.process.kill()
        served.process.wait()
