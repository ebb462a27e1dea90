"""A suite of the learning benchmark for its tests, and the modules of the benchmark."""

import importlib
import sys

import yaml
from conftest import REPOSITORY


# The benchmark's modules import one another as scripts do.
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
try:
    learning, learning_results, learning_tables, memory_content = map(
        importlib.import_module, ("learning", "learning_results", "learning_tables", "memory_content")
    )
finally:
    sys.path.remove(str(REPOSITORY / "benchmarks"))


SUITE = {
    "recipes": {
        "village": "recipes/village/village.yaml",
        "sft": "recipes/village/sft/config.yaml",
        "train": "recipes/village/mempo/config.yaml",
        "evaluate": "recipes/village/evaluate.yaml",
    },
    "seeds": [0, 1],
    "cold_starts": 2,
    "evaluations": 2,
    "window": 2,
    "levels": [0.5],
    "reference": "grpo",
    "settings": {"train": {"max_steps": 4, "learning_rate": 0.5}},
    "regimes": {
        "plain": {"seconds": {"cold_start": 100, "startup": 3, "step": 2, "evaluation": 10}},
        "far": {"arms": ["grpo", "paper"], "test_village": {"objectives": [8]}, "train": {"max_steps": 2}},
    },
    "arms": {
        "grpo": {"train": {"memory_advantage_weight": 0.0}},
        "full": {"sft": {"context": "full"}, "train": {"context": "full"}, "evaluate": {"context": "full"}},
        "paper": None,
        "rare": {"seeds": [1], "train": {"learning_rate": 0.25}},
    },
}


def plan_of(tmp_path, suite: dict = SUITE, **kwargs):
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return learning.Plan(learning.Suite.read(path), tmp_path / "out", **kwargs)
