"""
Queries per second and latency of retrieval, in process and behind `mempo serve`, beside the libraries alone.

```
python benchmarks/retrieval.py --corpus ../shared/data/corpus.jsonl --questions ../shared/data/dev.jsonl
```

The *overhead* of a row is how much longer it takes for the same queries than the library alone, in the same round; the
table has the median over the rounds. The clients of a server share the machine with it: they are one process that
sends ready-made bytes and reads answers by their length, and the CPU time of the server alone is given as well.
"""

import argparse
import asyncio
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
from mempo_trl.retrieval.document import Document, read_corpus


def time_calls(call: Callable[[list[str]], object], queries: list[str], size: int) -> dict:
    """Seconds for all queries in calls of `size` queries, and the latency of a call."""
    latencies = []
    for start in range(0, len(queries), size):
        begin = time.perf_counter()
        call(queries[start : start + size])
        latencies.append(time.perf_counter() - begin)
    return {"seconds": sum(latencies), "latencies": latencies}


def time_server(server: "Server", queries: list[str], top_k: int, num_clients: int) -> dict:
    """Seconds for all queries from clients that send one query at a time, and the latency of a request."""
    requests = iter([server.request(query, top_k) for query in queries])
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

    def request(self, query: str, top_k: int) -> bytes:
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True}).encode()
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
        result = {
            "queries_per_second": num_queries / statistics.median(run["seconds"] for run in runs[name]),
            "p50_ms": 1000 * float(np.percentile(latencies, 50)),
            "p99_ms": 1000 * float(np.percentile(latencies, 99)),
        }
        if base is not None:
            ratios = [own["seconds"] / other["seconds"] - 1 for own, other in zip(runs[name], runs[base], strict=True)]
            result |= {"compared_with": base, "overhead": statistics.median(ratios), "overheads": ratios}
        if "cpu_seconds" in runs[name][0]:
            cpu = statistics.median(run["cpu_seconds"] for run in runs[name])
            result["server_cpu_ms_per_query"] = 1000 * cpu / num_queries
        results[name] = result
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="Corpus as JSON Lines.")
    parser.add_argument("--questions", required=True, help="JSON Lines whose `question` is a query.")
    parser.add_argument("--copies", type=int, default=1, help="How many times over the corpus is taken.")
    parser.add_argument("--num_queries", type=int, default=2000, help="Queries per case; questions come again.")
    parser.add_argument("--top_k", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="JSON file for the figures.")
    args = parser.parse_args()

    with open(args.questions, encoding="utf-8") as file:
        questions = [json.loads(line)["question"] for line in file]
    queries = [questions[i % len(questions)] for i in range(args.num_queries)]
    with tempfile.TemporaryDirectory() as folder:
        BM25Retriever.from_corpus(enlarge(args.corpus, args.copies), show_progress=True).save(folder)
        bm25 = BM25Retriever.load(folder)
        server = Server(Path(folder), Path(folder) / "serve.log")
        library = bm25._index

        def bm25s(batch: list[str]) -> None:
            library.retrieve([split_words(query) for query in batch], k=args.top_k, show_progress=False)

        def search(batch: list[str]) -> None:
            bm25.search(batch, args.top_k)

        cases = {
            "bm25s, batches of 64": (None, lambda: time_calls(bm25s, queries, 64)),
            "bm25s, one at a time": (None, lambda: time_calls(bm25s, queries, 1)),
            "BM25Retriever, batches of 64": ("bm25s, batches of 64", lambda: time_calls(search, queries, 64)),
            "BM25Retriever, one at a time": ("bm25s, one at a time", lambda: time_calls(search, queries, 1)),
        }
        for clients in (1, 16, 64):
            cases[f"mempo serve, {clients} clients"] = (
                "bm25s, batches of 64" if clients > 1 else "bm25s, one at a time",
                lambda clients=clients: time_server(server, queries, args.top_k, clients),
            )
        try:
            results = measure(cases, len(queries), args.rounds)
        finally:
            server.close()
    table = Table(title=f"{len(bm25)} passages, {len(queries)} queries, {args.rounds} rounds")
    for column in ("", "queries/s", "p50 ms", "p99 ms", "overhead", "server CPU ms/query"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, r in results.items():
        overhead = f"{r['overhead']:+.0%}" if "overhead" in r else ""
        cpu = f"{r['server_cpu_ms_per_query']:.3f}" if "server_cpu_ms_per_query" in r else ""
        table.add_row(
            name, f"{r['queries_per_second']:.0f}", f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}", overhead, cpu
        )
    Console().print(table)
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
