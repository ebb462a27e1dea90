"""The learning benchmark: what a suite says, and what is planned from it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from learning_suites import SUITE, learning, plan_of

from mempo_trl.data import village as village_module
from mempo_trl.scripts import evaluate, sft, train
from mempo_trl.scripts.arguments import check_launch_arguments


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
    assert set(full.regimes) == {"dense", "noisy", "sparse", "long"} and len(full.seeds) == 5
    settings = [full.arguments("train", "dense", arm) for arm in full.arms]
    weighted = {(s["memory_advantage_weight"], s["memory_token_filter"]) for s in settings}
    filters = ("independent", "joint", "history", "none")
    assert weighted >= {(weight, token_filter) for weight in (0.3, 1.0) for token_filter in filters}
    forms = {(s["memory_baseline"], s["memory_answer"]) for s in settings if s["memory_token_filter"] == "none"}
    assert forms == {(baseline, answer) for baseline in ("history", "previous") for answer in ("joint", "objectives")}
    assert {s.get("context") for s in settings} == {None, "full"}
    assert {arm for regime in full.regimes.values() for arm in regime["arms"]} == set(full.arms)  # none is idle
    assert settings[0]["memory_advantage_weight"] == 0.0 and full.reference == "grpo"


def test_a_part_of_a_suite_is_the_same_runs(in_repository):
    """Task by task the commands of the whole, so that the whole goes on from what its part has done."""
    quick, full = (
        learning.Plan(learning.Suite.read(learning.find_suite(name)), Path("out/learning/full"))
        for name in ("quick", "full")
    )
    assert quick.tasks.items() <= full.tasks.items()
    runs = {(run.regime, run.arm, run.seed) for run in quick.runs}
    arms = ("grpo", "paper", "previous", "previous_weak")
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
