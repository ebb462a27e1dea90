"""
Rollouts through a vLLM server: each at its own pace, against all of them turn by turn.

    make vllm_environment
    python benchmarks/rollouts.py --search_seconds 0 0.2 1 --output out/benchmarks/rollouts.json

Both ways play the same rollouts on the same server, one way after the other and then the other way round. The work is
forced: a seeded script says what each turn is. Its request makes the server sample exactly as many tokens as the
scripted turn has (`max_tokens` with `ignore_eos`); the scripted turn then takes their place, so that
`mempo_trl.rollout.play` goes through the real protocol, makes the searches and builds the next prompts. No run finds
another one's prompts in the prefix cache (`cache_salt`).

- *free*: `CompletionsGenerator`. A rollout asks for its next turn as soon as its search is done.
- *by turns*: `BatchGenerator`. The next turns of all live rollouts are requested at the same time, once the last of
  their turns and the last of their searches are done. Its connections stay open between the turns.

*Live* is how many requests are with the server on average, *batch* how many of them a forward pass of it works on (far
fewer, if its HTTP side is what is slow), *idle* the share of the time in which it has none, *waited* the seconds that a
rollout waits for others: for a turn, what passes beyond the time of its own request.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from reporting import print_table, write_report
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mempo_trl.data.village import SYSTEM_PROMPT, Village
from mempo_trl.data.village_model import build_model, build_tokenizer
from mempo_trl.endpoints import CompletionsGenerator
from mempo_trl.generation import BatchGenerator, Generation, Generator, run_in_event_loop
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.rollout import Rollout, play
from mempo_trl.tools import Toolbox


sys.path.append(str(Path(__file__).parents[1] / "tests"))

from vllm_server import VllmServer


WAYS = ("free", "by turns")
MAX_TURNS = 16
SHORTEST, LONGEST = 24, 400  # tokens of a turn
WORDS = ("cat", "dog", "duck", "goat", "hen")
RESPONSE = "cat dog duck goat hen " * 10
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4}  # heads of 32, the smallest that vLLM has on a CPU

_length: ContextVar[int] = ContextVar("length")


@dataclass
class Work:
    """What is played: the ids of the turns of each question, and the seconds that each search takes."""

    turns: dict[str, list[list[int]]] = field(default_factory=dict)
    search_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(turn) for turns in self.turns.values() for turn in turns)

    async def search(self, query: str) -> str:
        """
        Searches nothing, in the time that the script says.

        Args:
            query: What to search for.
        """
        await asyncio.sleep(self.search_seconds[query])
        return f"Doc 1(Title: {query}) {RESPONSE}"


def make_work(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, search_seconds: float, seed: int) -> Work:
    """
    Rollouts of 1 to 16 turns of 24 to 400 tokens. "skewed": after each turn a rollout ends with the same probability,
    lengths of turns are log-normal, searches take 0.5 to 1.5 times their mean. "equal": every rollout has the mean
    number of turns, every turn the median length, every search the mean time.
    """
    rng = random.Random(seed)
    words = [token_id for word in WORDS for token_id in encode(tokenizer, f" {word}")[:1]]
    work = Work()
    for number in range(args.rollouts):
        if args.work == "equal":
            num_turns = round(args.mean_turns)
        else:  # the number of trials up to the first success
            num_turns = 1 + next(
                i for i in itertools.count() if i == MAX_TURNS - 1 or rng.random() < 1 / args.mean_turns
            )
        turns = []
        for turn in range(num_turns):
            query = f"{number} {turn}"
            call = f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'
            action = "<answer>cat</answer>" if turn == num_turns - 1 else call
            spread = 1.0 if args.work == "equal" else rng.uniform(0.5, 1.5)
            work.search_seconds[query] = search_seconds * spread
            scale = 1.0 if args.work == "equal" else math.exp(rng.gauss(0, args.length_sigma))
            length = min(max(round(args.median_length * scale), SHORTEST), LONGEST)
            turns.append(make_turn(tokenizer, action, length, words, rng))
        work.turns[f"What is the pet of number {number}?"] = turns
    return work


def waits_alone(work: Work, seconds_per_token: float) -> dict[str, float]:
    """
    Seconds of each way, by arithmetic, on an engine that is never short of compute: it makes a token of every request
    in the same time, however many there are. Then only waiting counts: for a rollout's own turns and searches, or in
    every turn for the longest turn and the longest search.
    """
    free, turns_of = 0.0, [[] for _ in range(MAX_TURNS)]
    for number, turns in enumerate(work.turns.values()):
        parts = [
            (len(turn) * seconds_per_token, work.search_seconds[f"{number} {t}"] if t < len(turns) - 1 else 0.0)
            for t, turn in enumerate(turns)
        ]
        free = max(free, sum(map(sum, parts)))
        for t, part in enumerate(parts):
            turns_of[t].append(part)
    by_turns = sum(
        max(made for made, _ in parts) + max(searched for _, searched in parts) for parts in turns_of if parts
    )
    return {"free": free, "by turns": by_turns}


def make_turn(tokenizer, action: str, length: int, words: list[int], rng: random.Random) -> list[int]:
    """A well-formed turn of so many tokens, half of its words in the memory; longer if the action alone is longer."""
    parts = [encode(tokenizer, text) for text in ("<mem>", "</mem><think>", f"</think>{action}")]
    count = max(2, length - 1 - sum(map(len, parts)))
    memory = [rng.choice(words) for _ in range(count // 2)]
    thought = [rng.choice(words) for _ in range(count - count // 2)]
    return parts[0] + memory + parts[1] + thought + parts[2] + [tokenizer.eos_token_id]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class ForcedGenerator(CompletionsGenerator):
    """Makes the server sample as many tokens as the scripted turn has, and gives the scripted turn."""

    def __init__(self, work: Work, url: str, model: str, cache_salt: str, concurrency: int):
        super().__init__(
            url,
            model,
            max_completion_length=2 * LONGEST,
            max_concurrency=concurrency,
            eos_token_ids=[],
            retry_seconds=30,
            # What is sampled is replaced, so that it needs no seed, which costs a server on the CPU its chunked prefill.
            extra_body={"ignore_eos": True, "cache_salt": cache_salt, "seed": None},
        )
        self.work = work
        self.spans: list[tuple[float, float]] = []  # when requests were at the server

    async def generate(self, prompt_ids: list[int], rollout: Rollout) -> Generation:
        scripted = self.work.turns[rollout.question][len(rollout.turns)]
        _length.set(len(scripted))
        sampled = await super().generate(prompt_ids, rollout)
        if len(sampled.ids) != len(scripted):
            raise RuntimeError(f"The server gave {len(sampled.ids)} tokens, and {len(scripted)} were asked for.")
        return Generation(scripted, sampled.logps)

    async def _request(self, body: dict) -> dict:
        start = time.perf_counter()
        choice = await super()._request({**body, "max_tokens": _length.get()})
        self.spans.append((start, time.perf_counter()))
        return choice


class KeptConnections(ForcedGenerator):
    """As its parent, but all of its runs use the same connections, in an event loop of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.connections = super()._open_client()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def _open_client(self) -> contextlib.AbstractAsyncContextManager:
        return contextlib.nullcontext(self.connections)

    def wait_for(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.wait_for(self.connections.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)


class ByTurns(BatchGenerator):
    """The turns of all live rollouts as concurrent requests, and a wait for the last of them."""

    def __init__(self, server: KeptConnections, eos_token_id: int):
        super().__init__(self._request_all, max_completion_length=2 * LONGEST, eos_token_ids=[eos_token_id])
        self.server = server
        self._rollouts: dict[tuple[int, ...], Rollout] = {}

    async def generate(self, prompt_ids: list[int], rollout: Rollout) -> Generation:
        self._rollouts[tuple(prompt_ids)] = rollout
        return await super().generate(prompt_ids, rollout)

    def _request_all(self, prompts: list[list[int]], idle: bool) -> tuple[list[list[int]], list[list[float]]]:
        if idle:
            return prompts, [[0.0]] * len(prompts)
        requests = [self.server.generate(prompt_ids, self._rollouts.pop(tuple(prompt_ids))) for prompt_ids in prompts]
        generations = self.server.wait_for(self.server.run(requests))
        return [g.ids for g in generations], [g.logps for g in generations]


class Timed(Generator):
    """Adds up how long the turns took, as the rollouts saw it."""

    def __init__(self, generator: Generator):
        self.generator = generator
        self.seconds = 0.0

    async def generate(self, prompt_ids: list[int], rollout: Rollout) -> Generation:
        start = time.perf_counter()
        generation = await self.generator.generate(prompt_ids, rollout)
        self.seconds += time.perf_counter() - start
        return generation

    async def run(self, rollouts: list[Coroutine], numbers: list[int] | None = None) -> list[Rollout]:
        return await self.generator.run(rollouts, numbers)


def engine_steps(url: str) -> int:
    """Forward passes since the server started, by its own count."""
    for line in httpx.get(f"{url}/metrics").raise_for_status().text.splitlines():
        if line.startswith("vllm:iteration_tokens_total_count"):
            return round(float(line.split()[-1]))
    raise RuntimeError(f"{url} is no vLLM server, or one without metrics: it does not count its forward passes.")


def measure(
    way: str, work: Work, tokenizer: PreTrainedTokenizerBase, url: str, model: str, salt: str
) -> tuple[dict, list]:
    """Play the work in one way: its figures, and the prompts and turns that were played."""
    toolbox = Toolbox([work.search])
    protocol = Protocol(tokenizer, toolbox, system_prompt=SYSTEM_PROMPT)
    server = (ForcedGenerator if way == "free" else KeptConnections)(work, url, model, salt, len(work.turns))
    timed = Timed(server if way == "free" else ByTurns(server, tokenizer.eos_token_id))
    plays = [
        play(question, None, protocol=protocol, generator=timed, call_tool=toolbox.call, max_turns=MAX_TURNS)
        for question in work.turns
    ]
    steps_before = engine_steps(url)
    start = time.perf_counter()
    rollouts = run_in_event_loop(timed.run(plays))
    seconds = time.perf_counter() - start
    steps = engine_steps(url) - steps_before
    if way == "by turns":
        server.close()
    busy, covered = 0.0, -math.inf
    for begin, end in sorted(server.spans):
        busy += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    at_server = sum(end - begin for begin, end in server.spans)
    figures = {
        "seconds": seconds,
        "tokens/s": work.tokens / seconds,
        "live": at_server / seconds,
        "batch": work.tokens / steps,
        "idle": 1 - busy / seconds,
        "waited": (timed.seconds - at_server) / len(work.turns),
    }
    return figures, [[(turn.prompt_ids, turn.completion_ids) for turn in rollout.turns] for rollout in rollouts]


def compare(args: argparse.Namespace, tokenizer, url: str, model: str, search_seconds: float, bar: tqdm) -> dict:
    """All repeats of one latency, the ways in turns: `{way: [figures]}`."""
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats):
        work = make_work(tokenizer, args, search_seconds, seed=args.seed + repeat)
        played = {}
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            figures, played[way] = measure(way, work, tokenizer, url, model, salt=str(time.time_ns()))
            runs[way].append(figures)
            bar.update()
        scripted = list(work.turns.values())
        for way in WAYS:
            if [[completion for _, completion in turns] for turns in played[way]] != scripted:
                raise RuntimeError(f"The rollouts played {way!r} are not those of the script.")
        if played["free"] != played["by turns"]:
            raise RuntimeError("The prompts of the two ways differ.")
    return runs


def make_model(folder: str) -> None:
    """A random model of 0.4 million parameters with the village's tokenizer."""
    tokenizer = build_tokenizer(Village.generate().texts())
    build_model(tokenizer, **MODEL).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; a random model of 0.4 million parameters is made without it")
    parser.add_argument(
        "--server_url", help="a vLLM server that serves `--model`; without it one is started and ended"
    )
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--search_seconds", type=float, nargs="+", default=[0.2], help="mean latencies to measure")
    parser.add_argument("--work", choices=["skewed", "equal"], default="skewed")
    parser.add_argument("--mean_turns", type=float, default=4.0, help="before the cut at 16")
    parser.add_argument("--median_length", type=int, default=60, help="tokens of a turn")
    parser.add_argument("--length_sigma", type=float, default=0.7, help="of the logarithm of the length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="out/benchmarks/rollouts.json")
    args = parser.parse_args()
    if args.server_url and not args.model:
        parser.error("`--server_url` needs `--model`, the folder of the model that it serves")
    with contextlib.ExitStack() as stack:
        folder = args.model or stack.enter_context(tempfile.TemporaryDirectory())
        if not args.model:
            make_model(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = tokenizer.chat_template or load_chat_template("chatml")
        url = args.server_url or stack.enter_context(VllmServer(folder, arguments=["--enable-chunked-prefill"])).url
        model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
        version = httpx.get(f"{url}/version").raise_for_status().json()["version"]
        load = os.getloadavg()
        with tqdm(total=2 * args.repeats * len(args.search_seconds) + 2, desc="Measuring") as bar:
            for way in WAYS:  # the server's first requests are slow
                measure(way, make_work(tokenizer, args, 0.0, seed=-1), tokenizer, url, model, "warm-up")
                bar.update()
            runs = {s: compare(args, tokenizer, url, model, s, bar) for s in args.search_seconds}
    rows, ratios = [], {}
    for search_seconds, ways in runs.items():
        ratios[search_seconds] = [b["seconds"] / a["seconds"] for a, b in zip(*ways.values(), strict=True)]
        for way, figures in ways.items():
            medians = {name: round(statistics.median(run[name] for run in figures), 2) for name in figures[0]}
            rows.append({"search s": search_seconds, "way": way, **medians})
    print_table(f"{args.rollouts} rollouts, {args.work}, vLLM {version}", rows)
    for search_seconds, values in ratios.items():
        print(
            f"search {search_seconds:g} s: by turns / free {statistics.median(values):.2f} "
            f"({min(values):.2f} to {max(values):.2f})"
        )
    alone = {}
    for search_seconds in args.search_seconds:
        work = make_work(tokenizer, args, search_seconds, args.seed)
        alone[f"{search_seconds:g}"] = waits_alone(work, 0.01)
        ratio = alone[f"{search_seconds:g}"]["by turns"] / alone[f"{search_seconds:g}"]["free"]
        print(
            f"search {search_seconds:g} s, computed for 10 ms a token whatever the batch: by turns / free {ratio:.2f}"
        )
    work = make_work(tokenizer, args, 0.0, args.seed)
    turns = [len(turns) for turns in work.turns.values()]
    lengths = [len(turn) for turns in work.turns.values() for turn in turns]
    write_report(
        args.output,
        vars(args),
        rows,
        ratios={f"{search_seconds:g}": statistics.median(values) for search_seconds, values in ratios.items()},
        runs={f"{search_seconds:g}": ways for search_seconds, ways in runs.items()},
        computed_at_10_ms_a_token=alone,
        first_work={"turns": turns, "lengths": lengths, "tokens": work.tokens},
        vllm=version,
        load_before=load,
    )


if __name__ == "__main__":
    main()
