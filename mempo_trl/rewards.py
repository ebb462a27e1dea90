"""Exact match, F1 and format rewards: pure functions, and the same in the form of TRL's reward functions.

Published systems compare answers under one of two normalizers, which give different numbers: name the one you report.
`"squad"` (SQuAD, HotpotQA, Search-R1) deletes punctuation and articles: `"The U.S."` becomes `"us"`. `"words"`
(DeepResearcher, MEM1's evaluation) turns punctuation into spaces and keeps articles: `"the u s"`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable


_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_squad(text: str) -> str:
    """
    Normalizes as SQuAD and HotpotQA do: lower case, punctuation deleted, articles removed, white space collapsed.

    Args:
        text (`str`):
            Answer or alias.

    Returns:
        `str`: The normalized text, empty when nothing but punctuation and articles was given.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def normalize_words(text: str) -> str:
    """
    Normalizes as DeepResearcher does: lower case, punctuation replaced by a space, articles kept, white space
    collapsed.

    Args:
        text (`str`):
            Answer or alias.

    Returns:
        `str`: The normalized text, empty when nothing but punctuation was given.
    """
    return " ".join(text.lower().translate(_SPACE_PUNCTUATION).split())


NORMALIZERS = {"squad": normalize_squad, "words": normalize_words}


def exact_match(answer: str, aliases: list[str], normalizer: str = "squad") -> float:
    """
    Whether the answer equals one of the aliases after normalization.

    Args:
        answer (`str`):
            Answer to one objective.
        aliases (`list[str]`):
            Golden answers of that objective; any one counts.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            `"squad"` or `"words"`.

    Returns:
        `float`: 1.0 or 0.0. An answer of which the normalization leaves nothing is 0.0, whatever the aliases.
    """
    return _best(_exact_match, answer, aliases, normalizer)


def f1(answer: str, aliases: list[str], normalizer: str = "squad") -> float:
    """
    Harmonic mean of precision and recall over tokens, the best over the aliases.

    `"squad"` counts repeated tokens, and as in HotpotQA an alias or answer that is `yes`, `no` or `noanswer` gives 0
    unless both are the same. `"words"` compares sets of tokens and has no such guard.

    Args:
        answer (`str`):
            Answer to one objective.
        aliases (`list[str]`):
            Golden answers of that objective; the best one counts.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            `"squad"` or `"words"`.

    Returns:
        `float`: Between 0.0 and 1.0. An answer of which the normalization leaves nothing is 0.0, whatever the aliases.
    """
    return _best(_f1_squad if normalizer == "squad" else _f1_words, answer, aliases, normalizer)


METRICS = {"em": exact_match, "f1": f1}


def split_answers(answer: str | None, num_objectives: int) -> list[str]:
    """
    Splits the answer to several objectives, `"first; second"`, by position.

    A missing part is `""`, which scores 0, and surplus parts are ignored. The answer to a single objective is never
    split, so it may hold a semicolon.

    Args:
        answer (`str` or `None`):
            Text of the answer; `None` when the rollout gave none.
        num_objectives (`int`):
            Number of questions asked together.

    Returns:
        `list[str]`: One answer per objective.
    """
    if num_objectives < 1:
        raise ValueError(f"got {num_objectives} objectives; pass one list of aliases per question, at least one.")
    if answer is None:
        return [""] * num_objectives
    if num_objectives == 1:
        return [answer.strip()]
    parts = [part.strip() for part in answer.split(";")][:num_objectives]
    return parts + [""] * (num_objectives - len(parts))


def score_answer(
    answer: str | None, golden_answers: list[list[str]], metric: str = "em", normalizer: str = "squad"
) -> list[float]:
    """
    Scores each objective of an answer; the sum is in 0..`len(golden_answers)` and the mean in 0..1.

    Args:
        answer (`str` or `None`):
            Text of the answer; `None` when the rollout gave none.
        golden_answers (`list[list[str]]`):
            Objectives × aliases.
        metric (`str`, *optional*, defaults to `"em"`):
            `"em"` for exact match or `"f1"`.
        normalizer (`str`, *optional*, defaults to `"squad"`):
            `"squad"` or `"words"`.

    Returns:
        `list[float]`: One score per objective.

    Example:

    ```python
    >>> score_answer("Paris; 1987", [["Paris"], ["1988", "in 1988"]])
    [1.0, 0.0]
    ```
    """
    if metric not in METRICS:
        raise ValueError(f"got metric {metric!r}, expected one of {sorted(METRICS)}.")
    parts = split_answers(answer, len(golden_answers))
    return [METRICS[metric](part, aliases, normalizer) for part, aliases in zip(parts, golden_answers, strict=True)]


def exact_match_reward(completions: list, golden_answers: list, rollouts: list, **kwargs) -> list[float | None]:
    """
    The outcome reward `R_T` of MemPO: exact match, the mean over the objectives, times "every turn is well formed".

    Args:
        completions (`list`):
            Completions as TRL passes them; not read, the answer is taken from the rollouts.
        golden_answers (`list[list[list[str]]]`):
            Objectives × aliases of each rollout.
        rollouts (`list[Rollout]`):
            Rollouts, of which `answer` and `well_formed` are read.
        **kwargs:
            Other columns and arguments that TRL passes; not read.

    Returns:
        `list[float | None]`: One reward per rollout, `None` where an objective has no golden answer to judge by.
    """
    return _with_format(answer_exact_match_reward(completions, golden_answers, rollouts), rollouts)


def f1_reward(completions: list, golden_answers: list, rollouts: list, **kwargs) -> list[float | None]:
    """As [`exact_match_reward`], with F1 in place of exact match."""
    return _with_format(answer_f1_reward(completions, golden_answers, rollouts), rollouts)


def answer_exact_match_reward(completions: list, golden_answers: list, rollouts: list, **kwargs) -> list[float | None]:
    """As [`exact_match_reward`], whether or not the turns are well formed."""
    return _mean_scores(golden_answers, rollouts, "em")


def answer_f1_reward(completions: list, golden_answers: list, rollouts: list, **kwargs) -> list[float | None]:
    """As [`f1_reward`], whether or not the turns are well formed."""
    return _mean_scores(golden_answers, rollouts, "f1")


def format_reward(completions: list, rollouts: list, **kwargs) -> list[float | None]:
    """1.0 where every turn of the rollout is well formed, else 0.0. Arguments as for [`exact_match_reward`]."""
    return [1.0 if rollout.well_formed else 0.0 for rollout in rollouts]


REWARD_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "rollouts"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""What reward functions get beside the columns, so that no column may have one of these names."""

# The names that recipes use.
REWARD_FUNCS = {
    func.__name__: func
    for func in (exact_match_reward, f1_reward, answer_exact_match_reward, answer_f1_reward, format_reward)
}


def _best(metric: Callable[[str, str], float], answer: str, aliases: list[str], normalizer: str) -> float:
    if normalizer not in NORMALIZERS:
        raise ValueError(f"got normalizer {normalizer!r}, expected one of {sorted(NORMALIZERS)}.")
    if isinstance(aliases, str) or not aliases:
        # A string would be taken for a list of one-letter aliases.
        raise ValueError(f"got aliases {aliases!r}, expected a list of at least one string, such as ['Paris'].")
    normalize = NORMALIZERS[normalizer]
    normalized = normalize(answer)
    return max(metric(normalized, normalize(alias)) for alias in aliases) if normalized else 0.0


def _exact_match(answer: str, alias: str) -> float:
    return float(answer == alias)


def _f1_squad(answer: str, alias: str) -> float:
    if answer != alias and {answer, alias} & {"yes", "no", "noanswer"}:
        return 0.0
    answer_tokens, alias_tokens = answer.split(), alias.split()
    common = (Counter(answer_tokens) & Counter(alias_tokens)).total()
    return 2 * common / (len(answer_tokens) + len(alias_tokens))


def _f1_words(answer: str, alias: str) -> float:
    answer_tokens, alias_tokens = set(answer.split()), set(alias.split())
    return 2 * len(answer_tokens & alias_tokens) / (len(answer_tokens) + len(alias_tokens))


def _mean_scores(golden_answers: list, rollouts: list, metric: str) -> list[float | None]:
    rewards = []
    for objectives, rollout in zip(golden_answers, rollouts, strict=True):
        if not objectives or not all(objectives):
            rewards.append(None)
        else:
            scores = score_answer(rollout.answer, objectives, metric)
            rewards.append(sum(scores) / len(scores))
    return rewards


def _with_format(rewards: list[float | None], rollouts: list) -> list[float | None]:
    return [
        None if reward is None else reward * factor
        for reward, factor in zip(rewards, format_reward([], rollouts), strict=True)
    ]
