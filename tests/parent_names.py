"""Finds, in the source of the package and of the tests, what they use of libraries beyond their public interface."""

import ast
import functools
import inspect
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from conftest import REPOSITORY


LIBRARIES = ("trl", "transformers", "peft", "accelerate", "datasets")
SOURCES = [*sorted((REPOSITORY / "mempo_trl").rglob("*.py")), *sorted((REPOSITORY / "tests").glob("*.py"))]
Places = dict[str, list[str]]


@functools.cache
def _trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES]


@functools.cache
def deep_imports() -> Places:
    """What the package imports from a module below the top of a library, by its dotted name: nobody promises it."""
    found = defaultdict(list)
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                library, _, rest = node.module.partition(".")
                if rest and library in LIBRARIES and path.is_relative_to(REPOSITORY / "mempo_trl"):
                    for alias in node.names:
                        found[f"{node.module}.{alias.name}"].append(_place(path, node))
    return found


@functools.cache
def private_names() -> Places:
    """Names with a leading underscore that the package asks of others: of what libraries make, and of their classes."""
    found, own = defaultdict(list), set()
    trees = [(path, tree) for path, tree in _trees() if path.is_relative_to(REPOSITORY / "mempo_trl")]
    for _, tree in trees:
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        own |= {node.attr for node in ast.walk(tree) if _is_stored(node)}
    for path, tree in trees:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not re.match("_[^_]", node.attr):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in imported or (owner not in ("self", "cls", "os") and node.attr not in own):
                found[node.attr].append(_place(path, node))
    return found


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(REPOSITORY)}:{node.lineno}"


def trainer_classes() -> list[tuple[Path, ast.ClassDef]]:
    """The classes that are made of TRL's trainer, directly or by another one of them, and mixins for them."""
    classes = {
        node.name: (path, node) for path, tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    bases = {
        name: {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases}
        for name, (_, node) in classes.items()
    }
    names = {"GRPOTrainer"}
    while True:
        more = {name for name, of in bases.items() if of & names} - names
        if not more:
            break
        names |= more
    mixins = {base for name in names for base in bases.get(name, ()) if base in classes}
    return [classes[name] for name in sorted(names | mixins) if name in classes]


@functools.cache
def attributes_of(parent: type) -> set[str]:
    """Attributes that TRL's trainer and its parents set on themselves, read from their source."""
    found = set()
    for kind in parent.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
            if _is_stored(node) and _of_self(node):
                found.add(node.attr)
    return found


def parent_names(parent: type) -> tuple[Places, Places]:
    """
    What our trainers and those of the tests use of TRL's.

    Args:
        parent (`type`):
            TRL's trainer.

    Returns:
        `tuple[Places, Places]`: Its methods and class attributes that are overridden or called, and attributes that it
        sets and ours read or set as well, each with the places.
    """
    methods, attributes = defaultdict(list), defaultdict(list)
    set_by_parent, known = attributes_of(parent), {name for name in dir(parent) if not name.startswith("__")}
    for path, node in trainer_classes():
        for part in node.body:
            names = [target.id for target in getattr(part, "targets", ())] + [getattr(part, "name", None)]
            for name in known.intersection(names):
                methods[name].append(_place(path, part))
        for part in ast.walk(node):
            if not isinstance(part, ast.Attribute) or not (_of_self(part) or _of_super(part)):
                continue
            if part.attr in known:
                methods[part.attr].append(_place(path, part))
            elif part.attr in set_by_parent:
                attributes[part.attr].append(_place(path, part))
    return methods, attributes


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _of_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
