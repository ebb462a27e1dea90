"""
What the memory saves: tokens of `context=memory` against `context=full` over 2 to 10 objectives.

    python benchmarks/tokens.py --output_dir out/benchmarks/tokens
    python benchmarks/tokens.py --output_dir out/benchmarks/tokens --scripted_only

The same questions are played twice in each context: by the script, which is always right, so that the comparison is
one at equal exact match, and by two small agents that were trained alike, on the same scripted rollouts with equally
many steps. It runs the commands that a user would type. What is in the output folder already is not made again.
"""

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from reporting import print_table, write_report
from transformers import AutoTokenizer

from mempo_trl.data.cold_start import read_rollouts, replay
from mempo_trl.data.village import SYSTEM_PROMPT, Village
from mempo_trl.data.village_model import build_model
from mempo_trl.evaluation.comparison import compare_pairs, pair
from mempo_trl.evaluation.metrics import bootstrap_sums, divide, interval, rollout_figures
from mempo_trl.monitoring import rollout_record
from mempo_trl.protocol import Protocol
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.rollout import Rollout
from mempo_trl.runner import read_records
from mempo_trl.tools import Toolbox


RECIPES = Path(__file__).parents[1] / "recipes" / "village" / "tokens"
CONTEXTS = ("memory", "full")
TOP_KS = (1, 3)  # passages a search
MODEL = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "seed": 0}
MAX_POSITIONS = 4096  # the scripted rollouts need 1,700 at most, and an agent that loses its way some more
BATCHES = {"memory": {"short": 16, "long": 8}, "full": {"short": 6, "long": 1}}  # sequences of equally many rollouts
SHORT = 3  # objectives
PARTS = (("short", "short", 0), ("long", "long", 0), ("long", "more", 1))  # recipe, name of the folder, seed
COUNTS = {
    "total": "tokens_total",
    "peak": "tokens_peak",
    "total, no prefix": "tokens_total_without_prefix",
    "peak, no prefix": "tokens_peak_without_prefix",
    "computed": "tokens_computed",
}
DEFINITIONS = {
    "total": "prompt and completion of every turn, summed over the turns",
    "peak": "prompt and completion of the longest turn",
    "no prefix": "without system prompt and question, which every turn's prompt starts with",
    "computed": "tokens that have to be computed where a perfect cache keeps everything that the rollout had before "
    "(prompts and sampled tokens) and reuses the longest common start of a prompt",
}


def run(*command: str) -> None:
    """Run a command of this Python environment, show it, stop on failure."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSON Lines file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def without_memory(rollout: dict) -> dict:
    """A scripted rollout for `context="full"`: it searches and answers in the same way, and writes no memory."""
    turns = [
        turn | {"completion": re.sub(r"<mem>.*?</mem>", "", turn["completion"], flags=re.DOTALL)}
        for turn in rollout["turns"]
    ]
    return rollout | {"turns": turns}


def computed_tokens(rollout: Rollout) -> int:
    """Tokens that are computed under a perfect prefix cache: what follows the longest start that was there before."""
    cached: list[list[int]] = []
    count = 0
    for turn in rollout.turns:
        reused = max((common_start(turn.prompt_ids, ids) for ids in cached), default=0)
        count += len(turn.prompt_ids) - reused + len(turn.completion_ids)
        cached.append(turn.prompt_ids + turn.completion_ids)
    return count


def common_start(first: list[int], second: list[int]) -> int:
    """Length of the longest common start."""
    for length, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return length
    return min(len(first), len(second))


def make_world(out: Path) -> None:
    """The village, the scripted rollouts of both contexts, and the untrained model."""
    village, config = out / "village", str(RECIPES / "village.yaml")
    run("mempo_trl.data.village", "--config", config, "--output_dir", str(village))
    model = build_model(AutoTokenizer.from_pretrained(village / "model"), **MODEL)
    model.config.max_position_embeddings = MAX_POSITIONS
    model.save_pretrained(village / "model")
    rollouts = {"memory": list(read_rollouts(village / "rollouts.jsonl"))}
    rollouts["full"] = [without_memory(rollout) for rollout in rollouts["memory"]]
    for context, long in rollouts.items():
        short = [rollout for rollout in long if len(rollout["golden_answers"]) <= SHORT]
        for part, chosen in (("short", short), ("long", long)):
            lines = "".join(json.dumps(rollout) + "\n" for rollout in chosen)
            (village / f"rollouts_{context}_{part}.jsonl").write_text(lines, encoding="utf-8")


def train(out: Path, context: str) -> None:
    """The cold start of one context in its parts; what is there is not trained again."""
    start = out / "village" / "model"
    for part, name, seed in PARTS:
        folder = out / f"{context}_{name}"
        if not (folder / "model.safetensors").exists():
            run(
                "mempo_trl.cli", "sft", "--config", str(RECIPES / "sft" / f"config_{part}.yaml"),
                "--model_name_or_path", str(start), "--context", context,
                "--rollouts", str(out / "village" / f"rollouts_{context}_{part}.jsonl"),
                "--per_device_train_batch_size", str(BATCHES[context][part]), "--seed", str(seed),
                "--output_dir", str(folder),
            )  # fmt: skip
        start = folder


def evaluate(out: Path, context: str) -> list[dict]:
    """The records of an agent on the held-out questions; an evaluation that was killed goes on."""
    model = out / f"{context}_{PARTS[-1][1]}"
    folder = model.with_name(f"{model.name}_evaluation")
    run(
        "mempo_trl.cli", "evaluate", "--config", str(RECIPES / "evaluate.yaml"),
        "--model_name_or_path", str(model), "--context", context,
        "--dataset_name", str(out / "village" / "test.jsonl"),
        "--corpus_path", str(out / "village" / "corpus.jsonl"), "--output_dir", str(folder),
    )  # fmt: skip
    return read_records(folder / "rollouts.jsonl")


def make_protocols(out: Path, top_k: int) -> dict[str, Protocol]:
    """The protocol of each context, with the search of the village."""
    tokenizer = AutoTokenizer.from_pretrained(out / "village" / "model")
    search = SearchTool(BM25Retriever.from_corpus(out / "village" / "corpus.jsonl"), top_k=top_k)
    return {
        context: Protocol(tokenizer, Toolbox([search]), context=context, system_prompt=SYSTEM_PROMPT)
        for context in CONTEXTS
    }


def script(rows: list[dict], village: Village, protocols: dict[str, Protocol]) -> dict[str, list[dict]]:
    """Records of the scripted rollouts of some questions in each context."""
    records: dict[str, list[dict]] = {context: [] for context in CONTEXTS}
    search = protocols["memory"].toolbox.tools["search"]
    for row in rows:
        scripted = village.expert_rollout(row, random.Random(0), search)
        for context, version in (("memory", scripted), ("full", without_memory(scripted))):
            rollout = replay(version, protocols[context])
            record = rollout_record(rollout, id=row["id"], sample=0)
            records[context].append(record | {"tokens_computed": computed_tokens(rollout)})
    return records


def add_computed_tokens(records: list[dict], protocol: Protocol) -> list[dict]:
    """Records of an agent with `tokens_computed`; the texts of its turns are tokenized for it."""
    return [record | {"tokens_computed": computed_tokens(replay(record, protocol))} for record in records]


def saving(pairs: list[tuple[dict, dict]]) -> dict:
    """What the second rollouts save in computed tokens, as `compare_pairs` says it of the other counts."""
    counts = np.array([[record["tokens_computed"] for record in sides] for sides in pairs], dtype=float)  # (Q, 2)
    first, second = counts.mean(axis=0)
    sums = bootstrap_sums(counts)
    ends = interval(100 * (1 - divide(sums[:, 1:], sums[:, :1])))[:, 0]
    return {
        "first": first,
        "second": second,
        "saving_percent": 100 * (1 - second / first),
        "saving_percent_ci95": ends.tolist(),
    }


def compare(records: dict[str, list[dict]]) -> dict[str, dict]:
    """Memory against full context by number of objectives."""
    pairs = pair(records["full"], records["memory"], ("full", "memory"))
    groups: dict[str, list] = {}
    for one, other in pairs:
        groups.setdefault(str(len(one["golden_answers"])), []).append((one, other))
    return {
        name: compare_pairs(groups[name]) | {"tokens_computed": saving(groups[name])}
        for name in sorted(groups, key=int)
    }


def both_right(records: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """The records of the questions that both contexts answered right in every objective."""
    right = [
        {record["id"] for record in records[context] if rollout_figures(record)["exact_match_squad"] == 1}
        for context in CONTEXTS
    ]
    ids = set.intersection(*right)
    return {context: [record for record in records[context] if record["id"] in ids] for context in CONTEXTS}


def table(results: dict[str, dict]) -> list[dict]:
    """Rows for a terminal, one per number of objectives and count of tokens; EM is that of memory / full."""
    rows = []
    for objectives, result in results.items():
        exact = result["exact_match"]
        for name, key in COUNTS.items():
            entry = result[key]
            low, high = entry["saving_percent_ci95"]
            rows.append(
                {
                    "k": objectives,
                    "EM": f"{exact['second']:.3f} / {exact['first']:.3f}",
                    "tokens": name,
                    "memory": round(entry["second"]),
                    "full": round(entry["first"]),
                    "saved % (95%)": f"{entry['saving_percent']:.1f} ({low:.1f}, {high:.1f})",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="out/benchmarks/tokens")
    parser.add_argument("--scripted_only", action="store_true", help="without the agents")
    args = parser.parse_args()

    out = Path(args.output_dir)
    if not (out / "village" / "rollouts_full_long.jsonl").exists():
        make_world(out)
    rows = read_rows(out / "village" / "test.jsonl")
    village = Village.generate(seed=0, num_people=60)  # as the recipe says
    protocols = {top_k: make_protocols(out, top_k) for top_k in TOP_KS}
    scripted = {top_k: script(rows, village, protocols[top_k]) for top_k in TOP_KS}
    results = {f"script, {top_k} passages a search": compare(records) for top_k, records in scripted.items()}
    if not args.scripted_only:
        agents = {}
        for context in CONTEXTS:
            train(out, context)
            agents[context] = add_computed_tokens(evaluate(out, context), protocols[1][context])
        results["agents, 1 passage a search"] = compare(agents)
        # An agent that gives up early is cheap, so the two are also compared where each has every answer right, and the
        # one with memory is compared with a full context that makes no mistake.
        if (right := both_right(agents))["memory"]:
            results["agents, 1 passage a search, both right"] = compare(right)
        mixed = {"memory": agents["memory"], "full": scripted[1]["full"]}
        results["agent with memory, script with full context"] = compare(mixed)
    for name, result in results.items():
        print_table(name, table(result))
    settings = vars(args) | {"model": MODEL, "definitions": DEFINITIONS}
    flat = [{"played by": name} | row for name, result in results.items() for row in table(result)]
    write_report(out / "tokens.json", settings, flat, results=results)
    print(f"\nFigures: {out / 'tokens.json'}. Tokens: " + "; ".join(f"{k}: {v}" for k, v in DEFINITIONS.items()) + ".")


if __name__ == "__main__":
    main()
