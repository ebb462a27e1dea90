"""The trainer where there is nothing to learn, where ids mean two things, and where nothing was sampled."""

import math

import pytest
import torch
from conftest import EOS, RecordedTrainer, build, call, generation, gradient_of, played, row_of, script_of, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from mempo_trl.generation import Generation


# Nothing to learn from


def gradients_are_zero(trainer):
    return all(gradient.abs().sum() == 0 for step in trainer.gradients for gradient in step.values())


def metrics_are_finite(trainer):
    return all(
        value is None or not isinstance(value, float) or math.isfinite(value)
        for entry in trainer.state.log_history
        for value in entry.values()
    )


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "vespo"])
@pytest.mark.parametrize(
    "turns",
    [
        ["<answer>cat</answer>"],  # all right
        ["nothing"],  # all failed
        [""],  # all sampled nothing but the end of turn
        None,  # all cut, and masked
    ],
    ids=["equal", "failed", "blank", "masked"],
)
def test_nothing_to_learn(turns, loss_type, short_folder, tmp_path):
    """Equal rewards, or no trained token at all: loss and metrics finite, and every gradient exactly 0."""
    trainer = build(
        short_folder,
        tmp_path,
        lambda number, turn: turns[turn] if turns else generation(trainer._tokenizer, "x" * 20, end=False),
        loss_type=loss_type,
        max_completion_length=20,
        mask_truncated_completions=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.losses == [0.0, 0.0] and gradients_are_zero(trainer) and metrics_are_finite(trainer)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])
    trained = sum((inputs["completion_mask"] * inputs["tool_mask"]).sum().item() for inputs in trainer.inputs_seen)
    assert (trained == 0) == (turns is None)


def test_one_real_rollout_among_masked_ones(short_folder, tmp_path):
    """Masked siblings give no gradient and do not dilute a rollout's own tokens beyond TRL's mean over rollouts."""

    def script(number, turn):
        return "<answer>cat</answer>" if number == 0 else generation(trainer._tokenizer, "x" * 20, end=False)

    trainer = build(
        short_folder,
        tmp_path,
        script,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=20,
        mask_truncated_completions=True,
        beta=0.0,
    )
    trainer.train()
    # One of four right: mean 0.25, std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5, A_T = 0.75 / 0.5001 = 1.499700. Six
    # tokens: -1.4997 / (4 * 6) each.
    gradient = gradient_of(trainer, played(trainer)[0].turns)
    torch.testing.assert_close(gradient[:6], torch.full((6,), -1.499700 / 24), rtol=1e-5, atol=0)
    for logps, inputs in zip(trainer.logps, trainer.inputs_seen, strict=True):
        masked = ~(inputs["completion_mask"] * inputs["tool_mask"]).any(dim=1)
        assert masked.sum() == 3 and logps.grad[masked].abs().sum() == 0
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0.75


def test_truncated_rollouts_are_trained_unless_masked(short_folder, tmp_path):
    """Without `mask_truncated_completions` a cut turn is trained like any other, earlier turns of its rollout too."""
    cut = "<mem>m</mem>" + "x" * 57

    def script(number, turn):
        if number == 1:
            return "<answer>cat</answer>"
        return call("a") if turn == 0 else generation(trainer._tokenizer, cut, end=False)

    masks = {}
    for masked in (False, True):
        trainer = build(short_folder, tmp_path, script, max_completion_length=60, mask_truncated_completions=masked)
        trainer.train()
        rollout = played(trainer)[0]
        assert (rollout.outcome, len(rollout.turns)) == ("truncated", 2)
        inputs, row = row_of(trainer, rollout.turns)
        masks[masked] = (inputs["completion_mask"][row] * inputs["tool_mask"][row]).sum().item()
    assert masks == {False: 50 + 60, True: 0}


def test_an_unscorable_sibling_does_not_shift_the_baseline(short_folder, tmp_path):
    """Rewards 1, 0, None, None: the valid two have the advantages that they would have alone, the others 0."""

    def reward(completions, **kwargs):
        return [1.0, 0.0, None, None]

    script = script_of(*[[f"<answer>{letter}</answer>"] for letter in "abcd"])
    trainer = train(
        short_folder, tmp_path, script, reward_funcs=reward, num_generations=4, per_device_train_batch_size=4, beta=0.0
    )
    # Mean 0.5, std 0.707107 of the valid two.
    assert [rollout.advantage for rollout in played(trainer)] == pytest.approx(
        [0.707007, -0.707007, 0.0, 0.0], abs=1e-6
    )
    assert [rollout.reward for rollout in played(trainer)] == [1.0, 0.0, None, None]
    for rollout in played(trainer)[2:]:
        assert gradient_of(trainer, rollout.turns).abs().sum() == 0


# Token ids that mean two things, and completions that hold none


def test_pad_id_equal_to_eos_id(short_folder, tmp_path):
    """The sampled end of turn is trained, padding with the same id is not."""
    tokenizer = AutoTokenizer.from_pretrained(short_folder)
    tokenizer.pad_token = EOS
    trainer = train(
        short_folder,
        tmp_path,
        script_of(["<answer>cat</answer>"], ["<answer>a long answer</answer>"]),
        processing_class=tokenizer,
        beta=0.0,
    )
    assert trainer._tokenizer.pad_token_id == trainer._tokenizer.eos_token_id
    short, long = played(trainer)
    gradient = gradient_of(trainer, short.turns)
    assert short.turns[0].completion_ids[-1] == trainer._tokenizer.pad_token_id
    assert (gradient[:6] != 0).all() and gradient[6:].abs().sum() == 0 and len(gradient) == 16
    inputs, row = row_of(trainer, long.turns)
    assert inputs["completion_mask"][row].all()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_empty_completions(loss_type, short_folder, tmp_path):
    """An empty completion is a turn without action: no exception, no row, reward 0; also when all are empty."""

    def script(number, turn):
        made = generation(trainer._tokenizer, "", end=False)
        return made if number != 1 else "<answer>cat</answer>"

    trainer = build(short_folder, tmp_path, script, loss_type=loss_type, max_steps=2)
    trainer.train()
    first, second = played(trainer)
    assert (first.outcome, first.reward, second.reward) == ("no_action", 0.0, 1.0)
    assert trainer.state.log_history[0]["completions/min_length"] == 0
    # The second step has empty completions only, and still its forward and backward.
    assert [rollout.completion_ids for rollout in played(trainer, 1)] == [[], []]
    assert len(trainer.gradients) == 2 and trainer.losses[1] == 0.0
    assert all(gradient.abs().sum() == 0 for gradient in trainer.gradients[1].values())


def test_sampling_logps_stay_with_their_tokens(short_folder, tmp_path):
    """Where the engine reports log-probabilities, each stays at its token, with 0 on tool responses and padding."""
    first = [[call("a"), -0.5], ["<mem>m</mem>" + call("b"), -0.25], ["<mem>n</mem><answer>cat</answer>", -0.125]]

    def script(number, turn):
        text, logp = first[turn] if number == 0 else ["<answer>dog</answer>", -2.0]
        return generation(trainer._tokenizer, text, logp=logp)

    trainer = build(short_folder, tmp_path, script, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    trainer.train()
    rollout, other = played(trainer)
    o = len(rollout.turns[0].response_ids)
    for turns, blocks in (
        (rollout.turns[:2], [(-0.5, 50), (0.0, o), (-0.25, 53)]),
        (rollout.turns[2:], [(-0.125, 9)]),
        (other.turns, [(-2.0, 6)]),
    ):
        inputs, row = row_of(trainer, turns)
        expected = [value for value, count in blocks for _ in range(count)]
        actual = inputs["sampling_per_token_logps"][row].tolist()
        assert actual == expected + [0.0] * (len(actual) - len(expected))


def test_every_declared_end_of_turn_counts(short_folder, tmp_path):
    """A model that declares several ids that end a turn: a turn of full length that ends in any of them is not cut."""
    model = AutoModelForCausalLM.from_pretrained(short_folder)
    tokenizer = AutoTokenizer.from_pretrained(short_folder)
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, other]
    # "<answer>", "cat", "</answer>" and one id more: six tokens, which is the limit.
    answer = generation(tokenizer, "<answer>cat</answer>", end=False).ids

    def script(number, turn):
        return Generation(answer + [other if number == 0 else tokenizer.convert_tokens_to_ids("<think>")])

    trainer = train(
        short_folder,
        tmp_path,
        script,
        model=model,
        processing_class=tokenizer,
        max_completion_length=6,
        beta=0.0,
        reward_funcs=lambda completions, rollouts, **kwargs: [float(r.well_formed) for r in rollouts],
    )
    assert trainer.eos_token_ids == [tokenizer.eos_token_id, other]
    ended, cut = played(trainer)
    assert (ended.outcome, ended.answer, ended.well_formed) == ("answer", "cat", True)
    assert not cut.well_formed
    assert (gradient_of(trainer, ended.turns)[:6] != 0).all()  # the id that ended the turn is trained


# An engine that reports log-probabilities, as vLLM does


class EngineTrainer(RecordedTrainer):
    """A trainer that takes the path of vLLM, with the script in place of the engine."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm = True

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if logps is not None:
            return ids, logps
        # The engine samples from the policy itself, so the importance ratios are 1.
        with torch.no_grad():
            return ids, [logps_of(self.model, prompt, row) for prompt, row in zip(prompt_ids, ids, strict=True)]


def logps_of(model, prompt, row):
    if not row:
        return []
    logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_importance_ratios_of_the_policy_itself_change_nothing(mode, short_folder, tmp_path):
    """Sampling log-probabilities equal to the policy's: the gradients of a run without them, over several rows."""
    script = script_of(
        [call("a"), "<mem>m</mem>" + call("b"), "<mem>n</mem><answer>cat</answer>"], ["<answer>dog</answer>"]
    )
    settings = dict(per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=0.0)
    plain = train(short_folder, tmp_path / "plain", script, **settings)
    engine = train(
        short_folder, tmp_path / "engine", script, EngineTrainer, vllm_importance_sampling_mode=mode, **settings
    )
    ratios = torch.cat([inputs["importance_sampling_ratio"].flatten() for inputs in engine.inputs_seen])
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(engine.gradients[0][name], gradient, rtol=1e-2, atol=1e-6)


def test_an_engine_that_samples_nothing(short_folder, tmp_path):
    """All completions empty on a process: padding rows only, with log-probabilities where the engine reports them."""
    trainer = train(short_folder, tmp_path, lambda number, turn: Generation([], []), EngineTrainer)
    assert trainer.losses == [0.0] and gradients_are_zero(trainer)
