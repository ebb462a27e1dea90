"""The parts of the Hugging Face Hub that a push and a download need, as a local server for the real client."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml


TOKEN = "hf_dummy"
USER = "founder"
LFS_SUFFIXES = (".safetensors", ".bin", ".parquet")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


class HubServer:
    """
    A Hub in this process. Files are kept in memory; large ones come by LFS, as on the real Hub without Xet.

    Attributes:
        repos (`dict[str, dict[str, bytes]]`):
            Content of each repository by path.
        commits (`list[tuple[str, str, list[str]]]`):
            Repository, message and paths of each commit.
        bodies (`list[bytes]`):
            Body of every request.
        failing (`str` or `None`):
            Requests whose path contains this text are answered with status 500.
    """

    def __init__(self):
        self.repos, self.commits, self.bodies, self.failing = {}, [], [], None
        self.objects = {}  # LFS objects by their sha256
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    def add_folder(self, repo_id: str, folder: str) -> None:
        """Make a repository of a folder's files."""
        self.repos[repo_id] = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}

    def sha(self, repo_id: str) -> str:
        """The commit that a repository is at."""
        state = sorted((path, hashlib.sha256(data).hexdigest()) for path, data in self.repos[repo_id].items())
        return hashlib.sha1(json.dumps(state).encode()).hexdigest()


def card_errors(content: str) -> list[str]:
    """What the Hub says about a card whose metadata it refuses."""
    metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
    errors = []
    for name, kind in (("base_model", "model"), ("datasets", "dataset")):
        values = metadata.get(name) or []
        for i, value in enumerate([values] if isinstance(values, str) else values):
            if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", value):
                errors.append(
                    f'"{name}[{i}]" with value "{value}" is not valid. If possible, use a {kind} id from '
                    f"https://hf.co/{kind}s."
                )
    return errors


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value, status: int = 200, **headers) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _handle(self) -> None:
        hub, body = self.hub, self._body()
        path = unquote(urlsplit(self.path).path)
        hub.bodies.append(body)
        if hub.failing is not None and hub.failing in path:
            self._json({"error": "the server has a problem"}, 500)
        elif path.startswith("/lfs/"):  # a signed address of the storage: no token is sent there
            hub.objects[path.removeprefix("/lfs/")] = body
            self._send(200)
        elif self.command == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/whoami-v2":
            self._json({"type": "user", "name": USER, "orgs": []})
        elif path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            self._json({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)
        elif path == "/api/repos/create":
            request = json.loads(body)
            repo_id = f"{request['organization'] or USER}/{request['name']}"
            exists = repo_id in hub.repos
            hub.repos.setdefault(repo_id, {".gitattributes": b""})
            self._json({"url": f"{hub.url}/{repo_id}", "error": "exists"}, 409 if exists else 200)
        else:
            self._handle_repo(path.removeprefix("/api/models").strip("/"), body)

    def _handle_repo(self, path: str, body: bytes) -> None:
        hub = self.hub
        match = REPO_ID.match(path)
        repo_id = match[0].removesuffix(".git") if match else path
        if repo_id not in hub.repos:
            self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return
        files = hub.repos[repo_id]
        action, _, rest = path[match.end() :].strip("/").partition("/")
        if action == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": _upload_mode(file["path"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": modes})
        elif action == "info":  # info/lfs/objects/batch
            objects = [
                {**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            paths = []
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    assert line["key"] == "lfsFile", line["key"]
                    data = hub.objects[value["oid"]]
                    assert hashlib.sha256(data).hexdigest() == value["oid"] and len(data) == value["size"]
                    files[value["path"]] = data
                paths.append(value["path"])
            hub.commits.append((repo_id, lines[0]["value"]["summary"], paths))
            sha = hub.sha(repo_id)
            self._json({"commitUrl": f"{hub.url}/{repo_id}/commit/{sha}", "commitOid": sha})
        elif action == "resolve":  # resolve/{revision}/{path}
            data = files.get(rest.partition("/")[2])
            headers = {"X_Repo_Commit": hub.sha(repo_id)}
            if data is None:
                self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", **headers)
            else:
                self._send(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', **headers)
        elif action == "tree":  # tree/{revision}/{folder}; there are no folders to list but the root
            if "/" in rest:
                self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            else:
                oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
                self._json([{"type": "file", "path": n, "size": len(files[n]), "oid": o} for n, o in oids.items()])
        else:  # the repository itself, or revision/{revision}
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo_id, "sha": hub.sha(repo_id), "siblings": siblings, "tags": [], "private": False})


def _upload_mode(path: str) -> str:
    return "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
