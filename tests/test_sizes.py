"""Files stop at 500 lines, functions at 50; an exception carries its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
EXCEPTIONS: dict[str, str] = {}  # "file" or "file:function" -> why it is right as it is

FILES = sorted(
    path
    for folder in ("ir", "pdv", "learned_cost", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "golden" not in path.parts
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_and_functions_are_small(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= MAX_FILE_LINES or name in EXCEPTIONS, f"{name} has {lines} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            where = f"{name}:{node.name}"
            assert length <= MAX_FUNCTION_LINES or where in EXCEPTIONS, f"{where} has {length} lines"


def test_no_exception_is_left_over() -> None:
    known = {path.relative_to(ROOT).as_posix() for path in FILES}
    assert {entry.split(":")[0] for entry in EXCEPTIONS} <= known
