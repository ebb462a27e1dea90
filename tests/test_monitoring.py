"""What a run tells about its rollouts."""

import json

import pytest
from conftest import call, generation, play_script, search

from mempo_trl.generation import Generation
from mempo_trl.monitoring import (
    OUTCOMES,
    RolloutWriter,
    memory_markers,
    peak_tokens,
    rollout_record,
    rollout_statistics,
    total_tokens,
)
from mempo_trl.protocol import Protocol
from mempo_trl.rollout import Rollout
from mempo_trl.tools import NO_RESULTS, Toolbox


def played(protocol):
    """Two rollouts: three turns with two memories, answered; and one turn that says nothing."""
    first = play_script(
        protocol,
        [
            "<think>go</think>" + call("Anna"),
            "<mem>a cat</mem><think>so</think>" + call("Bo") + "<answer>x</answer>",
            "<mem>cat</mem><answer>cat</answer>",
        ],
    )
    return [first, play_script(protocol, ["nothing"])]


def means(rollouts):
    return {name: total / count if count else None for name, (total, count) in rollout_statistics(rollouts).items()}


def test_statistics_by_hand(protocol):
    """Each metric from two written rollouts."""
    rollouts = played(protocol)
    first, second = rollouts
    first.turns[1].memory_reward, first.turns[1].p_mem, first.turns[1].p_full = 0.2, 0.6, 0.4
    first.turns[1].kept_frac_mem, first.turns[1].kept_frac_full = 1.0, 0.5
    first.turns[2].memory_reward, first.turns[2].p_mem, first.turns[2].p_full = -0.1, 0.3, 0.4
    first.turns[2].kept_frac_mem, first.turns[2].kept_frac_full = 0.0, 0.25
    for turn, seconds in zip(first.turns, (0.5, 0.1, 0.0), strict=True):
        turn.tool_seconds = seconds
    actual = means(rollouts)
    prompts = [len(turn.prompt_ids) for turn in first.turns]
    expected = {
        "memory/reward_mean": (0.2 - 0.1) / 2,
        "memory/p_mem": (0.6 + 0.3) / 2,
        "memory/p_full": 0.4,
        "memory/kept_frac_mem": 0.5,
        "memory/kept_frac_full": 0.375,
        "memory/tokens_mean": (7 + 5) / 2,  # two tags and 5 or 3 bytes
        "memory/defined_frac": 2 / 2,  # of the turns after the first
        "rollout/turns_mean": 4 / 2,
        "rollout/searches_mean": 2 / 2,
        "rollout/format_ok_frac": 0 / 2,  # turn 2 acts twice; the second rollout does not act
        "rollout/think_tokens_mean": 4.0,  # two tags and 2 bytes, twice
        "rollout/prompt_tokens_peak": (max(prompts) + len(second.turns[0].prompt_ids)) / 2,
        "rollout/tokens_total_mean": (total_tokens(first) + total_tokens(second)) / 2,
        "rollout/excluded_frac": 0 / 2,
        "rollout/bad_call_frac": 0 / 2,
        "rollout/dropped_actions_mean": 1 / 2,
        "rollout/trailing_text_frac": 1 / 4,
        "tool/error_frac": 0.0,
        "tool/empty_frac": 0.0,
        "tool/latency_mean": (0.5 + 0.1) / 2,
        "rollout/outcome/answer": 0.5,
        "rollout/outcome/no_action": 0.5,
        "rollout/outcome/truncated": 0.0,
        "rollout/outcome/out_of_turns": 0.0,
        "rollout/outcome/out_of_context": 0.0,
    }
    assert actual == pytest.approx(expected, abs=1e-12)


def test_metrics_without_a_case_have_no_value(protocol):
    """A mean over nothing has the count 0 and so no value: it is never an invented 0 or a division by zero."""
    statistics = rollout_statistics([play_script(protocol, ["nothing"])])
    for name in ("memory/reward_mean", "memory/p_mem", "memory/tokens_mean", "memory/defined_frac", "tool/error_frac"):
        assert statistics[name] == (0, 0)


def test_names_and_order_do_not_depend_on_the_rollouts(protocol):
    """Processes add their statistics name by name, so each has all of them in one order."""
    first, second = played(protocol)
    assert list(rollout_statistics([first])) == list(rollout_statistics([second])) == list(rollout_statistics([]))


def test_a_memory_reward_without_probabilities(protocol):
    """Another memory reward than the default may have no P_mem and P_full: its mean is reported, theirs is not."""
    rollouts = played(protocol)
    rollouts[0].turns[1].memory_reward = 0.25
    actual = means(rollouts)
    assert actual["memory/reward_mean"] == 0.25 and actual["memory/defined_frac"] == 0.5
    assert actual["memory/p_mem"] is None and actual["memory/kept_frac_full"] is None


def test_every_outcome_is_counted_once(protocol, tokenizer):
    """Each rollout has exactly one of the listed outcomes."""
    cut = generation(tokenizer, "<think>long", end=False)
    rollouts = [
        play_script(protocol, ["<answer>cat</answer>"]),
        play_script(protocol, ["nothing"]),
        play_script(protocol, [cut]),
        play_script(protocol, [call("a"), call("b")], max_turns=2),
        play_script(protocol, [call("a")], max_prompt_length=5),
    ]
    assert [rollout.outcome for rollout in rollouts] == list(OUTCOMES)
    statistics = rollout_statistics(rollouts)
    assert [statistics[f"rollout/outcome/{outcome}"] for outcome in OUTCOMES] == [(1, 5)] * 5


def test_tool_errors_bad_calls_and_empty_results(tokenizer):
    """A failed call, a call that found nothing and a malformed call are three different things."""

    def search(query: str) -> str:
        """
        Searches.

        Args:
            query: What to search for.
        """
        if query == "down":
            raise ConnectionError("no route")
        return NO_RESULTS if query == "unknown" else "found"

    protocol = Protocol(tokenizer, Toolbox([search], retries=0), system_prompt="Search.")
    rollout = play_script(
        protocol, [call("down"), call("unknown"), call("Anna"), "<tool_call>{}</tool_call>", "<answer>x</answer>"]
    )
    actual = means([rollout])
    assert actual["rollout/searches_mean"] == 3
    assert actual["tool/error_frac"] == actual["tool/empty_frac"] == pytest.approx(1 / 3)
    assert actual["rollout/bad_call_frac"] == 1 / 4


def test_token_counts(protocol):
    """Total tokens add prompt and completion of every turn; the peak is the most that one turn holds."""
    first, _ = played(protocol)
    lengths = [len(turn.prompt_ids) + len(turn.completion_ids) for turn in first.turns]
    assert total_tokens(first) == sum(lengths)
    assert peak_tokens(first) == max(lengths)


def test_memory_markers(protocol):
    """1 at the first token of a memory, 2 at its last, 0 elsewhere, one marker per sampled token."""
    first, second = played(protocol)
    assert memory_markers(first.turns[0]) == [0] * len(first.turns[0].completion_ids)
    # "<mem>", "c", "a", "t", "</mem>", "<answer>", "c", "a", "t", "</answer>", end of turn.
    assert memory_markers(first.turns[2]) == [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert memory_markers(second.turns[0]) == [0] * 8


def test_record_is_json_and_complete(protocol, tokenizer):
    """The dump of a rollout holds text, outcome and credit of every turn, ids only on demand, and is plain JSON."""
    rollout = play_script(
        protocol,
        [
            generation(tokenizer, call("Änna"), logp=-0.5),
            generation(tokenizer, "<mem>猫</mem><answer>cat</answer>", -0.25),
        ],
    )
    rollout.reward, rollout.advantage = 1.0, 0.7
    turn = rollout.turns[1]
    turn.memory_reward, turn.p_mem, turn.p_full, turn.memory_advantage = 0.1, 0.5, 0.4, 1.5
    record = json.loads(json.dumps(rollout_record(rollout, step=3, mode="train")))
    assert (record["step"], record["mode"], record["outcome"], record["answer"]) == (3, "train", "answer", "cat")
    assert (record["reward"], record["A_T"], record["golden_answers"]) == (1.0, 0.7, [["cat"]])
    assert [turn["outcome"] for turn in record["turns"]] == ["tool_call", "answer"]
    assert record["turns"][0]["call"] == {"name": "search", "arguments": {"query": "Änna"}}
    assert "has a cat" in record["turns"][0]["response"]
    second = record["turns"][1]
    assert (second["memory"], second["R_M"], second["P_mem"], second["P_full"], second["A_M"]) == (
        "猫",
        0.1,
        0.5,
        0.4,
        1.5,
    )
    # "猫" is three bytes: the first of 5 tokens and the last of them.
    assert second["mem_rewards_idx_list"][:6] == [1, 0, 0, 0, 2, 0]
    assert "completion_ids" not in second
    with_ids = rollout_record(rollout, ids=True)["turns"][1]
    assert with_ids["completion_ids"] == turn.completion_ids and with_ids["prompt_ids"] == turn.prompt_ids
    assert with_ids["logps"] == [-0.25] * len(turn.completion_ids)


@pytest.mark.parametrize("context", ["memory", "full"])
def test_record_with_a_tokenizer_holds_the_prompts(tokenizer, context):
    """The prefix once, and per turn what follows it: together exactly what the model read."""
    protocol = Protocol(tokenizer, Toolbox([search], retries=0), context=context, system_prompt="Search.")
    turns = [
        "<think>go</think>" + call("Anna"),
        "<mem>a</mem><think>\nso\n</think>" + call("Bo"),
        "<answer>cat</answer>",
    ]
    rollout = play_script(protocol, turns)
    record = json.loads(json.dumps(rollout_record(rollout, tokenizer=tokenizer)))
    assert record["prefix"].endswith("assistant\n") and "What is the pet of Anna?" in record["prefix"]
    assert record["prefix_tokens"] == len(rollout.prefix_ids)
    prompts = [turn.get("prompt") for turn in record["turns"]]
    # The whole history again and again would make the records of long rollouts large.
    assert (prompts[2] is None) == (context == "full")
    for turn, prompt in zip(rollout.turns, prompts, strict=True):
        assert prompt is None or record["prefix"] + prompt == tokenizer.decode(turn.prompt_ids)
    assert prompts[0] == "" and prompts[1].startswith(turns[0]) and "has a cat" in prompts[1]
    assert [turn["think"] for turn in record["turns"]] == ["go", "\nso\n", None]
    without = rollout_record(rollout)
    assert "prefix" not in without and not any("prompt" in turn or "tokens" in turn for turn in without["turns"])


def test_token_texts_join_to_the_completion(tokenizer):
    """One text per sampled token, the end of the turn included; a character of three tokens is in the first of them."""
    protocol = Protocol(tokenizer, Toolbox([search], retries=0), system_prompt="Search.")
    rollout = play_script(protocol, ["<mem>猫é</mem><answer>c</answer>"])
    (turn,) = rollout_record(rollout, tokenizer=tokenizer, ids=True)["turns"]
    assert turn["tokens"] == ["<mem>", "猫", "", "", "é", "", "</mem>", "<answer>", "c", "</answer>", "<|im_end|>"]
    assert len(turn["tokens"]) == len(turn["completion_ids"]) == len(turn["mem_rewards_idx_list"])
    assert "tokens" not in rollout_record(rollout, ids=True)["turns"][0]


@pytest.mark.parametrize("name", ["qwen_tokenizer", "smollm2_tokenizer"])
def test_token_texts_of_real_tokenizers(name, request):
    """Also where tokens are parts of characters, and for a sampled split that the tokenizer would not choose."""
    tokenizer = request.getfixturevalue(name)
    text = "<mem>Reed 里德学院 🦜 naïve</mem>\n<answer>42%</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [one for char in text for one in tokenizer(char, add_special_tokens=False)["input_ids"]] + ids
    protocol = Protocol(tokenizer, Toolbox([search], retries=0), system_prompt="Search.")
    rollout = play_script(protocol, [Generation(ids, None, "stop")])
    (turn,) = rollout_record(rollout, tokenizer=tokenizer, ids=True)["turns"]
    assert len(turn["tokens"]) == len(ids) and "".join(turn["tokens"]) == text + text


def test_a_failed_rollout_has_a_record():
    """A rollout that failed before its first turn is written with its error, and costs nothing."""
    record = rollout_record(Rollout("q", [["a"]], [1, 2], outcome="failed"), error="server is gone", id="7", sample=0)
    assert (record["outcome"], record["error"], record["turns"]) == ("failed", "server is gone", [])
    assert (record["tokens_total"], record["tokens_peak"]) == (0, 0)


def test_writer_appends_within_a_run_and_starts_anew_in_the_next(tmp_path):
    """Two batches of one step go to one file; a further run starts the file of a step anew."""
    writer = RolloutWriter(tmp_path / "rollouts")
    path = tmp_path / "rollouts" / "train-000007-rank0.jsonl"
    assert writer.write([{"n": 1}], "train", 7) and writer.write([{"n": 2}, {"text": "猫"}], "train", 7)
    assert path.read_text(encoding="utf-8") == '{"n": 1}\n{"n": 2}\n{"text": "猫"}\n'
    assert writer.write([{"n": 3}], "eval", 7)
    assert RolloutWriter(tmp_path / "rollouts").write([{"n": 9}], "train", 7)
    assert path.read_text(encoding="utf-8") == '{"n": 9}\n'
    assert RolloutWriter(tmp_path, process_index=3).write([], "train", 0)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["train-000000-rank3.jsonl"]
