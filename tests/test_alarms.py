"""Alarms: each is given for the log of its failure, none for a healthy one, and what the callback makes of them."""

import math
import os
import re
import subprocess
import sys

import pytest
from accelerate import PartialState
from conftest import REPOSITORY, GivenMemoryRewards, build, call, config, script_of, train
from transformers import HfArgumentParser, TrainerControl, TrainerState
from trl import TrlParser

import mempo_trl.alarms
from mempo_trl import MemPOConfig
from mempo_trl.alarms import ALARMS, REPEAT, WINDOW, AlarmCallback, find_alarms
from mempo_trl.config import ALARM_THRESHOLDS


# What the quickstart logged, one line per ten steps of 64 rollouts.
QUICKSTART = {
    "loss": [
        -0.0003,
        -0.0026,
        -0.0015,
        -0.0024,
        -0.0012,
        -0.0008,
        -0.0007,
        -0.0018,
        -0.0015,
        -0.0028,
        -0.0004,
        0.0007,
    ],
    "grad_norm": [0.265, 0.222, 0.208, 0.202, 0.197, 0.253, 0.169, 0.218, 0.230, 0.253, 0.251, 0.208],
    "entropy": [0.195, 0.161, 0.167, 0.182, 0.175, 0.148, 0.167, 0.158, 0.156, 0.164, 0.143, 0.143],
    "reward": [0.465, 0.544, 0.568, 0.545, 0.552, 0.638, 0.542, 0.616, 0.610, 0.612, 0.617, 0.654],
    "frac_reward_zero_std": [0.013, 0.063, 0.038, 0.113, 0.063, 0.075, 0.063, 0.113, 0.113, 0.1, 0.075, 0.125],
    "rollout/format_ok_frac": [0.948, 0.959, 0.958, 0.966, 0.955, 0.964, 0.963, 0.970, 0.972, 0.964, 0.969, 0.977],
    "memory/tokens_mean": [9.826, 9.224, 9.978, 10.23, 10.04, 9.746, 10.38, 9.864, 9.697, 9.996, 9.641, 9.624],
    "rollout/think_tokens_mean": [3.751, 3.739, 3.764, 3.761, 3.781, 3.753, 3.768, 3.752, 3.742, 3.749, 3.746, 3.731],
    "memory/defined_frac": [0.984, 0.988, 0.994, 0.991, 0.994, 0.995, 0.996, 0.996, 0.996, 0.997, 0.993, 0.995],
    "rollout/outcome/truncated": [0, 0, 0, 0.002, 0, 0.002, 0, 0, 0, 0, 0, 0],
}
HEALTHY = {
    "loss": 0.001,
    "grad_norm": 0.2,
    "entropy": 0.6,
    "kl": 0.001,
    "reward": 0.4,
    "frac_reward_zero_std": 0.3,
    "rollout/turns_mean": 4.0,
    "rollout/format_ok_frac": 0.9,
    "rollout/think_tokens_mean": 80.0,
    "rollout/outcome/truncated": 0.02,
    "rollout/outcome/out_of_context": 0.01,
    "memory/defined_frac": 0.9,
    "memory/kept_frac_mem": 0.5,
    "memory/kept_frac_full": 0.6,
    "memory/tokens_mean": 60.0,
    "tool/error_frac": 0.01,
    "tool/empty_frac": 0.05,
    "sampling/sampling_logp_difference/mean": 0.02,
}


def logs(first: int, last: int, every: int = 1, **changes) -> list[dict]:
    """Healthy logs of steps `first` to `last` with changed metrics (`__` for `/`)."""
    changed = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    return [{**changed, "step": step} for step in range(first, last + 1, every)]


@pytest.fixture
def args(tmp_path):
    return config(tmp_path, learning_rate=1e-6)


FAILURES = [
    ("not_finite", dict(grad_norm=math.nan), ["`grad_norm`", "`learning_rate` (1e-06)"]),
    ("memory_undefined", dict(memory__defined_frac=0.3), ["0.3, below 0.5", "`max_completion_length` (200)"]),
    (
        "memory_filtered",
        dict(memory__kept_frac_mem=0.02, memory__kept_frac_full=0.05),
        ["0.05, below 0.1", "`memory_prob_threshold` (0.5)", "`memory_token_filter` ('independent')"],
    ),
    (
        "kept_gap",
        dict(memory__kept_frac_mem=0.15),  # of 0.6
        ["0.25, below 0.5", "`memory/kept_frac_mem` 0.15, `memory/kept_frac_full` 0.6", "`memory_token_filter`"],
    ),
    ("kept_gap", dict(memory__kept_frac_mem=1.0, memory__kept_frac_full=0.2), ["0.2, below 0.5"]),
    ("format", dict(rollout__format_ok_frac=0.6), ["0.3, above 0.25", "`rollout/format_ok_frac` 0.6", "`beta`"]),
    ("memory_length", dict(memory__tokens_mean=12), ["0.2, below 0.4", "`memory_advantage_weight` (1.0)"]),
    ("think_length", dict(rollout__think_tokens_mean=8), ["0.1, below 0.4", "`learning_rate` (1e-06)"]),
    ("entropy", dict(entropy=3.0), ["5, above 3", "`entropy` 3", "`beta` (0.001)"]),
    (
        "zero_spread",
        dict(frac_reward_zero_std=1.0, reward=0.0),
        ["1, above 0.9", "`reward` 0", "`num_generations` (2)"],
    ),
    ("truncated", dict(rollout__outcome__truncated=0.5), ["0.51, above 0.25", "`max_completion_length` (200)"]),
    ("truncated", dict(rollout__outcome__out_of_context=0.5), ["0.52, above 0.25", "`max_prompt_length` (None)"]),
    ("tool_errors", dict(tool__error_frac=0.2), ["0.2, above 0.1", "`tool_timeout` (60.0)", "`tool_retries` (0)"]),
    ("empty_results", dict(tool__empty_frac=0.8), ["0.8, above 0.5", "`corpus_path`"]),
    (
        "sampling_gap",
        dict(sampling__sampling_logp_difference__mean=0.4),
        ["0.4, above 0.1", "`top_p` (1.0)", "`vllm_importance_sampling_correction` (True)"],
    ),
]


@pytest.mark.parametrize(("name", "failure", "parts"), FAILURES)
def test_each_failure_gives_its_alarm_and_no_other(name, failure, parts, args):
    """After 30 healthy steps ten of the failure: one line with the number, the threshold and the settings."""
    healthy = logs(1, 30)
    assert find_alarms(healthy, args) == {}
    alarms = find_alarms(healthy + logs(31, 40, **failure), args)
    assert list(alarms) == [name]
    (line,) = alarms.values()
    assert line.startswith(f"Alarm `{name}` at step 40: ") and "\n" not in line
    for part in parts:
        assert part in line
    # Switched off it is not given; with another threshold that the number does not cross, neither.
    args.alarm_thresholds[name] = None
    assert find_alarms(healthy + logs(31, 40, **failure), args) == {}
    args.alarm_thresholds[name] = 0.0 if "below" in line else 100.0
    assert find_alarms(healthy + logs(31, 40, **failure), args) == {}


def test_every_alarm_has_a_failure_here_and_a_threshold():
    """No alarm goes untested, and each can be switched."""
    assert {name for name, _, _ in FAILURES} == set(ALARM_THRESHOLDS)
    assert {alarm.name for alarm in ALARMS} | {"not_finite"} == set(ALARM_THRESHOLDS)


def test_the_quickstart_gives_no_alarm(args):
    """What the village recipe really logged, at its low reward of the beginning too."""
    history = []
    for i, values in enumerate(zip(*QUICKSTART.values(), strict=True)):
        unchanged = {"memory/kept_frac_mem": 1.0, "memory/kept_frac_full": 1.0, "tool/error_frac": 0.0}
        log = unchanged | {"tool/empty_frac": 0.0, "rollout/turns_mean": 4.2, "rollout/outcome/out_of_context": 0.0}
        history.append(log | dict(zip(QUICKSTART, values, strict=True)) | {"step": 10 * (i + 1)})
        assert find_alarms(history, args) == {}


def test_hard_first_steps_are_no_alarm(args):
    """Nothing right, all groups alike, half of the turns malformed: for a few steps that is how training begins."""
    hard = dict(frac_reward_zero_std=1.0, reward=0.0, rollout__format_ok_frac=0.3, memory__defined_frac=0.4)
    history = logs(1, 8, **hard)
    assert find_alarms(history, args) == {}
    for step in range(9, 41):
        history += logs(step, step)
        assert find_alarms(history, args) == {}


@pytest.mark.parametrize(("name", "failure", "parts"), [failure for failure in FAILURES if failure[0] != "not_finite"])
def test_one_bad_batch_is_no_alarm(name, failure, parts, args):
    """One step of the failure among nine healthy ones is averaged away, and so is a failure that is over."""
    history = logs(1, 30) + logs(31, 31, **failure) + logs(32, 40)
    assert find_alarms(history, args) == {}
    assert find_alarms(logs(1, 30) + logs(31, 40, **failure) + logs(41, 60), args) == {}


def test_nothing_is_judged_before_a_whole_window(args):
    """With a failure from the first step on the alarm comes at step ten, whatever the logging interval."""
    failure = dict(frac_reward_zero_std=1.0)
    for every in (1, 3):
        history = logs(1, 40, every, **failure)
        given = [log["step"] for i, log in enumerate(history) if find_alarms(history[: i + 1], args)]
        assert given == [log["step"] for log in history if log["step"] >= WINDOW]


@pytest.mark.parametrize("every", [1, 5, 10, 25, 100])
def test_any_logging_interval(every, args):
    """A fall against the first steps is seen from one log per window or less, as from ten."""
    healthy = logs(every, 200, every)
    assert find_alarms(healthy, args) == {}
    assert set(find_alarms(healthy + logs(200 + every, 300, every, entropy=3.0), args)) == {"entropy"}


def test_a_number_at_its_threshold_is_no_alarm(args):
    """Thresholds are crossed, not reached."""
    at = dict(memory__defined_frac=0.5, rollout__outcome__truncated=0.25, rollout__outcome__out_of_context=0.0)
    assert find_alarms(logs(1, 20, **at), args) == {}


def test_what_falls_is_compared_with_the_right_past(args):
    """The format with its best window, also one after a bad start; lengths and entropy with the first steps."""
    bad_start = logs(1, 10, rollout__format_ok_frac=0.4)
    assert find_alarms(bad_start + logs(11, 30), args) == {}
    fallen = find_alarms(bad_start + logs(11, 30) + logs(31, 40, rollout__format_ok_frac=0.5), args)
    assert set(fallen) == {"format"} and "0.4, above 0.25" in fallen["format"]
    # A ramble of 150 tokens between does not make 60 tokens a collapse.
    assert find_alarms(logs(1, 10) + logs(11, 20, memory__tokens_mean=150) + logs(21, 30), args) == {}


def test_entropy_of_a_sure_policy_may_triple(args):
    """0.2 to 0.8 nats is a policy that begins to explore; what explodes passes one nat."""
    sure = logs(1, 10, entropy=0.2)
    assert find_alarms(sure + logs(11, 20, entropy=0.8), args) == {}
    assert set(find_alarms(sure + logs(11, 20, entropy=1.2), args)) == {"entropy"}


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("metric", ["loss", "grad_norm", "entropy", "kl"])
def test_not_finite_is_given_at_once(metric, value, args):
    """At the first step, for each metric that must have a value; TRL writes None for what was NaN throughout."""
    assert set(find_alarms(logs(1, 1, **{metric: value}), args)) == {"not_finite"}


def test_metrics_without_a_case_are_not_judged(args):
    """None for a reward, a memory length or a search that nothing gave is no failure, and neither is a missing one."""
    absent = dict(reward=None, memory__tokens_mean=None, memory__kept_frac_mem=None, memory__kept_frac_full=None)
    absent |= dict(tool__error_frac=None, tool__empty_frac=None, rollout__think_tokens_mean=None)
    assert find_alarms(logs(1, 10, **absent) + logs(11, 40) + logs(41, 60, **absent), args) == {}
    assert find_alarms([{"step": step, "loss": 0.1} for step in range(1, 30)], args) == {}


def test_no_second_turn_is_an_undefined_memory_reward(args, tmp_path):
    """Where every rollout ends in its first turn there is nothing to reward; with λ = 0 nothing is wanted either."""
    alarms = find_alarms(logs(1, 10, memory__defined_frac=None, rollout__turns_mean=1.0), args)
    assert set(alarms) == {"memory_undefined"} and "`rollout/turns_mean` 1;" in alarms["memory_undefined"]
    off = config(tmp_path, memory_advantage_weight=0.0)
    assert find_alarms(logs(1, 10, memory__defined_frac=0.0), off) == {}


def test_evaluations_and_the_summary_are_not_judged(args):
    """Only training logs count, wherever others stand between them."""
    other = [{"step": 40, "eval_loss": math.nan, "eval_tool/error_frac": 1.0}, {"step": 40, "train_runtime": 3.0}]
    assert find_alarms(logs(1, 40) + other, args) == {}
    assert set(find_alarms(logs(1, 30) + other + logs(31, 40, tool__error_frac=1.0) + other, args)) == {"tool_errors"}


def test_a_resumed_run_is_judged_by_its_own_steps(args):
    """The failure before the resumption is over once the setting is repaired; what was healthy is still the measure."""
    before = logs(1, 30) + logs(31, 40, entropy=3.0, rollout__outcome__truncated=0.8)
    assert set(find_alarms(before, args)) == {"entropy", "truncated"}
    assert find_alarms(before, args, start_step=40) == {}
    again = before + logs(41, 49, entropy=3.0)
    assert find_alarms(again, args, start_step=40) == {}
    assert set(find_alarms(again + logs(50, 50, entropy=3.0), args, start_step=40)) == {"entropy"}


# Configuration


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("alarm_thresholds", {"entropie": 2.0}, "'entropie'"),
        ("alarm_thresholds", {"entropy": "high"}, "'high'"),
        ("alarm_thresholds", {"entropy": False}, "None"),
        ("alarm_thresholds", "entropy", "JSON object"),
        ("alarm_thresholds", ["entropy"], "JSON object"),
        ("stop_on_alarms", ["nan"], "'not_finite'"),
    ],
)
def test_unknown_alarms_are_refused(field, value, part, tmp_path):
    """The message names the field, the value and what is allowed."""
    with pytest.raises(ValueError, match=f"`{field}") as error:
        config(tmp_path, **{field: value})
    assert part in str(error.value)


def test_thresholds_from_the_command_line(tmp_path):
    """JSON on the command line, with null for off; what is not named keeps its default."""
    (args,) = HfArgumentParser(MemPOConfig).parse_args_into_dataclasses(
        [
            *("--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--report_to", "none"),
            *("--alarm_thresholds", '{"truncated": 0.5, "entropy": null}'),
            *("--stop_on_alarms", "not_finite", "format"),
        ]
    )
    assert args.alarm_thresholds == ALARM_THRESHOLDS | {"truncated": 0.5, "entropy": None}
    assert args.stop_on_alarms == ["not_finite", "format"] and args.alarms


def test_thresholds_from_a_recipe(tmp_path):
    """The same from YAML."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nreport_to: none\nstop_on_alarms: [all]\n"
        "alarm_thresholds:\n  truncated: 0.5\n  entropy: null\n",
        encoding="utf-8",
    )
    (args,) = TrlParser(MemPOConfig).parse_args_and_config(["--config", str(recipe)])
    assert args.alarm_thresholds == ALARM_THRESHOLDS | {"truncated": 0.5, "entropy": None}
    assert args.stop_on_alarms == ["all"]


def test_alarms_are_documented():
    """Each alarm has a row with its default threshold in docs/alarms.md."""
    page = (REPOSITORY / "docs" / "alarms.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, flags=re.MULTILINE))
    assert {name: float(threshold) for name, threshold in rows.items()} == ALARM_THRESHOLDS
    for figure in (f"last {WINDOW} steps", f"{REPEAT} steps"):
        assert figure in page


# The callback


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mempo_trl.alarms"]


def play(callback, args, history, state=None):
    """Logs one after the other, as the trainer gives them to a callback."""
    state = state or TrainerState()
    control = TrainerControl()
    for log in history:
        state.global_step = log["step"]
        state.log_history.append(log)
        callback.on_log(args, state, control, logs={name: value for name, value in log.items() if name != "step"})
    return state, control


def test_a_line_is_not_repeated(args, caplog):
    """An alarm that goes on is given once per `REPEAT` steps; one that cleared and comes again, at once."""
    PartialState()
    callback = AlarmCallback()
    state, control = play(callback, args, logs(1, REPEAT + 20, tool__empty_frac=1.0))
    assert [re.search(r"step (\d+)", line)[1] for line in lines(caplog)] == [str(WINDOW), str(WINDOW + REPEAT)]
    caplog.clear()
    play(callback, args, logs(121, 150) + logs(151, 170, tool__empty_frac=1.0), state)
    # At step 155 five steps at 1 and five at 0.05 have the mean 0.525.
    assert [re.search(r"step (\d+)", line)[1] for line in lines(caplog)] == ["155"]
    assert not control.should_training_stop


@pytest.mark.parametrize("every", [1, 10])
def test_an_alarm_at_the_edge_is_one_line(every, args, caplog):
    """A number that goes to and fro over its threshold is not a line each time."""
    PartialState()
    history = logs(every, 9 * WINDOW, every)
    for i, log in enumerate(history):
        log["tool/empty_frac"] = (0.6, 0.35)[i % 2] if every == WINDOW else (0.51, 0.49)[i // WINDOW % 2]
    given = [bool(find_alarms(history[: i + 1], args)) for i in range(len(history))]
    assert any(given) and not all(given[given.index(True) :])
    play(AlarmCallback(), args, history)
    assert len(lines(caplog)) == 1


def test_a_resumed_run_says_again_what_still_is(args, caplog):
    """After a resumption the alarm is judged by new steps only, and said once more if it is still there."""
    PartialState()
    callback = AlarmCallback()
    state, control = play(callback, args, logs(1, 20, tool__empty_frac=1.0))
    callback.on_train_begin(args, state, control)
    caplog.clear()
    play(callback, args, logs(21, 40, tool__empty_frac=1.0), state)
    assert [re.search(r"step (\d+)", line)[1] for line in lines(caplog)] == ["30"]


RIGHT = [call("a"), "<mem>cat</mem><answer>cat</answer>"]
WRONG = [call("a"), "<mem>dogs</mem><answer>dog</answer>"]


def test_a_run_is_stopped_with_a_checkpoint_and_goes_on_once_repaired(short_folder, tmp_path, caplog, monkeypatch):
    """All groups alike: one line and a checkpoint at that step; resumed with groups of two kinds it runs to its end."""
    monkeypatch.setattr(mempo_trl.alarms, "WINDOW", 2)
    settings = dict(max_steps=4, stop_on_alarms=["zero_spread"], memory_advantage_weight=0.0)
    stopped = train(short_folder, tmp_path, script_of(RIGHT), **settings)
    assert stopped.state.global_step == 2 and (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    alarm, stop = lines(caplog)
    assert "Alarm `zero_spread` at step 2: " in alarm and "`num_generations` (2)" in alarm
    assert "step 2" in stop and "zero_spread" in stop
    caplog.clear()
    resumed = build(short_folder, tmp_path, script_of(RIGHT, WRONG), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and not lines(caplog)
    (callback,) = (one for one in resumed.callback_handler.callbacks if isinstance(one, AlarmCallback))
    assert callback.start_step == 2
    assert [log["frac_reward_zero_std"] for log in resumed.state.log_history if "loss" in log] == [1, 1, 0, 0]


def test_weights_that_blow_up_are_noticed(short_folder, tmp_path, caplog):
    """A learning rate that makes everything NaN: the alarm comes with the first log that shows it."""
    trainer = train(short_folder, tmp_path, script_of(RIGHT, WRONG), learning_rate=1e30, max_steps=3)
    bad = [log["step"] for log in trainer.state.log_history if "loss" in log and not math.isfinite(log["grad_norm"])]
    (line,) = lines(caplog)
    assert f"Alarm `not_finite` at step {bad[0]}: " in line and "`grad_norm`" in line and "(1e+30)" in line


def test_alarms_are_on_by_default_and_can_be_replaced(short_folder, tmp_path):
    """One callback by default, none when switched off, the user's own instead of ours."""

    class Own(AlarmCallback):
        """A user's."""

    def callbacks(callbacks=(), **kwargs):
        trainer = build(short_folder, tmp_path, None, callbacks=[GivenMemoryRewards(), *callbacks], **kwargs)
        return [type(one) for one in trainer.callback_handler.callbacks if isinstance(one, AlarmCallback)]

    assert callbacks() == [AlarmCallback]
    assert callbacks(alarms=False) == []
    assert callbacks([Own()]) == [Own]


TWO_PROCESSES = """
import logging
from accelerate import PartialState
from transformers import TrainerControl, TrainerState
from mempo_trl import MemPOConfig
from mempo_trl.alarms import AlarmCallback

args = MemPOConfig({folder!r}, use_cpu=True, bf16=False, report_to="none", stop_on_alarms=["all"])
rank = PartialState().process_index
logging.basicConfig(format=f"rank {{rank}}: %(message)s")
state, control, callback = TrainerState(), TrainerControl(), AlarmCallback()
for step in range(1, 13):
    state.global_step = step
    state.log_history.append({{"step": step, "loss": 0.1, "tool/error_frac": 0.11 if rank == 0 else 0.09}})
    callback.on_log(args, state, control, logs=state.log_history[-1])
    if control.should_training_stop:
        break
print(f"rank {{rank}} stops at {{step}}, saves: {{control.should_save}}", flush=True)
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_of_two_processes_the_main_one_speaks_and_both_stop(tmp_path):
    """One line in all, and one decision, even if the processes' numbers lie on the two sides of a threshold."""
    script = tmp_path / "alarm.py"
    script.write_text(TWO_PROCESSES.format(folder=str(tmp_path)), encoding="utf-8")
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = launched.stdout + launched.stderr
    assert launched.returncode == 0, output
    assert len(re.findall(r"^rank 0: .*Alarm `tool_errors` at step 10", output, flags=re.MULTILINE)) == 1, output
    assert "rank 1: " not in output
    for rank in (0, 1):
        assert f"rank {rank} stops at 10, saves: True" in output
