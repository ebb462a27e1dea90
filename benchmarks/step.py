"""
A MemPO step against a step of TRL's `GRPOTrainer` with its tool loop: same model, questions, searches and rollouts.

    python benchmarks/step.py --output out/benchmarks/step.json

The rollouts are scripted in the village and forced token by token, so that every way generates, searches and trains the
same texts and pays for its forwards. The trainers take turns, one step each, so that other work on the machine hits all of
them; ratios are medians over the steps. `--clock cpu` counts the processor's seconds instead of the wall's, on a machine
that others keep busy. Peak memory is that of a further run, of each way in a process of its own. `trl`
and `full, λ=0` train the same rows; `memory` rewrites the context in every turn, as the paper does.
"""

import argparse
import contextlib
import cProfile
import hashlib
import json
import queue
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
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
    # As published: the history is scored too, which `memory_baseline="previous"` saves.
    "memory, λ=1": {"context": "memory", "memory_advantage_weight": 1.0, "memory_baseline": "history"},
}
PARTS = ("rollout", "memory_scoring", "logps", "train", "other")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
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
        generate = self.model.generate

        def forced(input_ids, **kwargs):
            processor = Forced(self._texts, input_ids.size(1), self._tokenizer.eos_token_id)
            return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([processor]), **kwargs)

        self.model.generate = forced

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


class TakeTurns(TrainerCallback):
    """
    Lets trainers in several threads make one step after the other, each with its own random state, and keeps the
    seconds of each step.
    """

    def __init__(self, own: threading.Semaphore, next_one: threading.Semaphore, clock: Callable[[], float]):
        self.own, self.next_one, self.clock = own, next_one, clock
        self.seconds = []

    def begin(self):
        self.own.acquire()
        torch.manual_seed(0)
        self.start = self.clock()

    def end(self):
        self.next_one.release()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self.clock() - self.start)
        random_state = torch.get_rng_state()
        self.next_one.release()
        self.own.acquire()
        torch.set_rng_state(random_state)
        self.start = self.clock()


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


def make_trainer(args: argparse.Namespace, way: str, folder: str) -> GRPOTrainer:
    """The trainer of a way, with everything that it needs."""
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
    model_folder = f"{folder}/model"  # where the reference is loaded from
    model.save_pretrained(model_folder)

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
    if WAYS[way] is None:
        return ForcedGRPO(model_folder, args=GRPOConfig(**settings), train_dataset=data, **shared)
    config = MemPOConfig(
        **settings,
        **WAYS[way],
        max_turns=32,
        system_prompt=SYSTEM_PROMPT,
        alarms=False,
        log_rollouts=False,
    )
    return ForcedMemPO(model_folder, args=config, train_dataset=data.remove_columns("prompt"), **shared)


def peak_memory(args: argparse.Namespace) -> float:
    """MB that one way takes in this process, above what it took before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, args.way, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with cProfile.Profile() if args.profile else contextlib.nullcontext() as profile:
            trainer.train()
        if args.profile:
            profile.dump_stats(args.profile)
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def side_by_side(args: argparse.Namespace, folder: str) -> dict[str, dict]:
    """Steps of all ways in turn: for each way the seconds of its steps, their parts, and what it trained."""
    turns = [threading.Semaphore(0) for _ in args.ways]
    runs, errors = {}, queue.Queue()
    for number, way in enumerate(args.ways):
        trainer = make_trainer(args, way, f"{folder}/{number}")
        callback = TakeTurns(turns[number], turns[(number + 1) % len(turns)], CLOCKS[args.clock])
        if args.clock == "cpu" and way != "trl":
            trainer._timer._clock = CLOCKS[args.clock]
        trainer.add_callback(callback)
        runs[way] = trainer, callback

    def run(trainer: GRPOTrainer, callback: TakeTurns) -> None:
        try:
            callback.begin()
            trainer.train()
            callback.end()
        except BaseException as error:
            errors.put(error)
        else:
            errors.put(None)

    for run_of_way in runs.values():
        threading.Thread(target=run, args=run_of_way, daemon=True).start()
    turns[0].release()
    for _ in runs:
        error = errors.get()
        if error is not None:  # the others wait for their turn in vain
            raise error
    results = {}
    for way, (trainer, callback) in runs.items():
        logs = [log for log in trainer.state.log_history if "reward" in log]
        results[way] = {"seconds": callback.seconds[1:], "trained": trainer.trained.hexdigest()}  # the first warms up
        for part in PARTS:
            if f"time/{part}" in logs[0]:
                results[way][part] = [log[f"time/{part}"] for log in logs[1:]]
        results[way]["turns"] = statistics.fmean(
            len(script) for samples in trainer.scripts.values() for script in samples
        )
    return results


def ratio(above: list[float], below: list[float]) -> float:
    """Median of the ratios, step by step."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


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
    parser.add_argument("--steps", type=int, default=6, help="the first one is not measured")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help="run this way only, for its peak memory")
    parser.add_argument("--profile", help="with `--way`: file for what cProfile finds")
    parser.add_argument("--output", default="out/benchmarks/step.json")
    args = parser.parse_args()
    if args.way:
        print(peak_memory(args))
        return
    peaks = {}
    for way in args.ways:  # first, because a process starts with the peak of the one that made it
        command = [sys.executable, __file__, *sys.argv[1:], "--steps", "2", "--way", way]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peaks[way] = float(output.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        results = side_by_side(args, folder)
    rows, ratios = [], {}
    for way, result in results.items():
        row = {"way": way, "step, s": statistics.median(result["seconds"])}
        row |= {part: statistics.median(result[part]) if part in result else "" for part in PARTS}
        rows.append(row | {"peak MB": peaks[way]})
        if "trl" in results and way != "trl":
            ratios[f"{way} / trl"] = ratio(result["seconds"], results["trl"]["seconds"])
        if "memory_scoring" in result:
            ratios[f"memory scoring / step ({way})"] = ratio(result["memory_scoring"], result["seconds"])
    if {"trl", "full, λ=0"} <= results.keys():
        assert results["trl"]["trained"] == results["full, λ=0"]["trained"], "they trained different tokens"
    mean_turns = next(iter(results.values()))["turns"]
    print_table(f"{args.questions} x {args.num_generations} rollouts of {mean_turns:.1f} turns", rows)
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    write_report(args.output, vars(args), rows, ratios=ratios, results=results)


if __name__ == "__main__":
    main()
