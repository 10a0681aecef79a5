"""docs/errors.md: of each error an example that fails, and the same one mended, run as they are printed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ir.errors import PdvError
from pdv.cli import app as cli
from tools.tutorial import read_page

PAGE = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
HEAD, *PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {part.partition("\n")[0]: part for part in PARTS}
WITHOUT = {"internal-error"}  # nobody can ask for one
EXAMPLES = [
    pytest.param(slug, marks=pytest.mark.slow if "takes seconds" in part else ())
    for slug, part in SECTIONS.items()
    if slug not in WITHOUT
]


@pytest.mark.parametrize("slug", EXAMPLES)
def test_examples_fail_and_are_mended(
    slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    codes = []
    for step in (*read_page(HEAD), *read_page(SECTIONS[slug])):
        if step.kind == "file":
            (tmp_path / step.name).write_text(step.text, encoding="utf-8")
            if step.name == "files.py":
                execute(tmp_path / step.name)
            continue
        for line in step.text.splitlines():
            expected = re.split(r"[, ]", line.partition(" # ")[2])[0]
            found = run_line(shlex.split(line, comments=True), tmp_path)
            assert found == expected, line
            said = capsys.readouterr().err
            assert found in ("", "0") or not found.isdigit() or f"error: {slug}: " in said, said
            codes.append(found)
    assert {"0"} < set(codes), f"{slug}: one that fails, one that does not"
    assert codes[-1] == "0", f"{slug}: mended last"


def run_line(words: list[str], folder: Path) -> str:
    """The exit code of pdv, the exception of Python, and nothing of what only prepares."""
    if words[0] == "pdv":
        return str(cli.run(words[1:]))
    if words[0] == "python":
        return execute(folder / words[1])
    subprocess.run(words, check=True)
    return ""


def execute(path: Path) -> str:
    """Run a file in this process: "0", or the name of the error."""
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    except PdvError as error:
        return type(error).__name__
    return "0"


def test_every_error_has_an_example() -> None:
    slugs = {kind.slug for kind in PdvError.__subclasses__() if kind.__module__ == "ir.errors"}
    assert slugs - WITHOUT <= {slug for slug, part in SECTIONS.items() if "```sh\n" in part}
