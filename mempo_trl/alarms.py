"""Alarms: what the logged metrics say about a run that goes wrong, and the callback that says it in the log."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from .config import ALARM_THRESHOLDS, MemPOConfig


logger = get_logger(__name__)

WINDOW = 10
"""Steps over which metrics are averaged before they are judged, so that a single bad batch is no alarm."""

REPEAT = 100
"""Steps after which an alarm that goes on is given again."""

ENTROPY_FLOOR = 1.0
"""Nats up to which no rise of the entropy is an explosion: a policy that is sure of nearly every token may triple it."""

FINITE = ("loss", "grad_norm", "entropy", "kl")
"""Metrics that are finite in every training log that has them, unless something is wrong."""

Means = dict[str, float]


def _mean(metric: str) -> Callable[[Means, list[Means], MemPOConfig], float | None]:
    return lambda recent, earlier, args: recent.get(metric)


def _to_start(metric: str) -> Callable[[Means, list[Means], MemPOConfig], float | None]:
    def ratio(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
        start = earlier[0].get(metric, 0.0) if earlier else 0.0
        return recent[metric] / start if metric in recent and start > 0 else None

    return ratio


def _defined_frac(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    if args.memory_advantage_weight == 0:
        return None
    # Without a value no rollout came to a second turn, and no memory could be rewarded.
    return recent.get("memory/defined_frac", 0.0 if "rollout/turns_mean" in recent else None)


def _kept(recent: Means) -> list[float]:
    return [recent[name] for name in ("memory/kept_frac_mem", "memory/kept_frac_full") if name in recent]


def _kept_most(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    return max(_kept(recent), default=None)


def _kept_ratio(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    kept = _kept(recent)
    # Where both sides keep next to nothing that is the other alarm, and their ratio is noise.
    return min(kept) / max(kept) if kept and max(kept) > ALARM_THRESHOLDS["memory_filtered"] else None


def _format_fall(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    metric = "rollout/format_ok_frac"
    before = [means[metric] for means in earlier if metric in means]
    return max(before) - recent[metric] if before and metric in recent else None


def _entropy_rise(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    return _to_start("entropy")(recent, earlier, args) if recent.get("entropy", 0.0) > ENTROPY_FLOOR else None


def _cut_frac(recent: Means, earlier: list[Means], args: MemPOConfig) -> float | None:
    metrics = ("rollout/outcome/truncated", "rollout/outcome/out_of_context")
    cut = [recent[metric] for metric in metrics if metric in recent]
    return sum(cut) if cut else None


@dataclass(frozen=True)
class Alarm:
    """
    One thing that can go wrong.

    Args:
        name (`str`):
            Its name in `alarm_thresholds`.
        metrics (`tuple[str, ...]`):
            The metrics that it judges, for the message.
        number (`Callable`):
            `number(recent, earlier, args)` from the means of the last window and of the windows before; `None` where
            there is nothing to judge.
        wrong (`str`):
            The side of the threshold that is wrong: `"below"` or `"above"`.
        says (`str`):
            What the number is.
        remedy (`str`):
            What to do; `{name}` stands for a setting and its value.
    """

    name: str
    metrics: tuple[str, ...]
    number: Callable[[Means, list[Means], MemPOConfig], float | None]
    wrong: str
    says: str
    remedy: str


ALARMS = (
    Alarm(
        "memory_undefined",
        ("memory/defined_frac", "rollout/turns_mean"),
        _defined_frac,
        "below",
        "the share of turns after the first that have a memory reward",
        "Teach the form in a cold start (`mempo sft`); if memories are cut, raise {max_completion_length}.",
    ),
    Alarm(
        "memory_filtered",
        ("memory/kept_frac_mem", "memory/kept_frac_full"),
        _kept_most,
        "below",
        "the share of answer tokens that the confidence filter keeps, on the side that keeps more,",
        "Lower {memory_prob_threshold} or change {memory_token_filter}: where no token is kept the memory reward is 0.",
    ),
    Alarm(
        "kept_gap",
        ("memory/kept_frac_mem", "memory/kept_frac_full"),
        _kept_ratio,
        "below",
        "the smaller of the two kept shares of answer tokens, as a part of the larger,",
        "Change {memory_token_filter} to 'joint', 'history' or 'none', which keep the same tokens on both sides.",
    ),
    Alarm(
        "format",
        ("rollout/format_ok_frac",),
        _format_fall,
        "above",
        "the fall of the share of well-formed rollouts from its best",
        "Lower {learning_rate} or raise {beta}, from a checkpoint before the fall.",
    ),
    Alarm(
        "memory_length",
        ("memory/tokens_mean",),
        _to_start("memory/tokens_mean"),
        "below",
        "the length of the memories, as a part of that in the first steps,",
        "Lower {memory_advantage_weight} or {learning_rate}, or raise {beta}.",
    ),
    Alarm(
        "think_length",
        ("rollout/think_tokens_mean",),
        _to_start("rollout/think_tokens_mean"),
        "below",
        "the length of the thoughts, as a part of that in the first steps,",
        "Lower {learning_rate} or raise {beta}.",
    ),
    Alarm(
        "entropy",
        ("entropy",),
        _entropy_rise,
        "above",
        "the entropy, as a multiple of that in the first steps,",
        "Lower {learning_rate} or {entropy_coef}, or raise {beta}, from a checkpoint before the rise.",
    ),
    Alarm(
        "zero_spread",
        ("frac_reward_zero_std", "reward"),
        _mean("frac_reward_zero_std"),
        "above",
        "the share of groups whose rollouts all have the same reward",
        "Take questions that are neither too hard nor too easy (the mean reward tells which), or raise "
        "{num_generations}.",
    ),
    Alarm(
        "truncated",
        ("rollout/outcome/truncated", "rollout/outcome/out_of_context"),
        _cut_frac,
        "above",
        "the share of rollouts that end because a turn was cut or the next prompt did not fit",
        "Raise {max_completion_length} for the former, {max_prompt_length} or a limit in {max_tool_response_length} "
        "for the latter.",
    ),
    Alarm(
        "tool_errors",
        ("tool/error_frac",),
        _mean("tool/error_frac"),
        "above",
        "the share of tool calls that fail for good",
        "Read `tool_error` in the rollouts and repair the tool, or raise {tool_timeout} or {tool_retries}.",
    ),
    Alarm(
        "empty_results",
        ("tool/empty_frac",),
        _mean("tool/empty_frac"),
        "above",
        "the share of tool calls that find nothing",
        "Compare the queries in the rollouts with the corpus: its language, its subject, and whether it was loaded "
        "whole (`corpus_path`, `index_path` or `search_url`).",
    ),
    Alarm(
        "sampling_gap",
        ("sampling/sampling_logp_difference/mean",),
        _mean("sampling/sampling_logp_difference/mean"),
        "above",
        "the mean difference of a token's log-probability between sampling and training",
        "Sample from the whole distribution ({top_p}, {top_k}), use the same dtype and attention on both sides, and "
        "keep {vllm_importance_sampling_correction}.",
    ),
)
"""Everything that is judged over a window. Beside them stands `"not_finite"`, which is judged at once."""


def find_alarms(history: list[dict], args: MemPOConfig, start_step: int = 0) -> dict[str, str]:
    """
    What is wrong at the end of a history of logs.

    Args:
        history (`list[dict]`):
            Logs with their `"step"`, as in [`~transformers.TrainerState`]`.log_history`.
        args ([`MemPOConfig`]):
            The configuration, with `alarm_thresholds`.
        start_step (`int`, *optional*, defaults to `0`):
            Step at which this run was started or resumed. Earlier steps are compared with, not judged: the settings
            may have been repaired since.

    Returns:
        `dict[str, str]`: Name of each alarm to one line with the number, the threshold and the setting to change.
    """
    logs = [log for log in history if "loss" in log]  # neither those of evaluations nor the summary at the end
    if not logs or logs[-1]["step"] <= start_step:
        return {}
    step = logs[-1]["step"]
    settings = _Settings(args)
    alarms = {}
    # TRL logs None for a metric that was NaN throughout.
    bad = [name for name in FINITE if name in logs[-1] and not _is_finite(logs[-1][name])]
    threshold = args.alarm_thresholds["not_finite"]
    if threshold is not None and bad and len(bad) >= threshold:
        remedy = (
            "Go back to the last good checkpoint and lower {learning_rate} or {max_grad_norm}; prefer bf16 to fp16."
        )
        alarms["not_finite"] = (
            f"Alarm `not_finite` at step {step}: {', '.join(f'`{name}`' for name in bad)} NaN or infinite. "
            + remedy.format_map(settings)
        )
    if step - start_step < WINDOW:
        return alarms

    judged = [log for log in logs if log["step"] > step - WINDOW]
    recent, earlier = _means(judged), _windows(logs, before=judged[0]["step"])
    for alarm in ALARMS:
        threshold = args.alarm_thresholds[alarm.name]
        number = alarm.number(recent, earlier, args)
        if threshold is None or number is None:
            continue
        if number < threshold if alarm.wrong == "below" else number > threshold:
            values = ", ".join(f"`{metric}` {recent[metric]:.3g}" for metric in alarm.metrics if metric in recent)
            alarms[alarm.name] = (
                f"Alarm `{alarm.name}` at step {step}: {alarm.says} is {number:.3g}, {alarm.wrong} {threshold:g} "
                f"({values}; mean of the logs from step {judged[0]['step']} on). {alarm.remedy.format_map(settings)}"
            )
    return alarms


class _Settings:
    """Settings by name as text, for `str.format_map`."""

    def __init__(self, args: MemPOConfig):
        self.args = args

    def __getitem__(self, name: str) -> str:
        return f"`{name}` ({self.args.__dict__[name]!r})"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _means(logs: list[dict]) -> Means:
    """Mean of each metric over the logs in which it has a finite value."""
    values: dict[str, list[float]] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: sum(of_metric) / len(of_metric) for name, of_metric in values.items()}


def _windows(logs: list[dict], before: int) -> list[Means]:
    """Means of the windows, counted from the first log, that end before a step."""
    first = logs[0]["step"]
    windows: dict[int, list[dict]] = {}
    for log in logs:
        windows.setdefault((log["step"] - first) // WINDOW, []).append(log)
    return [_means(of_window) for i, of_window in windows.items() if first + (i + 1) * WINDOW <= before]


class AlarmCallback(TrainerCallback):
    """
    Gives each alarm of a run as one line in the log, and ends training with a checkpoint where `stop_on_alarms` says so.

    An alarm that goes on is given again after `REPEAT` steps; one that was quiet for more than `WINDOW` steps, at once.
    """

    def __init__(self):
        self.start_step = 0
        self._given: dict[str, int] = {}  # step at which an alarm was given last
        self._active: dict[str, int] = {}  # step at which it was found last

    def on_train_begin(self, args, state, control, **kwargs):
        self.start_step, self._given, self._active = state.global_step, {}, {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        step = state.global_step
        alarms = find_alarms(state.log_history, args, self.start_step)
        for name in list(self._given):
            if name not in alarms and step - self._active[name] > WINDOW:
                del self._given[name]
        for name, message in alarms.items():
            if name not in self._given or step - self._given[name] >= REPEAT:
                logger.warning(message)
                self._given[name] = step
            self._active[name] = step

        if args.stop_on_alarms:
            reasons = [name for name in alarms if name in args.stop_on_alarms or "all" in args.stop_on_alarms]
            # One decision for all: a process that ends alone, over a rounding, would leave the others waiting.
            (reasons,) = broadcast_object_list([reasons])
            if reasons:
                logger.warning(
                    f"Training ends at step {step} with a checkpoint, because `stop_on_alarms` is "
                    f"{args.stop_on_alarms}: {', '.join(reasons)}. Change the setting and resume from it, or from an "
                    "earlier one."
                )
                control.should_save = control.should_training_stop = True
