"""A user's folder for the commands: questions, a corpus, a reward function and a recipe for one step on a CPU."""

import json
from pathlib import Path

import yaml


NAMES = ("Anna", "Ben", "Carl")
RECIPE = {
    "dtype": "float32",
    "use_peft": True,
    "lora_r": 2,
    "lora_target_modules": ["q_proj", "v_proj"],
    "dataset_name": "questions.jsonl",
    "corpus_path": "corpus.jsonl",
    "reward_funcs": ["user_rewards.first_id", "format_reward"],
    "max_steps": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": "1e-2",
    "max_completion_length": 8,
    "max_turns": 2,
    "system_prompt": "Search.",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
# The turns of a random model all have the same outcome reward, and nothing would be trained.
REWARDS = "def first_id(completion_ids, **kwargs):\n    return [float(ids[0]) for ids in completion_ids]\n"


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_lines(path: Path) -> list[dict]:
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_user_folder(folder: Path, **settings) -> Path:
    """Write the files of a user; `settings` change `recipe.yaml`."""
    questions = [
        {"question": f"What is the pet of {name}?", "golden_answers": ["cat"], "supporting_titles": [name]}
        for name in NAMES
    ]
    corpus = [{"id": name, "title": name, "text": f"{name} was born in Rome. The pet is a cat."} for name in NAMES]
    write_lines(folder / "questions.jsonl", questions)
    write_lines(folder / "corpus.jsonl", corpus)
    (folder / "user_rewards.py").write_text(REWARDS, encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | settings), encoding="utf-8")
    return folder
