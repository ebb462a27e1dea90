"""The memory reward: answer mask, confidence filter, contexts, and the callback that writes it."""

import math

import pytest
import torch
from conftest import byte_tokenizer, call, config, play_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import TrainerControl, TrainerState

from mempo_trl.config import ANSWER_TEMPLATE, TOKEN_FILTERS
from mempo_trl.memory_reward import (
    MemoryRewardCallback,
    answer_probability,
    keep_confident,
    make_answer,
    memory_reward,
)
from mempo_trl.scoring import RowScorer
from mempo_trl.token_spans import decode


def texts(tokenizer, ids: list[int], positions: list[int]) -> str:
    """The decoded tokens at some positions."""
    return decode(tokenizer, [ids[position] for position in positions])


def published_slice(tokenizer, answer: str) -> list[int]:
    """The mask of the published code: `mask[-(n + 4) : -4]`, n the tokens of the answer tokenized alone."""
    ids = make_answer(tokenizer, [[answer]]).ids
    n = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return list(range(len(ids)))[-(n + 4) : -4]


# The answer mask


@pytest.mark.parametrize("answer", ["1987", "Yes; no", "St. John's", "里德学院", " Paris", "日本 3", "AC/DC 2"])
@pytest.mark.parametrize("name", ["qwen_tokenizer", "smollm2_tokenizer"])
def test_mask_equals_the_published_slice_where_that_is_right(name, answer, request):
    """Where `\\n</answer>` is four tokens, the tokens of the answer are those that the published code counts."""
    tokenizer = request.getfixturevalue(name)
    made = make_answer(tokenizer, [[answer]])
    assert made.positions == published_slice(tokenizer, answer)
    assert texts(tokenizer, made.ids, made.positions) == answer
    assert decode(tokenizer, made.ids) == ANSWER_TEMPLATE.replace("{answer}", answer)


@pytest.mark.parametrize(
    ("answer", "sliced"), [("42%", ">\n42"), ("U.S.", ">\nU.S"), ("(b)", ">\n(b"), ("C++", ">\nC"), ("!", ">\n")]
)
def test_mask_on_qwen_where_the_newline_joins_the_answer(answer, sliced, qwen_tokenizer):
    """Qwen joins the newline to final punctuation: three closing tokens, so the published slice is one token early."""
    made = make_answer(qwen_tokenizer, [[answer]])
    assert texts(qwen_tokenizer, made.ids, published_slice(qwen_tokenizer, answer)) == sliced
    # A token that carries answer characters counts as answer, so the newline comes along with the last one.
    assert texts(qwen_tokenizer, made.ids, made.positions) == f"{answer}\n"


@pytest.mark.parametrize("answer", ["42%", "1987", "里德学院"])
def test_mask_on_smollm2_with_another_template(answer, smollm2_tokenizer):
    """SmolLM2 makes three tokens of `</answer>`: without the newline the published slice is one token early there."""
    template = "<answer>{answer}</answer>"
    made = make_answer(smollm2_tokenizer, [[answer]], template)
    n = len(smollm2_tokenizer(answer, add_special_tokens=False)["input_ids"])
    assert texts(smollm2_tokenizer, made.ids, list(range(len(made.ids)))[-(n + 4) : -4]) != answer
    assert texts(smollm2_tokenizer, made.ids, made.positions) == answer


def test_mask_where_the_closing_tag_is_one_token(tokenizer):
    """A tokenizer whose `</answer>` is one token: the published slice reaches three tokens too far to the left."""
    # "...<answer>" "\n" "c" "a" "t" "\n" "</answer>": the slice [-7:-4] is "<answer>", "\n", "c".
    made = make_answer(tokenizer, [["cat"]])
    assert texts(tokenizer, made.ids, published_slice(tokenizer, "cat")) == "<answer>\nc"
    assert texts(tokenizer, made.ids, made.positions) == "cat"


@pytest.mark.parametrize("name", ["qwen_tokenizer", "smollm2_tokenizer", "tokenizer"])
@pytest.mark.parametrize(
    "answers",
    [["Rome", "1987"], ["里德学院", "42%", " Paris"], ["U.S.", "(b)", "7"], ["a; b", "c"], ["😀", "é", "नमस्ते"]],
)
def test_spans_of_several_objectives(name, answers, request):
    """Each objective has the tokens that carry its text, in order; the mask holds these and the separators."""
    tokenizer = request.getfixturevalue(name)
    made = make_answer(tokenizer, [[answer, "another alias"] for answer in answers])
    joined = "; ".join(answers)
    assert texts(tokenizer, made.ids, made.positions).removesuffix("\n") == joined
    assert len(made.objectives) == len(answers)
    for answer, part in zip(answers, made.objectives, strict=True):
        text = texts(tokenizer, made.ids, part)
        # A token may join the answer's last character to what follows, never more than one token's worth.
        assert answer in text and answer not in texts(tokenizer, made.ids, part[1:])
        assert answer not in texts(tokenizer, made.ids, part[:-1])
        assert set(part) <= set(made.positions) and part == list(range(part[0], part[-1] + 1))


def test_mask_of_a_tokenizer_that_normalizes():
    """Qwen's tokenizer composes accents (NFC): ids and mask are those of the composed answer, not a token more."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    decomposed = [["Cafe\u0301"], ["Re\u0301ne\u0301e"], ["Rome"]]
    made = make_answer(tokenizer, decomposed)
    assert texts(tokenizer, made.ids, made.positions) == "Caf\u00e9; R\u00e9n\u00e9e; Rome"
    assert [texts(tokenizer, made.ids, part) for part in made.objectives] == ["Caf\u00e9", "R\u00e9n\u00e9e", "Rome"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6), min_size=1, max_size=3)
)
def test_mask_covers_any_answer(answers):
    """For any characters: the masked tokens are exactly the answer's bytes on a byte-level tokenizer."""
    tokenizer = byte_tokenizer(tags_are_tokens=False)
    made = make_answer(tokenizer, [[answer] for answer in answers])
    assert texts(tokenizer, made.ids, made.positions) == "; ".join(answers)
    assert [texts(tokenizer, made.ids, part) for part in made.objectives] == answers


def test_template_is_tokenized_alone(qwen_tokenizer):
    """The template's ids do not depend on what comes before, so every context is followed by the same ids."""
    made = make_answer(qwen_tokenizer, [["Paris"]], "\n<answer>{answer}</answer>")
    assert made.ids == qwen_tokenizer("\n<answer>Paris</answer>", add_special_tokens=False)["input_ids"]


# The confidence filter and the reward

# "Kath|ryn| Big|elow": the worked example of the method.
KATHRYN = torch.tensor([-0.2, -3.5, -0.1, -2.8])


def test_kathryn_bigelow():
    """With τ = 0.5 tokens 1 and 3 are kept, and P is the geometric mean of their probabilities."""
    # log 0.5 = -0.693: -0.2 and -0.1 are above it. P = exp((-0.2 - 0.1) / 2) = exp(-0.15) = 0.860708.
    keep, _ = keep_confident(KATHRYN, KATHRYN, "independent", 0.5)
    assert keep.tolist() == [True, False, True, False]
    assert answer_probability(KATHRYN, keep) == pytest.approx(math.exp(-0.15), abs=1e-7)
    # Unfiltered exp(-6.6 / 4) = exp(-1.65) = 0.192050.
    assert answer_probability(KATHRYN, torch.ones(4, dtype=torch.bool)) == pytest.approx(0.192050, abs=1e-6)


def test_an_answer_that_neither_side_knows():
    """All log p at -9 after the memory and -8 after the history: -0.0002 unfiltered, exactly 0 filtered."""
    # exp(-9) = 0.000123, exp(-8) = 0.000335: 0.000123 - 0.000335 = -0.000212.
    mem, full = torch.full((3,), -9.0), torch.full((3,), -8.0)
    unfiltered = memory_reward(mem, full, token_filter="none")
    assert (round(unfiltered.p_full, 4), round(unfiltered.p_mem, 4), round(unfiltered.reward, 4)) == (
        0.0003,
        0.0001,
        -0.0002,
    )
    for token_filter in ("independent", "joint", "history"):
        filtered = memory_reward(mem, full, token_filter=token_filter)
        assert (filtered.reward, filtered.p_mem, filtered.p_full) == (0.0, 0.0, 0.0)
        assert (filtered.kept_frac_mem, filtered.kept_frac_full) == (0.0, 0.0)


# Four tokens: both sides sure, only the memory, only the history, neither.
MEM, FULL = torch.tensor([-0.1, -0.2, -2.0, -3.0]), torch.tensor([-0.3, -1.0, -0.4, -4.0])


@pytest.mark.parametrize(
    ("token_filter", "mem", "full", "kept"),
    [
        # Each side its own: tokens 0, 1 after the memory, (-0.1 - 0.2) / 2; tokens 0, 2 after the history.
        ("independent", -0.15, -0.35, (0.5, 0.5)),
        ("joint", -0.1, -0.3, (0.25, 0.25)),  # token 0 on both sides
        ("history", -1.05, -0.35, (0.5, 0.5)),  # tokens 0, 2 on both: (-0.1 - 2.0) / 2, (-0.3 - 0.4) / 2
        ("none", -1.325, -1.425, (1.0, 1.0)),  # -5.3 / 4, -5.7 / 4
    ],
)
def test_filters_by_hand(token_filter, mem, full, kept):
    """Which tokens count under each filter, and the probabilities and reward that follow."""
    result = memory_reward(MEM, FULL, token_filter=token_filter)
    assert result.p_mem == pytest.approx(math.exp(mem), abs=1e-6)
    assert result.p_full == pytest.approx(math.exp(full), abs=1e-6)
    assert result.reward == pytest.approx(math.exp(mem) - math.exp(full), abs=1e-6)
    assert (result.kept_frac_mem, result.kept_frac_full) == kept


def test_a_side_that_keeps_no_token_has_probability_zero():
    """P is 0 for the side without a confident token, and the other side's P stands alone in the reward."""
    result = memory_reward(torch.tensor([-5.0, -6.0]), torch.tensor([-0.1, -9.0]))
    assert result.p_mem == 0.0 and result.kept_frac_mem == 0.0
    assert result.reward == pytest.approx(-math.exp(-0.1), abs=1e-6)
    assert memory_reward(torch.tensor([-0.1]), torch.tensor([-5.0])).reward == pytest.approx(math.exp(-0.1), abs=1e-6)


def test_the_threshold_is_a_probability_and_excludes_itself():
    """A token counts if p > τ: p = τ does not, τ = 0 keeps every token, τ = 1 none."""
    logps = torch.log(torch.tensor([0.25, 0.250001, 1.0], dtype=torch.float64))
    assert keep_confident(logps, logps, "independent", 0.25)[0].tolist() == [False, True, True]
    assert keep_confident(logps, logps, "independent", 0.0)[0].tolist() == [True, True, True]
    assert keep_confident(logps, logps, "independent", 1.0)[0].tolist() == [False, False, False]


def test_answer_forms_by_hand():
    """`"joint"`: one geometric mean over all tokens. `"objectives"`: one of each objective, then their mean."""
    # Tokens "Rome", ";", "19", "87" at -0.1, -0.5, -4, -6 after the memory and -0.1, -0.5, -2, -2 after the history.
    mem, full = torch.tensor([-0.1, -0.5, -4.0, -6.0]), torch.tensor([-0.1, -0.5, -2.0, -2.0])
    joint = memory_reward(mem, full, token_filter="none")
    assert joint.p_mem == pytest.approx(math.exp(-10.6 / 4), abs=1e-6)
    assert joint.p_full == pytest.approx(math.exp(-4.6 / 4), abs=1e-6)
    # Objectives {0} and {2, 3}; the separator belongs to none: (exp(-0.1) + exp(-5)) / 2, (exp(-0.1) + exp(-2)) / 2.
    parts = memory_reward(mem, full, [[0], [2, 3]], token_filter="none")
    assert parts.p_mem == pytest.approx((math.exp(-0.1) + math.exp(-5)) / 2, abs=1e-6)
    assert parts.p_full == pytest.approx((math.exp(-0.1) + math.exp(-2)) / 2, abs=1e-6)
    # With the filter the unknown objective is 0 on both sides instead of drowning the known one.
    filtered = memory_reward(mem, full, [[0], [2, 3]])
    assert filtered.p_mem == filtered.p_full == pytest.approx(math.exp(-0.1) / 2, abs=1e-6)
    assert filtered.reward == 0.0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=1, max_size=6),
    st.sampled_from(TOKEN_FILTERS),
    st.floats(0, 1),
)
def test_probabilities_stay_in_range(pairs, token_filter, threshold):
    """For any log-probabilities: both P in [0, 1], R_M their difference, and equal sides give exactly 0."""
    mem, full = torch.tensor([pair[0] for pair in pairs]), torch.tensor([pair[1] for pair in pairs])
    result = memory_reward(mem, full, token_filter=token_filter, threshold=threshold)
    assert 0 <= result.p_mem <= 1 and 0 <= result.p_full <= 1
    assert result.reward == result.p_mem - result.p_full
    assert memory_reward(mem, mem, token_filter=token_filter, threshold=threshold).reward == 0.0


# The contexts and the callback

SCRIPT = [
    call("Anna"),
    "<mem>a cat</mem><think>t</think>" + call("Bo"),
    "<think>no memory</think>" + call("Cy"),
    "<mem>cat</mem><think>t</think>" + call("Di"),
    "<mem>cat</mem><answer>cat</answer>",
]


def test_contexts_of_the_history_baseline(protocol, tokenizer):
    """`(cut, infix)` of the trunk: the prefix and the memory, and the trunk up to the turn, each context once."""
    rollout = play_script(protocol, SCRIPT)
    prefix = len(rollout.prefix_ids)
    trunk = rollout.history_ids
    contexts, of_turn = MemoryRewardCallback.contexts(rollout, [1, 3, 4], "history")
    memories = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<mem>a cat</mem>", "<mem>cat</mem>")
    ]
    # Each earlier turn adds its sampled ids and its response to the history.
    added = [len(turn.completion_ids) + len(turn.response_ids) for turn in rollout.turns]
    assert (
        contexts
        == [
            (prefix, memories[0]),
            (prefix + added[0], []),
            (prefix, memories[1]),  # the memory of turns 3 and 4 is the same text and is scored once
            (prefix + sum(added[:3]), []),
            (prefix + sum(added[:4]), []),
        ]
    )
    assert of_turn == {1: (0, 1), 3: (2, 3), 4: (2, 4)}
    # The ids themselves: the history is all that was said, the memory context nothing but question and memory.
    said = [turn.completion_ids + turn.response_ids for turn in rollout.turns]
    assert trunk == rollout.prefix_ids + said[0] + said[1] + said[2] + said[3]
    assert trunk[: contexts[3][0]] == rollout.prefix_ids + said[0] + said[1] + said[2]


def test_contexts_of_the_previous_baseline(protocol, tokenizer):
    """The memory of the turn before, the prefix alone where that turn had none; no history is scored."""
    rollout = play_script(protocol, SCRIPT)
    prefix = len(rollout.prefix_ids)
    first, second = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<mem>a cat</mem>", "<mem>cat</mem>")
    )
    contexts, of_turn = MemoryRewardCallback.contexts(rollout, [1, 3, 4], "previous")
    assert contexts == [(prefix, first), (prefix, []), (prefix, second)]
    assert of_turn == {1: (0, 1), 3: (2, 1), 4: (2, 2)}


def test_history_leaves_out_what_followed_the_call(protocol, tokenizer):
    """Text that the model invented after its call is in no context."""
    rollout = play_script(protocol, [call("Anna") + "INVENTED", "<mem>cat</mem><answer>cat</answer>"])
    contexts, of_turn = MemoryRewardCallback.contexts(rollout, [1], "history")
    cut, _ = contexts[of_turn[1][1]]
    assert "INVENTED" not in decode(tokenizer, rollout.history_ids)
    assert decode(tokenizer, rollout.history_ids[:cut]) == decode(tokenizer, rollout.turns[1].prompt_ids)


def fire(rollouts, tokenizer, model, tmp_path, callback=None, **kwargs):
    args = config(tmp_path, **kwargs)
    (callback or MemoryRewardCallback()).on_rollouts_end(
        args,
        TrainerState(),
        TrainerControl(),
        rollouts=rollouts,
        scorer=RowScorer(model, tokenizer.pad_token_id),
        processing_class=tokenizer,
    )


def logps_after(model, context: list[int], continuation: list[int], positions: list[int]) -> torch.Tensor:
    """The definition: one row, one forward, log-softmax at the position before each token."""
    model.eval()
    with torch.no_grad():
        logps = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    return torch.stack([logps[len(context) + p - 1, continuation[p]] for p in positions])


@pytest.mark.parametrize("memory_baseline", ["history", "previous"])
@pytest.mark.parametrize("memory_answer", ["joint", "objectives"])
@pytest.mark.parametrize("memory_token_filter", ["independent", "none"])
def test_callback_writes_the_definition(
    memory_baseline, memory_answer, memory_token_filter, protocol, tokenizer, tmp_path
):
    """R_M of every turn with a closed memory, equal to the definition computed row by row; no other turn has one."""
    model = tiny_model(tokenizer)
    rollout = play_script(protocol, SCRIPT, golden_answers=[["cat", "kitten"], ["7"]])
    fire(
        [rollout],
        tokenizer,
        model,
        tmp_path,
        memory_baseline=memory_baseline,
        memory_answer=memory_answer,
        memory_token_filter=memory_token_filter,
        memory_prob_threshold=0.0035,  # a random model gives each of 267 tokens about 1 / 267 = 0.0037
    )
    ids = tokenizer(ANSWER_TEMPLATE.replace("{answer}", "cat; 7"), add_special_tokens=False)["input_ids"]
    # "c", "a", "t", ";", " ", "7" before "\n</answer>".
    mask = list(range(len(ids) - 8, len(ids) - 2))
    assert decode(tokenizer, [ids[p] for p in mask]) == "cat; 7"
    memory = {t: rollout.turns[t].memory_ids for t in range(5)}
    said = [turn.completion_ids + turn.response_ids for turn in rollout.turns]
    assert rollout.turns[0].memory_reward is None and rollout.turns[2].memory_reward is None
    for t in (1, 3, 4):
        baseline = memory[t - 1] if memory_baseline == "previous" else sum(said[:t], [])
        mem = logps_after(model, rollout.prefix_ids + memory[t], ids, mask)
        full = logps_after(model, rollout.prefix_ids + baseline, ids, mask)
        expected = {}
        for side, logps in (("mem", mem), ("full", full)):
            keep = logps > (-math.inf if memory_token_filter == "none" else math.log(0.0035))
            parts = [[0, 1, 2], [5]] if memory_answer == "objectives" else [[0, 1, 2, 3, 4, 5]]
            probabilities = []
            for part in parts:
                kept = [logps[p].item() for p in part if keep[p]]
                probabilities.append(math.exp(sum(kept) / len(kept)) if kept else 0.0)
            expected[side] = (sum(probabilities) / len(probabilities), keep.float().mean().item())
        turn = rollout.turns[t]
        assert turn.p_mem == pytest.approx(expected["mem"][0], abs=1e-6)
        assert turn.p_full == pytest.approx(expected["full"][0], abs=1e-6)
        assert (turn.kept_frac_mem, turn.kept_frac_full) == (expected["mem"][1], expected["full"][1])
        assert turn.memory_reward == pytest.approx(expected["mem"][0] - expected["full"][0], abs=1e-6)


def test_turns_without_reward(protocol, tokenizer, tmp_path):
    """The first turn, a turn without memory and one whose block never closes have no reward: `None`, not 0."""
    first_with_memory = play_script(
        protocol, ["<mem>x</mem>" + call("Anna"), call("Bo"), "<mem>open <answer>cat</answer>"]
    )
    single = play_script(protocol, ["<mem>x</mem><answer>cat</answer>"])
    fire([first_with_memory, single], tokenizer, tiny_model(tokenizer), tmp_path)
    assert [turn.memory_span is not None for turn in first_with_memory.turns] == [True, False, False]
    for turn in first_with_memory.turns + single.turns:
        assert turn.memory_reward is None and turn.p_mem is None and turn.kept_frac_full is None


def test_rollouts_without_golden_answers_have_no_reward(protocol, tokenizer, tmp_path):
    """No answer to predict: no reward and no exception, and the other rollouts of the batch are scored."""
    script = [call("Anna"), "<mem>cat</mem><answer>cat</answer>"]
    without, empty, blank, given_answer = (
        play_script(protocol, script, golden_answers=answers) for answers in ([], [], [[""]], [["cat"]])
    )
    without.golden_answers = None
    fire([without, empty, blank, given_answer], tokenizer, tiny_model(tokenizer), tmp_path)
    for rollout in (without, empty, blank):
        assert [turn.memory_reward for turn in rollout.turns] == [None, None]
    assert math.isfinite(given_answer.turns[1].memory_reward)


def test_an_empty_memory_is_scored(protocol, tokenizer, tmp_path):
    """`<mem></mem>` is a closed block: its context is the prefix and the two tags, and its reward is defined."""
    model = tiny_model(tokenizer)
    rollout = play_script(protocol, [call("Anna"), "<mem></mem><answer>cat</answer>"])
    fire([rollout], tokenizer, model, tmp_path, memory_token_filter="none")
    made = make_answer(tokenizer, [["cat"]])
    context = rollout.prefix_ids + tokenizer("<mem></mem>", add_special_tokens=False)["input_ids"]
    expected = logps_after(model, context, made.ids, made.positions).mean().exp().item()
    assert rollout.turns[1].p_mem == pytest.approx(expected, abs=1e-6)


def test_answer_template_of_the_configuration(protocol, tokenizer, tmp_path):
    """`answer_template` is what is scored."""
    model = tiny_model(tokenizer)
    rollout = play_script(protocol, [call("Anna"), "<mem>cat</mem><answer>cat</answer>"])
    fire([rollout], tokenizer, model, tmp_path, memory_token_filter="none", answer_template="It is {answer}!")
    ids = tokenizer("It is cat!", add_special_tokens=False)["input_ids"]
    expected = logps_after(model, rollout.prefix_ids + rollout.turns[1].memory_ids, ids, [6, 7, 8]).mean().exp()
    assert rollout.turns[1].p_mem == pytest.approx(expected.item(), abs=1e-6)
