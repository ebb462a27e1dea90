"""The rollouts benchmark: both ways do the work of the script, one with a barrier and one without."""

import argparse
import itertools

import pytest
from conftest import load_benchmark
from stub_teacher import StubServer, completion

from mempo_trl.data.village import Village
from mempo_trl.data.village_model import build_tokenizer
from mempo_trl.parsing import parse_turn


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/rollouts.py`, which imports its neighbour `reporting` as a script does."""
    return load_benchmark("rollouts")


@pytest.fixture(scope="module")
def village_tokenizer():
    return build_tokenizer(Village.generate().texts())


def arguments(**kwargs) -> argparse.Namespace:
    defaults = dict(work="skewed", rollouts=8, mean_turns=3.0, median_length=60, length_sigma=0.7)
    return argparse.Namespace(**{**defaults, **kwargs})


def sampled(request):
    """What a vLLM server does with `ignore_eos`."""
    return completion([5] * request.body["max_tokens"], finish_reason="length")


def test_waits_alone(benchmark):
    """By hand: two rollouts, of turns of 10 and 30 tokens with a search of 2 s between, and of one turn of 50 tokens."""
    work = benchmark.Work(
        turns={"a": [[0] * 10, [0] * 30], "b": [[0] * 50]}, search_seconds={"0 0": 2.0, "0 1": 9.0, "1 0": 9.0}
    )
    # At 0.1 s a token: 1 + 2 + 3 = 6 s and 5 s; or 5 + 2 s for the first turns and 3 s for the second one. The last
    # turn of a rollout makes no search.
    assert benchmark.waits_alone(work, 0.1) == pytest.approx({"free": 6.0, "by turns": 10.0})


def test_work(benchmark, village_tokenizer):
    """The script's turns are well-formed, of skewed numbers and lengths within the limits, and drawn from the seed."""
    work = benchmark.make_work(village_tokenizer, arguments(rollouts=400), 0.2, seed=1)
    counts = [len(turns) for turns in work.turns.values()]
    lengths = [len(turn) for turns in work.turns.values() for turn in turns]
    # Geometric with mean 3 (the cut at 16 takes 0.5% of it away), standard deviation of the mean sqrt(6 / 400) = 0.12.
    assert 2.6 < sum(counts) / len(counts) < 3.4 and min(counts) == 1 and 8 < max(counts) <= 16
    assert 24 <= min(lengths) < 30 and 200 < max(lengths) <= 400 and 55 < sorted(lengths)[len(lengths) // 2] < 65
    assert 0.1 <= min(work.search_seconds.values()) < max(work.search_seconds.values()) <= 0.3
    for turns in work.turns.values():
        parsed = [parse_turn(village_tokenizer.decode(turn[:-1]), lambda name, arguments: None) for turn in turns]
        assert [turn.outcome for turn in parsed] == ["tool_call"] * (len(turns) - 1) + ["answer"]
        assert all(turn.well_formed(memory_required=True) for turn in parsed)
    again = benchmark.make_work(village_tokenizer, arguments(rollouts=400), 0.2, seed=1)
    assert again == work != benchmark.make_work(village_tokenizer, arguments(rollouts=400), 0.2, seed=2)
    equal = benchmark.make_work(village_tokenizer, arguments(work="equal"), 0.2, seed=1)
    assert {tuple(map(len, turns)) for turns in equal.turns.values()} == {(60, 60, 60)}
    assert set(equal.search_seconds.values()) == {0.2}


@pytest.fixture(autouse=True)
def no_metrics(benchmark, monkeypatch):
    """The stub makes no forward passes to be counted."""
    count = itertools.count()
    monkeypatch.setattr(benchmark, "engine_steps", lambda url: next(count))


def test_ways_do_the_same_work(benchmark, village_tokenizer):
    """Both ways send the same prompts with the same numbers of tokens, and play the turns of the script."""
    work = benchmark.make_work(village_tokenizer, arguments(), 0.0, seed=0)
    sent, played = {}, {}
    for way in benchmark.WAYS:
        with StubServer(sampled) as server:
            figures, played[way] = benchmark.measure(way, work, village_tokenizer, server.url, "policy", way)
        sent[way] = sorted((r.body["prompt"], r.body["max_tokens"], r.body["ignore_eos"]) for r in server.requests)
        assert {request.body["cache_salt"] for request in server.requests} == {way}
        assert figures["waited"] > 0 and 0 < figures["live"] <= 8 and 0 <= figures["idle"] < 1
    assert sent["free"] == sent["by turns"] and played["free"] == played["by turns"]
    assert [[ids for _, ids in turns] for turns in played["free"]] == list(work.turns.values())


def test_barrier(benchmark, village_tokenizer):
    """By turns, the requests of a turn follow those of the one before; freely, a rollout passes one that searches."""
    work = benchmark.make_work(village_tokenizer, arguments(work="equal"), 0.0, seed=0)
    work.search_seconds["0 0"] = 1.0  # the first search of the first rollout; the others have no delay
    order = {}
    for way in benchmark.WAYS:
        with StubServer(sampled) as server:
            benchmark.measure(way, work, village_tokenizer, server.url, "policy", way)
        texts = [village_tokenizer.decode(request.body["prompt"]) for request in server.requests]
        # A prompt holds the query of the turn before it: "number turn".
        order[way] = [
            1 + int(text.split('"query": "')[1].split('"')[0].split()[1]) if "query" in text else 0 for text in texts
        ]
    assert order["by turns"] == [0] * 8 + [1] * 8 + [2] * 8
    assert sorted(order["free"]) == order["by turns"] and order["free"][-2:] == [1, 2]
