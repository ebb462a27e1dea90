"""Log-probabilities of one continuation after many contexts of one trajectory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .batching import batch_by_length


@dataclass(frozen=True)
class ScoringRequest:
    """
    One continuation, to be scored after several contexts that share a trunk.

    Args:
        trunk (`list[int]`):
            Token ids of the trajectory.
        contexts (`list[tuple[int, list[int]]]`):
            Each context as `(cut, infix)`: the ids `trunk[:cut] + infix`, never empty.
        continuation (`list[int]`):
            Token ids after each context.
        positions (`list[int]`):
            Indices into `continuation` of the tokens whose log-probability is wanted, ascending.
    """

    trunk: list[int]
    contexts: list[tuple[int, list[int]]]
    continuation: list[int]
    positions: list[int]


class Scorer:
    """
    Scores requests under a policy as it is (adapter on), with dropout off and at temperature 1. On several processes
    every process calls it equally often, and makes the same number of forwards.

    Args:
        model (`torch.nn.Module`):
            Causal language model.
        pad_token_id (`int`):
            Id that fills up rows; masked out.
        max_tokens (`int`, *optional*, defaults to `16384`):
            Tokens per forward, padding included.
        autocast (`Callable`, *optional*):
            Context manager of the forward (`accelerator.autocast`).
        reduce_max (`Callable`, *optional*):
            `reduce_max(values) -> values`: element-wise maximum over processes. Defaults to a single process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        pad_token_id: int,
        max_tokens: int = 16384,
        autocast: Callable[[], AbstractContextManager] | None = None,
        reduce_max: Callable[[list[int]], list[int]] | None = None,
    ):
        self.model = model
        self.pad_token_id = pad_token_id
        self.max_tokens = max_tokens
        self.autocast = autocast or nullcontext
        self.reduce_max = reduce_max or (lambda values: values)

    def __call__(self, requests: list[ScoringRequest]) -> list[torch.Tensor]:
        """
        Score requests.

        Args:
            requests (`list[ScoringRequest]`):
                May be empty.

        Returns:
            `list[torch.Tensor]`: Per request, log-probabilities in float32 on the CPU.
            # (contexts, positions)
        """
        raise NotImplementedError


class RowScorer(Scorer):
    """
    Scores each context as a row of its own: batched, sorted by length, one no-grad forward per batch. A row that is
    longer than `max_tokens` is a batch of its own. Takes the arguments of [`Scorer`].
    """

    def __call__(self, requests: list[ScoringRequest]) -> list[torch.Tensor]:
        rows = [(i, j) for i, request in enumerate(requests) for j in range(len(request.contexts))]
        lengths = [
            requests[i].contexts[j][0] + len(requests[i].contexts[j][1]) + len(requests[i].continuation)
            for i, j in rows
        ]
        batches = batch_by_length(lengths, self.max_tokens)

        results = [torch.empty(len(request.contexts), len(request.positions)) for request in requests]
        training = self.model.training
        self.model.eval()
        try:
            for k in range(self.reduce_max([len(batches)])[0]):
                if k < len(batches):
                    self._score_batch(requests, [rows[row] for row in batches[k]], results)
                else:  # sharded weights are gathered in the forward: a process that is done must keep step
                    self._forward([[self.pad_token_id]], 1)
        finally:
            self.model.train(training)
        return results

    def _score_batch(
        self, requests: list[ScoringRequest], batch: list[tuple[int, int]], results: list[torch.Tensor]
    ) -> None:
        ids = []
        for i, j in batch:
            cut, infix = requests[i].contexts[j]
            ids.append(requests[i].trunk[:cut] + infix + requests[i].continuation)
        # Rows end together, so the last positions hold every wanted token; the token at p is predicted at p - 1.
        keep = max(len(requests[i].continuation) - min(requests[i].positions, default=0) for i, _ in batch) + 1
        logits = self._forward(ids, keep)  # (B, keep, V)
        for row, (i, j) in enumerate(batch):
            request = requests[i]
            at = [keep - 1 - len(request.continuation) + p for p in request.positions]
            targets = torch.tensor([request.continuation[p] for p in request.positions], device=logits.device)
            chosen = logits[row, at].float().log_softmax(dim=-1)
            results[i][j] = chosen.gather(1, targets.unsqueeze(1)).squeeze(1).cpu()

    @torch.no_grad()
    def _forward(self, ids: list[list[int]], keep: int) -> torch.Tensor:
        width = max(map(len, ids))
        device = next(self.model.parameters()).device
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(row)) + row for row in ids], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
        position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with self.autocast():
            return self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=keep,
            ).logits
