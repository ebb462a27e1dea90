"""
A long run with faults: village training through `mempo serve`, and what becomes of each fault.

```
python benchmarks/soak.py --minutes 20
```

Between training and server stands a proxy that answers 5% of the requests with an error and lets 2% hang until they time
out. After a third of the steps the search server is stopped and started again; after two thirds the training is killed
(`kill -9`) in the middle of a step between two checkpoints, and resumed. The run has to end with the planned number of
steps, each rollout once and in the order of an unbroken run in the dump, every fault accounted for, and steady memory.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import yaml
from reporting import print_table, write_report
from trl.trainer.utils import RepeatSampler


RECIPES = Path(__file__).parent.parent / "recipes" / "village"
QUESTIONS_PER_STEP, NUM_GENERATIONS = 2, 8  # of the recipe
TOOL_TIMEOUT = 3.0


class FaultyProxy:
    """Passes requests on, but for those that meet a fault; keeps what became of every request."""

    def __init__(self, error_rate: float, timeout_rate: float, seed: int):
        self.upstream: int | None = None  # port of the server
        self.requests: list[dict] = []
        self.injecting = threading.Event()
        self.closing = threading.Event()
        self._rates, self._random, self._lock = (error_rate, timeout_rate), random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def choose_fault(self) -> str | None:
        if not self.injecting.is_set():
            return None
        with self._lock:
            number = self._random.random()
        errors, timeouts = self._rates
        return "error" if number < errors else "time-out" if number < errors + timeouts else None

    def note(self, outcome: str, queries: list[str]) -> None:
        with self._lock:
            self.requests.append({"time": time.time(), "outcome": outcome, "queries": queries})

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._forward(None)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.proxy.choose_fault()
        queries = _queries(body)
        if fault == "error":
            self.proxy.note("error", queries)
            self._answer(500, b'{"detail": "injected"}')
        elif fault == "time-out":
            self.proxy.note("time-out", queries)
            self.proxy.closing.wait(10 * TOOL_TIMEOUT)  # the client is gone long before
        else:
            self._forward(body)

    def _forward(self, body: bytes | None) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.proxy.upstream}{self.path}", body)
        request.add_header("Content-Type", "application/json")
        queries = _queries(body)
        try:
            with urllib.request.urlopen(request, timeout=10 * TOOL_TIMEOUT) as response:
                status, answer = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, answer = error.code, error.read()
        except OSError:
            self.proxy.note("server away", queries)
            self._answer(502, b'{"detail": "no server"}')
            return
        if body is not None:
            self.proxy.note("answered" if status == 200 else f"HTTP {status}", queries)
        self._answer(status, answer)

    def _answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client did not wait, or was killed
            pass


def _queries(body: bytes | None) -> list[str]:
    content = json.loads(body or b"{}")
    queries = content.get("queries", content.get("query", []))
    return [queries] if isinstance(queries, str) else queries


class MemoryLog:
    """Resident memory of processes, by role, once a second."""

    def __init__(self):
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self._processes: dict[str, psutil.Process] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self, role: str, pid: int) -> None:
        self.samples[role] = []
        self._processes[role] = psutil.Process(pid)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            for role, process in list(self._processes.items()):
                try:
                    # `mempo train` starts the trainer, which is the larger of the two.
                    family = process.children(recursive=True) if role.startswith("training") else []
                    used = max(one.memory_info().rss for one in [process, *family])
                except psutil.Error:
                    used = 0
                if used:
                    self.samples[role].append((time.time(), used / 2**20))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def rows(self) -> list[dict]:
        """Slope per role, without the first quarter, in which memory is still taken for the first time."""
        rows = []
        for role, samples in self.samples.items():
            if len(samples) < 20:  # too short to say
                continue
            times, used = np.array(samples[len(samples) // 4 : -3]).T  # at its end a process frees much
            slope = np.polyfit(times - times[0], used, 1)[0] * 60
            rows.append(
                {
                    "process": role,
                    "minutes": float(times[-1] - times[0]) / 60,
                    "first MB": float(used[0]),
                    "last MB": float(used[-1]),
                    "MB/min": float(slope),
                    "growth": float(slope * (times[-1] - times[0]) / 60 / used[0]),
                }
            )
        return rows


def mempo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mempo_trl.cli", *arguments]


def prepare(session: Path) -> None:
    """The world, its index and a short cold start, unless the folder has them."""
    if (session / "sft" / "config.json").exists():
        return
    village = session / "village"
    commands = [
        [sys.executable, "-m", "mempo_trl.data.village", "--config", f"{RECIPES}/village.yaml", "--num_rollouts",
         "1500", "--num_train", "300", "--output_dir", f"{village}"],
        mempo("index", "--corpus_path", f"{village}/corpus.jsonl", "--kind", "bm25", "--output_dir", f"{session}/index"),
        mempo("sft", "--config", f"{RECIPES}/sft/config.yaml", "--model_name_or_path", f"{village}/model",
              "--rollouts", f"{village}/rollouts.jsonl", "--max_steps", "400", "--output_dir", f"{session}/sft"),
    ]  # fmt: skip
    for command in commands:
        subprocess.run(command, check=True)


def start_server(session: Path, port: int, log: Path) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen(
        mempo("serve", "--index_path", f"{session}/index", "--port", str(port), "--log_file", str(log)),
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    if "http://" not in line:
        raise RuntimeError(f"`mempo serve` did not start; it wrote {line!r}")
    return process, int(line.rsplit(":", 1)[1])


def start_training(session: Path, out: Path, port: int, max_steps: int, save_steps: int, *more: str):
    """`mempo train` in a process group of its own, so that it can be killed as a whole."""
    recipe = yaml.safe_load((RECIPES / "mempo" / "config_server.yaml").read_text(encoding="utf-8"))
    del recipe["search_cache_dir"]  # the village is small: soon no request would be made any more
    out.with_suffix(".yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = mempo(
        "train", "--config", f"{out}.yaml",
        "--model_name_or_path", f"{session}/sft", "--dataset_name", f"{session}/village/train.jsonl",
        "--search_url", f"http://127.0.0.1:{port}", "--output_dir", f"{out}",
        "--max_steps", str(max_steps), "--save_strategy", "steps", "--save_steps", str(save_steps),
        "--save_total_limit", "3", "--tool_timeout", str(TOOL_TIMEOUT), "--tool_retries", "5",
        "--num_cpu_threads_per_process", "1", "--disable_tqdm", "true", *more,
    )  # fmt: skip
    log = open(out.with_name(out.name + ".log"), "ab")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def files_of(out: Path) -> list[Path]:
    """The rollouts of each step."""
    return sorted((out / "rollouts").glob("train-*.jsonl"))


def wait_for_step(training: subprocess.Popen, out: Path, ready) -> int:
    """Wait until `ready(steps played)`; gives that number."""
    while True:
        if training.poll() is not None:
            raise RuntimeError(f"training ended early with status {training.returncode}; see {out}.log")
        if ready(steps := len(files_of(out))):
            return steps
        time.sleep(0.1)


def wait_until_it_plays(training: subprocess.Popen, out: Path, since: float) -> None:
    """Wait for the first rollouts that are written after a time: by then the process has loaded what it needs."""

    def is_new(path: Path) -> bool:
        try:
            return path.stat().st_mtime > since
        except FileNotFoundError:  # a resumed run has just moved it
            return False

    wait_for_step(training, out, lambda played: any(map(is_new, files_of(out))))


def seconds_per_step(session: Path, out: Path, port: int) -> float:
    """From a few steps without faults."""
    training = start_training(session, out, port, 6, 6)
    if training.wait() != 0:
        raise RuntimeError(f"training failed; see {out}.log")
    times = [path.stat().st_mtime for path in files_of(out)]
    return (times[-1] - times[1]) / (len(times) - 2)


def expected_questions(session: Path, steps: int) -> list[str]:
    """The questions of an unbroken run, one per rollout."""
    lines = open(session / "village" / "train.jsonl", encoding="utf-8")
    questions = [json.loads(line)["question"] for line in lines]
    sampler = RepeatSampler(questions, NUM_GENERATIONS, QUESTIONS_PER_STEP, 1, True, seed=0)
    asked = []
    while len(asked) < steps * QUESTIONS_PER_STEP * NUM_GENERATIONS:
        asked += [questions[i] for i in sampler]
    return asked[: steps * QUESTIONS_PER_STEP * NUM_GENERATIONS]


def read_rollouts(out: Path) -> list[dict]:
    return [json.loads(line) for file in files_of(out) for line in open(file, encoding="utf-8")]


def fates(requests: list[dict], rollouts: list[dict], killed_at: float) -> list[dict]:
    """Per kind of fault, what became of the queries that met it."""
    answered: dict[str, list[float]] = {}
    for request in requests:
        if request["outcome"] == "answered":
            for query in request["queries"]:
                answered.setdefault(query, []).append(request["time"])
    told = {
        turn["call"]["arguments"].get("query")
        for rollout in rollouts
        for turn in rollout["turns"]
        if turn["tool_error"] is not None
    }
    patience = 60.0  # longer than all attempts of a call together
    counts: dict[str, Counter] = {}
    for request in requests:
        if request["outcome"] == "answered":
            continue
        of_kind = counts.setdefault(request["outcome"], Counter())
        of_kind["requests"] += 1
        of_kind["queries"] += len(request["queries"])
        for query in request["queries"]:
            start = request["time"]
            if any(start < time < start + patience for time in answered.get(query, [])):
                of_kind["answered later"] += 1
            elif any(start - patience < time <= start for time in answered.get(query, [])):
                # A call that was given up repeats its request for a while, and met a fault when another attempt of the
                # same call had its answer.
                of_kind["answered before"] += 1
            elif start < killed_at < start + patience:
                of_kind["cut off by the kill"] += 1
            elif query in told:
                of_kind["told to the model"] += 1
            else:
                of_kind["lost"] += 1
    columns = (
        "requests",
        "queries",
        "answered later",
        "answered before",
        "told to the model",
        "cut off by the kill",
        "lost",
    )
    return [{"fault": kind, **{name: count[name] for name in columns}} for kind, count in sorted(counts.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="How long the training runs, about.")
    parser.add_argument("--error_rate", type=float, default=0.05, help="Share of requests answered with an error.")
    parser.add_argument("--timeout_rate", type=float, default=0.02, help="Share of requests that hang.")
    parser.add_argument("--seed", type=int, default=0, help="Of the faults.")
    parser.add_argument("--session", help="Folder with village, index and sft of an earlier run, to build none.")
    parser.add_argument("--output_dir", default="out/soak", help="Folder for everything; it must be new or empty.")
    parser.add_argument("--output", help="JSON file for the figures.")
    args = parser.parse_args()

    root = Path(args.output_dir)
    if root.exists() and any(root.iterdir()):
        raise SystemExit(f"{str(root)!r} is not empty; choose another `--output_dir`.")
    root.mkdir(parents=True, exist_ok=True)
    session = Path(args.session) if args.session else root / "session"
    prepare(session)

    out, memory = root / "mempo", MemoryLog()
    proxy = FaultyProxy(args.error_rate, args.timeout_rate, args.seed)
    server, port = start_server(session, 0, root / "server.log")
    running = [server]
    try:
        proxy.upstream = port
        pace = seconds_per_step(session, root / "pace", proxy.port)
        # Faults and two starts take their part.
        steps = max(12, int((args.minutes * 60 - 40) / (1.3 * pace)))
        save_steps = max(2, steps // 12)
        print(f"{pace:.2f} s per step without faults: {steps} steps, a checkpoint every {save_steps}", flush=True)

        proxy.injecting.set()
        start = time.time()
        memory.watch("search server", server.pid)
        memory.watch("proxy", os.getpid())
        training = start_training(session, out, proxy.port, steps, save_steps)
        running.append(training)
        wait_until_it_plays(training, out, start)
        memory.watch("training, killed", training.pid)

        restarted_step = wait_for_step(training, out, lambda played: played >= steps // 3)
        server.terminate()
        server.wait()
        down = time.time()
        server, _ = start_server(session, port, root / "server.log")
        running.append(server)
        seconds_away = time.time() - down
        memory.watch("search server, again", server.pid)

        # In the middle of a step, and between two checkpoints.
        def ready(played):
            return played >= 2 * steps // 3 and (played - 1) % save_steps == save_steps // 2

        killed_step = wait_for_step(training, out, ready)
        os.killpg(training.pid, signal.SIGKILL)
        training.wait()
        killed_at = time.time()
        training = start_training(session, out, proxy.port, steps, save_steps, "--resume_from_checkpoint", "true")
        running.append(training)
        wait_until_it_plays(training, out, killed_at)
        memory.watch("training, resumed", training.pid)
        status = training.wait()
        minutes = (time.time() - start) / 60
        server.terminate()
        server.wait()
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
        memory.close()
        proxy.close()

    with open(out.parent / "requests.jsonl", "w", encoding="utf-8") as file:  # to follow a query that is lost
        file.writelines(json.dumps(request) + "\n" for request in proxy.requests)
    faults = fates(proxy.requests, rollouts := read_rollouts(out), killed_at)
    num_answered = sum(request["outcome"] == "answered" for request in proxy.requests)
    state = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text(encoding="utf-8"))
    asked = [rollout["question"] for rollout in rollouts]
    expected = expected_questions(session, steps)
    replaced = len(list((out / "rollouts" / "replaced").glob("train-*.jsonl")))
    of_steps = Counter(rollout["step"] for rollout in rollouts)
    usage = memory.rows()
    logged = [log["step"] for log in state["log_history"] if "loss" in log]
    errors = sum(turn["tool_error"] is not None for rollout in rollouts for turn in rollout["turns"])
    per_step = QUESTIONS_PER_STEP * NUM_GENERATIONS

    def row(check: str, expected, found, right: bool) -> dict:
        return {"check": check, "expected": expected, "found": found, "": "ok" if right else "WRONG"}

    checks = [
        row("training ends", "status 0", f"status {status}", status == 0),
        row("steps", steps, state["global_step"], state["global_step"] == steps),
        row("steps in the log", steps, len(logged), logged == list(range(1, steps + 1))),
        row("rollouts in the dump", steps * per_step, len(rollouts), len(rollouts) == steps * per_step),
        row(
            "steps with all rollouts",
            steps,
            sum(count == per_step for count in of_steps.values()),
            of_steps == dict.fromkeys(range(steps), per_step),
        ),
        row("questions in order", len(expected), sum(map(str.__eq__, asked, expected)), asked == expected),
        row("steps played twice", "at least 1", replaced, replaced >= 1),
        row("queries lost", 0, sum(fault["lost"] for fault in faults), not any(fault["lost"] for fault in faults)),
        row(
            "largest growth of memory",
            "below 10%",
            f"{max(process['growth'] for process in usage):.1%}",
            max(process["growth"] for process in usage) < 0.1,
        ),
    ]
    print_table(f"Faults in {minutes:.1f} minutes, beside {num_answered} requests answered at once", faults)
    print_table("Memory", usage)
    print_table("Checks", checks)
    events = {
        "minutes": minutes,
        "search server away": {"at step": restarted_step, "seconds": seconds_away},
        "training killed": {"at step": killed_step, "steps played again": replaced},
        "requests answered": num_answered,
        "tool calls that failed for good": errors,
    }
    print(json.dumps(events, indent=2))
    if args.output is not None:
        write_report(args.output, vars(args), checks, faults=faults, memory=usage, events=events)
    sys.exit(any(check[""] != "ok" for check in checks))


if __name__ == "__main__":
    main()
