"""The comb equals rows, on several architectures, and reads every token once."""

import random

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mempo_trl import batching, comb
from mempo_trl.comb import CombScorer, choose_scorer, make_teeth, plan, unsupported
from mempo_trl.scoring import RowScorer, ScoringRequest


VOCABULARY = 267
PAD = 0


def make_model(config_class, attention: str = "sdpa", **kwargs):
    """A random model of two layers."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=PAD,
        **kwargs,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def make_requests(turns: list[int], memory_tokens: int = 20, answer: tuple[int, ...] = (6, 7, 9)):
    """Rollouts of one group, as the memory reward scores them: prefixes that start alike, memories of any length."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    system, requests = tokens(30), []
    for number in turns:
        trunk, contexts = system + tokens(6), []
        for _ in range(1, max(number, 2)):
            trunk = trunk + tokens(rng.randint(3, 25))
            contexts += [(36, tokens(rng.randint(0, memory_tokens))), (len(trunk), [])]
        requests.append(ScoringRequest(trunk, contexts, tokens(12), list(answer)))
    return requests


def assert_equals_rows(model, requests, max_tokens=16384, tolerance=1e-4) -> None:
    expected = RowScorer(model, PAD)(requests)
    for actual, wanted in zip(CombScorer(model, PAD, max_tokens)(requests), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)


ARCHITECTURES = [
    (LlamaConfig, {}),
    (LlamaConfig, {"attention": "eager"}),
    (Qwen2Config, {}),
    (Qwen3Config, {}),
    (GemmaConfig, {}),
    (MistralConfig, {"sliding_window": None}),
]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("config_class", "kwargs"), ARCHITECTURES)
def test_equals_rows_on_every_architecture(config_class, kwargs, lora):
    """1 to 16 turns side by side, in one batch and in small pieces, with and without an adapter."""
    model = make_model(config_class, **kwargs)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    assert unsupported(model) is None
    requests = make_requests([1, 2, 3, 5, 8, 12, 16])
    for max_tokens in (16384, 700, 90):
        assert_equals_rows(model, requests, max_tokens)


@pytest.mark.parametrize("turns", range(1, 17))
def test_equals_rows_for_every_number_of_turns(turns, tokenizer):
    """A rollout alone, of 1 to 16 turns, with a one-token answer."""
    assert_equals_rows(tiny_model(tokenizer).eval(), make_requests([turns], answer=(11,)))


def test_memory_longer_than_the_trunk(tokenizer):
    """A memory of 400 tokens beside a trunk of 40, and an empty one."""
    requests = [ScoringRequest(list(range(40)), [(30, list(range(200)) * 2), (30, []), (40, [])], [5, 6, 7], [1, 2])]
    assert_equals_rows(tiny_model(tokenizer).eval(), requests)


def test_equals_rows_in_bf16():
    """In bf16 both ways are as far from fp32 as the format is: means of answer log-probs within a few hundredths."""
    model = make_model(LlamaConfig)
    requests = make_requests([2, 5, 9])
    exact = RowScorer(model, PAD)(requests)
    for scorer in (RowScorer, CombScorer):
        for actual, wanted in zip(scorer(model.bfloat16(), PAD)(requests), exact, strict=True):
            assert (actual.mean(1) - wanted.mean(1)).abs().max() < 0.05


def test_another_attention_is_put_back(tokenizer):
    """Where the model's own attention takes no mask, the teeth go through `sdpa`; the setting is the same afterwards."""
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    AttentionMaskInterface.register("unmasked", sdpa_mask)
    model = tiny_model(tokenizer).eval()
    requests = make_requests([4, 6])
    expected = CombScorer(model, PAD)(requests)
    model.config._attn_implementation = "unmasked"
    seen = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *args: seen.append(model.config._attn_implementation)
    )
    try:
        actual = CombScorer(model, PAD)(requests)
    finally:
        hook.remove()
    assert seen == ["unmasked", "unmasked", "sdpa"]  # the shared prefix, the trunks, the teeth
    assert model.config._attn_implementation == "unmasked"
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_teeth_by_hand():
    """Each tooth starts with the last trunk token before its cut and ends before the last wanted token."""
    request = ScoringRequest([10, 11, 12, 13], [(2, [50, 51]), (4, []), (0, [60])], [70, 71, 72, 73], [1, 2])
    teeth = make_teeth(request, 5)
    # The token at position 2 is predicted by the one at position 1, the last that a tooth needs.
    assert [(tooth.context, tooth.visible, tooth.ids) for tooth in teeth] == [
        (1, 3, [13, 70, 71]),
        (0, 1, [11, 50, 51, 70, 71]),
        (2, 0, [60, 70, 71]),
    ]
    assert all(tooth.wanted == [2, 1] and tooth.targets == [71, 72] and tooth.request == 5 for tooth in teeth)


def test_every_token_is_read_once(tokenizer):
    """One rollout alone: trunk plus teeth, no token twice but the one that each tooth starts with."""
    (request,) = make_requests([8])
    sizes = []
    model = tiny_model(tokenizer).eval()
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        CombScorer(model, PAD)([request])
    finally:
        hook.remove()
    last = request.positions[-1]
    teeth = sum(1 + len(infix) + last for _, infix in request.contexts)
    assert sum(sizes) == len(request.trunk) - 1 + teeth


def test_the_shared_prefix_is_read_once(tokenizer):
    """Rollouts of one batch: what their trunks have in common goes through the model in one row."""
    requests = make_requests([4, 4, 4])
    (batch,) = plan(requests, 16384)
    assert batch.shared == 30  # the system part; the questions differ
    shapes = []
    model = tiny_model(tokenizer).eval()
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        CombScorer(model, PAD)(requests)
    finally:
        hook.remove()
    assert shapes[:2] == [(1, 30), (3, batch.width - 30)]


def test_the_same_prefix_for_all_is_the_whole_trunk(tokenizer):
    """Contexts that end at the prefix (the `previous` baseline): one row is read and repeated, then the teeth."""
    prefix = list(range(20))
    requests = [ScoringRequest(prefix + [99] * n, [(20, [n, n + 1]), (20, [n])], [5, 6], [0, 1]) for n in (3, 7)]
    (batch,) = plan(requests, 16384)
    assert (batch.shared, batch.width) == (19, 19)
    assert_equals_rows(tiny_model(tokenizer).eval(), requests)


def test_batches_have_little_padding_and_keep_to_the_budget():
    """Large batches hold trunks of like length: at most a tenth of padding, at most the budget."""
    rng = random.Random(1)
    requests = [ScoringRequest([1] * n, [(n, [])], [2, 3], [0]) for n in (rng.randint(100, 4000) for _ in range(60))]
    batches = plan(requests, 16384)
    assert sum(len(batch.trunks) for batch in batches) == 60
    for batch in batches:
        area = len(batch.trunks) * batch.width
        assert area <= 16384
        assert area <= batching.SMALL_BATCH_TOKENS or area <= 1.1 * sum(map(len, batch.trunks))


def test_logits_are_bounded(monkeypatch):
    """A group ends where its positions would be too many for the LM head, whatever the number of rows."""
    monkeypatch.setattr(comb, "MAX_LOGIT_POSITIONS", 12)
    requests = make_requests([6, 6])  # 2 rows; each slot wants the last 4 positions of its teeth: 8 of them
    (batch,) = plan(requests, 16384)
    assert all(len(group) == 1 for group in batch.groups) and len(batch.groups) == 10


def test_every_process_makes_the_same_number_of_forwards(tokenizer):
    """A process with less to do makes up for it with dummy forwards, one without anything too."""
    model = tiny_model(tokenizer).eval()
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    asked = []

    def reduce_max(values):
        asked.append(values)
        return [7]

    try:
        CombScorer(model, PAD, reduce_max=reduce_max)(make_requests([3]))
        CombScorer(model, PAD, reduce_max=reduce_max)([])
    finally:
        hook.remove()
    assert asked == [[2], [0]]  # the trunk and one group of teeth
    assert len(shapes) == 14 and shapes[2:] == [(1, 1)] * 12


@pytest.mark.parametrize(
    ("config_class", "word"), [(Gemma2Config, "gemma2"), (Gemma3TextConfig, "gemma3"), (MistralConfig, "mistral")]
)
def test_sliding_windows_fall_back_to_rows(config_class, word, caplog):
    """`auto` takes rows with one line that says why; `comb` is an error that names the remedy."""
    model = make_model(config_class, attention="eager", sliding_window=64)
    with caplog.at_level("WARNING", logger="mempo_trl"):
        assert choose_scorer(model, "auto") is RowScorer
    assert len(caplog.records) == 1 and word in caplog.text and "SlidingWindow" in caplog.text
    with pytest.raises(ValueError, match="can't be cropped.*use 'rows' or 'auto'"):
        choose_scorer(model, "comb")


def test_choice(tokenizer):
    """The comb by default, rows on demand; virtual tokens and models without a cache fall back."""
    model = tiny_model(tokenizer)
    assert choose_scorer(model, "auto") is choose_scorer(model, "comb") is CombScorer
    assert choose_scorer(model, "rows") is RowScorer
    virtual = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "virtual tokens" in unsupported(virtual)
    recurrent = AutoModelForCausalLM.from_config(
        RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    )
    assert "rwkv" in unsupported(recurrent)
