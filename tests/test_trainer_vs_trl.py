"""The trainer against TRL's own on the same sampled ids: where MemPO has nothing to add, nothing may differ."""

import pytest
import torch
from conftest import (
    TRL_CHAT_TEMPLATES,
    RecordedTrainer,
    Recording,
    byte_tokenizer,
    call,
    config,
    dataset,
    generation,
    search,
    tiny_model,
)
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mempo_trl.config import LOSS_TYPES
from mempo_trl.generation import Generation


QUESTION = "What is the pet of Anna?"
PROMPT = [{"role": "system", "content": "Search."}, {"role": "user", "content": QUESTION}]


class ScriptedGRPO(Recording, GRPOTrainer):
    """TRL's trainer, whose policy "samples" what a script says: `script(rollout_number, turn_number)`."""

    def __init__(self, *args, script, **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script
        self._start = 0  # number of the batch's first rollout
        self._turns = []  # per live rollout its number and its turn

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if len(prompt_ids) == self.args.generation_batch_size:
            self._turns = [(self._start + i, 0) for i in range(len(prompt_ids))]
            self._start += len(prompt_ids)
        else:
            self._turns = [(number, turn + 1) for number, turn in self._turns if "<tool_call>" in self.texts[number]]
        turns = [self.script(number, turn) for number, turn in self._turns]
        self.texts = {number: text for (number, _), text in zip(self._turns, turns, strict=True)}
        ids = [made.ids if not isinstance(made, str) else generation(self._tokenizer, made).ids for made in turns]
        return [list(row) for row in ids], None


def grpo_config(folder, **kwargs) -> GRPOConfig:
    """The same settings as `config`, without those that GRPO does not have."""
    own = config(folder, **kwargs)
    names = GRPOConfig.__dataclass_fields__
    changed = {
        name: value
        for name, value in own.__dict__.items()
        if name in names and names[name].init and name not in ("generation_batch_size", "accelerator_config")
    }
    return GRPOConfig(**changed)


def reward(completions, **kwargs):
    """Rewards that differ between rollouts, from the last message's text."""
    return [float(len(messages[-1]["content"]) % 7) / 3 for messages in completions]


def train_both(folder, tmp_path, script, data=None, grpo_kwargs=None, **kwargs):
    """The same run by TRL's trainer and by ours."""
    kwargs = dict(memory_advantage_weight=0.0, max_grad_norm=0.0, max_completion_length=30) | kwargs
    theirs = ScriptedGRPO(
        model=folder,
        reward_funcs=reward,
        args=grpo_config(tmp_path / "grpo", **kwargs),
        train_dataset=data or Dataset.from_dict({"prompt": [PROMPT] * 4}),
        script=script,
        **(grpo_kwargs or {}),
    )
    ours = RecordedTrainer(
        model=folder,
        reward_funcs=reward,
        args=config(tmp_path / "mempo", **kwargs),
        train_dataset=dataset(),
        tools=[search],
        script=script,
    )
    for trainer in (theirs, ours):
        torch.manual_seed(0)  # TRL shuffles the rows of a generation batch
        trainer.train()
    return theirs, ours


def assert_same_run(theirs, ours):
    """Same rows, masks and advantages, same loss, and the same gradient of every parameter, in every micro-batch."""
    assert len(theirs.inputs_seen) == len(ours.inputs_seen) > 0
    for expected, actual in zip(theirs.inputs_seen, ours.inputs_seen, strict=True):
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "num_items_in_batch"):
            assert torch.equal(actual[name], expected[name]), name
        mask = expected["completion_mask"] * expected.get("tool_mask", 1)
        assert torch.equal(actual["completion_mask"] * actual["tool_mask"], mask)
        spread = expected["advantages"].unsqueeze(1).expand_as(mask)
        torch.testing.assert_close(actual["advantages"] * mask, spread * mask, rtol=0, atol=1e-7)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-8)
    assert len(theirs.gradients) == len(ours.gradients) == theirs.state.global_step
    for expected, actual in zip(theirs.gradients, ours.gradients, strict=True):
        assert expected.keys() == actual.keys()
        assert max(gradient.abs().max() for gradient in expected.values()) > 1e-5
        for name, gradient in expected.items():
            torch.testing.assert_close(
                actual[name], gradient, rtol=1e-4, atol=3e-5 * gradient.abs().max().item() + 1e-8
            )
    assert [row["completions/clipped_ratio"] for row in ours.state.log_history if "reward" in row] == [
        row["completions/clipped_ratio"] for row in theirs.state.log_history if "reward" in row
    ]
    for metric in ("reward", "reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "learning_rate"):
        logged = [[entry[metric] for entry in t.state.log_history if metric in entry] for t in (theirs, ours)]
        assert logged[1] == pytest.approx(logged[0], rel=1e-4, abs=1e-7), metric


ONE_TURN = [
    "<answer>cat</answer>",
    "<think>it may be a dog</think><answer>dog</answer>",
    "no action at all, but a longer text than the others",
]


def one_turn(number, turn):
    """One turn without search, another text in each of the two generation batches; one is cut at 30 tokens."""
    if number % 4 == 3:
        return Generation(list(range(number, number + 30)), None, "length")
    return ONE_TURN[number % 4] + ("" if number < 4 else "!" * number)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_turn_is_grpo(loss_type, beta, short_folder, tmp_path):
    """One turn, no search, λ = 0: loss and gradients of GRPO, on-policy and off, over two micro-batches and two steps."""
    # Two optimiser steps from one generation batch: the second one is off-policy, so that clipping, the ratio and the
    # KL against the reference have a value and a gradient.
    theirs, ours = train_both(
        short_folder,
        tmp_path,
        one_turn,
        loss_type=loss_type,
        beta=beta,
        num_generations=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
        learning_rate=0.03,
    )
    assert_same_run(theirs, ours)
    assert "old_per_token_logps" in ours.inputs_seen[0]
    if beta:
        kl = [entry["kl"] for entry in ours.state.log_history if "kl" in entry]
        assert kl == pytest.approx([entry["kl"] for entry in theirs.state.log_history if "kl" in entry], rel=1e-4)
        assert kl[1] > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        dict(importance_sampling_level="sequence"),
        dict(importance_sampling_level="sequence", loss_type="luspo", beta=0.1),
        dict(importance_sampling_level="sequence", loss_type="dapo"),
        dict(gradient_accumulation_steps=1, per_device_train_batch_size=4),
        dict(gradient_accumulation_steps=1, per_device_train_batch_size=4, num_iterations=2, beta=0.1),
        dict(scale_rewards="none"),
        dict(scale_rewards="batch", num_generations=2),
        dict(use_bias_correction_kl=True, beta=0.1),
        dict(use_bias_correction_kl=True, beta=0.1, importance_sampling_level="sequence", num_iterations=2),
        dict(top_entropy_quantile=0.5, beta=0.1),
        dict(entropy_coef=0.01),
        dict(delta=1.2, num_iterations=2),
        dict(mask_truncated_completions=True),
        dict(pad_to_multiple_of=8),
        dict(off_policy_mask_threshold=0.01, num_iterations=2, learning_rate=0.03),
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_one_turn_is_grpo_under_each_option(options, short_folder, tmp_path):
    """The options of GRPO keep their meaning."""
    settings = dict(
        loss_type="grpo",
        beta=0.0,
        num_generations=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        optim="sgd",  # Adam's first step is that of the sign, which makes of rounding a different second step
        learning_rate=1.0,
    )
    theirs, ours = train_both(short_folder, tmp_path, one_turn, **(settings | options))
    assert_same_run(theirs, ours)


# Several turns against TRL's own tool loop

TURNS = [
    ["<think>who</think>" + call("Anna"), "<think>so</think>" + call("cats"), "<answer>cat</answer>"],
    [call("dogs"), "<answer>a dog, I think</answer>"],
    ["<answer>fish</answer>"],
    ["<think>t</think>" + call("x"), "I do not know"],
]


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3_instruct_2507"])
def tools_folder(request, tmp_path_factory):
    """The tiny model with one of the templates whose tool calls TRL can parse."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (TRL_CHAT_TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")
    folder = str(tmp_path_factory.mktemp(request.param))
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("loss_type", "beta"), [("grpo", 0.1), ("dapo", 0.0), ("dr_grpo", 0.0)])
def test_full_context_is_the_tool_loop_of_trl(loss_type, beta, tools_folder, tmp_path):
    """`context="full"`: the same rows, masks, losses and gradients as TRL's tool loop, however many turns it took."""
    theirs, ours = train_both(
        tools_folder,
        tmp_path,
        lambda number, turn: TURNS[number % 4][turn],
        grpo_kwargs=dict(tools=[search]),
        context="full",
        loss_type=loss_type,
        beta=beta,
        num_generations=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_completion_length=2000,
    )
    assert_same_run(theirs, ours)
    assert len(ours.inputs_seen[0]["completion_ids"]) == 2  # one row per rollout
    assert any((inputs["tool_mask"] == 0).any() for inputs in theirs.inputs_seen)
