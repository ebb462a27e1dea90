"""Retrieval servers of every dialect, with every fault, as threads of the test."""

import json
import socket
import struct
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


FAULTS = ("timeout", "500", "503", "empty_body", "html", "reset", "drip", "drip_headers", "wrong_count", "wrong_shape")


def passages(query: str, top_k: int) -> list[dict]:
    """What the stubs find: as many passages as asked for, at most five."""
    return [
        {"id": rank, "contents": f'"{query} {rank}"\nText {rank}\nof {query}.'} for rank in range(1, min(top_k, 5) + 1)
    ]


def scores(found: list[dict]) -> list[float]:
    return [1 / passage["id"] for passage in found]


class StubServer(ThreadingHTTPServer):
    """A server in a thread, running inside `with`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type, port: int = 0):
        self.requests = []
        self.released = threading.Event()
        self.connections = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.released.set()
        self.shutdown()
        self.server_close()
        for connection in self.connections:  # those that are kept alive
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        pass  # clients that leave in the middle are what the tests are about


class SearchServer(StubServer):
    """
    A stub server, running inside `with`.

    `faults` is what goes wrong with the next searches, one after the other; `fault` what goes wrong with all others.
    `prefix` is the path before the routes and `echo` the body of an error.
    `requests` holds `(path, body, headers)` of every search that came in.
    """

    def __init__(self, dialect: str, health: dict | None = None, retry_after: str = "0", port: int = 0):
        self.dialect = dialect
        self.health = health
        self.retry_after = retry_after
        self.prefix = ""
        self.echo = "Internal Server Error"
        self.fault = None
        self.faults = []
        super().__init__(_SearchHandler, port)

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        """Status and JSON, as the server of this dialect gives them."""
        return getattr(self, "_" + self.dialect.replace("-", "_"))(path, body)

    def _search_r1(self, path, body):
        if path != "/retrieve":
            return 404, {"detail": "Not Found"}
        if not isinstance(body.get("queries"), list):
            return 422, {"detail": [{"loc": ["body", "queries"], "msg": "Field required"}]}
        if not body.get("return_scores"):
            return 500, "Internal Server Error"
        found = [passages(query, body.get("topk") or 3) for query in body["queries"]]
        return 200, {"result": [_with_scores(row) for row in found]}

    def _asearcher(self, path, body):
        status, answer = self._search_r1(path, body)
        if status == 500:
            return 200, {"result": [passages(query, body.get("topk") or 3) for query in body["queries"]]}
        return status, answer

    def _skyrl(self, path, body):
        if path != "/retrieve":
            return 404, {"detail": "Not Found"}
        if not isinstance(body.get("query"), str):
            return 422, {"detail": [{"loc": ["body", "query"], "msg": "Field required"}]}
        return 200, {"result": [_with_scores(passages(body["query"], body.get("topk") or 3))]}

    def _flashrag(self, path, body):
        if path not in ("/search", "/batch_search"):
            return 404, {"detail": "Not Found"}
        query, top_n, many = body.get("query"), body.get("top_n", 5), path == "/batch_search"
        if not isinstance(query, list if many else str):
            return 422, {"detail": [{"loc": ["body", "query"], "msg": "Field required"}]}
        if not all(text.strip() for text in (query if many else [query])):
            return 400, {"detail": "Query content cannot be empty"}
        found = [passages(text, top_n) for text in query] if many else passages(query, top_n)
        if not body.get("return_score"):
            return 200, found
        return 200, [found, [scores(row) for row in found] if many else scores(found)]


def _with_scores(found):
    return [{"document": passage, "score": score} for passage, score in zip(found, scores(found), strict=True)]


class WebServer(StubServer):
    """
    A search engine that gives `answers`, `(status, JSON or bytes)`, one after the other, and then the last one again.

    `requests` holds `(method, path, body, headers)` of every search that came in.
    """

    def __init__(self, *answers: tuple[int, object]):
        self.answers = list(answers)
        super().__init__(_WebHandler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _send(self, status, content, headers=None):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _WebHandler(_Handler):
    def do_GET(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with server.lock:
            server.requests.append((self.command, self.path, json.loads(body or "null"), dict(self.headers)))
            status, answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        self._send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    do_POST = do_GET


class _SearchHandler(_Handler):
    def do_GET(self):
        if self.path.partition("?")[0] == "/health" and self.server.health is not None:
            return self._send(200, json.dumps(self.server.health).encode())
        self._send(404, b'{"detail": "Not Found"}')

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        path = path.removeprefix(server.prefix) if path.startswith(server.prefix) else "/elsewhere"
        with server.lock:
            server.requests.append((self.path, body, dict(self.headers)))
            fault = server.faults.pop(0) if server.faults else server.fault
        status, answer = server.answer(path, body)
        content = json.dumps(answer).encode()
        if fault is None or status in (404, 422):  # a wrong dialect is noticed before anything can go wrong
            self._send(status, content)
        elif fault == "timeout":
            server.released.wait()
            self.close_connection = True
        elif fault == "503":
            self._send(503, b"busy", {"Retry-After": server.retry_after})
        elif fault.isdigit():
            self._send(int(fault), server.echo.encode())
        elif fault == "empty_body":
            self._send(200, b"")
        elif fault == "html":
            self._send(200, b"<html><body>Welcome to nginx!</body></html>", {"Content-Type": "text/html"})
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif fault == "drip":
            self._drip(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode(), content)
        elif fault == "drip_headers":
            self._drip(b"", b"HTTP/1.1 200 OK\r\nX-Padding: " + b"x" * 10_000)
        elif fault == "wrong_shape":
            self._send(200, json.dumps({"error": "the index is being loaded"}).encode())
        else:
            lists = {"empty": 0, "wrong_count": 1}[fault]
            self._send(200, json.dumps(self._without_passages(path, body, lists)).encode())

    def _without_passages(self, path, body, too_many):
        asked = body.get("queries", body.get("query"))
        lists = [[] for _ in range((len(asked) if isinstance(asked, list) else 1) + too_many)]
        if path == "/retrieve":
            return {"result": lists}
        if path == "/batch_search":
            return [lists, lists]
        return [[passages("x", 1)[0]] * too_many, []]

    def _drip(self, at_once, content):
        """A byte now and then: no single read ever times out, the whole takes for ever."""
        self.close_connection = True
        self.wfile.write(at_once)
        for byte in content:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            if self.server.released.wait(0.05):
                return
