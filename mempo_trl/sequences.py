"""Rollouts to training sequences: which tokens a row holds, which of them are trained, and with which weight."""

from dataclasses import dataclass

import torch

from .rollout import Rollout


@dataclass
class Sequence:
    """
    One tensor row.

    Args:
        rollout_index (`int`):
            Rollout that it belongs to; -1 for a padding sequence.
        prompt_ids (`list[int]`):
            Ids before the first trained one.
        completion_ids (`list[int]`):
            Sampled ids, and the tool responses between them.
        loss_mask (`list[int]`):
            1 = sampled by the model and trained.
        memory_turns (`list[int]`):
            Index (from 0) of the turn whose memory block the token belongs to; -1 outside every memory block.
        logps (`list[float]`, *optional*):
            Log-probabilities under the sampling policy, 0 where nothing was sampled.
    """

    rollout_index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int]
    memory_turns: list[int]
    logps: list[float] | None = None

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return sum(self.loss_mask)


def build_sequences(rollout: Rollout, rollout_index: int) -> list[Sequence]:
    """
    Training sequences of one rollout. Every sampled token is trained in exactly one of them.

    A turn continues the sequence of the turn before it where its prompt extends that sequence token for token (all of
    `context="full"`, and the second turn of `context="memory"`), and starts a new one where the context was rewritten.

    Args:
        rollout ([`~mempo_trl.rollout.Rollout`]):
            A played rollout.
        rollout_index (`int`):
            Its index in the batch.

    Returns:
        `list[Sequence]`: In the order of the turns; empty if nothing was sampled.
    """
    sequences: list[Sequence] = []
    ids: list[int] = []  # prompt and completion of the last sequence
    for index, turn in enumerate(rollout.turns):
        if not turn.completion_ids:
            continue
        if sequences and turn.prompt_ids[: len(ids)] == ids:
            sequence, between = sequences[-1], turn.prompt_ids[len(ids) :]
            sequence.completion_ids += between
            sequence.loss_mask += [0] * len(between)
            sequence.memory_turns += [-1] * len(between)
            if sequence.logps is not None:
                sequence.logps += [0.0] * len(between)
        else:
            logps = None if turn.logps is None else []
            sequence = Sequence(rollout_index, turn.prompt_ids, [], [], [], logps)
            sequences.append(sequence)
        start, end = turn.memory_span or (0, 0)
        sequence.completion_ids += turn.completion_ids
        sequence.loss_mask += [1] * len(turn.completion_ids)
        sequence.memory_turns += [index if start <= k < end else -1 for k in range(len(turn.completion_ids))]
        if sequence.logps is not None:
            sequence.logps += turn.logps
        ids = turn.prompt_ids + turn.completion_ids
    return sequences


def pad_sequences(sequences: list[Sequence], count: int, token_id: int) -> list[Sequence]:
    """
    Add padding sequences. They hold two real tokens, so that they take part in forward and backward, and train none.

    Args:
        sequences (`list[Sequence]`):
            Sequences of this process.
        count (`int`):
            Number to reach.
        token_id (`int`):
            Any valid id.

    Returns:
        `list[Sequence]`: `count` sequences.
    """
    has_logps = bool(sequences) and sequences[0].logps is not None
    padding = [
        Sequence(-1, [token_id], [token_id], [0], [-1], [0.0] if has_logps else None)
        for _ in range(count - len(sequences))
    ]
    return sequences + padding


def padded_count(counts: list[int], multiple: int) -> int:
    """
    Number of sequences that every process trains on.

    Args:
        counts (`list[int]`):
            Sequences of each process.
        multiple (`int`):
            `steps_per_generation`: TRL splits the rows into that many equal parts and drops the remainder.

    Returns:
        `int`: The smallest multiple, at least one, that holds every process's sequences.
    """
    return max(1, -(-max(counts) // multiple)) * multiple


def loss_weights(sequences: list[Sequence], num_rollouts: int, loss_type: str) -> torch.Tensor:
    r"""
    Weight of each sequence, so that TRL's mean over rows becomes the loss over rollouts.

    TRL's `"grpo"` and `"sapo"` average over rows the mean over a row's tokens. With `S` rows for `R` rollouts, the
    weight `S / R * n_row / n_rollout` turns that into the average over rollouts of the mean over a rollout's tokens
    (one weight per rollout, shared by its tokens, as in the paper). `"dr_grpo"` and `"luspo"` sum over a row's tokens
    and average over rows, so `S / R` makes it an average over rollouts. The other types average over tokens and need
    no weight.

    Args:
        sequences (`list[Sequence]`):
            Sequences of this process, padding sequences included.
        num_rollouts (`int`):
            Number of rollouts of this process.
        loss_type (`str`):
            TRL's `loss_type`.

    Returns:
        `torch.Tensor`: Weights # (S,)
    """
    if loss_type in ("grpo", "sapo"):
        trained = [0] * num_rollouts
        for sequence in sequences:
            if sequence.rollout_index >= 0:
                trained[sequence.rollout_index] += sequence.num_trained
        # A sequence without trained tokens (padding, or a masked rollout) has no loss, whatever its weight.
        weights = [
            sequence.num_trained / trained[sequence.rollout_index] if sequence.num_trained else 0.0
            for sequence in sequences
        ]
    elif loss_type in ("dr_grpo", "luspo"):
        weights = [float(sequence.rollout_index >= 0) for sequence in sequences]
    else:
        return torch.ones(len(sequences))
    return torch.tensor(weights) * len(sequences) / num_rollouts


def kl_per_sequence(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    max_completion_length: int,
    log_importance_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    KL term of each sequence as TRL's loss counts it before its mean over rows, for the types that average over rows.

    Args:
        logps (`torch.Tensor`), ref_logps (`torch.Tensor`):
            Log-probabilities under the policy and under the reference. # (B, C), (B, C)
        mask (`torch.Tensor`):
            1 = trained token. # (B, C)
        loss_type (`str`):
            `"grpo"` and `"sapo"`: mean over the row's tokens; `"dr_grpo"`: sum over `max_completion_length`;
            `"luspo"`: sum.
        max_completion_length (`int`):
            As in the configuration.
        log_importance_weights (`torch.Tensor`, *optional*):
            Weights of the tokens or of the rows, with `use_bias_correction_kl`. # (B, C) or (B, 1)

    Returns:
        `torch.Tensor`: The estimator `exp(r) - r - 1` with `r = ref - policy`, reduced per row. # (B,)
    """
    log_ratio = ref_logps - logps
    kl = log_ratio.exp() - log_ratio - 1
    if log_importance_weights is not None:
        kl = kl * log_importance_weights.exp()
    kl = (kl * mask).sum(dim=1)
    if loss_type in ("grpo", "sapo"):
        return kl / mask.sum(dim=1).clamp(min=1.0)
    return kl / max_completion_length if loss_type == "dr_grpo" else kl
