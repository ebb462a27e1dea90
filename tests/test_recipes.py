"""Every recipe goes through the parser of its script, and every command in the documents names what there is."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import REPOSITORY
from transformers import TrainingArguments
from trl import TrlParser
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from mempo_trl.cli import LAUNCHED, PLAIN
from mempo_trl.data import village
from mempo_trl.scripts import arguments, collect, compare, data, evaluate, index, serve, sft, train, view


SCRIPTS = {
    "train": train,
    "sft": sft,
    "collect": collect,
    "compare": compare,
    "data": data,
    "evaluate": evaluate,
    "index": index,
    "serve": serve,
    "view": view,
}
ALL = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
ACCELERATE = [path for path in ALL if path.parent.name == "accelerate_configs"]
RECIPES = [path for path in ALL if path not in ACCELERATE]
TRAINING = [path for path in RECIPES if path.parent.name in ("mempo", "sft")]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
OWN_FOLDERS = ("recipes/", "docs/", "tests/", "mempo_trl/", "benchmarks/")


def parser_of(script: str) -> TrlParser:
    """The parser of a script, and that of the village's generator."""
    return village.make_parser() if script == "village" else SCRIPTS[script].make_parser()


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def script_of(path: Path) -> str:
    """The script that a recipe is for: its folder says so, or its name."""
    return {"mempo": "train", "sft": "sft"}.get(path.parent.name, path.stem)


def header_of(path: Path) -> str:
    """The comment at the top of a recipe, without its marks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:count])


@pytest.fixture
def parse(monkeypatch):
    """
    Parse a recipe with the real parser of its script, as one of its processes would. `--use_cpu` lets recipes for GPUs
    with `bf16` through where there is none. What a recipe leaves to the command line is given here.
    """

    def parse(path: Path, *overrides: str, processes: int = 1):
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
        parser = parser_of(script_of(path))
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        missing = [action for action in parser._actions if action.required and action.dest not in recipe]
        left_open = [word for action in missing for word in (action.option_strings[0], "given")]
        given = ["--config", str(path), *left_open, *overrides]
        if script_of(path) not in LAUNCHED:
            return parser.parse_args_and_config(given)
        monkeypatch.setattr("sys.argv", ["script", *given, "--use_cpu"])
        return arguments.parse_launched(parser)

    return parse


def processes_of(path: Path) -> int:
    """Number of processes in the launch command of a recipe's header."""
    config = re.search(r"--accelerate_config (\S+)", header_of(path))
    return load_config_from_file(str(REPOSITORY / config[1])).num_processes if config else 1


def test_there_are_recipes():
    """The tests below see the recipes of the village, of a real small model and of the paper's model."""
    assert {path.relative_to(REPOSITORY / "recipes").parts[0] for path in TRAINING} >= {
        "SmolLM2-135M-Instruct",
        "Qwen2.5-7B-Instruct",
    }


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipe_is_parsed(path, parse):
    """The real parser takes every key and value, each key is there once, and the values arrive."""
    keys = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) == len(set(keys))
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(recipe) == set(keys)
    parsed = {}
    for part in parse(path, processes=processes_of(path)):
        parsed |= vars(part)
    # What the script does not know is for `accelerate launch`, which a recipe may hold as well.
    launch = {action.dest for action in launch_command_parser()._actions} if script_of(path) in LAUNCHED else set()
    assert set(recipe) <= set(parsed) | launch
    for name in ("output_dir", "max_turns", "memory_token_filter", "max_tool_response_length", "lora_r", "use_vllm"):
        if name in recipe:
            assert parsed[name] == recipe[name]


@pytest.mark.parametrize("path", TRAINING, ids=name_of)
def test_batch_arithmetic_of_the_header(path, parse):
    """The numbers in the header are those of the run: processes, sequences, micro-batches, rollouts and questions."""
    header = re.sub(r"\s+", " ", header_of(path))
    processes = processes_of(path)
    _, args, *_ = parse(path, processes=processes)
    per_step = processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    if script_of(path) == "sft":
        assert [int(count) for count in re.findall(r"(\d+) sequences per step", header)] == [per_step]
        return
    assert [int(count) for count in re.findall(r"= (\d+) rollouts per step", header)] == [per_step]
    questions, generations = re.search(r"(\d+) questions? x (\d+) rollouts", header).groups()
    assert int(generations) == args.num_generations
    assert int(questions) * int(generations) == per_step
    factors = re.search(r"(\d+) process(?:es)? x (\d+) (?:sequences?|rollouts?) x (\d+) micro-batch", header)
    if factors is not None:
        expected = (processes, args.per_device_train_batch_size, args.gradient_accumulation_steps)
        assert tuple(map(int, factors.groups())) == expected
    micro_batches = re.search(r"in (\d+) micro-batches", header)
    if micro_batches is not None:
        assert int(micro_batches[1]) == args.gradient_accumulation_steps


@pytest.mark.parametrize("path", TRAINING, ids=name_of)
def test_header_says_what_a_reader_needs(path):
    """Each recipe starts with its hardware, launch command, batch arithmetic and what to expect."""
    for name in ("Hardware:", "Launch:", "Batch:", "Expected:"):
        assert name in header_of(path)
    (config,) = set(re.findall(r"--config (\S+)", header_of(path)))
    assert config == name_of(path)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_unknown_key_is_named(path, parse, tmp_path, capsys):
    """A key that neither the script nor `accelerate launch` knows fails with its name, whatever recipe it is in."""
    changed = tmp_path / path.parent.name / path.name
    changed.parent.mkdir()
    changed.write_text(path.read_text(encoding="utf-8") + "\nmax_turnz: 3\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        parse(changed, processes=processes_of(path))
    error = capsys.readouterr().err
    assert "--max_turnz" in error and error.count("\n") == 1


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_command_line_wins(path, parse):
    """A value on the command line replaces that of the recipe; the other values stay."""
    plain = parse(path, processes=processes_of(path))
    overrides = ["--output_dir", "elsewhere"]
    if script_of(path) in LAUNCHED:
        overrides += ["--learning_rate", "0.125", "--lora_r", "3"]
    changed = parse(path, *overrides, processes=processes_of(path))
    differing = {
        name: value
        for before, after in zip(plain, changed, strict=True)
        for name, value in vars(after).items()
        if not name.startswith("_") and name != "logging_dir" and vars(before)[name] != value
    }
    # A run's distributed state and the like are objects of their own.
    differing = {name: value for name, value in differing.items() if isinstance(value, (str, int, float, list))}
    expected = {"output_dir": "elsewhere"}
    if script_of(path) in LAUNCHED:
        expected |= {"learning_rate": 0.125, "lora_r": 3}
    assert differing == expected


@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_accelerate_config_is_loaded(path):
    """accelerate's own loader takes the file, and `--accelerate_config` finds it."""
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert resolve_accelerate_config_argument(["--accelerate_config", str(path)]) == ["--config_file", str(path)]


def commands_of(text: str) -> list[str]:
    """The commands in the code blocks of a document, continued lines joined, comments left out."""
    commands = []
    for block in re.findall(r"^```(?:bash|console|sh|shell)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        commands += [line.removeprefix("$ ").strip() for line in block.replace("\\\n", " ").splitlines()]
    return [command for command in commands if command and not command.startswith("#")]


def commands_of_headers() -> list[tuple[str, str]]:
    """The commands in the headers of the recipes and in the docstrings of the scripts beside them."""
    found = []
    for path in (REPOSITORY / "recipes").rglob("*.*"):
        if path.suffix == ".yaml" and path not in ACCELERATE:
            text = header_of(path)
        elif path.suffix == ".py":
            text = path.read_text(encoding="utf-8").split('"""')[1]
        else:
            continue
        text = text.replace("\\\n", " ")
        found += [
            (name_of(path), command) for command in re.findall(r"(?:^|: +|^ +)((?:mempo|python) .*)", text, re.M)
        ]
    return found


COMMANDS = [(name_of(path), command) for path in DOCUMENTS for command in commands_of(path.read_text("utf-8"))]
COMMANDS += commands_of_headers()


def test_commands_are_found():
    """The documents hold commands of each kind, so that the next test looks at some."""
    programs = {command.split()[0] for _, command in COMMANDS}
    assert {"make", "mempo", "python"} <= programs
    assert {"README.md", "docs/smollm2.md"} <= {document for document, _ in COMMANDS}
    text = (
        "```console\n$ mempo train \\\n    --config a.yaml  # why\n# no command\n\nmake test\n```\n```python\nx\n```"
    )
    assert commands_of(text) == ["mempo train      --config a.yaml  # why", "make test"]


def check_own_files(words: list[str]) -> None:
    for word in words:
        value = word.split("=")[-1]
        if value.startswith(OWN_FOLDERS):
            assert (REPOSITORY / value).exists(), f"there is no {value}"


@pytest.mark.parametrize("document, command", COMMANDS, ids=[f"{d}: {c[:60]}" for d, c in COMMANDS])
def test_command_names_what_there_is(document, command, monkeypatch):
    """
    A command names subcommands, flags, make targets and files of the repository that exist. Other files are the user's
    or outputs.
    """
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command.removesuffix("&"), comments=True)
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):  # of the environment
        words.pop(0)
    check_own_files(words)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "python" and words[1].endswith(".py"):
        text = (REPOSITORY / words[1]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words[2:] if word.startswith("--"))
    elif words[0] == "mempo" or words[:3] == ["python", "-m", "mempo_trl.data.village"]:
        name, given = (words[1], words[2:]) if words[0] == "mempo" else ("village", words[3:])
        assert name in {**LAUNCHED, **PLAIN, "village": ""}
        check_mempo_command(name, given)
    elif words[:2] == ["accelerate", "launch"]:
        module = words.index("-m") + 1
        check_mempo_command(words[module].removeprefix("mempo_trl.scripts."), words[module + 1 :])
        arguments.check_launch_arguments(words[2 : module - 1])
    else:
        # `vllm serve` is another project's; its flags are not checked here.
        assert words[0] in ("pip", "git", "cd", "python", "export", "vllm"), f"{words[0]} is not checked"


def check_mempo_command(name: str, given: list[str]) -> None:
    """All flags are known by their whole names, and what is required is there."""
    parser = parser_of(name)
    known = {"--config", "--accelerate_config", *parser._option_string_actions}
    known |= set(launch_command_parser()._option_string_actions) if name in LAUNCHED else set()
    assert {word.split("=")[0] for word in given if word.startswith("--")} <= known
    parser.parse_args_into_dataclasses = lambda args, **kwargs: parser.parse_known_args(args)
    *_, from_config, from_command_line = parser.parse_args_and_config(
        given, return_remaining_strings=True, separate_remaining_strings=True
    )
    if name in LAUNCHED:
        arguments.check_launch_arguments(from_config + from_command_line)
    else:
        assert not from_config and not from_command_line


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_and_names_in_documents(path):
    """Relative links lead to files, and so do the paths of recipes and modules in the text."""
    text = path.read_text(encoding="utf-8")
    targets = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert all((path.parent / target).exists() for target in targets), targets
    names = re.findall(r"`((?:recipes|docs|tests|mempo_trl|benchmarks)/[\w./-]*)`", text)
    assert all((REPOSITORY / name).exists() for name in names), names


def test_names_of_accelerate_configs_in_the_readme():
    """The names that the README gives for `--accelerate_config` are names of the `trl` command."""
    (sentence,) = re.findall(
        r"`--accelerate_config` takes .*?\((.*?)\)", (REPOSITORY / "README.md").read_text("utf-8")
    )
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) >= 2
    for name in names:
        option, path = resolve_accelerate_config_argument(["--accelerate_config", name])
        assert option == "--config_file" and Path(path).is_file()
