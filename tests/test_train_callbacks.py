"""The names of callbacks and reward functions in a recipe of `mempo train`, and what they become."""

import sys

import pytest
from user_folder import make_user_folder, read_lines

from mempo_trl.scripts import arguments, train


CALLBACKS = """
from mempo_trl import MemoryRewardCallback

class Ranked(MemoryRewardCallback):
    def on_rollouts_end(self, args, state, control, *, rollouts, **kwargs):
        for number, rollout in enumerate(rollouts):
            for turn in rollout.turns:
                turn.memory_reward = 7.0 + number
"""


@pytest.fixture
def folder(tmp_path, model_folder, monkeypatch):
    """A user's folder as the working directory."""
    make_user_folder(
        tmp_path,
        model_name_or_path=model_folder,
        callbacks=["user_callbacks.Ranked", "transformers.ProgressCallback"],
    )
    (tmp_path / "user_callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    (tmp_path / "user_needs.py").write_text("import not_there", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("user_"):
            del sys.modules[name]


def test_callbacks_of_a_recipe(folder, monkeypatch):
    """A memory reward that the recipe names replaces the default one; any other callback is added."""
    trainers = []
    monkeypatch.setattr(train.MemPOTrainer, "end", lambda trainer: trainers.append(trainer))  # the last that is done
    monkeypatch.setattr(sys, "argv", ["train", "--config", "recipe.yaml", "--output_dir", "out"])
    train.main(*arguments.parse_launched(train.make_parser()))
    names = [type(callback).__name__ for callback in trainers[0].callback_handler.callbacks]
    assert {"Ranked", "ProgressCallback"} < set(names) and "MemoryRewardCallback" not in names
    (rollouts,) = (folder / "out" / "rollouts").iterdir()
    assert [{turn["R_M"] for turn in record["turns"]} for record in read_lines(rollouts)] == [{7.0}, {8.0}]


@pytest.mark.parametrize(
    ("load", "name", "error", "message"),
    [
        (train.load_callback, "Mine", ValueError, "no callback 'Mine'.*'my_module.MyCallback'"),
        (
            train.load_callback,
            "user_rewards.Mine",
            ValueError,
            "'user_rewards' has no callback 'Mine'. Give .*subclass",
        ),
        (train.load_callback, "no.module.Mine", ModuleNotFoundError, "'no.module' .* 'no.module.Mine'.*install it"),
        (train.load_callback, "user_rewards.first_id", ValueError, "'user_rewards.first_id' is <function.*subclass"),
        (train.load_callback, "collections.Counter", ValueError, "'collections.Counter' is <class.*subclass"),
        (train.load_callback, "user_needs.Mine", ModuleNotFoundError, "^No module named 'not_there'$"),
        (train.load_reward_func, "no_module.f", ModuleNotFoundError, "'no_module' .* 'no_module.f'.*install it"),
        (train.load_reward_func, ".first_id", ValueError, "no reward function '.first_id'.*dotted path"),
    ],
)
def test_wrong_names(load, name, error, message, folder):
    """A name that gives nothing of its kind is an error with the name and the remedy, as is a module's own error."""
    with pytest.raises(error, match=message):
        load(name)
