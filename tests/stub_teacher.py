"""A server with an OpenAI-compatible API, whose answers a test writes."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What the server says: an object as JSON or a text as it is; with `reset` it breaks the connection instead."""

    body: dict | str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    reset: bool = False


@dataclass
class Request:
    """What a client asked for."""

    path: str
    body: dict
    headers: dict[str, str]


def chat(text: str | None, finish_reason: str = "stop", tokens: tuple[int, int] = (10, 5)) -> Reply:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return Reply({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage})


def completion(ids: list[int], logps: list | None = None, finish_reason: str = "stop") -> Reply:
    """A completion as vLLM gives it with `return_token_ids`."""
    logps = [-0.5] * len(ids) if logps is None else logps
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 10, "completion_tokens": len(ids), "total_tokens": 10 + len(ids)}
    return Reply({"choices": [{**choice, "logprobs": {"token_logprobs": logps}}], "usage": usage})


class StubServer:
    """
    Answers each `POST` with what `answer(request)` returns, in a thread of its own, and keeps the requests.

    `GET` (the list of models) is answered with `models`.
    """

    def __init__(self, answer: Callable[[Request], Reply], port: int = 0):
        self.answer = answer
        self.models = Reply({"data": [{"id": "teacher"}]})
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply(stub.models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                request = Request(self.path, body, {name.lower(): value for name, value in self.headers.items()})
                with stub.lock:
                    stub.requests.append(request)
                self.reply(stub.answer(request))

            def reply(self, reply: Reply):
                if reply.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # a client that was killed

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def closed_port():
    """A URL where nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"
