"""Recipes: YAML files of arguments, read so that whatever is wrong with one is said in a line."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from mempo_trl.validation import field_types


class _RecipeLoader(yaml.SafeLoader):
    """A safe loader that takes no key twice; YAML's own keeps the last value without a word."""

    def construct_mapping(self, node, deep=False):
        seen = []  # a key may be of a kind that can't be hashed, which the parent refuses
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} comes twice", problem_mark=key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def read_recipe(path: str) -> dict[str, Any]:
    """
    Read a recipe.

    Args:
        path (`str`):
            Its file.

    Returns:
        `dict`: Values by name of the argument.

    Raises:
        ValueError: If there is no such file, or if it is no YAML mapping of names without repetitions; the message says
            in which line.
    """
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), _RecipeLoader)
    except OSError as error:
        raise ValueError(f"the recipe {path!r} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the recipe {path!r} is no text in UTF-8: {error}.") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        tab = " Indent with spaces, not tabs." if "\\t" in str(error.problem) else ""
        raise ValueError(f"the recipe {path!r} is no valid YAML{line}: {error.problem}.{tab}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"the recipe {path!r} is no valid YAML: {error}.") from None
    if recipe is None:
        raise ValueError(f"the recipe {path!r} is empty.")
    if not isinstance(recipe, dict) or not all(isinstance(name, str) for name in recipe):
        raise ValueError(f"the recipe {path!r} must hold lines of the form `name: value`.")
    return recipe


def _check_types(recipe: dict[str, Any], path: str, dataclass_types: Iterable[type]) -> None:
    """What argparse does not look at: it converts texts, and takes every other value as it is."""
    all_types = {name: types for kind in dataclass_types for name, types in field_types(kind).items()}
    defaults = {name: field.default for kind in dataclass_types for name, field in kind.__dataclass_fields__.items()}
    for name, value in recipe.items():
        if name not in defaults:
            continue  # for `accelerate launch`, or unknown
        types = all_types[name]
        expected = None
        if value is None:
            expected = None if type(None) in types or defaults[name] is None else "a value"
        elif types <= {str, type(None)} and not isinstance(value, str):
            expected = "a text; put it in quotes"
        elif types <= {list, type(None)} and not isinstance(value, list):
            expected = f"a list; write [{value}]"
        elif types <= {int, float, type(None)} and (
            isinstance(value, bool) or not isinstance(value, int | float | str)
        ):
            expected = "a number"
        elif types <= {int, type(None)} and isinstance(value, float):
            expected = "a whole number"
        elif types <= {bool, type(None)} and not isinstance(value, bool | str):
            expected = "true or false"
        if expected is not None:
            raise ValueError(f"the recipe {path!r} has `{name}: {value}`, which must be {expected}.")


class RecipeParser(TrlParser):
    """[`~trl.TrlParser`] whose every complaint about a recipe, an argument or a value is one line."""

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs) -> tuple:
        args = list(sys.argv[1:] if args is None else args)
        try:
            for at, argument in enumerate(args):
                if argument.startswith("--config="):
                    args[at : at + 1] = argument.split("=", 1)
            if "--config" in args:
                path = next(iter(args[args.index("--config") + 1 :]), None)
                if path is None:
                    raise ValueError("--config needs the path of a recipe.")
                _check_types(read_recipe(path), path, self.dataclass_types)
            return super().parse_args_and_config(args, **kwargs)
        except ValueError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage, which has hundreds of arguments here."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")
