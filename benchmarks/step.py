"""
A MemPO step against a step of TRL's `GRPOTrainer` with its tool loop: same model, questions, searches and rollouts.

    python benchmarks/step.py --output out/benchmarks/step.json

The rollouts are scripted in the village and forced token by token, so that every way generates, searches and trains the
same texts and pays for its forwards. Each way runs in a process of its own, for its peak memory; the ways take turns, so
that other work on the machine hits all of them. `trl` and `full, λ=0` train the same rows; `memory` rewrites the context
in every turn, as the paper does.
"""

import argparse
import cProfile
import hashlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import trl
from datasets import Dataset
from reporting import print_table, write_report
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from mempo_trl import BM25Retriever, MemPOConfig, MemPOTrainer, SearchTool
from mempo_trl.data.village import Village
from mempo_trl.data.village_model import build_model, build_tokenizer
from mempo_trl.retrieval.document import Document
from mempo_trl.rewards import exact_match


WAYS = {
    "trl": None,
    "full, λ=0": {"context": "full", "memory_advantage_weight": 0.0},
    "memory, λ=0": {"context": "memory", "memory_advantage_weight": 0.0},
    "memory, λ=1": {"context": "memory", "memory_advantage_weight": 1.0},
}
PARTS = ("rollout", "memory_scoring", "logps", "train", "other")
SYSTEM_PROMPT = "Search for what you need."


class Forced(LogitsProcessor):
    """Leaves only the next token of a script in each row."""

    def __init__(self, scripts: list[list[int]], start: int, end: int):
        longest = max(map(len, scripts))
        self.tokens = torch.tensor([script + [end] * (longest - len(script)) for script in scripts])  # (B, C)
        self.start = start

    def __call__(self, input_ids, scores):
        column = self.tokens[:, input_ids.size(1) - self.start].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, column.unsqueeze(1), 0.0)


class ForcedRollouts:
    """Mixin for a trainer whose policy says what `scripts[question][sample]` says, turn by turn."""

    def __init__(self, *args, scripts, **kwargs):
        super().__init__(*args, **kwargs)
        self.scripts = scripts
        self.trained = hashlib.sha256()
        self.times = []
        generate = self.model.generate

        def forced(input_ids, **kwargs):
            processor = Forced(self._texts, input_ids.size(1), self._tokenizer.eos_token_id)
            return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([processor]), **kwargs)

        self.model.generate = forced
        self.add_callback(StepEnds(self.times))

    def _generate(self, prompts):
        seen = Counter()
        self._live = []
        for messages in prompts:
            question = messages[-1]["content"]
            self._live.append((self.scripts[question][seen[question]], 0))
            seen[question] += 1
        self._first = True
        return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not self._first:
            self._live = [(script, turn + 1) for script, turn in self._live if turn + 1 < len(script)]
        self._first = False
        assert len(self._live) == len(prompt_ids)
        self._texts = [script[turn] for script, turn in self._live]
        ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        assert ids == self._texts
        return ids, logps

    def _compute_loss(self, model, inputs):
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        self.trained.update(json.dumps(inputs["completion_ids"][mask].tolist()).encode())
        return super()._compute_loss(model, inputs)


class StepEnds(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self, times: list[float]):
        self.times = times

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


class ForcedGRPO(ForcedRollouts, GRPOTrainer):
    pass


class ForcedMemPO(ForcedRollouts, MemPOTrainer):
    pass


def reward(completions, golden_answers, **kwargs) -> list[float]:
    """Exact match of the last answer, for both trainers."""
    answers = [messages[-1]["content"].partition("<answer>")[2].partition("</answer>")[0] for messages in completions]
    return [
        statistics.fmean(map(exact_match, answer.split("; "), golden))
        for answer, golden in zip(answers, golden_answers, strict=True)
    ]


def make_trainer(args: argparse.Namespace, folder: str) -> GRPOTrainer:
    village = Village.generate(0, num_people=40)
    tool = SearchTool(BM25Retriever.from_corpus(Document(**row) for row in village.corpus()), top_k=1)

    def search(query: str) -> str:
        """
        Searches the corpus and returns the passages that match best.

        Args:
            query: The search query.

        Returns:
            The passages found, each with its title.
        """
        time.sleep(args.search_seconds)
        return tool(query)

    rows = village.questions("train", 2 * args.questions * args.steps, args.objectives, seed=0)
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
    tokenizer = build_tokenizer(village.texts())
    system = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": rows[0]["question"]}],
        tools=[get_json_schema(search)],
        chat_template=template,
        tokenize=False,
    )
    tokenizer = build_tokenizer([*village.texts(), system])
    tokenizer.chat_template = template
    tokenizer.padding_side = "left"
    model = build_model(tokenizer, args.hidden_size, args.num_layers)
    model.config.max_position_embeddings = 8192

    rng, scripts = random.Random(0), {}
    for row in rows:
        played = [
            village.expert_rollout(row, rng, tool, args.memory_mistake_rate) for _ in range(args.num_generations)
        ]
        scripts[row["question"]] = [
            [tokenizer(turn["completion"])["input_ids"] + [tokenizer.eos_token_id] for turn in rollout["turns"]]
            for rollout in played
        ]
    data = Dataset.from_list(
        [
            {
                "question": row["question"],
                "golden_answers": row["golden_answers"],
                "prompt": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": row["question"]},
                ],
            }
            for row in rows
        ]
    )
    settings = dict(
        output_dir=folder,
        bf16=torch.cuda.is_available(),
        report_to="none",
        beta=args.beta,
        num_generations=args.num_generations,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.questions * args.num_generations // args.per_device_train_batch_size,
        max_completion_length=3000,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        seed=0,
    )
    shared = dict(reward_funcs=reward, processing_class=tokenizer, tools=[search], scripts=scripts)
    if WAYS[args.way] is None:
        return ForcedGRPO(model, args=GRPOConfig(**settings), train_dataset=data, **shared)
    config = MemPOConfig(
        **settings,
        **WAYS[args.way],
        max_turns=32,
        system_prompt=SYSTEM_PROMPT,
        alarms=False,
        log_rollouts=False,
    )
    return ForcedMemPO(model, args=config, train_dataset=data.remove_columns("prompt"), **shared)


def measure(args: argparse.Namespace) -> None:
    """One way, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        trainer.train()
        if args.profile:
            profile.disable()
            profile.dump_stats(args.profile)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    logs = [log for log in trainer.state.log_history if "reward" in log][1:]  # the first step warms up
    turns = [len(script) for samples in trainer.scripts.values() for script in samples]
    result = {
        "seconds": statistics.median(b - a for a, b in zip(trainer.times, trainer.times[1:], strict=False)),
        "peak MB": peak,
        "turns": statistics.fmean(turns),
        "reward": [log["reward"] for log in logs],
        "trained": trainer.trained.hexdigest(),
    }
    for part in PARTS:
        values = [log[f"time/{part}"] for log in logs if f"time/{part}" in log]
        result[part] = statistics.median(values) if values else None
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=64, help="of the village's model; 64 is the quickstart's")
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--objectives", type=int, nargs="+", default=[3, 4, 5], help="per question")
    parser.add_argument("--questions", type=int, default=2, help="per step")
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--memory_mistake_rate", type=float, default=0.2, help="what lets rollouts of a group differ")
    parser.add_argument("--search_seconds", type=float, default=0.0, help="further time that a search takes")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5, help="the first one is not measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--profile", help="with `--way`: write what cProfile finds to this file")
    parser.add_argument("--output", default="out/benchmarks/step.json")
    args = parser.parse_args()
    if args.way:
        measure(args)
        return
    runs: dict[str, list[dict]] = {way: [] for way in args.ways}
    for _ in range(args.repeats):
        for way, results in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    rows = []
    for way, results in runs.items():
        best = min(results, key=lambda run: run["seconds"])
        row = {"way": way, "step, s": best["seconds"]}
        row |= {part: "" if best[part] is None else best[part] for part in PARTS}
        row["peak MB"] = min(run["peak MB"] for run in results)
        rows.append(row)
    ratios = {}
    if {"trl", "full, λ=0"} <= runs.keys():
        pairs = list(zip(runs["full, λ=0"], runs["trl"], strict=True))
        assert all(ours["trained"] == theirs["trained"] for ours, theirs in pairs), "the ways trained different tokens"
        ratios["full, λ=0 / trl"] = statistics.median(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
    if "memory, λ=1" in runs:
        ratios["memory scoring / step"] = statistics.median(
            run["memory_scoring"] / sum(run[part] for part in PARTS) for run in runs["memory, λ=1"]
        )
    turns = statistics.fmean(run["turns"] for results in runs.values() for run in results)
    print_table(f"{args.questions} x {args.num_generations} rollouts of {turns:.1f} turns", rows)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
    write_report(args.output, vars(args), rows, ratios=ratios, turns=turns, runs=runs)


if __name__ == "__main__":
    main()
