"""Commands on benchmarks run as the documentation prints them: scripts find their imports, and have their options."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text())


def printed() -> dict[str, list[str]]:
    """Every command on a script of benchmarks that a page or a docstring prints, and where."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in re.findall(r"`python (benchmarks/[a-z][^`]+)`", page.read_text(encoding="utf-8")):
            found.setdefault(command, []).append(page.name)
    for script in SCRIPTS:
        text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        for command in re.findall(r"^ *python (benchmarks/.+)$", text, re.MULTILINE):
            found.setdefault(command, []).append(script.name)
    return found


COMMANDS = printed()


def test_every_script_is_printed_somewhere() -> None:
    assert len(COMMANDS) >= 40
    assert {Path(command.split()[0]).name for command in COMMANDS} == {script.name for script in SCRIPTS}


@pytest.mark.parametrize("cwd", [ROOT, ROOT / "docs"], ids=lambda path: path.name)
def test_a_script_runs_from_any_folder(cwd: Path) -> None:
    """And without PYTHONPATH; see benchmarks/benchmarks.py."""
    command = [sys.executable, str(ROOT / "benchmarks" / "planning.py"), "--help"]
    done = subprocess.run(command, cwd=cwd, env={}, capture_output=True, text=True, check=False)
    assert "--smoke" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_of_ours_first_leads_to_all_of_it(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    ours = [name for name in names if (ROOT / name.split(".")[0]).is_dir()]
    assert ours[0].split(".")[0] == "benchmarks", ours
    beside = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert not beside & {name.split(".")[0] for name in names} - {"benchmarks"}, "from another folder it is not found"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_has_its_script_and_options(command: str) -> None:
    script, *words = shlex.split(re.sub(r"[\[\]|]", " ", command))
    places = COMMANDS[command]
    known = {
        node.value
        for path in (ROOT / script, ROOT / "benchmarks" / "record.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for word in words:
        assert not word.startswith("-") or word in known, f"{word}, printed in {places}"
        assert not word.startswith("benchmarks/") or (ROOT / word).exists(), f"{word}, printed in {places}"
