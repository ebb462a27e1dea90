"""The soak benchmark: what became of each query that met a fault."""

import pytest
from conftest import load_benchmark


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/soak.py`, which imports its neighbours as a script does."""
    return load_benchmark("soak")


def test_fates(benchmark):
    """
    Within a minute after a fault a query is answered, or it was within the minute before (a call that was given up
    asks on), or the trainer was killed, or the model was told; else it is lost.
    """

    def request(time, outcome, *queries):
        return {"time": float(time), "outcome": outcome, "queries": list(queries)}

    requests = [
        request(0, "error", "a", "b"),
        request(5, "answered", "a"),
        request(70, "answered", "b"),  # too late: nobody waits any more
        request(100, "answered", "c"),
        request(110, "time-out", "c"),
        request(280, "time-out", "d"),
        request(400, "time-out", "e"),
    ]
    turns = [{"call": {"arguments": {"query": "e"}}, "tool_error": "no answer"}]
    fates = {row.pop("fault"): row for row in benchmark.fates(requests, [{"turns": turns}], killed_at=300.0)}
    nothing = dict.fromkeys(fates["error"], 0)
    assert fates["error"] == {**nothing, "requests": 1, "queries": 2, "answered later": 1, "lost": 1}
    assert fates["time-out"] == {
        **nothing,
        "requests": 3,
        "queries": 3,
        "answered before": 1,
        "cut off by the kill": 1,
        "told to the model": 1,
    }
