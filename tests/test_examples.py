"""Commands that examples print in their first lines: the script is there, and knows every option that is named."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^\s*((?:torchrun|python) .+?)(?:\s{2,}.*)?$", re.MULTILINE)
SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*.py") if path.name not in ("__init__.py", "text.py"))


def commands(path: Path) -> list[list[str]]:
    """The words of each, without the launcher's own."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = []
    for text in COMMAND.findall(docstring):
        words = shlex.split(text.replace("[", " ").replace("]", " ").replace("…", " "))[1:]
        while words[0].startswith("--"):
            words = words[1:]
        found.append(words)
    return found


def options(path: Path) -> set[str]:
    """What its parser takes; of a script with a configuration, what that says."""
    text = path.read_text(encoding="utf-8")
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    added = [
        node.args[0] for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
    ]
    names = {name.value for name in added if isinstance(name, ast.Constant) and isinstance(name.value, str)}
    if (config := path.with_suffix(".toml")).exists():
        said = tomllib.loads(config.read_text(encoding="utf-8"))
        names |= {f"--{section}.{name}" for section, entries in said.items() for name in entries}
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_command_of_an_example_is_its_own(path: Path) -> None:
    for words in commands(path):
        script = ROOT / words[1].replace(".", "/") if words[0] == "-m" else ROOT / words[0]
        assert script.with_suffix(".py") == path, "the command runs the file that it stands in"
        known = options(path)
        assert {word for word in words if word.startswith("--")} <= known
        named = [word for word in words if word.startswith("examples/") and not word.endswith(".py")]
        assert all((ROOT / word).exists() for word in named)


def test_examples_say_how_they_are_run() -> None:
    said = {path.stem for path in SCRIPTS if commands(path)}
    assert {"train", "huggingface", "lightning_loop", "titan", "demo", "beside_ddp", "launch"} <= said
