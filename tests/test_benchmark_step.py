"""The step benchmark compares equal work: the same tokens are trained, whoever trains them."""

import argparse

import pytest
from conftest import load_benchmark


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/step.py`, which imports its neighbour `reporting` as a script does."""
    return load_benchmark("step")


def test_ways_do_the_same_work(benchmark, tmp_path):
    """TRL's tool loop and ours in full context train the same tokens; memory adds its scoring and trains other rows."""
    args = argparse.Namespace(
        ways=["trl", "full, λ=0", "memory, λ=1"],
        hidden_size=16,
        num_layers=1,
        objectives=[1, 2],
        questions=2,
        num_generations=2,
        per_device_train_batch_size=2,
        memory_mistake_rate=0.5,
        search_seconds=0.0,
        beta=0.1,
        steps=2,
        clock="wall",
    )
    theirs, full, memory = benchmark.side_by_side(args, str(tmp_path)).values()
    assert theirs["trained"] == full["trained"] != memory["trained"]
    assert all(len(result["seconds"]) == 1 for result in (theirs, full, memory))  # the first step is not measured
    assert "rollout" not in theirs and "memory_scoring" not in full and memory["memory_scoring"][0] > 0
    # The parts are the step: what the callback measures around it leaves little room.
    for result in (full, memory):
        parts = sum(result[part][0] for part in benchmark.PARTS if part in result)
        assert 0 < parts <= result["seconds"][0]
