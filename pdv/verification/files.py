"""The Python files of a package, byte for byte what the plan is written as."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import all_suffixes
from itertools import takewhile, zip_longest
from pathlib import Path

from ir.errors import VerificationError
from pdv.emit.package import WEIGHTS

CACHE = "__pycache__"  # Python's own; what lies there is not read
IMPORTABLE = (*all_suffixes(), ".pyd", ".so", ".pyw")
_MEND = "Restore it with pdv optimize"


def check_program(folder: Path, texts: Mapping[str, str]) -> None:
    """Whether the Python files are ``texts``, and no others.

    Raises:
        VerificationError: naming the one that is edited, missing or too many, and the first line that differs.
    """
    for name, text in texts.items():
        path = folder / name
        found = _read(path)
        if found != text.encode():
            what = f"{path} is not what the plan is written as, from line {_differs(text, found)}"
            raise VerificationError(what, "The file as this version of pdv writes it", _MEND)
    _check_extra(folder, texts)


def edited_program(folder: Path, texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The Python files as they lie there, and the names of those that are not in ``texts`` or differ.

    Raises:
        VerificationError: if one of ``texts`` is missing, one is no text, or there is more that Python could import.
    """
    names = [*texts, *sorted(path.name for path in folder.glob("*.py") if path.name not in texts)]
    data = {name: _read(folder / name) for name in names}
    try:
        found = {name: content.decode("utf-8") for name, content in data.items()}
    except UnicodeDecodeError as error:
        raise VerificationError(f"{folder} has a Python file that is no text: {error}", "", _MEND) from error
    _check_extra(folder, found)
    return found, [name for name in names if data[name] != texts.get(name, "").encode() or name not in texts]


def _read(path: Path) -> bytes:
    """The content of a file that has to be there.

    Raises:
        VerificationError: if it is not, or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise VerificationError(f"{path} is missing", "The files that the plan is written as", _MEND) from None
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error.strerror}", "", _MEND) from error


def check_no_program(folder: Path) -> None:
    """Whether a plan that was saved without a program has none.

    Raises:
        VerificationError: naming a file of one.
    """
    _check_extra(folder, {})
    if (folder / WEIGHTS).exists():
        raise VerificationError(f"{folder / WEIGHTS} is of no plan here: plan.json names no weights", "", _MEND)


def _differs(text: str, found: bytes) -> str:
    """The first line that differs, by number, and what stands there."""
    expected = text.encode().split(b"\n")
    for number, (one, other) in enumerate(zip_longest(expected, found.split(b"\n")), 1):
        if one != other:
            return f"{number}: {_excerpt(other, one)} for {_excerpt(one, other)}"
    raise AssertionError("equal files differ")


def _excerpt(line: bytes | None, other: bytes | None) -> str:
    """A line near the first byte at which it differs from another; None stands behind the last line."""
    if line is None:
        return "the end"
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(line, other or b"", strict=False))
    place = sum(1 for _ in alike)
    return repr(line[max(0, place - 24) : place + 36].decode("utf-8", "replace"))


def _check_extra(folder: Path, texts: Mapping[str, str]) -> None:
    """Nothing that Python could import besides ``texts``."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if CACHE in inside.parts[:-1] or str(inside) in texts:
            continue
        if path.is_dir() and not path.is_symlink():
            continue  # what is in it comes by itself
        if path.name.endswith(IMPORTABLE) or path.is_dir():
            allowed = "Of files that Python imports, those that the plan is written as"
            raise VerificationError(f"{path} is no file of the plan's", allowed, "Remove it")
