"""
The comb: scoring in one pass over the unique tokens of a trajectory.

The contexts of a [`~mempo_trl.scoring.ScoringRequest`] are starts of one trunk, with or without an infix. As rows they
repeat the trunk once per context, O(T^2) tokens for T turns. Here the trunk is read once, into a KV cache, and each
context is a *tooth*: the few tokens that are its own, which see the trunk only up to their cut.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile

import torch
from peft import PeftModel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .batching import batch_by_length
from .scoring import RowScorer, Scorer, ScoringRequest


logger = logging.getLogger(__name__)


GROUP_TOKENS = 512
"""Tokens of teeth per row and forward. In a group each tooth is masked from the others, which costs their product."""

MAX_LOGIT_POSITIONS = 1024
"""Positions that go through the LM head in one forward: 0.3 GB of bf16 logits for a vocabulary of 150,000."""


@dataclass(frozen=True)
class Tooth:
    """
    What one context adds to the trunk.

    Args:
        request (`int`), context (`int`):
            Which context of which request.
        visible (`int`):
            Number of trunk tokens that it sees.
        ids (`list[int]`):
            Its own tokens: the last one of the trunk before the cut (whose output predicts what comes next), the infix,
            and the continuation up to the token before the last wanted one.
        wanted (`list[int]`):
            For each wanted token, how many positions before the end of `ids` it is predicted; 1 is the last.
        targets (`list[int]`):
            The wanted tokens.
    """

    request: int
    context: int
    visible: int
    ids: list[int]
    wanted: list[int]
    targets: list[int]


@dataclass(frozen=True)
class Batch:
    """
    Requests whose trunks are read side by side.

    Args:
        trunks (`list[list[int]]`):
            Per row, the trunk as far as any tooth sees it.
        shared (`int`):
            Tokens at the start that all rows have in common, read once.
        groups (`list[list[list[Tooth | None]]]`):
            Groups of slots; a slot holds at most one tooth of each row. Groups see ever less of the trunk.
    """

    trunks: list[list[int]]
    shared: int
    groups: list[list[list[Tooth | None]]]

    @property
    def width(self) -> int:
        """Length of the longest trunk."""
        return max(map(len, self.trunks))


def make_teeth(request: ScoringRequest, index: int) -> list[Tooth]:
    """
    The teeth of a request, those that see most of the trunk first.

    Args:
        request ([`~mempo_trl.scoring.ScoringRequest`]):
            With at least one wanted position.
        index (`int`):
            Its index in the call.

    Returns:
        `list[Tooth]`
    """
    last = request.positions[-1]
    wanted = [last - position + 1 for position in request.positions]
    targets = [request.continuation[position] for position in request.positions]
    teeth = []
    for context, (cut, infix) in enumerate(request.contexts):
        visible = max(cut - 1, 0)
        ids = request.trunk[visible:cut] + infix + request.continuation[:last]
        teeth.append(Tooth(index, context, visible, ids, wanted, targets))
    return sorted(teeth, key=lambda tooth: (tooth.visible, len(tooth.ids)), reverse=True)


def plan(requests: list[ScoringRequest], max_tokens: int) -> list[Batch]:
    """
    Batches of all requests that ask for something; trunks of like length share one ([`batch_by_length`]).

    Args:
        requests (`list[ScoringRequest]`):
            May be empty.
        max_tokens (`int`):
            Tokens per forward.

    Returns:
        `list[Batch]`
    """
    rows = []  # (trunk, teeth)
    for index, request in enumerate(requests):
        if request.contexts and request.positions:
            teeth = make_teeth(request, index)
            rows.append((request.trunk[: teeth[0].visible], teeth))
    batches = batch_by_length([len(trunk) for trunk, _ in rows], max_tokens)
    return [_make_batch([rows[row] for row in batch], max_tokens) for batch in batches]


def _make_batch(rows: list[tuple[list[int], list[Tooth]]], max_tokens: int) -> Batch:
    trunks = [trunk for trunk, _ in rows]
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*trunks, strict=False))
    shared = sum(1 for _ in same) if len(rows) > 1 else 0
    num_slots = max(len(teeth) for _, teeth in rows)
    slots = [[teeth[k] if k < len(teeth) else None for _, teeth in rows] for k in range(num_slots)]
    limit = min(GROUP_TOKENS, max_tokens // len(rows))
    groups: list[list[list[Tooth | None]]] = []
    tokens = positions = 0
    for slot in slots:
        width = max(len(tooth.ids) for tooth in slot if tooth)
        kept = max(tooth.wanted[0] for tooth in slot if tooth)
        tokens, positions = tokens + width, positions + kept
        if groups and tokens <= limit and positions * len(rows) <= MAX_LOGIT_POSITIONS:
            groups[-1].append(slot)
        else:
            groups.append([slot])
            tokens, positions = width, kept
    return Batch(trunks, shared, groups)


def unsupported(model: torch.nn.Module) -> str | None:
    """
    Why a model can't be scored with the comb, or `None` if it can.

    Args:
        model (`torch.nn.Module`):
            Causal language model, with or without an adapter.

    Returns:
        `str` or `None`
    """
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return f"{model.active_peft_config.peft_type} puts virtual tokens before the prompt"
    config = model.config
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer}
    if kinds:
        return f"the cache of {config.model_type} can't be cropped to any length ({', '.join(sorted(kinds))})"
    if not inspect.signature(_causal_model(model).forward).parameters.keys() >= {"position_ids", "logits_to_keep"}:
        return f"the forward of {config.model_type} does not take `position_ids` and `logits_to_keep`"
    return None


def choose_scorer(model: torch.nn.Module, kind: str) -> type[Scorer]:
    """
    The way of scoring a model.

    Args:
        model (`torch.nn.Module`):
            Causal language model, with or without an adapter.
        kind (`str`):
            `"comb"`, `"rows"`, or `"auto"`: the comb where the model can be scored with it.

    Returns:
        `type`: [`CombScorer`] or [`~mempo_trl.scoring.RowScorer`].

    Raises:
        ValueError: If `kind` is `"comb"` and the model can't be scored with it.
    """
    if kind == "rows":
        return RowScorer
    reason = unsupported(model)
    if reason is None:
        return CombScorer
    if kind == "comb":
        raise ValueError(f"`memory_scoring` is 'comb', but {reason}; use 'rows' or 'auto'.")
    logger.warning("Memory scoring reads every context as a row of its own, which is slower: %s.", reason)
    return RowScorer


def _causal_model(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


class CombScorer(Scorer):
    """
    Scores the contexts of each trajectory in one pass over its unique tokens. Equals
    [`~mempo_trl.scoring.RowScorer`] up to floating point.

    The trunk is read with the model's own attention, in pieces where it is longer than `max_tokens`; its start is read
    once for all rows of a batch that share it. The teeth are read with a 4-D mask (own tooth causal, trunk before the
    cut) and position ids that restart at the cut, with `sdpa` where the model's attention takes no such mask. Only
    wanted positions go through the LM head. The cache holds at most `max_tokens` tokens, or one longer trunk.

    Takes the arguments of [`~mempo_trl.scoring.Scorer`], and a model for which [`unsupported`] is `None`.
    """

    def __init__(self, model: torch.nn.Module, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        # transformers 5.24 calls the argument `cache`, and takes `past_key_values`, its old name, until 5.40.
        parameters = inspect.signature(_causal_model(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def __call__(self, requests: list[ScoringRequest]) -> list[torch.Tensor]:
        results = [torch.empty(len(request.contexts), len(request.positions)) for request in requests]
        batches = plan(requests, self.max_tokens)
        count = sum(len(self._pieces(batch)) + len(batch.groups) for batch in batches)
        # Sharded weights are gathered in the forward: all processes agree on a number of them beforehand, and one that
        # is done keeps step.
        idle = self.reduce_max([count])[0] - count
        training = self.model.training
        self.model.eval()
        try:
            for batch in batches:
                cache = self._read_trunks(batch)
                for group in batch.groups:
                    self._score_group(group, cache, results)
                del cache
            for _ in range(idle):
                self._forward(torch.tensor([[self.pad_token_id]]), DynamicCache(config=self.model.config))
        finally:
            self.model.train(training)
        return results

    def _pieces(self, batch: Batch) -> list[tuple[int, int, int]]:
        """Forwards that read the trunks, as (number of rows, start, end)."""
        pieces, rows = [], len(batch.trunks)
        for start, end, height in ((0, batch.shared, 1), (batch.shared, batch.width, rows)):
            step = max(1, self.max_tokens // height)
            pieces += [(height, at, min(at + step, end)) for at in range(start, end, step)]
        return pieces

    def _read_trunks(self, batch: Batch) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        rows = len(batch.trunks)
        for height, start, end in self._pieces(batch):
            if height == rows > 1 and start == batch.shared > 0:
                cache.batch_repeat_interleave(rows)
            # Padding is on the right, where causal attention never looks.
            ids = [trunk[start:end] for trunk in batch.trunks[:height]]
            ids = [row + [self.pad_token_id] * (end - start - len(row)) for row in ids]
            self._forward(torch.tensor(ids), cache, position_ids=torch.arange(start, end).expand(height, -1))
        if batch.shared == batch.width and rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache

    def _score_group(self, group: list[list[Tooth | None]], cache: DynamicCache, results: list[torch.Tensor]) -> None:
        rows = len(group[0])
        trunk = max(tooth.visible for slot in group for tooth in slot if tooth)
        cache.crop(trunk - cache.get_seq_length())
        # Teeth end together in their slot, so that the rows want nearly the same positions.
        widths = [max(len(tooth.ids) for tooth in slot if tooth) for slot in group]
        width = sum(widths)
        ids = torch.full((rows, width), self.pad_token_id)
        visible = torch.zeros(rows, width, dtype=torch.long)
        position_ids = torch.zeros(rows, width, dtype=torch.long)
        # Which tooth a token belongs to; padding is a tooth of its own per token, as each needs something to see.
        owner = torch.arange(-width, 0).repeat(rows, 1)
        wanted: list[tuple[Tooth, int, list[int]]] = []  # (tooth, row, columns)
        end = 0
        for number, (slot, slot_width) in enumerate(zip(group, widths, strict=True)):
            end += slot_width
            for row, tooth in enumerate(slot):
                if tooth is None:
                    continue
                at = slice(end - len(tooth.ids), end)
                ids[row, at] = torch.tensor(tooth.ids)
                visible[row, at] = tooth.visible
                position_ids[row, at] = torch.arange(tooth.visible, tooth.visible + len(tooth.ids))
                owner[row, at] = number
                wanted.append((tooth, row, [end - before for before in tooth.wanted]))
        columns = torch.arange(width)
        own = (owner.unsqueeze(2) == owner.unsqueeze(1)) & (columns.unsqueeze(1) >= columns)  # (B, Q, Q)
        mask = torch.cat([torch.arange(trunk) < visible.unsqueeze(2), own], dim=2)  # (B, Q, V + Q)
        keep = sorted({column for _, _, at in wanted for column in at})
        logits = self._forward(ids, cache, mask.unsqueeze(1), position_ids, torch.tensor(keep))  # (B, keep, V)

        index = {column: k for k, column in enumerate(keep)}
        at_rows = [row for _, row, at in wanted for _ in at]
        at_kept = [index[column] for _, _, at in wanted for column in at]
        targets = torch.tensor([target for tooth, _, _ in wanted for target in tooth.targets], device=logits.device)
        parts = zip(logits[at_rows, at_kept].split(64), targets.split(64), strict=True)  # (N, V), (N,)
        logps = [part.float().log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1) for part, target in parts]
        of_teeth = torch.cat(logps).cpu().split([len(at) for _, _, at in wanted])
        for (tooth, _, _), values in zip(wanted, of_teeth, strict=True):
            results[tooth.request][tooth.context] = values

    def _forward(
        self,
        ids: torch.Tensor,
        cache: DynamicCache,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        keep: torch.Tensor | int = 1,
    ) -> torch.Tensor:
        device = next(self.model.parameters()).device
        with self.autocast(), self._masked_attention() if mask is not None else nullcontext() as implementation:
            if mask is not None:
                mask = mask.to(device)
                if implementation == "eager":  # adds its mask to the scores
                    mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(
                        ~mask, torch.finfo(self.model.dtype).min
                    )
            return self.model(
                input_ids=ids.to(device),
                attention_mask=mask,
                position_ids=None if position_ids is None else position_ids.to(device),
                use_cache=True,
                logits_to_keep=keep.to(device) if isinstance(keep, torch.Tensor) else keep,
                **{self._cache_argument: cache},
            ).logits

    @contextmanager
    def _masked_attention(self) -> Iterator[str]:
        """The model with an attention that takes a 4-D mask: its own if it does, else `sdpa` or `eager`."""
        config = self.model.config.get_text_config()
        own = config._attn_implementation
        if own in ("eager", "sdpa"):
            masked = own
        else:
            masked = "sdpa" if _causal_model(self.model)._supports_sdpa else "eager"
        config._attn_implementation = masked
        try:
            yield masked
        finally:
            config._attn_implementation = own
