"""Whole runs: options of the parent, evaluation, reward functions, adapters and checkpoints."""

import json
import math

import pandas
import pytest
import torch
from conftest import (
    GivenMemoryRewards,
    build,
    call,
    config,
    dataset,
    played,
    script_of,
    search,
    train,
)
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mempo_trl import MemoryRewardCallback, MemPOTrainer, RolloutCallback
from mempo_trl.memory_reward import make_answer
from mempo_trl.rewards import exact_match_reward


RIGHT = [call("a"), "<mem>a cat</mem>" + call("b"), "<mem>cat</mem><answer>cat</answer>"]
WRONG = [call("a"), "<mem>x</mem>" + call("b"), "<mem>dogs</mem><answer>dog</answer>"]


def answer_logps(model, context, made):
    """The definition of the memory reward's log-probabilities: one row, temperature 1, dropout off."""
    model.eval()
    with torch.no_grad():
        logps = model(torch.tensor([context + made.ids])).logits[0].float().log_softmax(-1)
    return torch.stack([logps[len(context) + p - 1, made.ids[p]] for p in made.positions])


# The memory reward within a run


def test_memory_rewards_of_the_current_policy(short_folder, tmp_path):
    """The default callback scores the policy of the moment at temperature 1, whatever the sampling temperature."""
    keep = KeepRollouts()
    trainer = train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        callbacks=[keep],
        temperature=0.5,
        memory_token_filter="none",
        max_steps=2,
        learning_rate=0.05,
    )
    assert any(type(callback) is MemoryRewardCallback for callback in trainer.callback_handler.callbacks)
    made = make_answer(trainer._tokenizer, [["cat"]])
    start = AutoModelForCausalLM.from_pretrained(short_folder)
    first, second = keep.rollouts
    for rollout in first:
        history = list(rollout.prefix_ids)
        for t, turn in enumerate(rollout.turns):
            if t == 0:
                assert turn.memory_reward is None
            else:
                mem = answer_logps(start, rollout.prefix_ids + turn.memory_ids, made).mean().exp().item()
                full = answer_logps(start, history, made).mean().exp().item()
                assert turn.memory_reward == pytest.approx(mem - full, abs=1e-6)
            history += turn.completion_ids + turn.response_ids
    # The step in between has moved the policy, and the second batch is scored by what it is then.
    assert abs(second[0].turns[1].p_mem - first[0].turns[1].p_mem) > 1e-6


class KeepRollouts(RolloutCallback):
    """Keeps the rollouts of each generation batch."""

    def __init__(self):
        self.rollouts = []

    def on_rollouts_end(self, args, state, control, *, rollouts, scorer, processing_class, **kwargs):
        self.rollouts.append(rollouts)


def test_a_policy_that_samples_for_itself(short_folder, tmp_path):
    """Nothing scripted: a random model generates, acts on nothing, and is trained without an error."""
    keep = KeepRollouts()
    trainer = MemPOTrainer(
        short_folder,
        args=config(tmp_path, max_completion_length=6, max_steps=2, num_generations=4, per_device_train_batch_size=4),
        train_dataset=dataset(),
        tools=[search],
        callbacks=[keep],
    )
    trainer.train()
    assert trainer.state.global_step == 2
    for rollout in keep.rollouts[0] + keep.rollouts[1]:
        (turn,) = rollout.turns
        assert rollout.outcome in ("truncated", "no_action") and 1 <= len(turn.completion_ids) <= 6
        assert (rollout.outcome == "truncated") == (turn.completion_ids[-1] not in trainer.eos_token_ids)


@pytest.mark.parametrize("memory_advantage_weight", [0.0, 1.0])
def test_a_rollout_callback_is_called_once_per_batch(memory_advantage_weight, short_folder, tmp_path):
    """Also without a memory advantage, when nothing is scored; and it does not replace the memory reward."""
    keep = KeepRollouts()
    train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        callbacks=[keep],
        memory_advantage_weight=memory_advantage_weight,
        max_steps=2,
    )
    assert [len(rollouts) for rollouts in keep.rollouts] == [2, 2]
    scored = [turn.memory_reward is not None for rollout in keep.rollouts[0] for turn in rollout.turns]
    assert scored == [False, memory_advantage_weight > 0, memory_advantage_weight > 0] * 2


def test_weight_zero_scores_nothing(short_folder, tmp_path):
    """With λ = 0 no forward is spent on memories, and the memory metrics have no value."""
    trainer = train(
        short_folder, tmp_path, script_of(RIGHT, WRONG), memory_advantage_weight=0.0, callbacks=[GivenMemoryRewards([[None, 1, 2], [None, 3, 9]])]
    )  # fmt: skip
    logged = trainer.state.log_history[0]
    assert "time/memory_scoring" not in logged and logged["memory/reward_mean"] is None
    advantages = trainer.inputs_seen[0]["advantages"] / trainer.inputs_seen[0]["loss_weights"].unsqueeze(1)
    assert sorted({round(value, 4) for value in advantages.flatten().tolist()}) == [-0.707, 0.707]


# Options of the parent


def test_two_iterations_use_each_batch_twice(short_folder, tmp_path):
    """`num_iterations=2`: the second pass trains the same rows, against the log-probabilities of the first."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        rewards=[[None, 0.3, 0.1], [None, -0.1, 0.5]],
        num_iterations=2,
        max_steps=4,
        learning_rate=0.01,
    )
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, GivenMemoryRewards))
    assert trainer.state.global_step == 4 and len(callback.rollouts) == 2
    first, second = trainer.inputs_seen[:2]
    assert torch.equal(first["completion_ids"], second["completion_ids"])
    assert torch.equal(first["advantages"], second["advantages"])
    mask = (first["completion_mask"] * first["tool_mask"]).bool()
    torch.testing.assert_close(first["old_per_token_logps"][mask], trainer.logps[0][mask].detach(), rtol=0, atol=1e-5)
    ratio = (trainer.logps[1].detach() - second["old_per_token_logps"]).exp()[mask]
    assert (ratio - 1).abs().max() > 1e-3
    assert all(any(gradient.abs().sum() > 0 for gradient in step.values()) for step in trainer.gradients)


def test_completions_table(short_folder, tmp_path):
    """`log_completions` writes one row per rollout, with its messages, reward, advantage and the extra columns."""

    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("turns", [len(messages) for messages in completions])
        log_metric("messages", 2.5)
        return [float(messages[-1]["content"].endswith("<answer>cat</answer>")) for messages in completions]

    trainer = train(short_folder, tmp_path, script_of(RIGHT, WRONG), log_completions=True, reward_funcs=reward)
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 2
    assert [message["role"] for message in table["completion"][0]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert table["completion"][0][0]["content"] == RIGHT[0]
    assert table["prompt"][0][-1]["content"] == "What is the pet of Anna?"
    assert table["reward"].tolist() == [1.0, 0.0] and table["turns"].tolist() == [5, 5]
    assert table["advantage"].tolist() == pytest.approx([0.707007, -0.707007], abs=1e-6)
    assert trainer.state.log_history[0]["messages"] == 2.5


def test_evaluation_within_training(short_folder, tmp_path):
    """`eval_strategy`: rollouts are played and scored on the evaluation questions, and training is left as it is."""
    weights = {}
    for eval_strategy in ("no", "steps"):
        folder = tmp_path / eval_strategy
        trainer = train(
            short_folder,
            folder,
            script_of(RIGHT, WRONG),
            callbacks=[],
            eval_dataset=dataset(4),
            eval_strategy=eval_strategy,
            eval_steps=1,
            per_device_eval_batch_size=4,
            num_generations_eval=2,
            max_steps=2,
        )
        weights[eval_strategy] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [1, 2]
    for entry in evaluations:
        assert math.isfinite(entry["eval_loss"])
        assert entry["eval_reward"] == 0.5 and entry["eval_rollout/turns_mean"] == 3
        assert entry["eval_sequences/per_rollout"] == 2
        assert entry["eval_memory/defined_frac"] == 1 and math.isfinite(entry["eval_memory/reward_mean"])
    lines = (folder / "rollouts" / "eval-000002-rank0.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8 and all(json.loads(line)["mode"] == "eval" for line in lines)
    for name, weight in weights["no"].items():
        torch.testing.assert_close(weights["steps"][name], weight, rtol=0, atol=1e-6)


def test_evaluation_with_one_generation_per_question(short_folder, tmp_path):
    """A group of one has no advantage, and its metrics are still those of its rollouts."""
    trainer = build(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        callbacks=[],
        eval_dataset=dataset(2),
        num_generations_eval=1,
        per_device_eval_batch_size=1,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == 0.5 and metrics["eval_memory/defined_frac"] == 1
    assert math.isfinite(metrics["eval_loss"])


def test_a_streamed_data_set(short_folder, tmp_path):
    """An `IterableDataset` keeps the rollouts of a question together; its first row is checked at construction."""
    data = Dataset.from_dict({"question": [f"q{i}" for i in range(4)], "golden_answers": [["cat"]] * 4})
    trainer = train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        data=data.to_iterable_dataset(),
        max_steps=2,
        shuffle_dataset=False,
    )
    assert [[rollout.question for rollout in played(trainer, batch)] for batch in (0, 1)] == [["q0"] * 2, ["q1"] * 2]
    with pytest.raises(ValueError, match="'question'"):
        build(short_folder, tmp_path, None, data=data.rename_column("question", "q").to_iterable_dataset())


def test_removing_unused_columns_keeps_ours(short_folder, tmp_path):
    """With `remove_unused_columns` question and answers stay, other columns do not reach the reward functions."""
    seen = {}

    def reward(completions, **kwargs):
        seen.update(kwargs)
        return [1.0, 0.0]

    data = dataset(level=["easy"] * 4)
    train(short_folder, tmp_path, script_of(RIGHT, WRONG), data=data, reward_funcs=reward, remove_unused_columns=True)
    assert seen["golden_answers"] == [[["cat"]]] * 2 and "level" not in seen


def test_mixed_precision(short_folder, tmp_path):
    """Under bf16 autocast memories are scored like the policy is trained: finite, and close to full precision."""
    rewards = {}
    for bf16 in (False, True):
        keep = KeepRollouts()
        trainer = train(
            short_folder,
            tmp_path / str(bf16),
            script_of(RIGHT, WRONG),
            callbacks=[keep],
            bf16=bf16,
            memory_token_filter="none",
        )
        rewards[bf16] = [turn.p_mem for rollout in keep.rollouts[0] for turn in rollout.turns[1:]]
        assert all(math.isfinite(loss) for loss in trainer.losses)
        assert all(gradient.isfinite().all() for gradient in trainer.gradients[0].values())
    assert rewards[True] == pytest.approx(rewards[False], rel=0.02)
    assert rewards[True] != rewards[False]


def test_rollouts_are_dumped(short_folder, tmp_path):
    """Every rollout of a step with text, R_M, P_mem, P_full and credit; nothing when switched off."""
    train(short_folder, tmp_path / "on", script_of(RIGHT, WRONG), callbacks=[], log_rollout_ids=True)
    path = tmp_path / "on" / "rollouts" / "train-000000-rank0.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert [turn["completion"] for turn in first["turns"]] == RIGHT
    assert first["A_T"] == pytest.approx(0.707007, abs=1e-6) and second["reward"] == 0.0
    for turn in first["turns"][1:]:
        assert turn["R_M"] == pytest.approx(turn["P_mem"] - turn["P_full"], abs=1e-9)
        assert isinstance(turn["A_M"], float) and len(turn["mem_rewards_idx_list"]) == len(turn["completion_ids"])
    train(short_folder, tmp_path / "off", script_of(RIGHT, WRONG), log_rollouts=False)
    assert not (tmp_path / "off" / "rollouts").exists()


def test_the_dump_says_which_question_and_which_rewards(short_folder, tmp_path):
    """`id` and `dataset` of the row, λ, the prompts, and each function's reward; one it could not give is null."""

    def bonus(completions, **kwargs):
        return [None, 0.5]

    data = dataset(id=["q7"] * 4, dataset=["pets"] * 4)
    train(short_folder, tmp_path, script_of(RIGHT, WRONG), data=data, reward_funcs=[exact_match_reward, bonus])
    path = tmp_path / "rollouts" / "train-000000-rank0.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert (first["id"], first["dataset"], first["memory_weight"]) == ("q7", "pets", 1.0)
    assert first["rewards"] == {"exact_match_reward": 1.0, "bonus": None} and first["reward"] == 1.0
    assert second["rewards"] == {"exact_match_reward": 0.0, "bonus": 0.5} and second["reward"] == 0.5
    assert "What is the pet of Anna?" in first["prefix"] and first["turns"][1]["prompt"].startswith(RIGHT[0])
    assert "tokens" not in first["turns"][0]


# Reward functions


def test_what_reward_functions_get(short_folder, tmp_path):
    """Columns, messages, the sampled ids of all turns and the rollouts: one entry per rollout, in one order."""
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.25, 0.75]

    async def slow_reward(completions, **kwargs):
        return [None, 2.0]

    trainer = train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        data=dataset(level=["easy"] * 4),
        reward_funcs=[reward, slow_reward],
        reward_weights=[1.0, 0.5],
    )
    rollouts = seen["rollouts"]
    assert rollouts == played(trainer)
    assert seen["level"] == ["easy"] * 2 and seen["golden_answers"] == [[["cat"]]] * 2
    assert seen["question"] == ["What is the pet of Anna?"] * 2
    assert [prompt[-1]["content"] for prompt in seen["prompts"]] == seen["question"]
    assert [message["content"] for message in seen["completions"][1] if message["role"] == "assistant"] == WRONG
    assert seen["completion_ids"] == [
        rollout.turns[0].completion_ids + rollout.turns[1].completion_ids + rollout.turns[2].completion_ids
        for rollout in rollouts
    ]
    # 0.25 and 0.75 + 0.5 * 2: mean 1, std sqrt(2 * 0.75 ** 2) = 1.060660, +-0.75 / 1.060760.
    assert [rollout.reward for rollout in rollouts] == [0.25, 1.75]
    assert [rollout.advantage for rollout in rollouts] == pytest.approx([-0.707040, 0.707040], abs=1e-6)


def test_a_given_reward_needs_no_golden_answers(short_folder, tmp_path):
    """With a reward function and λ = 0 the data set may have questions only."""

    def reward(completions, rollouts, **kwargs):
        return [float(len(rollout.turns)) for rollout in rollouts]

    keep = KeepRollouts()
    train(
        short_folder,
        tmp_path,
        script_of(RIGHT, ["<answer>x</answer>"]),
        data=dataset().remove_columns("golden_answers"),
        callbacks=[keep],
        reward_funcs=reward,
        memory_advantage_weight=0.0,
    )
    assert [rollout.reward for rollout in keep.rollouts[0]] == [3.0, 1.0]


def test_too_many_failed_tools_stop_the_run(short_folder, tmp_path):
    """A retriever that is down is not trained on: an error with the last cause, at the set rate."""

    def search(query: str) -> str:
        """
        Searches in vain.

        Args:
            query: What to search for.
        """
        raise ConnectionError("http://localhost:8000 refused")

    with pytest.raises(RuntimeError, match="localhost:8000 refused.*max_tool_error_rate"):
        train(short_folder, tmp_path, script_of(RIGHT, WRONG), tools=[search])
    trainer = train(short_folder, tmp_path, script_of(RIGHT, WRONG), tools=[search], max_tool_error_rate=1.0)
    assert trainer.state.log_history[0]["tool/error_frac"] == 1.0


# Adapters

LORA = dict(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def logits_of(model, ids):
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def test_a_new_adapter(short_folder, tmp_path):
    """With `peft_config` only the adapter moves; saved and reloaded by PEFT it is the trained policy."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(RIGHT, WRONG),
        callbacks=[],
        peft_config=LoraConfig(**LORA),
        max_steps=2,
        beta=0.1,
        gradient_checkpointing=True,
    )
    base = AutoModelForCausalLM.from_pretrained(short_folder)
    for name, parameter in base.named_parameters():
        wrapped = (
            name if "q_proj" not in name and "v_proj" not in name else name.replace(".weight", ".base_layer.weight")
        )
        assert torch.equal(trainer.model.base_model.model.get_parameter(wrapped), parameter)
    moved = [p.abs().sum().item() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert len(moved) == 4 and all(value > 0 for value in moved)
    assert trainer.state.log_history[0]["kl"] == 0
    trainer.save_model(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = trainer.inputs_seen[0]["completion_ids"][0].tolist()
    torch.testing.assert_close(logits_of(reloaded, ids), logits_of(trainer.model, ids), rtol=0, atol=1e-6)


def test_a_trained_adapter_goes_on_and_is_the_reference(short_folder, tmp_path):
    """The KL of a continued adapter is against that adapter, not against the bare base, also after it has moved."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(short_folder)
    adapted = get_peft_model(base, LoraConfig(**LORA, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "start")

    def start():
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(short_folder), tmp_path / "start", is_trainable=True
        )

    trainer = train(
        short_folder,
        tmp_path / "run",
        script_of(RIGHT, WRONG),
        model=start(),
        processing_class=AutoTokenizer.from_pretrained(short_folder),
        callbacks=[],
        beta=0.1,
        max_steps=2,
    )
    kls = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kls[0] == pytest.approx(0, abs=1e-9) and kls[1] > 1e-6
    before, plain = start(), AutoModelForCausalLM.from_pretrained(short_folder)
    inputs = trainer.inputs_seen[1]  # after one step
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    width = inputs["completion_ids"].size(1)
    logps = {}
    for name, model in (("start", before), ("base", plain)):
        model.eval()
        with torch.no_grad():
            logits = model(ids, attention_mask=attention).logits[:, -width - 1 : -1].log_softmax(-1)
        logps[name] = logits.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)[mask]
    reference = inputs["ref_per_token_logps"][mask]
    torch.testing.assert_close(reference, logps["start"], rtol=0, atol=1e-4)
    assert (reference - logps["base"]).abs().max() > 1e-2
    # The adapter has moved from where it was, and what is saved is the trained one.
    trainer.save_model(tmp_path / "end")
    end = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(short_folder), tmp_path / "end")
    row = ids[0].tolist()
    torch.testing.assert_close(logits_of(end, row), logits_of(trainer.model, row), rtol=0, atol=1e-6)
    assert (logits_of(end, row) - logits_of(before, row)).abs().max() > 1e-4


# Checkpoints


def test_a_resumed_run_ends_where_an_unbroken_one_does(short_folder, tmp_path):
    """Save after each step, stop after the first, resume: the same weights as two steps at once."""
    settings = dict(callbacks=[], save_strategy="steps", save_steps=1, lr_scheduler_type="constant", beta=0.1)
    unbroken = train(short_folder, tmp_path / "unbroken", script_of(RIGHT, WRONG), max_steps=2, **settings)
    train(short_folder, tmp_path / "broken", script_of(RIGHT, WRONG), max_steps=1, **settings)
    resumed = build(short_folder, tmp_path / "broken", script_of(RIGHT, WRONG), max_steps=2, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    for name, parameter in unbroken.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), parameter, rtol=0, atol=1e-6)
    assert "MemPO" in (tmp_path / "broken" / "README.md").read_text(encoding="utf-8")
