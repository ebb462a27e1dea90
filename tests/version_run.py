"""
What `make test_latest` and `make test_minimum` do: requirements derived from `pyproject.toml`, and a run of the tests in
another environment with what broke, by library and contract.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from pip._vendor import tomli  # `tomllib` of Python 3.11, for 3.10 as well


REPOSITORY = Path(__file__).parent.parent
EXTRAS = ("dense", "serve")
LIBRARIES = ("trl", "transformers", "peft", "datasets", "accelerate", "torch")


def requirements(which: str) -> list[str]:
    """
    The package's requirements with those of its extras, but for torch, which the Makefile installs.

    Args:
        which (`str`):
            `"latest"`: without any bound. `"minimum"`: each at its lower bound, so that the bounds are tested.
    """
    project = tomli.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = []
    for line in [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]:
        name, bound = re.fullmatch(r"([\w-]+(?:\[\w+\])?)>=([\w.]+)(?:,<[\w.]+)?", line).groups()
        if name != "torch":
            lines.append(name if which == "latest" else f"{name}=={bound}")
    return lines + [line for line in extras["dev"] if not line.startswith("mempo_trl")]


def group_of(name: str, text: str) -> str:
    """The library that a failure points at: the one that a contract names, else the deepest one in its traceback."""
    if "test_trl_contract" in name:
        named = re.search(r"(?:E\s+AssertionError: )?\b(trl|TRL|transformers|peft|accelerate|datasets) \d", text)
        return f"contract: {named[1].lower() if named else 'see the message'}"
    frames = re.findall(r"site-packages/(\w+)/\S+:\d+: ", text)
    return f"raised in {frames[-1]}" if frames else "assertions of ours"


def report(pytest_arguments: list[str]) -> int:
    """Run the tests that need neither a GPU nor a server, and print what broke."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        marks = "not slow and not gpu and not network and not vllm"
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "--junitxml", str(results), *pytest_arguments]
        status = subprocess.run(command, cwd=REPOSITORY).returncode
        groups = defaultdict(list)
        for case in ElementTree.parse(results).iter("testcase") if results.is_file() else ():
            for fault in [*case.findall("failure"), *case.findall("error")]:
                name = f"{case.get('classname')}::{case.get('name')}"
                first = (fault.get("message") or "").strip().split("\n")[0]
                groups[group_of(name, fault.text or "")].append(f"{name}: {first[:160]}")
    lines = ["", "versions: " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES)]
    for group, faults in sorted(groups.items(), key=lambda item: (not item[0].startswith("contract"), -len(item[1]))):
        lines += [f"\n{group} ({len(faults)})", *(f"  {fault}" for fault in faults[:20])]
        lines += [f"  ... and {len(faults) - 20} more"] * (len(faults) > 20)
    lines.append("" if groups else "nothing broke" if status == 0 else f"pytest ended with status {status}")
    sys.stdout.write("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    if sys.argv[1] == "report":
        sys.exit(report(sys.argv[2:]))
    sys.stdout.write("\n".join(requirements(sys.argv[1])) + "\n")
