"""Run an agent over questions, and say how good and how expensive it is."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .generation import BatchGenerator, run_in_event_loop
from .monitoring import OUTCOMES, peak_tokens, rollout_record, total_tokens
from .protocol import Protocol
from .rewards import NORMALIZERS, score_answer
from .rollout import Rollout, play


def model_eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a turn: the tokenizer's, and those that the model declares (as [`~trl.GRPOTrainer`] takes them)."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({tokenizer.eos_token_id, *declared})


class TransformersEngine:
    """
    Samples batches of turns with `model.generate`, for [`~mempo_trl.generation.BatchGenerator`].

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The agent.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        max_completion_length (`int`):
            Tokens after which a turn is cut.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; 0 is greedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_completion_length: int,
        temperature: float = 1.0,
    ):
        self.model = model
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.eos_token_ids = model_eos_token_ids(model, tokenizer)
        self.max_completion_length = max_completion_length
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.generation_config = GenerationConfig(
            max_new_tokens=max_completion_length,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.eos_token_ids,
            repetition_penalty=1.0,  # as in training; the model's own (1.05 for Qwen2.5-Instruct) would count here
            **(sampling if temperature > 0 else {"do_sample": False}),
        )

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], idle: bool = False) -> tuple[list[list[int]], None]:
        """
        Sample one turn for each prompt.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            idle (`bool`, *optional*, defaults to `False`):
                Ignored.

        Returns:
            `tuple[list[list[int]], None]`: Sampled ids up to the first end-of-turn id, and no log-probabilities.
        """
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        output = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=self.generation_config,
        )
        completions = []
        for ids in output[:, width:].tolist():
            end = next((k for k, token_id in enumerate(ids) if token_id in self.eos_token_ids), len(ids) - 1)
            completions.append(ids[: end + 1])
        return completions, None


def run_agent(
    questions: list[dict],
    *,
    protocol: Protocol,
    engine: TransformersEngine,
    max_turns: int,
    batch_size: int,
    max_prompt_length: int | None = None,
    on_batch: Callable[[list[Rollout]], None] | None = None,
) -> list[Rollout]:
    """
    Play one rollout per question.

    Args:
        questions (`list[dict]`):
            Rows with `question` and `golden_answers` (objectives x aliases).
        protocol ([`~mempo_trl.protocol.Protocol`]):
            Prompts, tools and parsing.
        engine ([`TransformersEngine`]):
            Samples the turns.
        max_turns (`int`):
            Turns after which a rollout without an answer ends.
        batch_size (`int`):
            Rollouts that are played at the same time.
        max_prompt_length (`int`, *optional*):
            Tokens above which the next prompt does not fit.
        on_batch (`Callable`, *optional*):
            Called with the rollouts of each batch.

    Returns:
        `list[Rollout]`: In the order of the questions.
    """
    rollouts = []
    for start in range(0, len(questions), batch_size):
        generator = BatchGenerator(engine, engine.max_completion_length, engine.eos_token_ids)
        batch = [
            play(
                row["question"],
                row["golden_answers"],
                protocol=protocol,
                generator=generator,
                call_tool=protocol.toolbox.call,
                max_turns=max_turns,
                max_prompt_length=max_prompt_length,
            )
            for row in questions[start : start + batch_size]
        ]
        played = run_in_event_loop(generator.run(batch))
        rollouts += played
        if on_batch is not None:
            on_batch(played)
    return rollouts


def summarize(rollouts: list[Rollout], normalizer: str = "squad") -> dict[str, Any]:
    """
    Figures of an evaluation. Every rollout counts, whatever its outcome.

    Args:
        rollouts (`list[Rollout]`):
            Played rollouts with golden answers.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            Normaliser of `exact_match` and `f1`; those under the other one are there by name as well.

    Returns:
        `dict[str, Any]`: Means over rollouts. `exact_match` and `f1` are means over objectives first;
        `tokens_total_mean` sums prompt and completion over turns, `tokens_peak_mean` is that of the longest turn, both
        with system prompt and question counted.
    """
    scores = {
        (metric, name): [
            statistics.fmean(score_answer(rollout.answer, rollout.golden_answers, metric, name))
            for rollout in rollouts
        ]
        for metric in ("em", "f1")
        for name in NORMALIZERS
    }
    summary = {
        "num_rollouts": len(rollouts),
        "normalizer": normalizer,
        "exact_match": statistics.fmean(scores["em", normalizer]),
        "f1": statistics.fmean(scores["f1", normalizer]),
    }
    for metric, key in (("exact_match", "em"), ("f1", "f1")):
        for name in NORMALIZERS:
            summary[f"{metric}_{name}"] = statistics.fmean(scores[key, name])
    summary |= {
        "format_ok_frac": statistics.fmean(rollout.well_formed for rollout in rollouts),
        "tokens_total_mean": statistics.fmean(total_tokens(rollout) for rollout in rollouts),
        "tokens_peak_mean": statistics.fmean(peak_tokens(rollout) for rollout in rollouts),
        "turns_mean": statistics.fmean(len(rollout.turns) for rollout in rollouts),
        "searches_mean": statistics.fmean(
            sum(turn.outcome == "tool_call" and turn.response is not None for turn in rollout.turns)
            for rollout in rollouts
        ),
        "tool_errors": sum(turn.tool_error is not None for rollout in rollouts for turn in rollout.turns),
        "outcomes": {outcome: sum(rollout.outcome == outcome for rollout in rollouts) for outcome in OUTCOMES},
    }
    return summary


def summarize_by_objectives(rollouts: list[Rollout], normalizer: str = "squad") -> dict[str, dict[str, Any]]:
    """[`summarize`] of all rollouts (`"all"`), and of those with each number of objectives (`"1"`, `"2"`, …)."""
    counts = sorted({len(rollout.golden_answers) for rollout in rollouts})
    groups = {str(k): [rollout for rollout in rollouts if len(rollout.golden_answers) == k] for k in counts}
    groups = {"all": rollouts, **groups}
    return {name: summarize(group, normalizer) for name, group in groups.items()}


def write_evaluation(folder: str, report: dict[str, Any], rollouts: list[Rollout]) -> None:
    """
    Write an evaluation: `evaluation.json` with the report and `rollouts.jsonl` with every rollout.

    Args:
        folder (`str`):
            Where they go.
        report (`dict`):
            What was evaluated and with which settings, and the figures.
        rollouts (`list[Rollout]`):
            The rollouts.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "rollouts.jsonl", "w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(rollout_record(rollout), ensure_ascii=False) + "\n")
    (path / "evaluation.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
