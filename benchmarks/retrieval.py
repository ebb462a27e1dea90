"""
Queries per second and latency of retrieval, in process and behind `mempo serve`, beside the libraries alone.

```
python benchmarks/retrieval.py --corpus ../shared/data/corpus.jsonl --questions ../shared/data/dev.jsonl
```

The *overhead* of a row is how much more time it takes for the same queries than the library alone in the same round,
by the clock and in CPU time; the table has the median over the rounds. The clients of a server share the machine with
it: they are one process that sends ready-made bytes and reads answers by their length. The CPU time is that of the
server alone, and other work on the machine hardly disturbs it. What a request costs does not depend on the corpus:
`--copies` takes the corpus several times over, and `--queries_per_request` sends several queries at once.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from mempo_trl.retrieval.bm25 import BM25Retriever, split_words
from mempo_trl.retrieval.document import Document, Retriever, read_corpus
from mempo_trl.retrieval.index import load_index


def time_calls(call: Callable[[list[str]], object], queries: list[str], size: int) -> dict:
    """Seconds for all queries in calls of `size` queries, and the latency of a call."""
    latencies = []
    cpu = time.process_time()
    for start in range(0, len(queries), size):
        begin = time.perf_counter()
        call(queries[start : start + size])
        latencies.append(time.perf_counter() - begin)
    return {"seconds": sum(latencies), "latencies": latencies, "cpu_seconds": time.process_time() - cpu}


def time_server(server: "Server", queries: list[str], top_k: int, size: int, num_clients: int) -> dict:
    """Seconds for all queries from clients that send `size` queries at a time, and the latency of a request."""
    requests = iter([server.request(queries[i : i + size], top_k) for i in range(0, len(queries), size)])
    latencies = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for request in requests:
            begin = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {head!r}")
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
            await reader.readexactly(int(length))
            latencies.append(time.perf_counter() - begin)
        writer.close()

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(num_clients)))

    cpu = server.cpu_seconds()
    begin = time.perf_counter()
    asyncio.run(clients())
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "latencies": latencies, "cpu_seconds": server.cpu_seconds() - cpu}


class Server:
    """`mempo serve` in a process of its own."""

    def __init__(self, index_path: Path, log_file: Path):
        command = [sys.executable, "-m", "mempo_trl.cli", "serve", "--index_path", str(index_path), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--log_file", str(log_file)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        line = self.process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"`{' '.join(command)}` did not start; it wrote {line!r}")
        self.port = int(line.rsplit(":", 1)[1])

    def request(self, queries: list[str], top_k: int) -> bytes:
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def enlarge(corpus: str, copies: int) -> list[Document]:
    """The corpus several times over, as a stand-in for a larger one."""
    documents = list(read_corpus(corpus))
    return [Document(f"{copy}-{d.id}", d.title, d.text) for copy in range(copies) for d in documents]


def measure(cases: dict[str, tuple[str | None, Callable[[], dict]]], num_queries: int, rounds: int) -> dict[str, dict]:
    """Runs all cases in turn, round after round. A case names the one that it is compared with."""
    runs = {name: [] for name in cases}
    with tqdm(total=rounds * len(cases), desc="Measuring") as bar:
        for _ in range(rounds):
            for name, (_, run) in cases.items():
                runs[name].append(run())
                bar.update()
    results = {}
    for name, (base, _) in cases.items():
        latencies = [latency for run in runs[name] for latency in run["latencies"]]
        results[name] = {
            "queries_per_second": num_queries / statistics.median(run["seconds"] for run in runs[name]),
            "p50_ms": 1000 * float(np.percentile(latencies, 50)),
            "p99_ms": 1000 * float(np.percentile(latencies, 99)),
            "cpu_ms_per_query": 1000 * statistics.median(run["cpu_seconds"] for run in runs[name]) / num_queries,
        }
        if base is not None:
            results[name]["compared_with"] = base
            for key, overhead in (("seconds", "overhead"), ("cpu_seconds", "cpu_overhead")):
                ratios = [own[key] / other[key] - 1 for own, other in zip(runs[name], runs[base], strict=True)]
                results[name] |= {overhead: statistics.median(ratios), f"{overhead}_of_each_round": ratios}
    return results


def make_cases(
    name: str, library: Callable[[list[str]], object], retriever: Retriever, server: Server, queries: list[str], args
) -> dict[str, tuple[str | None, Callable[[], dict]]]:
    """The library alone, our retriever in this process, and the server, all on the same queries."""

    def search(batch: list[str]) -> None:
        retriever.search(batch, args.top_k)

    single, batches = f"{name}, one at a time", f"{name}, batches of 64"
    ours = type(retriever).__name__
    cases = {
        single: (None, lambda: time_calls(library, queries, 1)),
        batches: (None, lambda: time_calls(library, queries, 64)),
        f"{ours}, one at a time": (single, lambda: time_calls(search, queries, 1)),
        f"{ours}, batches of 64": (batches, lambda: time_calls(search, queries, 64)),
    }
    for clients in (1, 16, 64):
        cases[f"mempo serve ({ours}), clients: {clients}"] = (
            single if clients == 1 else batches,
            lambda clients=clients: time_server(server, queries, args.top_k, args.queries_per_request, clients),
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="Corpus as JSON Lines, for BM25.")
    parser.add_argument("--questions", required=True, help="JSON Lines whose `question` is a query.")
    parser.add_argument("--dense_index", help="Folder of a dense index of `mempo index`, measured as well.")
    parser.add_argument("--copies", type=int, default=1, help="How many times over the corpus is taken.")
    parser.add_argument("--num_queries", type=int, default=2000, help="Queries per case; questions come again.")
    parser.add_argument("--queries_per_request", type=int, default=1, help="Queries that a client sends at once.")
    parser.add_argument("--top_k", type=int, default=3, help="Passages per query.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each case is run.")
    parser.add_argument("--output", help="JSON file for the figures.")
    args = parser.parse_args()

    with open(args.questions, encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for line in file]
    queries = [questions[i % len(questions)] for i in range(args.num_queries)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        BM25Retriever.from_corpus(enlarge(args.corpus, args.copies), show_progress=True).save(folder)
        bm25 = BM25Retriever.load(folder)

        def bm25s(batch: list[str]) -> None:
            bm25._index.retrieve([split_words(query) for query in batch], k=args.top_k, show_progress=False)

        server = stack.enter_context(contextlib.closing(Server(folder, folder / "serve.log")))
        cases = make_cases("bm25s", bm25s, bm25, server, queries, args)
        if args.dense_index is not None:
            dense = load_index(args.dense_index)

            def faiss(batch: list[str]) -> None:
                dense._index.search(dense.encoder.encode_queries(batch), args.top_k)

            server = stack.enter_context(contextlib.closing(Server(Path(args.dense_index), folder / "dense.log")))
            cases |= make_cases("encoder + FAISS", faiss, dense, server, queries, args)
        results = measure(cases, len(queries), args.rounds)

    title = f"{len(bm25)} passages, {len(queries)} queries, {args.queries_per_request} per request"
    table = Table(title=f"{title}, median of {args.rounds} rounds")
    for column in ("", "queries/s", "p50 ms", "p99 ms", "CPU ms/query", "overhead", "CPU overhead"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, row in results.items():
        overheads = [f"{row[key]:+.0%}" if key in row else "" for key in ("overhead", "cpu_overhead")]
        times = [f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "cpu_ms_per_query")]
        table.add_row(name, f"{row['queries_per_second']:.0f}", *times, *overheads)
    Console(width=120).print(table)
    report = {
        "settings": vars(args),
        "num_passages": len(bm25),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {n: importlib.metadata.version(n) for n in ("mempo_trl", "bm25s", "numpy", "fastapi", "uvicorn")},
        "results": results,
    }
    if args.output is not None:
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
