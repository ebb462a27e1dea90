"""The memory reward: how much better the gold answer is predicted from a memory than from its baseline."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from .config import ANSWER_TEMPLATE
from .rollout import Rollout
from .scoring import ScoringRequest
from .token_spans import decode, token_spans, tokens_of


@dataclass(frozen=True)
class Answer:
    """
    The gold answer as a continuation.

    Args:
        ids (`list[int]`):
            Ids of the whole answer template.
        objectives (`list[list[int]]`):
            Per objective, the indices in `ids` of the tokens that carry its text. Together with the separators they
            make `positions`.
        positions (`list[int]`):
            Indices in `ids` of all tokens that carry text of `{answer}` (the answer mask).
    """

    ids: list[int]
    objectives: list[list[int]]
    positions: list[int]


def make_answer(
    tokenizer: PreTrainedTokenizerBase, golden_answers: list[list[str]], template: str = ANSWER_TEMPLATE
) -> Answer:
    """
    Tokenize the answer template and find the answer's tokens.

    The template is tokenized alone, whatever comes before it. A token counts as answer if it carries any character of
    the answer, for any tokenizer; the published code counts four tokens from the end, which agrees wherever the
    closing tag after the answer makes exactly four tokens.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        golden_answers (`list[list[str]]`):
            Objectives x aliases; the first alias of each objective is scored.
        template (`str`, *optional*):
            Text with one `{answer}`.

    Returns:
        [`Answer`]
    """
    answers = [aliases[0] for aliases in golden_answers]
    before, after = template.split("{answer}")
    text = before + "; ".join(answers) + after

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokens(start: int, end: int) -> list[int]:
        # Some tokenizers normalize (Qwen's composes accents), so that decoded offsets are not those of the text.
        start, end = (len(decode(tokenizer, encode(text[:offset]))) for offset in (start, end))
        return list(range(*tokens_of(spans, start, end)))

    ids = encode(text)
    _, spans = token_spans(tokenizer, ids)
    objectives, start = [], len(before)
    for answer in answers:
        objectives.append(tokens(start, start + len(answer)))
        start += len(answer) + len("; ")
    return Answer(ids, objectives, tokens(len(before), start - len("; ")))


def keep_confident(
    mem_logps: torch.Tensor, full_logps: torch.Tensor, token_filter: str, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The confidence filter: which answer tokens count on each side.

    Args:
        mem_logps (`torch.Tensor`):
            Log-probabilities of the answer tokens after the memory. # (A,)
        full_logps (`torch.Tensor`):
            The same after the baseline context. # (A,)
        token_filter (`str`):
            `"independent"`: each side keeps its own tokens above the threshold (published). `"joint"`: both keep the
            tokens that are above it on both sides. `"history"`: both keep the tokens that the baseline makes
            confident. `"none"`: both keep all.
        threshold (`float`):
            τ, a probability; a token is confident if `log p > log τ`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Kept tokens of the memory side and of the baseline side. # (A,), (A,)
    """
    if token_filter == "none":
        keep = torch.ones_like(mem_logps, dtype=torch.bool)
        return keep, keep
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf
    mem, full = mem_logps > log_threshold, full_logps > log_threshold
    if token_filter == "independent":
        return mem, full
    if token_filter == "joint":
        return mem & full, mem & full
    return full, full


def answer_probability(logps: torch.Tensor, keep: torch.Tensor) -> float:
    """
    `P(a|c) = exp(mean of log p over the kept answer tokens)`, the geometric mean; 0 when no token is kept.

    Args:
        logps (`torch.Tensor`):
            Log-probabilities of the answer tokens. # (A,)
        keep (`torch.Tensor`):
            The tokens that count. # (A,)

    Returns:
        `float`: Between 0 and 1.
    """
    return logps[keep].mean().exp().item() if keep.any() else 0.0


@dataclass(frozen=True)
class MemoryReward:
    """`R_M[i,t]` with what it is made of: `reward = p_mem - p_full`, and the kept fractions of answer tokens."""

    reward: float
    p_mem: float
    p_full: float
    kept_frac_mem: float
    kept_frac_full: float


def memory_reward(
    mem_logps: torch.Tensor,
    full_logps: torch.Tensor,
    objectives: list[list[int]] | None = None,
    token_filter: str = "independent",
    threshold: float = 0.5,
) -> MemoryReward:
    """
    The memory reward `R_M[i,t] = P(a | memory) - P(a | baseline)`.

    Args:
        mem_logps (`torch.Tensor`):
            Log-probabilities of the answer tokens after the memory. # (A,)
        full_logps (`torch.Tensor`):
            The same after the baseline context: the full history in the paper. # (A,)
        objectives (`list[list[int]]`, *optional*):
            Per objective its tokens, as indices into the two above: P is then taken of each objective and averaged.
            Without them it is one mean over all answer tokens (the paper).
        token_filter (`str`, *optional*, defaults to `"independent"`), threshold (`float`, *optional*, defaults to `0.5`):
            See [`keep_confident`].

    Returns:
        [`MemoryReward`]
    """
    keep_mem, keep_full = keep_confident(mem_logps, full_logps, token_filter, threshold)
    parts = objectives or [list(range(len(mem_logps)))]
    p_mem = sum(answer_probability(mem_logps[part], keep_mem[part]) for part in parts) / len(parts)
    p_full = sum(answer_probability(full_logps[part], keep_full[part]) for part in parts) / len(parts)
    return MemoryReward(p_mem - p_full, p_mem, p_full, keep_mem.float().mean().item(), keep_full.float().mean().item())


def stack_memory_rewards(rollouts: list[Rollout], max_turns: int) -> torch.Tensor:
    """
    The memory rewards that take part in the standardisation.

    Args:
        rollouts (`list[Rollout]`):
            Rollouts with their rewards. One without an outcome reward has no part in any baseline.
        max_turns (`int`):
            Turns that a rollout may have, T.

    Returns:
        `torch.Tensor`: NaN where there is none. # (R, T)
    """
    rewards = torch.full((len(rollouts), max_turns), torch.nan)
    for i, rollout in enumerate(rollouts):
        if rollout.reward is None:
            continue
        for t, turn in enumerate(rollout.turns):
            if turn.memory_reward is not None:
                rewards[i, t] = turn.memory_reward
    return rewards


class RolloutCallback(TrainerCallback):
    """A `TrainerCallback` with one more event, which [`MemPOTrainer`] fires once per generation batch."""

    def on_rollouts_end(self, args, state, control, *, rollouts: list[Rollout], scorer, processing_class, **kwargs):
        """
        Event called after the rollouts of a generation batch and before rewards and advantages.

        It is collective: every process calls it once per generation batch, with its own rollouts, and has to call
        `scorer` equally often whatever they hold.

        Args:
            args ([`MemPOConfig`]), state (`TrainerState`), control (`TrainerControl`):
                As in every event.
            rollouts (`list[Rollout]`):
                The rollouts of this process.
            scorer ([`~mempo_trl.scoring.Scorer`]):
                Scores continuations under the current policy.
            processing_class (`PreTrainedTokenizerBase`):
                The tokenizer.
        """


class MemoryRewardCallback(RolloutCallback):
    """
    Writes the memory reward `R_M[i,t]` of every turn that has one.

    Turn 1 has none, as there is no history to summarise, nor has a turn without a closed memory block. To try
    another memory reward, subclass it, override [`~MemoryRewardCallback.on_rollouts_end`] and pass the callback to
    the trainer: it then replaces this one.
    """

    def on_rollouts_end(self, args, state, control, *, rollouts, scorer, processing_class, **kwargs):
        answers = [
            make_answer(processing_class, rollout.golden_answers, args.answer_template)
            if rollout.golden_answers
            else None
            for rollout in rollouts
        ]
        requests, scored = [], []
        for rollout, answer in zip(rollouts, answers, strict=True):
            turns = [t for t, turn in enumerate(rollout.turns) if t > 0 and turn.memory_span is not None]
            if rollout.excluded or answer is None or not answer.positions or not turns:
                continue
            contexts, of_turn = self.contexts(rollout, turns, args.memory_baseline)
            requests.append(ScoringRequest(rollout.history_ids, contexts, answer.ids, answer.positions))
            scored.append((rollout, answer, of_turn))

        for (rollout, answer, of_turn), logps in zip(scored, scorer(requests), strict=True):
            objectives = None
            if args.memory_answer == "objectives":
                index = {position: k for k, position in enumerate(answer.positions)}
                objectives = [[index[position] for position in part] for part in answer.objectives]
            for t, (mem, full) in of_turn.items():
                result = memory_reward(
                    logps[mem], logps[full], objectives, args.memory_token_filter, args.memory_prob_threshold
                )
                turn = rollout.turns[t]
                turn.memory_reward, turn.p_mem, turn.p_full = result.reward, result.p_mem, result.p_full
                turn.kept_frac_mem, turn.kept_frac_full = result.kept_frac_mem, result.kept_frac_full

    @staticmethod
    def contexts(
        rollout: Rollout, turns: list[int], baseline: str
    ) -> tuple[list[tuple[int, list[int]]], dict[int, tuple[int, int]]]:
        """
        The contexts that the answer is scored after, each one once.

        Args:
            rollout ([`~mempo_trl.rollout.Rollout`]):
                A played rollout.
            turns (`list[int]`):
                Turns (from 0) whose memory is rewarded.
            baseline (`str`):
                `"history"`: `h[i,t]`, everything before the turn (the paper). `"previous"`: the prefix and the memory
                of the turn before, so that a turn is credited with what it added or lost itself.

        Returns:
            `tuple`: Contexts as `(cut, infix)` of `rollout.history_ids`, and per turn the indices of its memory
            context and of its baseline context.
        """
        prefix_length = len(rollout.prefix_ids)
        contexts: list[tuple[int, list[int]]] = []
        index: dict[tuple[int, tuple[int, ...]], int] = {}

        def add(cut: int, infix: list[int]) -> int:
            key = (cut, tuple(infix))
            if key not in index:
                index[key] = len(contexts)
                contexts.append((cut, infix))
            return index[key]

        of_turn = {}
        for t in turns:
            mem = add(prefix_length, rollout.turns[t].memory_ids)
            if baseline == "history":
                full = add(rollout.history_length(t), [])
            else:
                full = add(prefix_length, rollout.turns[t - 1].memory_ids)
            of_turn[t] = (mem, full)
        return contexts, of_turn
