"""The learning benchmark: what it plans, what it counts, and what it says about memories."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY
from records import record, turn

from mempo_trl.data import village as village_module
from mempo_trl.data.village import ATTRIBUTES, RELATIONS, Village
from mempo_trl.scripts import evaluate, sft, train
from mempo_trl.scripts.arguments import check_launch_arguments


# The benchmark's modules import one another as scripts do.
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
try:
    learning, learning_results, learning_tables, memory_content = map(
        importlib.import_module, ("learning", "learning_results", "learning_tables", "memory_content")
    )
finally:
    sys.path.remove(str(REPOSITORY / "benchmarks"))


@pytest.fixture
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


# What is planned


SUITE = {
    "recipes": {
        "village": "recipes/village/village.yaml",
        "sft": "recipes/village/sft/config.yaml",
        "train": "recipes/village/mempo/config.yaml",
        "evaluate": "recipes/village/evaluate.yaml",
    },
    "seeds": [0, 1],
    "cold_starts": 2,
    "evaluations": 2,
    "window": 2,
    "levels": [0.5],
    "reference": "grpo",
    "settings": {"train": {"max_steps": 4, "learning_rate": 0.5}},
    "regimes": {
        "plain": {"seconds": {"cold_start": 100, "startup": 3, "step": 2, "evaluation": 10}},
        "far": {"arms": ["grpo", "paper"], "test_village": {"objectives": [8]}, "train": {"max_steps": 2}},
    },
    "arms": {
        "grpo": {"train": {"memory_advantage_weight": 0.0}},
        "full": {"sft": {"context": "full"}, "train": {"context": "full"}, "evaluate": {"context": "full"}},
        "paper": None,
        "rare": {"seeds": [1], "train": {"learning_rate": 0.25}},
    },
}


def plan_of(tmp_path, suite: dict = SUITE, **kwargs):
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return learning.Plan(learning.Suite.read(path), tmp_path / "out", **kwargs)


def options(command: tuple[str, ...]) -> dict[str, list[str]]:
    """Values of a command line by option."""
    table: dict[str, list[str]] = {}
    for word in command:
        if word.startswith("--"):
            name = word
            table[name] = []
        elif table:
            table[name].append(word)
    return table


def test_plan(tmp_path, in_repository):
    """
    One run per regime, arm and seed, those of a seed before those of the next; what a task needs comes before it.

    Seed 0: 3 arms in `plain` (`rare` has only seed 1) and 2 in `far`; seed 1: 4 and 2. Trainings: 11. Evaluations after
    them: 22. Two cold starts: per regime 2 villages; 2 cold starts and evaluations of it in each, 2 more for `full` in
    `plain`; 2 villages for the questions of `far`.
    """
    plan = plan_of(tmp_path)
    assert [(run.seed, run.regime, run.arm) for run in plan.runs] == [
        *[(0, "plain", arm) for arm in ("grpo", "full", "paper")],
        *[(0, "far", arm) for arm in ("grpo", "paper")],
        *[(1, "plain", arm) for arm in ("grpo", "full", "paper", "rare")],
        *[(1, "far", arm) for arm in ("grpo", "paper")],
    ]
    scripts = [task.command[2] if "." not in task.command[2] else "village" for task in plan.tasks.values()]
    scripts = [
        task.command[2] if task.command[1] != "mempo_trl.cli" else task.command[2] for task in plan.tasks.values()
    ]
    counts = {name: scripts.count(name) for name in ("sft", "train", "evaluate")}
    assert counts == {"sft": 6, "train": 11, "evaluate": 22 + 6}
    assert len(plan.tasks) == 4 + 2 + sum(counts.values())
    seen = set()
    for task in plan.tasks.values():
        assert {needed.name for needed in task.needs} <= seen
        seen.add(task.name)
    # `plain` alone: 4 cold starts and their evaluations, 7 trainings of 4 steps, 14 evaluations, 2 villages of 10 s.
    only = plan_of(tmp_path, regimes=["plain"])
    assert {run.seed for run in plan_of(tmp_path, only_seeds=[1]).runs} == {1}
    assert only.seconds() == 4 * (100 + 10) + 7 * (3 + 4 * 2 + 2 * 10) + 2 * 10


def test_arms_differ_by_what_the_suite_says(tmp_path, in_repository):
    """Runs of a seed share cold start and questions, and differ in their arm's options; later changes win."""
    runs = {(run.regime, run.arm, run.seed): run for run in plan_of(tmp_path).runs}
    grpo, paper = (options(runs["plain", arm, 1].train.command) for arm in ("grpo", "paper"))
    assert {name for name in grpo if grpo[name] != paper.get(name)} == {"--memory_advantage_weight", "--output_dir"}
    assert grpo["--memory_advantage_weight"] == ["0.0"] and grpo["--seed"] == ["1"]
    assert (grpo["--max_steps"], grpo["--save_steps"]) == (["4"], ["2"])
    assert options(runs["far", "grpo", 0].train.command)["--max_steps"] == ["2"]
    assert paper["--learning_rate"] == ["0.5"]
    assert options(runs["plain", "rare", 1].train.command)["--learning_rate"] == ["0.25"]
    assert sorted(runs["plain", "grpo", 0].evaluations) == [0, 2, 4]
    # A cold start per seed, shared by the arms but for the one that has its own.
    starts = {key: options(run.train.command)["--model_name_or_path"] for key, run in runs.items()}
    assert starts["plain", "grpo", 1] == starts["plain", "paper", 1] == starts["plain", "rare", 1]
    assert len({starts["plain", arm, seed][0] for arm in ("grpo", "full") for seed in (0, 1)}) == 4
    (own,) = runs["plain", "full", 0].train.needs
    assert options(own.command)["--context"] == ["full"]
    assert runs["plain", "full", 0].evaluations[0].needs[0] is own
    # Other held-out questions come from the same people and facts.
    far, test = runs["far", "grpo", 1].village, runs["far", "grpo", 1].evaluations[2].needs[1]
    assert options(test.command)["--objectives"] == ["8"] and "--objectives" not in options(far.command)
    assert options(test.command)["--seed"] == options(far.command)["--seed"] == ["1"]
    evaluation = options(runs["far", "grpo", 1].evaluations[2].command)
    assert evaluation["--dataset_name"] == [str(test.folder / "test.jsonl")]
    assert evaluation["--corpus_path"] == [str(far.folder / "corpus.jsonl")]
    assert evaluation["--model_name_or_path"][0].endswith("checkpoint-2")


def test_regimes_share_a_world(tmp_path, in_repository):
    """The same questions, cold start and evaluations, with the settings of the regime whose they are; another training."""
    rewards = {"world": "plain", "train": {"reward_funcs": ["f1"]}, "seconds": {"cold_start": 7}}
    plain = SUITE["regimes"]["plain"] | {"sft": {"num_train_epochs": 3}}
    plan = plan_of(tmp_path, SUITE | {"regimes": {"plain": plain, "other": rewards}})
    runs = {(run.regime, run.arm, run.seed): run for run in plan.runs}
    first, second = runs["plain", "paper", 0], runs["other", "paper", 0]
    assert second.village is first.village and second.evaluations[0] is first.evaluations[0]
    assert second.train.needs == first.train.needs and second.train.needs[0].seconds == 100
    ours, theirs = options(second.train.command), options(first.train.command)
    assert {name for name in ours if ours[name] != theirs.get(name)} == {"--reward_funcs", "--output_dir"}


def test_regimes_start_from_another(tmp_path, in_repository):
    """A cold start on top of that of another regime with the same people; an arm with its own has both of its own."""
    plain = SUITE["regimes"]["plain"]
    worse = {"start": "plain", "village": {"memory_mistake_rate": 0.5}, "sft": {"learning_rate": 0.125}}
    plan = plan_of(tmp_path, SUITE | {"regimes": {"plain": plain, "worse": worse | {"seconds": {"cold_start": 7}}}})
    runs = {(run.regime, run.arm, run.seed): run for run in plan.runs}
    first, second = (runs[regime, "paper", 1].train.needs[0] for regime in ("plain", "worse"))
    assert second.needs == (runs["worse", "paper", 1].village, first) and second.seconds == 7
    ours = options(second.command)
    assert ours["--model_name_or_path"] == [str(first.folder)] and ours["--learning_rate"] == ["0.125"]
    assert ours["--rollouts"] == [str(runs["worse", "paper", 1].village.folder / "rollouts.jsonl")]
    assert options(second.needs[0].command)["--seed"] == options(first.needs[0].command)["--seed"] == ["1"]
    of_full = runs["worse", "full", 1].train.needs[0]
    assert options(of_full.command)["--context"] == options(of_full.needs[1].command)["--context"] == ["full"]
    assert of_full.needs[1] is runs["plain", "full", 1].train.needs[0]


@pytest.mark.parametrize("name", ["quick", "full"])
def test_commands_of_the_suites_are_parsed(name, in_repository, monkeypatch):
    """Every option of every arm in every regime is known to its script, and its value is accepted."""
    plan = learning.Plan(learning.Suite.read(learning.find_suite(name)), Path("out/learning/full"))
    parsers = {
        "sft": sft.make_parser(),
        "train": train.make_parser(),
        "evaluate": evaluate.make_parser(),
        "village": village_module.make_parser(),
    }
    seen = set()
    for task in plan.tasks.values():
        script = task.command[2] if task.command[1] == "mempo_trl.cli" else "village"
        given = list(task.command[3 if script != "village" else 2 :])
        # Seeds and folders differ, and nothing else does.
        key = tuple(word for word in given if "out/learning" not in word and not word.isdecimal()), script
        if key in seen:
            continue
        seen.add(key)
        parser = parsers[script]
        if script not in ("sft", "train"):
            parser.parse_args_and_config(given)
            continue
        *_, from_config, from_command_line = parser.parse_args_and_config(
            given, return_remaining_strings=True, separate_remaining_strings=True
        )
        check_launch_arguments(from_config + from_command_line)


def test_suites_hold_the_study(in_repository):
    """Quick: two regimes, four arms, three seeds. Full: the regimes, λ of 0, 0.3 and 1 with each of the filters."""
    quick, full = (learning.Suite.read(learning.find_suite(name)) for name in ("quick", "full"))
    assert (len(quick.regimes), len(quick.arms)) == (2, 4)
    assert all(arm["seeds"] == [0, 1, 2] for arm in quick.arms.values())
    assert set(full.regimes) == {"dense", "noisy", "sparse"} and len(full.seeds) == 5
    settings = [full.arguments("train", "dense", arm) for arm in full.arms]
    weighted = {(s["memory_advantage_weight"], s["memory_token_filter"]) for s in settings}
    filters = ("independent", "joint", "history", "none")
    assert weighted >= {(weight, token_filter) for weight in (0.3, 1.0) for token_filter in filters}
    forms = {(s["memory_baseline"], s["memory_answer"]) for s in settings if s["memory_token_filter"] == "none"}
    assert forms == {(baseline, answer) for baseline in ("history", "previous") for answer in ("joint", "objectives")}
    assert {s.get("context") for s in settings} == {None, "full"}
    assert {s.get("memory_credit") for s in settings} == {None, "successful"}
    assert settings[0]["memory_advantage_weight"] == 0.0 and full.reference == "grpo"


def test_a_part_of_a_suite_is_the_same_runs(in_repository):
    """Task by task the commands of the whole, so that the whole goes on from what its part has done."""
    quick, full = (
        learning.Plan(learning.Suite.read(learning.find_suite(name)), Path("out/learning/full"))
        for name in ("quick", "full")
    )
    assert quick.tasks.items() <= full.tasks.items()
    runs = {(run.regime, run.arm, run.seed) for run in quick.runs}
    arms = ("grpo", "paper", "unfiltered", "previous")
    assert runs == {(regime, arm, seed) for regime in ("dense", "noisy") for arm in arms for seed in range(3)}
    assert {run.cold_start for run in quick.runs} == {0, 1}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"regimes": ["typo"]}, "the suite 'full' has no regime .'typo'."),
        ({"arms": ["typo"]}, "the suite 'full' has no arm .'typo'."),
        ({"seeds": [77]}, "the suite 'full' has no seed .77."),
        ({"levels": [0.5]}, "a part of a suite has .*not .*'levels'"),
        ({"part_of": "typo"}, "there is no suite"),
    ],
)
def test_wrong_parts(tmp_path, in_repository, change, message):
    """A part can choose, and change nothing."""
    part = {"part_of": "full", "regimes": ["dense"], "arms": ["grpo"], "seeds": [0]}
    path = tmp_path / "part.yaml"
    path.write_text(yaml.safe_dump(part | change))
    with pytest.raises(ValueError, match=message):
        learning.Suite.read(path)


def test_reward_of_the_sparse_regime(in_repository, monkeypatch):
    """`mempo train` finds it by the name in the suite, and it is 1 only where every objective is right, in the format."""
    (name,) = learning.Suite.read(learning.find_suite("full")).arguments("train", "sparse", "paper")["reward_funcs"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = train.load_reward_func(name)
    golden = [["cat"], ["tea"]]
    rollouts = [
        SimpleNamespace(answer=answer, well_formed=well_formed)
        for answer, well_formed in (("cat; tea", True), ("cat; tea", False), ("cat; x", True), (None, True))
    ]
    assert reward([None] * 4, [golden] * 4, rollouts=rollouts) == [1.0, 0.0, 0.0, 0.0]
    assert reward([None], [None], rollouts=rollouts[:1]) == [None]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"regime": {}}, "the suite has .'regime'."),
        ({"regimes": {"plain": {"lr": 1}}}, "a regime 'plain' has .'lr'."),
        ({"arms": {"grpo": {"lr": 1}}}, "an arm 'grpo' has .'lr'."),
        ({"reference": "sft"}, "no arm .'sft'."),
        ({"regimes": {"plain": {"arms": ["typo"]}}}, "no arm .'typo'."),
        ({"regimes": {"plain": {"world": "typo"}}}, "the world of the regime 'plain' is 'typo'"),
        ({"regimes": {"a": None, "b": {"world": "a"}, "c": {"world": "b"}}}, "the world of the regime 'c' is 'b'"),
        ({"regimes": {"a": None, "b": {"start": "a"}, "c": {"start": "b"}}}, "the start of the regime 'c' is 'b'"),
        ({"regimes": {"a": None, "b": {"world": "a", "sft": {}}}}, "the regime 'b' has .'sft'. and the world"),
        ({"regimes": {"a": None, "b": {"world": "a", "start": "a"}}}, "the regime 'b' has .'start'. and the world"),
        ({"cold_starts": 0}, "`cold_starts` is 0"),
        ({"evaluations": 3}, "`max_steps` 4, which can't be cut into 3"),
        ({"settings": {"train": {"max_steps": 4, "report_to": None}}}, "`report_to` is None"),
        ({"recipes": {}}, "`recipes` lacks"),
    ],
)
def test_wrong_suites(tmp_path, in_repository, change, message):
    """What a suite can't mean is said with its name, before anything is run."""
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, SUITE | change)


def test_wrong_choices(tmp_path, in_repository):
    """Names on the command line that are in no suite."""
    with pytest.raises(ValueError, match=r"no arm \['typo'\]; the arms are"):
        plan_of(tmp_path, arms=["typo"])
    with pytest.raises(ValueError, match=r"no seed \[7\]; the seeds are \[0, 1\]"):
        plan_of(tmp_path, only_seeds=[7])
    with pytest.raises(ValueError, match="no suite"):
        learning.find_suite("typo")


# What is counted


def test_intervals():
    """Student's t with 2 degrees of freedom: 4.3027 · 1 / √3 = 2.4841 around the mean of 1, 2, 3; none for one value."""
    entry = learning_tables.mean_interval([1.0, 2.0, 3.0])
    assert (entry["mean"], entry["n"]) == (2.0, 3)
    assert entry["ci95"] == pytest.approx([2 - 2.4841, 2 + 2.4841], abs=1e-4)
    assert learning_tables.mean_interval([0.5]) == {"mean": 0.5, "ci95": None, "n": 1}


def test_differences_are_of_pairs():
    """
    By seed, whatever else a side has: differences 0.1, 0.2, 0.3 with half-width 4.3027 · 0.1 / √3 = 0.2484; of the 8
    signs two are as far from 0: p = 0.25.
    """
    entry = learning_tables.compare_arms({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {2: 0.6, 1: 0.5, 0: 0.4, 8: 1.0})
    assert (entry["mean"], entry["n"], entry["p_sign_flip"]) == (pytest.approx(0.2), 3, 0.25)
    assert entry["ci95"] == pytest.approx([0.2 - 0.2484, 0.2 + 0.2484], abs=1e-4)
    assert learning_tables.compare_arms({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("level, steps", [(0.1, 1), (0.3, 2), (0.4, 4), (0.5, None)])
def test_steps_to_a_level(level, steps):
    """Means of two steps: 0.1, 0.3, 0.3, 0.4 after 1, 2, 3, 4 steps."""
    training = [{"step": step, "exact_match": value} for step, value in enumerate([0.0, 0.2, 0.4, 0.2, 0.6])]
    assert learning_tables.steps_to(training, level, window=2) == steps


# What memories hold


def make_village() -> Village:
    """Everyone's attributes are `x`, but Anna has a cat and Carl drinks tea; Bob's friend is Carl."""
    people = {
        name: dict.fromkeys(ATTRIBUTES, "x") | dict.fromkeys(RELATIONS, "Dora")
        for name in ("Anna", "Bob", "Carl", "Dora")
    }
    people["Anna"]["pet"], people["Bob"]["friend"], people["Carl"]["drink"] = "cat", "Carl", "tea"
    return Village(0, people)


VILLAGE = make_village()
QUESTION = "What is the pet of Anna?; What is the drink of the friend of Bob?"


def memory_turn(memory: str | None, searched: str | None, R_M: float | None = None, tokens: int = 3, **kwargs) -> dict:
    """A turn that writes a memory and reads a passage; the markers are those of a memory of so many tokens."""
    markers = [0] * 8
    if memory is not None:
        markers[tokens - 1] = 2
        markers[0] = 1
    response = None if searched is None else f"Doc 1(Title: {searched}) {VILLAGE.passage(searched)}\n"
    probabilities = {"R_M": R_M, "P_mem": R_M, "P_full": None if R_M is None else 0.0}
    outcome = "answer" if searched is None else "tool_call"
    defaults = {"memory": memory, "response": response, "mem_rewards_idx_list": markers} | probabilities
    return turn(10, 8, outcome, **(defaults | kwargs))


def rollout(answer: str | None, *turns: dict, id: str = "q0", step: int = 0, **kwargs) -> dict:
    score = 0.5 * sum(a == b for a, b in zip((answer or "").split("; "), ("cat", "tea"), strict=False))
    given = {"id": id, "step": step, "reward": score} | kwargs
    return record(answer, [["cat"], ["tea"]], list(turns), question=QUESTION, **given)


def test_facts_of_a_question():
    """The answers, and the name between two hops unless the question says it; each with the passage that states it."""
    assert memory_content.question_facts(QUESTION, VILLAGE) == [("Anna", "cat"), ("Bob", "carl"), ("Carl", "tea")]
    question = "What is the pet of Carl?; What is the drink of the friend of Bob?"
    assert memory_content.question_facts(question, VILLAGE) == [("Carl", "x"), ("Carl", "tea")]


def test_memories_of_a_rollout():
    """
    Facts: cat, Carl, tea. Turn 2 (Anna read): holds cat, 1/3 of all and 1/1 of those found. Turn 3 (Bob read): holds
    Carl and lost the cat, 1/3 and 1/2. Turn 4 (Dora read, who states none of them): all wrong but a guessed tea, which
    was not found: 1/3 and 0/2. Turn 5 has no closed memory and turn 1 no history. Turn 6 holds all: 3/3 and 2/2.
    """
    turns = [
        memory_turn("cat", "Anna"),
        memory_turn("Anna pet cat", "Bob", R_M=0.1, tokens=1),
        memory_turn("Anna pet dog; Bob friend Carl", "Dora", R_M=0.2),
        memory_turn("tea, concatenated", "Dora", R_M=0.3),
        memory_turn(None, "Dora"),
        memory_turn("cat, Carl, tea", None, tokens=8),
    ]
    table = memory_content.memory_table([rollout("cat; x", *turns)], VILLAGE)
    assert table["turn"].tolist() == [2, 3, 4, 6]
    assert table["content"].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert table["kept"].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert table["change"].tolist() == pytest.approx([0, 0, 0, 1])  # turn 1 held the cat, turn 5 nothing
    assert table["memory_tokens"].tolist() == [1, 3, 3, 8]
    assert table["exact_match"].tolist() == [0.5] * 4
    assert table["memory_reward"].tolist()[:3] == [0.1, 0.2, 0.3] and np.isnan(table["memory_reward"].iloc[3])


def test_correlations_within_groups():
    """
    y rises with x in each group, but the group with the larger x has the smaller y.

    Ranks in a: 1 2 3 and 1 3 2, ρ = 1 - 6 · 2 / (3 · 8) = 0.5; in b: ρ = 1; their mean is 0.75. Overall 1 2 3 4 5 and
    3 5 4 1 2: Σd² = 32, ρ = 1 - 6 · 32 / (5 · 24) = -0.6. The pair with a NaN is left out.
    """
    x = pd.Series([1, 2, 3, 11, 12, np.nan])
    y = pd.Series([101, 103, 102, 1, 2, 0.0])
    group = pd.Series(list("aaabbb"))
    assert memory_content.spearman_within(x, y, [group]) == {"mean": pytest.approx(0.75), "groups": 2, "pairs": 5}
    assert memory_content.spearman_within(x, y, []) == {"mean": pytest.approx(-0.6), "groups": 1, "pairs": 5}
    flat = memory_content.spearman_within(pd.Series([1.0, 2.0]), pd.Series([5.0, 5.0]), [])
    assert flat == {"mean": None, "groups": 0, "pairs": 0}


def test_correlations_have_ties():
    """Ties share their mean rank. x: 1 2 2 3 → 1 2.5 2.5 4; y: 1 3 2 4. Pearson of the ranks: 4.5 / √(4.5 · 5) = 0.9487."""
    mean = memory_content.spearman_within(pd.Series([1, 2, 2, 3]), pd.Series([1, 3, 2, 4]), [])["mean"]
    assert mean == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_a_reward_of_the_position_is_told_from_one_of_the_content():
    """
    A memory reward that is the turn's number follows the content of a group, since later memories hold more, and says
    nothing within a turn. One that is the content does both.
    """
    contents = {2: ["cat", "dog"], 3: ["cat, Carl", "dog, Carl"], 4: ["cat, Carl, tea", "dog, Carl, tea"]}

    def rollouts(reward) -> list[dict]:
        return [
            rollout("x; x", memory_turn(None, "Anna"), *(
                memory_turn(texts[which], "Bob", R_M=reward(t, texts[which])) for t, texts in contents.items()
            ))
            for which in (0, 1)
        ]  # fmt: skip

    position = memory_content.memory_table(rollouts(lambda t, text: t / 10), VILLAGE)
    by_kind = memory_content.correlations(position)["content"]
    # Ranks of content 1/3 2/3 1 and 0 1/3 2/3: 2.5 4.5 6 and 1 2.5 4.5; of the turn: 1.5 3.5 5.5 twice.
    expected = np.corrcoef([2.5, 4.5, 6, 1, 2.5, 4.5], [1.5, 3.5, 5.5, 1.5, 3.5, 5.5])[0, 1]
    assert by_kind["within_groups"]["mean"] == pytest.approx(expected)
    assert by_kind["within_turns"] == {"mean": None, "groups": 0, "pairs": 0}
    content = memory_content.memory_table(rollouts(lambda t, text: len(text) - 2 * text.count("dog")), VILLAGE)
    assert memory_content.correlations(content)["content"]["within_turns"] == {"mean": 1.0, "groups": 3, "pairs": 6}


def test_description_without_memories():
    """Rollouts without a memory have nothing to say about them, and no error either."""
    told = memory_content.describe_memories([rollout("cat; x", memory_turn(None, None))], VILLAGE)
    assert (told["memories"], told["content"], told["by_turn"]) == (0, None, {})
    assert told["correlations"]["turn"]["overall"]["mean"] is None
    assert json.loads(json.dumps(told)) == told


# From folders to tables


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def finish(task, seconds: float = 8.0) -> None:
    task.folder.mkdir(parents=True, exist_ok=True)
    task.write_done(seconds)


ANSWERS = ("x; x", "cat; x", "cat; tea")
"""Exact match 0, 0.5 and 1."""


@pytest.fixture
def study(tmp_path, in_repository, monkeypatch):
    """
    A finished study of two arms and two seeds of four steps, made by hand. `grpo` answers 0 0.5 0.5 0.5 and 0.5 0.5 0.5
    0.5, `paper` 0.5 1 1 1 and 0.5 0.5 0.5 1, each in two rollouts of one question; held out it is 0, then 0.5 (and 1 for
    `paper`).
    """
    monkeypatch.setattr(learning_results.Village, "generate", lambda seed, num_people: VILLAGE)
    suite = SUITE | {"regimes": {"plain": {}}, "arms": {name: SUITE["arms"][name] for name in ("grpo", "paper")}}
    plan = plan_of(tmp_path, suite)
    trained = {
        ("grpo", 0): (0, 1, 1, 1),
        ("grpo", 1): (1,) * 4,
        ("paper", 0): (1, 2, 2, 2),
        ("paper", 1): (1, 1, 1, 2),
    }

    def play(score: int, R_M: float | None, **kwargs) -> dict:
        turns = memory_turn(None, "Anna"), memory_turn("Anna pet cat", None, R_M=R_M)
        return rollout(ANSWERS[score], *turns, **kwargs)

    for task in plan.tasks.values():
        finish(task, seconds=10.0)
    for run in plan.runs:
        R_M = None if run.arm == "grpo" else 0.25
        for step, score in enumerate(trained[run.arm, run.seed]):
            rows = [play(score, R_M, step=step), play(score, R_M, step=step)]
            write_lines(run.train.folder / "rollouts" / f"train-{step:06d}-rank0.jsonl", rows)
        for step, task in run.evaluations.items():
            score = 0 if step == 0 else 1 if run.arm == "grpo" else 2
            probe = [{"R_M": None, "P_mem": None, "P_full": None}, {"R_M": 0.5, "P_mem": 0.75, "P_full": 0.25}]
            write_lines(task.folder / "rollouts.jsonl", [play(score, None, sample=0)])
            probed = {"probabilities": {"rollouts": [{"id": "q0", "sample": 0, "turns": probe}]}}
            (task.folder / "probe.json").write_text(json.dumps(probed))
    return plan


def test_results_of_runs(study):
    """A row per step and point, the mean exact match as area, and the probe's probabilities in what is held out."""
    results = learning_results.read_results(study.runs)
    by_run = {(result["arm"], result["seed"]): result for result in results}
    assert {run: result["area"] for run, result in by_run.items()} == {
        ("grpo", 0): 0.375, ("grpo", 1): 0.5, ("paper", 0): 0.875, ("paper", 1): 0.625,
    }  # fmt: skip
    paper = by_run["paper", 0]
    assert [row["exact_match"] for row in paper["training"]] == [0.5, 1, 1, 1]
    assert [row["step"] for row in paper["training"]] == [0, 1, 2, 3]
    first = paper["training"][0]
    assert (first["memory_reward"], first["memory_tokens"], first["groups_without_spread"]) == (0.25, 3, 1.0)
    assert (first["tokens_total"], first["tokens_peak"], first["outcomes"]["answer"]) == (36, 18, 1.0)
    assert by_run["grpo", 0]["training"][0]["memory_reward"] is None
    assert list(paper["held_out"]) == ["0", "2", "4"]
    assert [point["exact_match"] for point in paper["held_out"].values()] == [0.0, 1.0, 1.0]
    end = by_run["grpo", 0]["held_out"]["4"]
    assert (end["exact_match"], end["p_mem"], end["p_full"], end["memory_reward"]) == (0.5, 0.75, 0.25, 0.5)
    assert end["exact_match_by_objectives"] == {"2": 0.5} and end["memories"]["kept"] == 1.0
    assert paper["commands"]["runs/plain/paper/seed_0/train"] == list(study.runs[1].train.command)


def test_results_are_kept_until_a_task_is_made_anew(study):
    """`result.json` is read where it is there, made again after a task was, and missing while one is not finished."""
    run = study.runs[0]
    learning_results.read_results(study.runs)
    path = run.folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"area": 0.125}))
    assert learning_results.read_results([run])[0]["area"] == 0.125
    last = run.evaluations[4]
    (last.folder / "done.json").unlink()
    assert learning_results.read_results([run]) == []
    finish(last)
    assert learning_results.read_results(study.runs, last)[0]["area"] == 0.375


def test_summary_and_tables(study, tmp_path):
    """
    Means over seeds and pairs of seeds. Area: grpo 0.4375, paper 0.75, differences 0.5 and 0.125: 0.3125 ± 12.7062 ·
    0.265165 / √2 = 2.3824; both signs alike: p = 2 / 4. Level 0.5 with means of two steps: grpo after 2 and 1 steps.
    """
    results = learning_results.read_results(study.runs)
    tables = learning_tables.write_results(study.folder, results, study.suite, {"suite": "made up"})
    arms = learning_tables.summarize_results(results, study.suite)["plain"]
    assert arms["grpo"]["values"]["area"]["mean"] == 0.4375 and arms["grpo"]["differences"] == {}
    entry = arms["paper"]["differences"]["area"]
    assert (entry["mean"], entry["n"], entry["p_sign_flip"]) == (0.3125, 2, 0.5)
    assert entry["ci95"] == pytest.approx([0.3125 - 2.3824, 0.3125 + 2.3824], abs=1e-4)
    assert arms["grpo"]["values"]["steps to 0.5"]["mean"] == 1.5 and arms["grpo"]["reached"] == {"0.5": 2}
    assert arms["paper"]["values"]["held out 2/2: exact_match"]["mean"] == 1.0
    assert arms["paper"]["values"]["seconds of a step"]["mean"] == 2.5
    assert (
        "| paper | 2 | 0.750 (-0.838 to 2.338) | +0.312 (-2.070 to +2.695), p 0.5 | 0.000 (0.000 to 0.000) |" in tables
    )
    assert (
        "| paper | last tenth | kept | 1 |  |" in tables and "| paper | first tenth | memory reward | 0.25 |" in tables
    )
    assert tables == (study.folder / "tables.md").read_text()
    lines = (study.folder / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["grpo", "paper", "grpo", "paper"]
    report = json.loads((study.folder / "learning.json").read_text())
    assert report["summary"]["plain"]["paper"]["differences"]["area"]["mean"] == 0.3125
    assert report["suite"]["arms"]["grpo"] == SUITE["arms"]["grpo"] and "content" in report["definitions"]


def test_dry_run(in_repository, monkeypatch, capsys, tmp_path):
    """`--dry_run` prints every command as it can be typed, and how long all will take; it makes no folder."""
    given = ["learning.py", "--suite", "quick", "--dry_run", "--jobs", "2", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", given)
    assert learning.main() == 0
    *commands, last = capsys.readouterr().out.splitlines()
    assert len(commands) == 2 * 2 * (1 + 1 + 1) + 24 * 2 and all(
        line.startswith("OMP_NUM_THREADS=1 python -m") for line in commands
    )
    assert "24 runs in 60 tasks, 60 of them not finished" in last
    assert not (tmp_path / "out").exists()
