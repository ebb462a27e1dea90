"""Scoring: every batched way equals one plain forward per context."""

import pytest
import torch
from conftest import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers.modeling_outputs import CausalLMOutput

from mempo_trl.comb import CombScorer
from mempo_trl.memory_reward import make_answer
from mempo_trl.scoring import RowScorer, ScoringRequest


VOCABULARY = 267
PAD = 257
both = pytest.mark.parametrize("scorer", [RowScorer, CombScorer])


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer).eval()


def oracle(model, request: ScoringRequest) -> torch.Tensor:
    """One context per forward, no batch, no padding: log-softmax at the position before each wanted token."""
    rows = []
    with torch.no_grad():
        for cut, infix in request.contexts:
            context = request.trunk[:cut] + infix
            logits = model(torch.tensor([context + request.continuation])).logits[0].float()
            at = [len(context) + p - 1 for p in request.positions]
            targets = [request.continuation[p] for p in request.positions]
            rows.append(torch.tensor([logits[i].log_softmax(-1)[t].item() for i, t in zip(at, targets, strict=True)]))
    return torch.stack(rows) if rows else torch.empty(0, len(request.positions))


def assert_equal(actual: list[torch.Tensor], model, requests: list[ScoringRequest]) -> None:
    assert len(actual) == len(requests)
    for result, request in zip(actual, requests, strict=True):
        assert result.dtype == torch.float32 and result.device.type == "cpu"
        assert result.shape == (len(request.contexts), len(request.positions))
        torch.testing.assert_close(result, oracle(model, request), rtol=0, atol=1e-5)


token = st.integers(0, VOCABULARY - 1)


@st.composite
def scoring_requests(draw):
    trunk = draw(st.lists(token, min_size=1, max_size=12))
    context = st.tuples(st.integers(0, len(trunk)), st.lists(token, max_size=5)).filter(lambda c: c[0] + len(c[1]) > 0)
    continuation = draw(st.lists(token, min_size=1, max_size=7))
    positions = sorted(draw(st.sets(st.integers(0, len(continuation) - 1))))
    return ScoringRequest(trunk, draw(st.lists(context, max_size=4)), continuation, positions)


@both
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(scoring_requests(), max_size=4), max_tokens=st.integers(1, 100))
def test_scores_equal_one_forward_per_context(model, scorer, requests, max_tokens):
    """For any requests (several at once, with no context or no position too) and any budget: the plain definition."""
    assert_equal(scorer(model, PAD, max_tokens)(requests), model, requests)


REQUESTS = [
    ScoringRequest(list(range(1, 41)), [(3, []), (40, []), (3, [50, 51, 52]), (20, [53])], [60, 61, 62, 63], [1, 2]),
    ScoringRequest([7, 8], [(1, []), (2, [9])], [100], [0]),  # a continuation of one token
    ScoringRequest([PAD, 5, PAD], [(3, [PAD]), (1, [])], [PAD, 6, PAD], [0, 1, 2]),  # the pad id as a real token
]


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [
        # Row lengths: 44, 25, 10, 7 and 4, 2 and 7, 4; sorted 44, 25, 10, 7, 7, 4, 4, 2. A batch of n costs n times its
        # longest row.
        (1, [1] * 8),
        (25, [1, 1, 2, 3, 1]),  # 44 alone though above; 25; 2 * 10; 3 * 7; 2
        (50, [1, 2, 5]),  # 44; 2 * 25; 5 * 7
        (16384, [8]),
    ],
)
def test_batches_keep_to_the_budget(max_tokens, sizes, model):
    """Rows are packed longest first, as many as fit; a longer row is a batch of its own; the scores stay the same."""
    seen = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        results = RowScorer(model, PAD, max_tokens)(REQUESTS)
    finally:
        hook.remove()
    assert [rows for rows, _ in seen] == sizes
    assert all(rows == 1 or rows * width <= max_tokens for rows, width in seen)
    assert_equal(results, model, REQUESTS)


@both
def test_padding_does_not_change_a_score(model, scorer):
    """A short row scored beside a long one (left padding) has the scores that it has alone, whatever the pad id."""
    short = ScoringRequest([1, 2, 3], [(3, [])], [4, 5, 6], [0, 1, 2])
    long = ScoringRequest(list(range(100, 180)), [(80, [])], [4, 5, 6], [0, 1, 2])
    alone = scorer(model, PAD)([short])[0]
    for pad_token_id in (PAD, 0, 42):
        beside = scorer(model, pad_token_id)([long, short])[1]
        torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)


def test_only_the_needed_logits_are_made(model):
    """The head runs on the positions from the first wanted token on, not on the context."""
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    try:
        # Continuation of 4, first wanted token at 1: it is predicted at position 0, so 4 positions remain.
        RowScorer(model, PAD)([REQUESTS[0]])
    finally:
        hook.remove()
    assert seen == [4]


@both
def test_no_request(model, scorer):
    """Nothing to score gives nothing, without a forward."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        assert scorer(model, PAD)([]) == []
        empty = ScoringRequest([1, 2], [], [3], [0])
        assert scorer(model, PAD)([empty])[0].shape == (0, 1)
    finally:
        hook.remove()
    assert calls == []


@both
def test_dropout_is_off_and_the_mode_restored(tokenizer, scorer):
    """A model in training with dropout is scored without it, and is in training again afterwards; also after an error."""
    model = tiny_model(tokenizer, attention_dropout=0.5).train()
    plain = tiny_model(tokenizer).eval()
    results = scorer(model, PAD)(REQUESTS)
    assert model.training and all(module.training for module in model.modules())
    assert_equal(results, plain, REQUESTS)
    with pytest.raises(IndexError):
        scorer(model, PAD)([ScoringRequest([1], [(1, [VOCABULARY + 1])], [3], [0])])
    assert model.training
    model.eval()
    scorer(model, PAD)(REQUESTS)
    assert not model.training


@both
def test_no_gradient_is_kept(tokenizer, scorer):
    """Scores carry no gradient, and scoring with gradient checkpointing on gives the same scores."""
    model = tiny_model(tokenizer).train()
    model.gradient_checkpointing_enable()
    results = scorer(model, PAD)(REQUESTS)
    assert not any(result.requires_grad for result in results)
    assert model.is_gradient_checkpointing and model.training
    assert_equal(results, tiny_model(tokenizer).eval(), REQUESTS)


@both
def test_the_adapter_is_on(tokenizer, scorer):
    """With LoRA the adapted policy is scored, its own dropout off; not the base model."""
    model = get_peft_model(tiny_model(tokenizer), LoraConfig(r=4, lora_dropout=0.5, init_lora_weights=False))
    model.train()
    results = scorer(model, PAD)(REQUESTS)
    model.eval()
    assert_equal(results, model, REQUESTS)
    with model.disable_adapter():
        assert (oracle(model, REQUESTS[0]) - results[0]).abs().max() > 1e-3


def test_every_process_makes_the_same_number_of_forwards(model):
    """A process with fewer batches than another makes up for them with dummy forwards, and its scores are its own."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        asked = []

        def reduce_max(values):
            asked.append(values)
            return [5]

        results = RowScorer(model, PAD, reduce_max=reduce_max)(REQUESTS[:1])
        assert RowScorer(model, PAD, reduce_max=reduce_max)([]) == []
    finally:
        hook.remove()
    assert asked == [[1], [0]]
    assert shapes == [(4, 44)] + [(1, 1)] * 4 + [(1, 1)] * 5
    assert_equal(results, model, REQUESTS[:1])


@pytest.mark.parametrize("ending", ["Ans", "Ans ", "Ans\n", "<answer>", ""])
@pytest.mark.parametrize("answer", ["wer", " wer", "7", "里德", "wer 7%"])
@both
def test_boundary_between_context_and_answer(ending, answer, smollm2_tokenizer, scorer):
    """
    Ids are joined, never text: whatever the context ends in, the same answer tokens are scored, none is lost.

    "Ans" + "wer" is the trap: encoded as one text it has fewer tokens than the parts, so that counting tokens of the
    whole would leave an empty or shifted continuation.
    """
    made = make_answer(smollm2_tokenizer, [[answer]], "{answer}")
    context = smollm2_tokenizer("The" + ending, add_special_tokens=False)["input_ids"]
    assert len(made.positions) == len(smollm2_tokenizer(answer, add_special_tokens=False)["input_ids"]) > 0
    model = tiny_model(smollm2_tokenizer).eval()
    request = ScoringRequest(context, [(len(context), [])], made.ids, made.positions)
    assert_equal(scorer(model, smollm2_tokenizer.pad_token_id)([request]), model, [request])


class Successor(torch.nn.Module):
    """A model that is sure that each token is followed by the next id: its logit is 50, the others 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(50 * torch.eye(VOCABULARY))

    def forward(self, input_ids, attention_mask, position_ids, use_cache, logits_to_keep):
        for mask, positions in zip(attention_mask.tolist(), position_ids.tolist(), strict=True):
            real = sum(mask)
            assert mask == [0] * (len(mask) - real) + [1] * real  # padding on the left
            assert positions[len(mask) - real :] == list(range(real))
        logits = self.weight[(input_ids + 1) % VOCABULARY]
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])


def test_off_by_one_by_hand():
    """Each token is scored by the logits of the position before it, and real tokens count from position 0."""
    # After 1, 2, 3: 4 follows 3 and 5 follows 4 (log p = 0), 7 does not follow 5 (log p = -50). After 1, 8: 4 does not.
    request = ScoringRequest([1, 2, 3], [(3, []), (1, [8])], [4, 5, 7], [0, 1, 2])
    (scores,) = RowScorer(Successor(), PAD)([request])
    torch.testing.assert_close(scores, torch.tensor([[0.0, 0.0, -50.0], [-50.0, 0.0, -50.0]]), rtol=0, atol=1e-5)
