"""The trainer: from scripted rollouts through the real path to advantages, losses, gradients and steps."""

import math
import time

import pytest
import torch
from conftest import (
    build,
    call,
    gradient_of,
    played,
    row_of,
    script_of,
    train,
)
from transformers import AutoModelForCausalLM

from mempo_trl import BM25Retriever, SearchTool
from mempo_trl.retrieval.cache import CachedRetriever
from mempo_trl.retrieval.document import Document
from mempo_trl.sequences import build_sequences


def check_row(trainer, turns, weight, blocks):
    """
    Check a row token by token: blocks of `(advantage, tokens)`, `None` for tokens that are not trained, then padding.
    """
    inputs, row = row_of(trainer, turns)
    advantages = torch.tensor([value or 0.0 for value, count in blocks for _ in range(count)])
    trained = [int(value is not None) for value, count in blocks for _ in range(count)]
    mask = inputs["completion_mask"][row] * inputs["tool_mask"][row]
    assert mask.tolist() == trained + [0] * (len(mask) - len(trained))
    assert inputs["loss_weights"][row].item() == pytest.approx(weight, abs=1e-6)
    actual = inputs["advantages"][row][: len(trained)] * torch.tensor(trained)
    torch.testing.assert_close(actual, weight * advantages, rtol=0, atol=5e-6)


THREE_TURNS = [
    [call("a"), "<mem>no</mem>" + call("bb"), "<mem>yes</mem><answer>cat</answer>"],
    [call("a"), "<mem>x</mem>" + call("bb"), "<mem>y</mem><answer>dog</answer>"],
]


def test_every_advantage_by_hand(short_folder, tmp_path):
    """Two rollouts of three turns with given memory rewards: the advantage of every single token."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(*THREE_TURNS),
        rewards=[[None, 0.3, 0.1], [None, -0.1, 0.5]],
        memory_advantage_weight=0.5,
    )
    # Outcome: rollout 0 answers "cat" and is right, rollout 1 answers "dog". Rewards 1 and 0: mean 0.5,
    # std sqrt(0.25 + 0.25) = 0.707107, A_T = +-0.5 / (0.707107 + 0.0001) = +-0.707007.
    #
    # Memory: 0.3, 0.1, -0.1, 0.5 over both rollouts: mean 0.2, deviations 0.1, -0.1, -0.3, 0.3,
    # std sqrt((0.01 + 0.01 + 0.09 + 0.09) / 3) = 0.258199, so
    # A_M = 0.387148 (rollout 0, turn 1), -0.387148 (rollout 0, turn 2), -1.161445 (1, 1), 1.161445 (1, 2).
    # λ = 0.5: 0.193574, -0.193574, -0.580722, 0.580722 are added on memory tokens.
    #
    # One token per byte and per tag. call("a") is <tool_call>, 47 bytes of JSON, </tool_call>: 49 tokens, and 50 with
    # the end of turn; call("bb") 50, and 51 with it. Turn 1 of rollout 0 is <mem>, "no", </mem>: 4 tokens before its
    # call; turn 2 is <mem>, "yes", </mem>: 5, then <answer>, "cat", </answer>, end of turn: 6. Rollout 1: 3, and 3 + 6.
    # The response after turn 0 is o tokens, which are not trained.
    #
    # Turn 1 continues turn 0 (its prompt is prefix + y0 + o0), turn 2 starts anew: two sequences per rollout.
    #   sequence 0.0: 50 tokens A_T | o not trained | 4 memory tokens | 51 tokens A_T     (n = 105 trained)
    #   sequence 0.1: 5 memory tokens | 6 tokens A_T                                      (n = 11)
    #   sequence 1.0: 50 | o | 3 | 51 (n = 104);  sequence 1.1: 3 | 6 (n = 9)
    # The loss divides each row by its own n and averages over the 4 rows; one weight per rollout wants 1 / (2 * 116)
    # and 1 / (2 * 113) per token. So the weights are 4 / 2 * n_row / n_rollout: 2 * 105 / 116, 2 * 11 / 116,
    # 2 * 104 / 113, 2 * 9 / 113, and they sit on the advantages.
    first, second = played(trainer)
    o = len(first.turns[0].response_ids)
    a = 0.707007
    check_row(trainer, first.turns[:2], 2 * 105 / 116, [(a, 50), (None, o), (a + 0.193574, 4), (a, 51)])
    check_row(trainer, first.turns[2:], 2 * 11 / 116, [(a - 0.193574, 5), (a, 6)])
    check_row(trainer, second.turns[:2], 2 * 104 / 113, [(-a, 50), (None, o), (-a - 0.580722, 3), (-a, 51)])
    check_row(trainer, second.turns[2:], 2 * 9 / 113, [(-a + 0.580722, 3), (-a, 6)])
    assert len(trainer.inputs_seen[0]["advantages"]) == 4
    # The dump of the rollouts carries the same credit.
    assert first.advantage == pytest.approx(a, abs=1e-6) and second.advantage == pytest.approx(-a, abs=1e-6)
    assert [turn.memory_advantage for turn in first.turns] == [
        None,
        pytest.approx(0.387148, abs=2e-6),
        pytest.approx(-0.387148, abs=2e-6),
    ]
    assert second.turns[2].memory_advantage == pytest.approx(1.161445, abs=5e-6)
    assert (first.reward, second.reward) == (1.0, 0.0)
    # (2 * 0.387148 + 2 * 1.161445) / 4
    assert trainer.state.log_history[0]["memory/advantage_abs_mean"] == pytest.approx(0.774297, abs=5e-6)


def test_full_context_is_one_row_with_every_memory(short_folder, tmp_path):
    """`context="full"`: all turns of a rollout in one row, each memory with the advantage of its own turn."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(*THREE_TURNS),
        rewards=[[None, 0.3, 0.1], [None, -0.1, 0.5]],
        memory_advantage_weight=0.5,
        context="full",
    )
    first, second = played(trainer)
    # The same values as above; a rollout is one row, so the weight is 2 / 2 * n / n = 1.
    a = 0.707007
    for rollout, sign, values, lengths in (
        (first, 1, (0.193574, -0.193574), (4, 5)),
        (second, -1, (-0.580722, 0.580722), (3, 3)),
    ):
        o = [len(turn.response_ids) for turn in rollout.turns[:2]]
        blocks = [(sign * a, 50), (None, o[0]), (sign * a + values[0], lengths[0]), (sign * a, 51), (None, o[1])]
        check_row(trainer, rollout.turns, 1.0, [*blocks, (sign * a + values[1], lengths[1]), (sign * a, 6)])
    assert len(trainer.inputs_seen[0]["advantages"]) == 2


def test_twelve_right_of_sixteen(short_folder, tmp_path):
    """The worked value of the outcome: the group's mean is 0.75."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(*[["<answer>cat</answer>"]] * 3, ["<answer>dog</answer>"]),
        num_generations=16,
        per_device_train_batch_size=16,
    )
    # Std sqrt((12 * 0.0625 + 4 * 0.5625) / 15) = 0.447214: 0.25 / 0.447314 and -0.75 / 0.447314.
    expected = [0.558892, 0.558892, 0.558892, -1.676676] * 4
    assert [rollout.advantage for rollout in played(trainer)] == pytest.approx(expected, abs=1e-6)
    assert trainer.state.log_history[0]["reward"] == 0.75


def test_requests_come_in_the_order_of_the_rollouts(short_folder, tmp_path):
    """A turn's batch has the order of the rollouts whatever tool is done first, so that a seed gives one run."""

    def search(query: str) -> str:
        """
        Searches slowly for the first rollout.

        Args:
            query: What to search for.
        """
        time.sleep(0.2 if query == "slow" else 0.0)
        return query

    rollouts = [
        [call("slow"), "<mem>slow</mem><answer>cat</answer>"],
        [call("fast"), "<mem>fast</mem><answer>dog</answer>"],
    ]
    trainer = train(short_folder, tmp_path, script_of(*rollouts), tools=[search])
    assert [rollout.turns[1].memory for rollout in played(trainer)] == ["slow", "fast"]


# Gradients


def test_which_tokens_get_gradient(short_folder, tmp_path):
    """Gradient on sampled tokens only, each with its own advantage and one weight per rollout; none on padding."""
    # Rollout 0 as above (two sequences of 105 and 11 trained tokens), rollout 1 answers at once: "<answer>", "dog",
    # "</answer>", end of turn: 6 tokens. Three sequences in two micro-batches: one padding sequence is added.
    trainer = train(
        short_folder,
        tmp_path,
        script_of(THREE_TURNS[0], ["<answer>dog</answer>"]),
        rewards=[[None, 0.3, 0.1], [None]],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        beta=0.0,
    )
    first, second = played(trainer)
    o = len(first.turns[0].response_ids)
    # Memory rewards 0.3 and 0.1: mean 0.2, std sqrt(2 * 0.01) = 0.141421, A_M = +-0.1 / 0.141521 = +-0.706609.
    # On-policy the ratio is 1 and the loss of a token is -A / (2 rollouts * tokens of its rollout): 116 and 6.
    a, m = 0.707007, 0.706609
    expected = [
        (first.turns[:2], 116, [(a, 50), (0, o), (a + m, 4), (a, 51)]),
        (first.turns[2:], 116, [(a - m, 5), (a, 6)]),
        (second.turns, 6, [(-a, 6)]),
    ]
    for turns, count, blocks in expected:
        gradient = gradient_of(trainer, turns)
        values = torch.tensor([-value / (2 * count) for value, tokens in blocks for _ in range(tokens)])
        torch.testing.assert_close(gradient[: len(values)], values, rtol=1e-4, atol=1e-8)
        assert gradient[len(values) :].tolist() == [0.0] * (len(gradient) - len(values))
        assert gradient[: len(values)][values == 0].abs().sum() == 0
    # Log-probabilities are of completion tokens only, so that no prompt token can be trained; and the padding
    # sequence, which takes part in forward and backward, has a gradient of exactly 0.
    assert [logps.shape for logps in trainer.logps] == [
        inputs["completion_ids"].shape for inputs in trainer.inputs_seen
    ]
    padding = [
        (logps.grad[row], inputs["loss_weights"][row])
        for logps, inputs in zip(trainer.logps, trainer.inputs_seen, strict=True)
        for row in range(len(logps))
        if not (inputs["completion_mask"][row] * inputs["tool_mask"][row]).any()
    ]
    assert len(padding) == 1
    assert padding[0][0].abs().sum() == 0 and padding[0][1] == 0


def test_an_invented_tool_response_is_trained_but_not_read(short_folder, tmp_path):
    """Sampled ids are trained as they are, also those after the call, while the next turn's prompt leaves them out."""
    turns = [call("a") + "<tool_response>made up</tool_response>", "<mem>m</mem><answer>cat</answer>"]
    trainer = train(short_folder, tmp_path, script_of(turns, ["<answer>dog</answer>"]), beta=0.0)
    rollout = played(trainer)[0]
    # The next prompt does not extend what was sampled, so that the turns are rows of their own.
    for turn in rollout.turns:
        inputs, row = row_of(trainer, [turn])
        assert inputs["tool_mask"][row][: len(turn.completion_ids)].all()
    assert "made up" not in trainer._tokenizer.decode(rollout.turns[1].prompt_ids)


# The loss of rollouts, whatever sequences they gave


def perturb(model, scale=0.05):
    """Move a policy away from its reference, so that the KL term and its gradient are not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def turn_logps(model, turn):
    """Log-probabilities of a turn's sampled ids, from a plain forward over its own prompt and nothing else."""
    logits = model(torch.tensor([turn.prompt_ids + turn.completion_ids])).logits[0, len(turn.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(turn.completion_ids).unsqueeze(1)).squeeze(1)


def loss_by_hand(policy, reference, rollouts, outcome, memory, args):
    """
    The loss as the paper has it: rollouts and turns, no sequences. `outcome[i]` is A_T, `memory[i][t]` is A_M.
    """
    losses = []  # per rollout, the loss of each trained token
    for i, rollout in enumerate(rollouts):
        tokens = []
        for t, turn in enumerate(rollout.turns):
            start, end = turn.memory_span or (0, 0)
            in_memory = torch.tensor([float(start <= k < end) for k in range(len(turn.completion_ids))])
            advantage = outcome[i] + args.memory_advantage_weight * memory[i][t] * in_memory
            logps = turn_logps(policy, turn)
            ratio = (logps - logps.detach()).exp()
            if args.loss_type == "sapo":
                temperature = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
                loss = -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
            elif args.loss_type == "cispo":
                loss = -min(1.0, args.epsilon) * advantage * logps
            elif args.loss_type == "vespo":
                loss = -advantage * logps
            else:
                loss = -ratio * advantage
            if args.beta:
                with torch.no_grad():
                    reference_logps = turn_logps(reference, turn)
                kl = (reference_logps - logps).exp() - (reference_logps - logps) - 1
                loss = loss + args.beta * kl * (ratio if args.use_bias_correction_kl else 1)
            tokens.append(loss)
        losses.append(torch.cat(tokens))
    if args.loss_type in ("grpo", "sapo"):
        return torch.stack([loss.mean() for loss in losses]).mean()
    if args.loss_type == "dr_grpo":
        return torch.cat(losses).sum() / (len(losses) * args.max_completion_length)
    if args.loss_type == "luspo":
        return torch.stack([loss.sum() for loss in losses]).mean()
    return torch.cat(losses).mean()


# Turns 1, 3, 4, 1: sequences 1, 2, 3, 1 (turn 1 continues turn 0), 7 in all. The second list gives 2, 2, 2, 2.
UNEVEN = [
    ["<answer>cat</answer>"],
    [call("a"), "<mem>x</mem>" + call("b"), "<mem>yy</mem><answer>dog</answer>"],
    [call("a"), "<mem>cat</mem>" + call("b"), "<mem>p</mem>" + call("c"), "<mem>qq</mem><answer>cat</answer>"],
    ["<think>so</think><answer>dog</answer>"],
]
UNEVEN_REWARDS = [[None], [None, 0.4, -0.2], [None, 0.1, 0.3, None], [None]]
EVEN = [
    [call("a"), f"<mem>{text}</mem>" + call("b"), f"<mem>{text} {answer}</mem><answer>{answer}</answer>"]
    for text, answer in (("one", "cat"), ("two and more", "dog"), ("three", "cat"), ("", "dog"))
]
EVEN_REWARDS = [[None, 0.4, -0.2], [None, 0.1, 0.3], [None, None, 0.9], [None, 0.0, 0.2]]


def standardised(groups):
    """A_M by its definition in plain numbers, for lists of rollouts of one group each."""
    advantages = []
    for rollouts in groups:
        values = [reward for rewards in rollouts for reward in rewards if reward is not None]
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        advantages += [
            [0.0 if reward is None else (reward - mean) / (std + 1e-4) for reward in rewards] for rewards in rollouts
        ]
    return advantages


@pytest.mark.parametrize(
    ("loss_type", "micro_batches", "even", "bias_correction"),
    [(loss_type, micro, False, False) for loss_type in ("grpo", "dr_grpo") for micro in (1, 2, 4)]
    + [(loss_type, 4, False, False) for loss_type in ("sapo", "luspo", "dapo")]
    + [(loss_type, 4, True, False) for loss_type in ("grpo", "luspo")]
    + [(loss_type, 2, False, True) for loss_type in ("grpo", "sapo", "dr_grpo", "luspo")]
    + [(loss_type, 1, False, False) for loss_type in ("bnpo", "cispo", "vespo")],
)
def test_sequences_do_not_change_the_loss(loss_type, micro_batches, even, bias_correction, short_folder, tmp_path):
    """Loss and gradient equal the loss over rollouts, with the KL, for any split into rows, padding and micro-batches."""
    script, rewards = (EVEN, EVEN_REWARDS) if even else (UNEVEN, UNEVEN_REWARDS)
    trainer = build(
        short_folder,
        tmp_path,
        script_of(*script),
        rewards=rewards,
        loss_type=loss_type,
        beta=0.1,
        memory_advantage_weight=0.5,
        per_device_train_batch_size=4 // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=4,
        max_grad_norm=0.0,
        use_bias_correction_kl=bias_correction,
    )
    perturb(trainer.model)
    policy, reference = (AutoModelForCausalLM.from_pretrained(short_folder) for _ in range(2))
    policy.load_state_dict(trainer.model.state_dict())
    trainer.train()

    # Two of four right: mean 0.5, std sqrt(4 * 0.25 / 3) = 0.577350, A_T = +-0.5 / 0.577450 = +-0.865876.
    outcome = [0.865876, -0.865876] * 2 if even else [0.865876, -0.865876, 0.865876, -0.865876]
    loss = loss_by_hand(policy, reference, played(trainer), outcome, standardised([rewards]), trainer.args)
    loss.backward()
    rows = sum(len(inputs["loss_weights"]) for inputs in trainer.inputs_seen)
    assert rows == {1: 7, 2: 8, 4: 8}[micro_batches] if not even else rows == 8
    assert len(trainer.losses) == micro_batches and len(trainer.gradients) == 1
    assert sum(trainer.losses) == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert policy.lm_head.weight.grad.abs().max() > 1e-3
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(trainer.gradients[0][name], parameter.grad, rtol=1e-3, atol=2e-6)


# Sequence counts and the schedule


@pytest.mark.parametrize("steps_per_generation", [2, 4])
def test_every_sequence_is_trained_exactly_once(steps_per_generation, short_folder, tmp_path):
    """Seven rows in 2 or 4 parts: none is lost to the split, none comes twice, and the steps are as many as asked."""
    trainer = train(
        short_folder,
        tmp_path,
        script_of(*UNEVEN),
        per_device_train_batch_size=4 // steps_per_generation,
        steps_per_generation=steps_per_generation,
        num_generations=2,
        max_steps=steps_per_generation,
    )
    assert trainer.state.global_step == steps_per_generation
    expected = sorted(
        sequence.completion_ids
        for i, rollout in enumerate(played(trainer))
        for sequence in build_sequences(rollout, i)
    )
    assert len(expected) == 7
    seen = []
    for inputs in trainer.inputs_seen:
        trained = (inputs["completion_mask"] * inputs["tool_mask"]).any(dim=1)
        for row in trained.nonzero().flatten().tolist():
            seen.append(inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist())
    assert sorted(seen) == expected
    assert len({len(inputs["completion_ids"]) for inputs in trainer.inputs_seen}) == 1


def test_schedule_does_not_depend_on_the_turns(short_folder, tmp_path):
    """One turn or six: the same optimiser steps, scheduler steps and learning rates, over an epoch of the data."""
    searching = [call("a")] + ["<mem>m</mem>" + call("b")] * 4 + ["<mem>m</mem><answer>cat</answer>"]
    schedules = []
    for turns in (1, 6):
        trainer = train(
            short_folder,
            tmp_path / str(turns),
            script_of(searching, ["<answer>cat</answer>"]),
            max_turns=turns,
            max_steps=-1,
            num_train_epochs=1,
            gradient_accumulation_steps=2,
            lr_scheduler_type="linear",
            loss_type="dapo",
        )
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        assert max(len(rollout.turns) for rollout in played(trainer)) == turns
        schedules.append((trainer.state.global_step, trainer.state.max_steps, trainer.lr_scheduler.last_epoch, rates))
    # 4 questions, 2 rollouts each, 4 rollouts per step: 2 steps.
    assert schedules[0] == schedules[1] and schedules[0][0] == 2


def test_metrics_of_sequences(short_folder, tmp_path):
    """`sequences/per_rollout` counts real rows, and TRL's names count rollouts."""
    trainer = train(short_folder, tmp_path, script_of(*UNEVEN), num_generations=4, per_device_train_batch_size=2,
                    gradient_accumulation_steps=2)  # fmt: skip
    logged = trainer.state.log_history[0]
    assert logged["sequences/per_rollout"] == 7 / 4
    # TRL's names count rollouts, not rows: 4 rollouts, none cut.
    lengths = [len(rollout.completion_ids) for rollout in played(trainer)]
    assert logged["completions/mean_length"] == sum(lengths) / 4
    assert (logged["completions/min_length"], logged["completions/max_length"]) == (min(lengths), max(lengths))
    assert logged["completions/clipped_ratio"] == 0


def test_cache_hits_are_counted_per_batch(short_folder, tmp_path):
    """`tool/cache_hit_frac` is that of the searches since it was last logged, not of the whole run."""
    corpus = [Document("1", "Anna", "Anna has a cat."), Document("2", "Berta", "Berta has a dog.")]
    search = SearchTool(CachedRetriever(BM25Retriever.from_corpus(corpus), tmp_path / "cache", source="test"))
    # First batch: Anna twice, which is one search and shared; second batch: Anna and Berta (one hit, one search).
    rollouts = [[call("Anna"), "<mem>m</mem><answer>cat</answer>"]] * 3
    rollouts += [[call("Berta"), "<mem>m</mem><answer>cat</answer>"]]
    trainer = train(short_folder, tmp_path, script_of(*rollouts), tools=[search], max_steps=2)
    assert [log["tool/shared_frac"] for log in trainer.state.log_history[:2]] == [0.5, 0.0]
    assert [log["tool/cache_hit_frac"] for log in trainer.state.log_history[:2]] == [0.0, 0.5]
