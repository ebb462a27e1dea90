"""
An encoder that needs no model, and builds of indexes that are killed at random points.

As a script: `python tests/index_builds.py FOLDER BUILDS SEED lines|time MAX_KILLS`, the last for each build. It forks, because importing anew for every kill
would take seconds each, and pytest's process has threads.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mempo_trl.retrieval.dense import DenseRetriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.index import build_index, load_index


class FakeEncoder:
    """Stands in for `Encoder`: a random direction per text, always the same one for the same text."""

    def __init__(self, name="fake", dimension=16, query_prompt="q: ", passage_prompt="p: "):
        self.name, self.query_prompt, self.passage_prompt, self.max_length = name, query_prompt, passage_prompt, 256
        self.dimension = dimension
        self.passages = []  # ids, in the order in which they were encoded

    def encode_queries(self, queries):
        return np.stack([self.vector(query) for query in queries])

    def encode_passages(self, documents):
        self.passages += [document.id for document in documents]
        return np.stack([self.vector(f"{document.title}\n{document.text}") for document in documents])

    def vector(self, text):
        """Independent of the prompts, so that a text as a query finds itself as a passage."""
        seed = int.from_bytes(hashlib.sha256(f"{self.name} {text}".encode()).digest()[:8], "little")
        vector = np.random.default_rng(seed).normal(size=self.dimension)
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def make_documents(count, text="about"):
    return [Document(f"d{i}", f"Title {i}", f"{text} number {i}") for i in range(count)]


def write_corpus(path, documents):
    rows = [{"id": document.id, "title": document.title, "text": document.text} for document in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trace_lines(on_line):
    """Calls `on_line` before each line of the package and of what removes and writes files for it."""
    traced = ("mempo_trl/retrieval/", "shutil.py", "numpy/lib/_format_impl.py", "tempfile.py")

    def trace(frame, event, argument):
        if not any(part in frame.f_code.co_filename for part in traced):
            return None
        if event == "line":
            on_line()
        return trace

    sys.settrace(trace)


def run_killed(build, at_line=None, after=None):
    """Runs `build` in a fork that is killed at a line or after seconds. Returns whether it was."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if at_line is not None:
                lines = 0

                def on_line():
                    nonlocal lines
                    lines += 1
                    if lines == at_line:
                        os.kill(os.getpid(), signal.SIGKILL)

                trace_lines(on_line)
            build()
            status = 0
        finally:
            os._exit(status)
    if after is not None:
        timer = threading.Timer(after, os.kill, (child, signal.SIGKILL))
        timer.start()
    _, status = os.waitpid(child, 0)
    if after is not None:
        timer.cancel()
        timer.join()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the build failed"
    return False


def main(folder, builds, seed, by, max_kills):
    folder, dice = Path(folder), random.Random(seed)
    corpus = write_corpus(folder / "corpus.jsonl", make_documents(60))
    kinds = [("dense", "flat"), ("bm25", "flat"), ("hybrid", "flat"), ("dense", "hnsw"), ("dense", "ivf")]
    kills, complete = 0, 0
    for number in range(builds):
        kind, faiss = kinds[number % len(kinds)]
        encoder = FakeEncoder()

        def build(target, kind=kind, faiss=faiss, encoder=encoder):
            build_index(corpus, target, kind, encoder=encoder, faiss=faiss, shard_size=8)

        whole = folder / f"{kind}-{faiss}"
        lines = []
        start = time.perf_counter()
        if by == "lines":
            trace_lines(lambda lines=lines: lines.append(1))
        build(folder / f"measured-{number}")
        sys.settrace(None)
        seconds = time.perf_counter() - start
        build(whole)
        target, before = folder / f"killed-{number}", kills
        while kills - before < max_kills and run_killed(
            lambda target=target: build(target),
            at_line=dice.randint(1, len(lines)) if by == "lines" else None,
            # Ever longer: on a busy machine it might never end.
            after=dice.uniform(0, seconds * (1 + kills - before)) if by == "time" else None,
        ):
            kills += 1
            try:
                load_index(target, encoder)
            except FileNotFoundError as error:
                assert not target.exists() or "no finished" in str(error)
            else:
                complete += 1
                found = files_of(target)
                assert all(found[name] == content for name, content in files_of(whole).items())
        build(target)
        assert files_of(target) == files_of(whole), f"{kind} {faiss} after {kills - before} kills"
        assert isinstance(load_index(target, encoder), DenseRetriever) == (kind == "dense")
    sys.stdout.write(json.dumps({"builds": builds, "kills": kills, "complete": complete}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
