"""The session of docs/retrieval.md, command by command: corpus, index, search server, cold start, training over HTTP."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from conftest import REPOSITORY


def documented_commands() -> list[str]:
    """The commands of the session, one per entry."""
    page = (REPOSITORY / "docs" / "retrieval.md").read_text(encoding="utf-8")
    session = page[page.index("## From a corpus to training") :]
    block = re.search(r"```bash\n(.*?)```", session, re.DOTALL)[1].replace("\\\n", " ")
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the session with its outputs in a folder and its server on a port of this test; gives the server's metrics."""
    folder, port = tmp_path_factory.mktemp("session"), free_port()
    (folder / "out").mkdir()
    server = None
    try:
        for line in documented_commands():
            words = shlex.split(line.removesuffix("&").replace("--port 8000", f"--port {port}"))
            words = [word.replace("out/session", str(folder / "out")) for word in words]
            command = [sys.executable, "-m", "mempo_trl.cli", *words[1:]] if words[0] == "mempo" else words
            command[0] = sys.executable
            if words[1] in ("sft", "train"):  # two threads that wait for each other are slow where a core is busy
                command += ["--num_cpu_threads_per_process", "1"]
            if words[:2] == ["mempo", "train"]:  # the recipe's own paths, moved with the others
                recipe = (REPOSITORY / words[3]).read_text(encoding="utf-8")
                recipe = recipe.replace("out/session", str(folder / "out")).replace(":8000", f":{port}")
                (folder / "train.yaml").write_text(recipe, encoding="utf-8")
                command[command.index(words[3])] = str(folder / "train.yaml")
            if line.endswith("&"):
                server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
                assert "Serving" in server.stdout.readline()
                continue
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    finally:
        if server is not None:
            server.terminate()
            server.wait(timeout=30)
    return folder / "out", metrics


def test_training_searched_the_server(session):
    """Both steps were made; the rollouts read passages that came from the server; none of the searches failed."""
    out, metrics = session
    files = sorted((out / "mempo" / "rollouts").glob("train-*.jsonl"))
    assert [file.name for file in files] == ["train-000000-rank0.jsonl", "train-000001-rank0.jsonl"]
    rollouts = [json.loads(line) for file in files for line in open(file, encoding="utf-8")]
    assert len(rollouts) == 32
    calls = [turn for rollout in rollouts for turn in rollout["turns"] if turn["outcome"] == "tool_call"]
    assert calls and not any(turn["tool_error"] for turn in calls)
    titles = {json.loads(line)["title"] for line in open(out / "village" / "corpus.jsonl", encoding="utf-8")}
    read = [re.match(r"Doc 1\(Title: (.*?)\)", turn["response"] or "") for turn in calls]
    assert any(read) and {match[1] for match in read if match} <= titles
    # The probe, and each different query once: the rest came from the cache.
    queries = {turn["call"]["arguments"]["query"] for turn in calls if turn["response"]}
    counted = int(float(re.search(r"^\S*queries_total\S* (\S+)$", metrics, re.MULTILINE)[1]))
    assert len(queries) <= counted <= len(queries) + 20


def test_the_page_of_the_session(session):
    """The last command wrote a page of both steps."""
    out, _ = session
    page = Path(out / "mempo" / "view.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert time.time() - Path(out / "mempo" / "view.html").stat().st_mtime < 3600
