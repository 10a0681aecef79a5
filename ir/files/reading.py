"""The door through which files of a user are read: ordinary files alone, no larger than such files are, text that is
text, JSON that is JSON. Limits stand in ``pdv`` with what is read; what is refused is the kind's own error.

Entry points: ``read_bytes``, ``read_text``, ``parse_json``.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir.errors import PdvError, first_line

LONGEST = 80  # characters of a path that nobody can read


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file.

    Attributes:
        most_bytes: the largest that is read.
        error: what is raised of one that is not read.
        missing, wanted: what to do where there is none, and in place of a larger one.
    """

    most_bytes: int
    error: type[PdvError]
    missing: str = "Check the path"
    wanted: str = "Check the path"

    def refuse(self, path: Path, why: str, mend: str = "") -> PdvError:
        """The error of this file."""
        return self.error(f"{shown(path)} {why}", mend=mend)


def shown(path: Path) -> str:
    """A path in a message: as it is, unless it has what no line shows."""
    text = str(path)
    return text if text.isprintable() else ascii(text)[:LONGEST]


def read_bytes(path: Path, kind: FileKind) -> bytes:
    """What is in an ordinary file; pipes and devices, which may never end, are not opened for long.

    Raises:
        PdvError: ``kind.error``, if there is no such file, or one that is not read.
    """
    if path.is_dir():
        raise kind.refuse(path, "is a folder, not a file", kind.missing)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            ordinary = stat.S_ISREG(os.fstat(handle).st_mode)
            data = file.read(kind.most_bytes + 1) if ordinary else b""
    except (FileNotFoundError, NotADirectoryError):
        raise kind.refuse(path, "does not exist", kind.missing) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        raise kind.refuse(path, f"cannot be read ({why})", kind.missing) from error
    if not ordinary:
        raise kind.refuse(path, "is no ordinary file", kind.missing)
    if len(data) > kind.most_bytes:
        raise kind.refuse(path, f"is larger than {_size(kind.most_bytes)}", kind.wanted)
    return data


def read_text(path: Path, kind: FileKind) -> str:
    """The text of a file.

    Raises:
        PdvError: as ``read_bytes``, or where it is no text in UTF-8.
    """
    try:
        return read_bytes(path, kind).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{shown(path)} is not text in UTF-8 (byte {error.start})"
        raise kind.error(what, "Allowed: text in UTF-8", "Save it as UTF-8") from error


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:  # Any: JSON
    """The value of a text; ``pairs`` makes an object of its names and values.

    Raises:
        ValueError: if it is no JSON, has what no JSON has (infinities), or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError(f"it is nested too deep ({first_line(error)})") from error


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
