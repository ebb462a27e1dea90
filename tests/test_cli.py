"""The `mempo` command: what it lists, what it passes on, and what it refuses before anything is started."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from user_folder import make_user_folder

from mempo_trl import cli
from mempo_trl.scripts import collect, evaluate, sft, train


CPU_CONFIG = str(REPOSITORY / "recipes" / "accelerate_configs" / "cpu.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_user_folder(tmp_path_factory.mktemp("cli"))


def test_console_command():
    """The installed `mempo` is this command line."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="mempo")
    assert entry.load() is cli.main


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_usage(argv, capsys):
    """Without a command, and with `--help`, the commands are listed."""
    assert cli.main(argv) == 0
    usage = capsys.readouterr().out
    for name in cli.LAUNCHED | cli.PLAIN:
        assert f"  {name} " in usage


def test_unknown_command(capsys):
    """A command that does not exist is named, with those that do, and the exit status is 2."""
    assert cli.main(["trian", "--config", "x"]) == 2
    error = capsys.readouterr().err
    assert "'trian'" in error and ", ".join(cli.LAUNCHED | cli.PLAIN) in error


@pytest.mark.parametrize(
    "name, options",
    [
        ("train", ["--memory_prob_threshold", "--corpus_path", "--lora_r", "--reward_funcs"]),
        ("sft", ["--rollouts", "--max_length", "--lora_r"]),
        ("evaluate", ["--max_questions", "--index_path", "--model_name_or_path"]),
        ("collect", ["--output_file", "--retrieval_top_k", "--teacher_url"]),
        ("compare", ["--output_dir"]),
        ("data", ["--objectives", "--question_column"]),
        ("index", ["--kind", "--encoder"]),
        ("serve", ["--index_path", "--allow_remote"]),
        ("view", ["--output_file", "--max_rollouts"]),
    ],
)
def test_help_of_a_command(name, options, capsys):
    """`mempo COMMAND --help` lists the arguments of the command and ends well."""
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: mempo {name}" in text
    assert all(option in text for option in options)


@pytest.fixture
def launched(monkeypatch) -> list:
    """What would be launched, instead of launching it."""
    launched = []
    monkeypatch.setattr(cli, "launch_command", launched.append)
    return launched


def test_arguments_of_the_launcher_are_told_apart(folder, launched):
    """
    What is for `accelerate launch` goes there, from the command line and from the recipe; the rest goes to the script in
    its order, even where a value looks like one of the launcher's.
    """
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"main_process_port": 29511}
    (folder / "launch.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    given = ["--max_turns", "8", "--config", str(folder / "launch.yaml"), "--accelerate_config", CPU_CONFIG]
    given += ["--output_dir", "8", "--num_processes", "8", "--reward_funcs", "f1_reward", "format_reward"]
    assert cli.main(["train", *given]) == 0
    (launch,) = launched
    assert (launch.config_file, launch.num_processes, launch.main_process_port) == (CPU_CONFIG, 8, 29511)
    assert launch.module and launch.training_script == "mempo_trl.scripts.train"
    assert launch.training_script_args == [
        *("--max_turns", "8", "--config", str(folder / "launch.yaml"), "--output_dir", "8"),
        *("--reward_funcs", "f1_reward", "format_reward"),
    ]


def test_a_batch_for_all_processes_together(folder, launched):
    """A group that is spread over the processes is not refused by the launcher, which is only one of them."""
    given = ["--config", str(folder / "recipe.yaml"), "--num_processes", "8", "--num_generations", "16"]
    assert cli.main(["train", *given]) == 0
    assert launched[0].num_processes == 8


def refused(argv: list[str], capsys) -> str:
    """The one line with which a command ends that is not started."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"mempo {argv[0]}: error: ") and error.count("\n") == 1
    return error


def test_names_of_accelerate_configs(folder, launched, capsys):
    """`--accelerate_config` takes the names of the `trl` command, and refuses others by name."""
    given = ["train", "--config", str(folder / "recipe.yaml"), "--accelerate_config"]
    assert cli.main([*given, "zero2"]) == 0
    assert launched[0].config_file.endswith("zero2.yaml") and Path(launched[0].config_file).is_file()
    assert "Accelerate config nonsense" in refused([*given, "nonsense"], capsys)


@pytest.mark.parametrize("name", ["train", "sft", "evaluate", "collect"])
def test_unknown_argument_is_named(name, folder, launched, capsys):
    """An argument that nothing knows is an error with its name, and nothing is started."""
    required = {
        "train": ["--config", str(folder / "recipe.yaml")],
        "sft": ["--rollouts", "x"],
        "evaluate": ["--dataset_name", "x", "--output_dir", "x", "--model_name_or_path", "x"],
        "collect": ["--dataset_name", "x", "--output_file", "x"],
    }
    for unknown in (["--max_turnz", "3"], ["--max_turnz=3"]):
        assert "--max_turnz" in refused([name, *required[name], *unknown], capsys)
    assert not launched


def test_recipe_without_its_option(folder, launched, capsys):
    """A recipe that is given without `--config` is an error which says how it is given."""
    error = refused(["train", "recipe.yaml", "--dataset_name", "questions.jsonl"], capsys)
    assert "'recipe.yaml' belongs to no argument. A recipe is given as `--config FILE.yaml`" in error
    assert not launched


@pytest.mark.parametrize("name, missing", [("train", "dataset_name"), ("sft", "rollouts"), ("evaluate", "output_dir")])
def test_missing_argument_is_named(name, missing, launched, capsys):
    """A required argument that is missing is named, and nothing is started."""
    with pytest.raises(SystemExit) as ended:
        cli.main([name])
    assert ended.value.code == 2
    assert f"--{missing}" in capsys.readouterr().err
    assert not launched


WRONG_RECIPES = [
    ("max_turns: 3\nmax_turns: 4\n", "in line 2: the key 'max_turns' comes twice"),
    ("env: {A: b, A: c}\n", "in line 1: the key 'A' comes twice"),
    ("", "is empty"),
    ("# nothing yet\n", "is empty"),
    ("max_turns: 3\n\tmax_steps: 1\n", "in line 2: found character '\\t' that cannot start any token. Indent with"),
    ("max_turns: [3\n", "is no valid YAML"),
    ("- max_turns\n", "lines of the form `name: value`"),
    ("3: 4\n", "lines of the form `name: value`"),
    ("just a text", "lines of the form `name: value`"),
    ("max_turns: !!python/object:os.system x\n", "is no valid YAML"),
    ("max_turnz: 3\n", "--max_turnz"),
    ("max_turns: true\n", "`max_turns: True`, which must be a number"),
    ("max_turns: 2.5\n", "`max_turns: 2.5`, which must be a whole number"),
    ("max_turns: [3]\n", "`max_turns: [3]`, which must be a number"),
    ("max_turns: three\n", "invalid int value: 'three'"),
    ("max_turns:\n", "`max_turns: None`, which must be a value"),
    ("log_rollouts: 2\n", "`log_rollouts: 2`, which must be true or false"),
    ("log_rollouts: maybe\n", "argument --log_rollouts"),
    ("system_prompt: 3\n", "`system_prompt: 3`, which must be a text; put it in quotes"),
    ("dataset_name: {a: b}\n", "which must be a text"),
    ("reward_funcs: f1_reward\n", "`reward_funcs: f1_reward`, which must be a list; write [f1_reward]"),
    ("retrieval_top_k: true\n", "`retrieval_top_k: True`, which must be a number"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_RECIPES, ids=lambda value: repr(value)[:40])
def test_wrong_recipes(text, message, tmp_path, launched, capsys):
    """Whatever is wrong with a recipe is said in one line with its path, and nothing is started."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    required = ["--output_dir", "o"] + ["--dataset_name", "q"] * ("dataset_name" not in text)
    assert message in refused(["train", "--config", str(path), *required], capsys)
    assert not launched


@pytest.mark.parametrize("name", sorted(cli.LAUNCHED | cli.PLAIN))
def test_recipes_that_are_no_files(name, tmp_path, launched, capsys):
    """In every command: no file, a folder, a binary file, a missing value."""
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "'no-recipe.yaml' can't be read: No such file" in refused([name, "--config", "no-recipe.yaml"], capsys)
    assert "can't be read: Is a directory" in refused([name, f"--config={tmp_path}"], capsys)
    assert "is no text in UTF-8" in refused([name, "--config", str(path)], capsys)
    assert "--config needs the path" in refused([name, "--config"], capsys)
    assert not launched


def test_a_failed_launch_ends_with_its_status(folder, monkeypatch):
    """The process has said what went wrong; a traceback of the launcher would only hide it."""

    def fail(launched):
        raise subprocess.CalledProcessError(7, "python")

    monkeypatch.setattr(cli, "launch_command", fail)
    assert cli.main(["train", "--config", str(folder / "recipe.yaml")]) == 7


@pytest.mark.slow
def test_a_wrong_configuration_is_one_line(folder):
    """What only the launched processes can check, the values of the configuration, is said in one line as well."""
    command = [sys.executable, "-m", "mempo_trl.cli", "train", "--config", "recipe.yaml", "--max_turns", "0"]
    command += ["--accelerate_config", CPU_CONFIG]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: `max_turns` is 0; it must be at least 1." in done.stderr
    assert "Traceback" not in done.stderr


def test_parsers_know_their_defaults():
    """The four parsers build their arguments from the required ones alone."""
    required = {
        collect: ["--dataset_name", "q", "--output_file", "o"],
        evaluate: ["--dataset_name", "q", "--output_dir", "o"],
        sft: ["--rollouts", "a", "b", "--use_cpu", "--bf16", "false"],
        train: ["--dataset_name", "q", "--use_cpu", "--bf16", "false"],
    }
    for script, given in required.items():
        first, *_ = script.make_parser().parse_args_and_config(given)
        assert vars(first)["rollouts" if script is sft else "dataset_name"] in ("q", ["a", "b"])
