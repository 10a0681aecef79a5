"""Which lines of an edited text were run: what a run does not reach, it says nothing of.

Entry points: ``Reached``, while texts run; ``check_reached``, when all have.
"""

from __future__ import annotations

import ast
import difflib
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ir.errors import VerificationError

Rows = Collection[int]
_HARMLESS = (ast.Raise, ast.Pass, ast.Import, ast.ImportFrom)  # an error is no wrong result


@dataclass
class Reached:
    """Numbers of the lines that ran, by file."""

    rows: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    @contextmanager
    def noted(self, directory: Path) -> Iterator[None]:
        """While this lasts, threads that begin note what they run of the files of a directory."""
        inside = str(directory)

        def trace(frame: FrameType, event: str, _: Any) -> Any:  # Any: as of ``sys.settrace``
            name = frame.f_code.co_filename
            if not name.startswith(inside):
                return None
            rows = self.rows[name]
            rows.add(frame.f_lineno)

            def line(frame: FrameType, event: str, _: Any) -> Any:
                rows.add(frame.f_lineno)
                return line

            return line

        before = threading.gettrace()
        threading.settrace(trace)
        try:
            yield
        finally:
            threading.settrace(before)


def check_reached(name: str, before: str, after: str, ran: tuple[Rows, Rows], directory: Path) -> None:
    """Whether each line that was taken out of a file, or put into it, ran.

    before, after: the file as it was emitted and as it is; ran: which lines of the one, and of the other, did.

    Raises:
        VerificationError: naming a line that did not, unless it can give no wrong result.
    """
    old, new = before.split("\n"), after.split("\n")
    taken, put = _Text(before, ran[0]), _Text(after, ran[1])
    known = {node.name for node in taken.tree.body if isinstance(node, _DEFINED)} if before else set()
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        missed = put.missed(range(k + 1, m + 1), known)
        gone = [] if put.counting(range(k + 1, m + 1)) else taken.missed(range(i + 1, j + 1), known)
        for row, text, how in ((missed, new, "has"), (gone, old, "has no more")):
            if row:
                what = f"{directory / name} {how} {text[row[0] - 1].strip()!r} (line {row[0]}), which no run reaches"
                allowed = "Edits of what a step of training runs on simulated ranks, on a CPU"
                raise VerificationError(what, allowed, "Restore it, and hold your edit to the source yourself")


_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Text:
    """A module, and which of its lines ran."""

    def __init__(self, text: str, ran: Rows) -> None:
        self.tree = ast.parse(text)
        self._ran = set(ran)
        self._code = set(_rows_of(compile(text, "edited", "exec")))
        self._harmless = {row for node in ast.walk(self.tree) if _is_harmless(node) for row in _span(node)}

    def counting(self, rows: Collection[int]) -> bool:
        """Whether some of these do anything."""
        return bool((self._code & set(rows)) - self._harmless)

    def missed(self, rows: Collection[int], known: Collection[str]) -> list[int]:
        """Those that do something and did not run; of a function or class that is not ``known`` only if a part did."""
        found = (self._code & set(rows)) - self._harmless - self._ran
        for node in self.tree.body:
            if isinstance(node, _DEFINED) and node.name not in known:
                inside = {row for each in ast.walk(node) if isinstance(each, _DEFINED[:2]) for row in _inside(each)}
                found -= set() if inside & self._ran else set(_span(node))
        return sorted(found)


def _rows_of(code: CodeType) -> Iterator[int]:
    yield from (row for *_, row in code.co_lines() if row)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _rows_of(inner)


def _span(node: Any) -> range:  # Any: a node of a text that has a place
    return range(node.lineno, node.end_lineno + 1)


def _inside(function: Any) -> Iterator[int]:  # Any: one of two kinds
    for node in function.body:
        yield from _span(node)


def _is_harmless(node: ast.AST) -> bool:
    """An error, a print, a docstring, or what runs where the file is a script."""
    if isinstance(node, _HARMLESS):
        return True
    if isinstance(node, ast.Expr):
        value = node.value
        is_print = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
        return is_print or isinstance(value, ast.Constant)
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def reached_in(found: Reached, directory: Path, names: Collection[str]) -> Mapping[str, Rows]:
    """By file name."""
    return {name: found.rows.get(str(directory / name), set()) for name in names}
