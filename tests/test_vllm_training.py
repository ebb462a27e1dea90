"""MemPO on a real vLLM server: an adapter is trained on the village, and the server is killed in the middle."""

import subprocess
import sys
import threading

import pytest
import torch
from conftest import REPOSITORY, RecordedMemPOTrainer, config
from peft import LoraConfig
from transformers import AutoTokenizer
from vllm_server import VllmServer

from mempo_trl import BM25Retriever, MemoryRewardCallback, SearchTool, load_questions
from mempo_trl.data.village_model import build_model


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

STEPS = 4


class KeepRollouts(MemoryRewardCallback):
    """The default memory reward; keeps the rollouts."""

    def __init__(self):
        self.rollouts = []

    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        super().on_rollouts_end(args, state, control, rollouts=rollouts, **kwargs)
        self.rollouts.append(rollouts)


@pytest.fixture(scope="module")
def village(tmp_path_factory):
    """The village and a quarter of its cold start: enough for searches, memories and some right answers."""
    folder = tmp_path_factory.mktemp("village")
    recipes = REPOSITORY / "recipes" / "village"

    def run(*arguments: str) -> None:
        done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr[-3000:]

    run("mempo_trl.data.village", "--config", f"{recipes}/village.yaml", "--output_dir", f"{folder}")
    # vLLM's attention on the CPU takes heads of 32, and the village's have 16.
    build_model(AutoTokenizer.from_pretrained(folder / "model"), num_heads=2).save_pretrained(folder / "model")
    run(
        *("mempo_trl.cli", "sft", "--config", f"{recipes}/sft/config.yaml", "--output_dir", f"{folder}/sft"),
        *("--model_name_or_path", f"{folder}/model", "--rollouts", f"{folder}/rollouts.jsonl"),
        *("--max_steps", "350", "--num_cpu_threads_per_process", "1"),
    )
    return folder


@pytest.fixture(scope="module")
def trained(village, vllm_environment, tmp_path_factory):
    """Four steps; the server is killed in the third one, with rollouts under way, and started again."""
    searches = 0
    restarts = []
    retriever = BM25Retriever.from_corpus(f"{village}/corpus.jsonl")

    class Search(SearchTool):
        """Kills the server at a search of the third step."""

        def __call__(self, query: str) -> str:
            nonlocal searches
            if trainer.state.global_step == 2:
                searches += 1
                if searches == 10:
                    server.kill()
                    restarts.append(threading.Thread(target=server.start))
                    restarts[0].start()
            return super().__call__(query)

        __call__.__doc__ = SearchTool.__call__.__doc__

    keep = KeepRollouts()
    with VllmServer(village / "sft", lora=True, max_model_len=1024) as server:
        trainer = RecordedMemPOTrainer(
            model=f"{village}/sft",
            args=config(
                tmp_path_factory.mktemp("run"),
                system_prompt="Answer by searching.",
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=server.url,
                vllm_server_timeout=300.0,
                max_steps=STEPS,
                num_generations=8,
                per_device_train_batch_size=16,
                max_completion_length=64,
                max_turns=8,
                learning_rate=0.003,  # so large that the policies of two steps can be told apart
                lr_scheduler_type="constant",
                beta=0.0,
                memory_token_filter="none",
                answer_template="<think>done</think><answer>{answer}</answer>",
            ),
            train_dataset=load_questions(f"{village}/train.jsonl"),
            tools=[Search(retriever, top_k=1)],
            callbacks=[keep],
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        )
        trainer.train()
        restarts[0].join()
    return trainer, keep.rollouts, server


def test_the_run_goes_on_after_a_restart(trained):
    """All steps are made, every rollout has an outcome, and the log of the server shows two starts."""
    trainer, batches, server = trained
    assert trainer.state.global_step == STEPS == len(batches)
    assert all(rollout.outcome for rollouts in batches for rollout in rollouts)
    assert {len(rollouts) for rollouts in batches} == {16}
    assert max(len(rollout.turns) for rollouts in batches for rollout in rollouts) > 2
    assert server.log_tail(100_000).count("Application startup complete") == 2


def test_each_step_samples_from_its_own_adapter(trained, record_testsuite_property):
    """
    The server's log-probabilities are the trainer's own to 1e-3 in every step, while the policy moves by far more from
    one step to the next: an adapter that came a step late would show.
    """
    trainer, _, _ = trained
    gaps = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "loss" in entry]
    record_testsuite_property("largest gap between server and trainer per step", gaps)
    assert len(gaps) == STEPS and max(gaps) < 1e-3
    # What the policy after all steps says to what was sampled in each of them; the last one may have had no signal.
    moved = []
    for inputs in trainer.inputs_seen:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
        trained_tokens = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        moved.append((logps - inputs["sampling_per_token_logps"])[trained_tokens].abs().max().item())
    record_testsuite_property("largest difference to the last policy per step", moved)
    assert min(moved[:-1]) > 0.05


def test_what_was_sampled_is_trained(trained):
    """Each rollout's sampled ids are found in one row of their step each, token for token, with their mask."""
    trainer, batches, _ = trained
    for step, rollouts in enumerate(batches):
        rows = trainer.inputs_seen[step]
        masked = [
            row[mask.bool()].tolist()
            for row, mask in zip(rows["completion_ids"], rows["completion_mask"] * rows["tool_mask"], strict=True)
        ]
        assert sum(map(len, masked)) == sum(len(rollout.completion_ids) for rollout in rollouts)
        for rollout in rollouts:
            # Turns 1 and 2 share a row; each further turn has its own.
            first = [i for turn in rollout.turns[:2] for i in turn.completion_ids]
            assert first in masked
            assert all(turn.completion_ids in masked for turn in rollout.turns[2:])
