"""The benchmark on real questions: what it runs, and what it makes of the evaluations."""

import json
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, load_benchmark
from records import record, turn

from mempo_trl.scripts import collect, data, evaluate, sft, train
from mempo_trl.scripts.arguments import check_launch_arguments


questions = load_benchmark("questions")
Task, make_rows, make_tables = questions.Task, questions.make_rows, questions.make_tables


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def plan_of(folder: Path, *words: str):
    return questions.Plan(questions.make_parser().parse_args(["--output_dir", str(folder), *words]))


def options(task) -> dict[str, list[str]]:
    """Values of a command line by option."""
    table: dict[str, list[str]] = {}
    for word in task.command:
        if word.startswith("--"):
            values = table[word] = []
        elif table:
            values.append(word)
    return table


# What is run


def test_tasks(tmp_path):
    """
    1 model; 3 files of test questions and 1 of training questions; 1 file of scripted rollouts; the cold start; 2
    trainings. Evaluations on 1, 2 and 4 objectives: 3 of the base model, and 3 in each context of the three others: 21.
    """
    plan = plan_of(tmp_path, "--steps", "5", "--questions", "7", "--rollouts", "3")
    assert len(plan.tasks) == 1 + 3 + 1 + 1 + 1 + 2 + 21 and len(plan.evaluations) == 21
    seen = set()
    for task in plan.tasks:
        assert {needed.name for needed in task.needs} <= seen
        seen.add(task.name)
    cold_start, grpo, full = (
        options(task)
        for task in (plan.tasks[[task.name for task in plan.tasks].index("cold_start")], plan.trainings["grpo"],
                     plan.evaluations["mempo", "full", 4])
    )  # fmt: skip
    assert cold_start["--rollouts"] == [str(tmp_path / "rollouts" / "rollouts.jsonl")]
    assert cold_start["--gradient_accumulation_steps"] == ["1"]
    assert grpo["--model_name_or_path"] == cold_start["--output_dir"] and grpo["--max_steps"] == ["5"]
    assert grpo["--dataset_name"] == [str(tmp_path / "questions" / "train_1" / "questions.jsonl")]
    assert grpo["--reward_funcs"] == ["exact_match_reward", "f1_reward"]
    assert full["--model_name_or_path"] == [str(tmp_path / "mempo")] and full["--context"] == ["full"]
    assert full["--dataset_name"] == [str(tmp_path / "questions" / "dev_4" / "questions.jsonl")]
    assert full["--max_questions"] == ["7"]
    assert all("_full_" in task.name for task in plan.tasks[-9:])  # what takes longest comes last


def test_arms_differ_in_their_settings_alone(tmp_path):
    """Cold start, questions, seed and all else are the same; the search of the evaluations is that of the training."""
    plan = plan_of(tmp_path, "--seed", "3")
    grpo, mempo = (options(plan.trainings[arm]) for arm in ("grpo", "mempo"))
    differing = {name for name in mempo if mempo[name] != grpo.get(name)}
    assert differing == {f"--{name}" for name in questions.ARMS["mempo"]} | {"--output_dir"}
    assert grpo["--memory_advantage_weight"] == ["0.0"] and grpo["--seed"] == ["3"]
    recipe = questions.read_recipe("recipes/SmolLM2-135M-Instruct/mempo/config_lora.yaml")
    for evaluation in map(options, plan.evaluations.values()):
        for name in ("retrieval_top_k", "max_passage_tokens", "max_tool_response_length", "system_prompt", "dtype"):
            assert evaluation[f"--{name}"] == [str(recipe[name])]


def test_test_questions_are_those_of_every_seed(tmp_path):
    """Another seed trains on other questions, without those of `dev.jsonl`, and is evaluated on the same ones."""
    by_seed = [{task.name: task for task in plan_of(tmp_path, "--seed", seed).tasks} for seed in ("0", "1")]
    for name in ("questions/dev_4", "evaluations/base_memory_2"):
        assert by_seed[0][name].command == by_seed[1][name].command
    one, other = (options(tasks["questions/train_1"]) for tasks in by_seed)
    assert one["--seed"] != other["--seed"] and one["--exclude"] == ["../shared/data/dev.jsonl"]


def test_commands_are_parsed(tmp_path):
    """Every option is known to its script, and its value is accepted."""
    plan = plan_of(tmp_path, "--set_train", "per_device_train_batch_size=16", "bf16=true", "--set_sft", "max_steps=1")
    assert options(plan.trainings["mempo"])["--per_device_train_batch_size"] == ["16"]
    modules = {"data": data, "collect": collect, "evaluate": evaluate, "sft": sft, "train": train}
    parsers = {name: module.make_parser() for name, module in modules.items()}
    for name in ("questions/dev_2", "rollouts", "cold_start", "grpo", "mempo", "evaluations/mempo_full_4"):
        (task,) = (task for task in plan.tasks if task.name == name)
        assert task.command[:2] == ("-m", "mempo_trl.cli")
        parser, given = parsers[task.command[2]], list(task.command[3:])
        if task.command[2] not in ("sft", "train"):
            parser.parse_args_and_config(given)
            continue
        parser.parse_args_into_dataclasses = lambda args, parser=parser, **kwargs: parser.parse_known_args(args)
        *_, from_config, from_command_line = parser.parse_args_and_config(
            given, return_remaining_strings=True, separate_remaining_strings=True
        )
        check_launch_arguments(from_config + from_command_line)


def test_a_model_of_ones_own(tmp_path):
    """It takes the place of the packaged one everywhere, and nothing is unpacked."""
    plan = plan_of(tmp_path, "--model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct")
    named = [task.name for task in plan.tasks if "Qwen/Qwen2.5-0.5B-Instruct" in task.command]
    assert "model" not in {task.name for task in plan.tasks}
    assert named == [*(f"evaluations/base_memory_{k}" for k in (1, 2, 4)), "rollouts", "cold_start"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps", "0"], "--steps is 0, expected at least 1"),
        (["--set_train", "learning_rat=1"], "`set_train` has 'learning_rat=1'; expected NAME=VALUE"),
        (["--set_evaluate", "dtype"], "`set_evaluate` has 'dtype'; expected NAME=VALUE"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, capsys, words, message):
    """They are refused before anything is run, by name."""
    monkeypatch.setattr(sys, "argv", ["questions.py", "--output_dir", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit):
        questions.main()
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_dry_run(tmp_path, monkeypatch, capsys):
    """It prints every command as it can be typed, with the sum of their times, and makes no folder."""
    words = ["--output_dir", str(tmp_path / "out"), "--num_cpu_threads", "3", "--dry_run"]
    monkeypatch.setattr(sys, "argv", ["questions.py", *words])
    assert questions.main() == 0
    *commands, last = capsys.readouterr().out.splitlines()
    assert len(commands) == 30 and all(line.startswith("OMP_NUM_THREADS=3 python ") for line in commands)
    seconds = sum(int(line.rsplit("# ", 1)[1].removesuffix(" s")) for line in commands)
    assert f"30 of 30 commands are not finished: about {seconds / 3600:.1f} hours" in last
    assert not (tmp_path / "out").exists()


# From folders to tables


def finish(task, name: str, rows: list[dict]) -> None:
    path = task.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_done(50.0)


@pytest.fixture
def finished(tmp_path):
    """
    Two questions of one objective and one of two. `grpo` in memory: wrong, right, half right, with 15, 25 and 30 tokens;
    `mempo`: all right, with 15 tokens each. In full context only `mempo` has played, and only one objective.
    """

    def play(k: int, *answers: tuple[str, int]) -> list[dict]:
        golden = [["cat"], ["tea"]][:k]
        return [
            record(answer, golden, [turn(tokens - 5, 5, "answer")], id=f"q{k}{i}", sample=0)
            for i, (answer, tokens) in enumerate(answers)
        ]

    rollouts = {
        ("grpo", "memory", 1): play(1, ("dog", 15), ("cat", 25)),
        ("grpo", "memory", 2): play(2, ("cat; milk", 30)),
        ("grpo", "full", 1): None,
        ("grpo", "full", 2): None,
        ("mempo", "memory", 1): play(1, ("cat", 15), ("cat", 15)),
        ("mempo", "memory", 2): play(2, ("cat; tea", 15)),
        ("mempo", "full", 1): play(1, ("cat", 20), ("cat", 20)),
        ("mempo", "full", 2): None,
    }
    evaluations = {}
    for key, rows in rollouts.items():
        name = "_".join(map(str, key))
        evaluations[key] = Task(name, tmp_path / name, ())
        if rows is not None:
            finish(evaluations[key], "rollouts.jsonl", rows)
    return evaluations


def test_figures_and_differences(finished):
    """
    Exact match of `grpo`: (0 + 1) / 2 and 1/2. `mempo` minus `grpo`: differences 1, 0 and 1/2, together 0.5; tokens 0,
    -10 and -15, together -25/3. Of the two of one objective either is drawn twice in a quarter of the resamples: both
    are ends of the interval. One difference that is not 0 is as extreme with either sign: p = 1; two with one sign: 1/2.
    """
    rows, differences, trainings = make_rows(
        finished, {"grpo": Task("g", Path("g"), ()), "mempo": Task("m", Path("m"), ())}
    )
    assert [(row["model"], row["context"], row["objectives"]) for row in rows] == [
        ("grpo", "memory", "1"), ("grpo", "memory", "2"),
        ("mempo", "memory", "1"), ("mempo", "memory", "2"), ("mempo", "full", "1"),
    ]  # fmt: skip
    assert [row["exact_match"] for row in rows] == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert rows[0]["ci95"]["exact_match"] == [0.0, 1.0] and rows[0]["ci95"]["tokens_total_mean"] == [15.0, 25.0]
    table = {(row["second"], row["first"], row["objectives"]): row for row in differences}
    assert set(table) == {
        *(("mempo memory", "grpo memory", k) for k in ("1", "2", "all")), ("mempo memory", "mempo full", "1")
    }  # fmt: skip
    one, every = (table["mempo memory", "grpo memory", k] for k in ("1", "all"))
    assert (one["exact_match"]["difference"], one["exact_match"]["ci95"]) == (0.5, [0.0, 1.0])
    assert (one["exact_match"]["p_sign_flip"], every["exact_match"]["p_sign_flip"]) == (1.0, 0.5)
    assert (every["num_questions"], every["exact_match"]["difference"]) == (3, 0.5)
    assert every["tokens_total"]["difference"] == pytest.approx(-25 / 3)
    assert table["mempo memory", "mempo full", "1"]["tokens_peak"]["difference"] == -5.0
    assert trainings == []


def test_training_figures_and_tables(finished, tmp_path):
    """
    Step 0 has exact match 0 and no spread, step 1 1/2 and a spread; a memory reward of 0.25 and a memory of 4 tokens. 50 s for two steps.
    """
    task = Task("grpo", tmp_path / "train_grpo", ())
    unscored = {"R_M": None, "P_mem": None, "P_full": None, "mem_rewards_idx_list": [0]}
    scored = {"R_M": 0.25, "P_mem": 0.5, "P_full": 0.25, "mem_rewards_idx_list": [1, 0, 0, 2, 0]}

    def rollout(step: int, answer: str, reward: float, **kwargs) -> dict:
        turns = [turn(10, 5, **unscored), turn(10, 5, "answer", **{**unscored, **kwargs})]
        return record(answer, [["cat"]], turns, id=f"q{step}", step=step, reward=reward)

    dump = [rollout(0, "dog", 0.0, **scored), rollout(0, "dog", 0.0), rollout(1, "dog", 0.0), rollout(1, "cat", 2.0)]
    finish(task, "rollouts/train-000000-rank0.jsonl", dump)
    rows, differences, trainings = make_rows(finished, {"grpo": task, "mempo": Task("m", tmp_path / "no", ())})
    (row,) = trainings
    assert (row["steps"], row["exact_match"], row["groups_without_spread"]) == (2, 0.25, 0.5)
    assert (row["memory_reward"], row["turns"], row["seconds of a step"]) == (0.25, 2.0, 25.0)
    tables = make_tables(rows, differences, trainings)
    assert "| grpo | memory | 1 | 2 | 0.500 (0.000 to 1.000) |" in tables
    assert "| 20.0 (15.0 to 25.0) | 20.0 (15.0 to 25.0) | 0.000 (0.000 to 0.000) |" in tables
    assert "| mempo memory minus grpo memory | 1 | 2 | +0.500 (+0.000 to +1.000), p 1 |" in tables
    assert "| -5.0 (-10.0 to +0.0), p 1 |" in tables
    assert "| grpo | 2 | 0.250 | 0.250 | 0.500 | 0.250 | 4.000 |" in tables and tables.endswith("| 25.0 |\n")


def test_report_of_what_is_finished(tmp_path, monkeypatch, capsys):
    """`--report_only` runs nothing and writes tables and figures, with the settings and commands they come from."""
    plan = plan_of(tmp_path)
    task = plan.evaluations["base", "memory", 1]
    finish(task, "rollouts.jsonl", [record("cat", [["cat"]], id="q", sample=0)])
    monkeypatch.setattr(sys, "argv", ["questions.py", "--output_dir", str(tmp_path), "--report_only"])
    assert questions.main() == 0
    tables = (tmp_path / "tables.md").read_text()
    assert "| base | memory | 1 | 1 | 1.000 (1.000 to 1.000) |" in tables and tables in capsys.readouterr().out
    report = json.loads((tmp_path / "questions.json").read_text())
    assert report["rows"][0]["exact_match"] == 1.0 and report["settings"]["output_dir"] == str(tmp_path)
    assert report["arms"]["grpo"] == {"memory_advantage_weight": 0.0}
    assert report["seconds"][task.name] == 50.0 and report["seconds"]["cold_start"] is None
    assert report["commands"][task.name].startswith("-m mempo_trl.cli evaluate ")
    assert not (tmp_path / "lock").exists()
