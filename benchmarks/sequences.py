"""
A train step over rollouts of 1 to 16 turns: sequences of like length per forward against TRL's one padded block.
"recomputed" is the former with `recompute_forwards`, whose peak is that of one forward.

    python benchmarks/sequences.py --output out/benchmarks/sequences.json

Each way runs in a process of its own, for its peak memory; the ways take turns, so that other work on the machine hits
all of them.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from datasets import Dataset
from reporting import print_table, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOTrainer

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.protocol import load_chat_template
from mempo_trl.sequences import Sequence


VOCABULARY = 4096


def make_sequences(rollouts: int, seed: int = 0) -> list[Sequence]:
    """Sequences of rollouts in `context="memory"`: turns from 1 to 16, few of them long; each turn a row of its own."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY) for _ in range(rng.randint(low, high))]

    sequences = []
    for index in range(rollouts):
        turns = min(16, 1 + int(rng.expovariate(1 / 4)))
        prefix = tokens(120, 160)
        prompt = prefix
        for turn in range(turns):
            completion = tokens(40, 200)
            if turn != 1:  # the second turn continues the row of the first
                sequences.append(Sequence(index, prompt, list(completion), [1] * len(completion), []))
            else:
                sequences[-1].completion_ids += response + completion  # noqa: F821
                sequences[-1].loss_mask += [0] * len(response) + [1] * len(completion)  # noqa: F821
            response = tokens(60, 400)
            prompt = prefix + completion + response
    return sequences


def block(sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """TRL's padded block: ids, attention mask, trained tokens, and the width of the completions."""
    prompts = max(len(sequence.prompt_ids) for sequence in sequences)
    completions = max(len(sequence.completion_ids) for sequence in sequences)
    ids = torch.zeros(len(sequences), prompts + completions, dtype=torch.long)
    mask, trained = torch.zeros_like(ids), torch.zeros(len(sequences), completions)
    for row, sequence in enumerate(sequences):
        at = slice(prompts - len(sequence.prompt_ids), prompts + len(sequence.completion_ids))
        ids[row, at] = torch.tensor(sequence.prompt_ids + sequence.completion_ids)
        mask[row, at] = 1
        trained[row, : len(sequence.loss_mask)] = torch.tensor(sequence.loss_mask)
    return ids, mask, trained, completions


def search(query: str) -> str:
    """
    Searches nothing.

    Args:
        query: Anything.
    """
    return query


def make_trainer(args: argparse.Namespace, folder: str) -> MemPOTrainer:
    """A trainer whose forwards are measured; it never plays."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.chat_template = load_chat_template("chatml")
    torch.manual_seed(0)
    if args.model == "tiny":
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = MemPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
        recompute_forwards=args.way == "recomputed",
        gradient_checkpointing=False,
    )
    rows = Dataset.from_dict({"question": ["Who?"] * 2, "golden_answers": [["a"]] * 2})
    return MemPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer, tools=[search])


def measure(args: argparse.Namespace) -> None:
    """One way, in this process: seconds of forward and backward over all micro-batches, padding, and peak memory."""
    parts = []
    for step in range(args.micro_batches):
        parts.append(block(make_sequences(args.rollouts, seed=step)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
        trainer.model.train()
        forward = (
            trainer._get_per_token_logps_and_entropies
            if args.way != "block"
            else GRPOTrainer._get_per_token_logps_and_entropies.__get__(trainer)
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        losses = []
        for ids, mask, trained, completions in parts:
            logps, _, _ = forward(trainer.model, ids, mask, completions, compute_entropy=True)
            loss = -(logps * trained).sum() / trained.sum()
            loss.backward()
            losses.append(loss.item())
        seconds = time.perf_counter() - start
    if args.way != "block":
        padding = statistics.fmean(trainer._metrics["train"]["sequences/padding_frac"])
    else:
        padding = statistics.fmean(1 - mask.sum().item() / mask.numel() for _, mask, _, _ in parts)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "padding": padding, "peak MB": peak, "losses": losses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny' (hidden 128, 4 layers), or a model folder")
    parser.add_argument("--tokenizer", required=True, help="any tokenizer folder; no text is tokenized")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts per micro-batch")
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--max_tokens_per_microbatch", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=["budgeted", "recomputed", "block"], help=argparse.SUPPRESS)
    parser.add_argument("--output", default="out/benchmarks/sequences.json")
    args = parser.parse_args()
    if args.way:
        measure(args)
        return
    runs: dict[str, list[dict]] = {"budgeted": [], "recomputed": [], "block": []}
    for _ in range(args.repeats):
        for way, results in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    assert all(
        abs(ours - theirs) < 1e-3
        for ours, theirs in zip(runs["budgeted"][0]["losses"], runs["block"][0]["losses"], strict=True)
    )
    rows = [
        {
            "way": way,
            "seconds": min(run["seconds"] for run in results),
            "padding": results[0]["padding"],
            "peak MB": min(run["peak MB"] for run in results),
        }
        for way, results in runs.items()
    ]
    ratio = statistics.median(
        b["seconds"] / a["seconds"] for a, b in zip(runs["budgeted"], runs["block"], strict=True)
    )
    print_table(f"{args.micro_batches} micro-batches of {args.rollouts} rollouts, {args.model}", rows)
    print(f"block / budgeted: {ratio:.2f}")
    write_report(args.output, vars(args), rows, ratio=ratio)


if __name__ == "__main__":
    main()
