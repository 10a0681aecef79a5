"""One input: files in a folder of their own, and the command that reads them. Entry point: ``Case``."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECRET = b"\x00\x00\x80?outside: nobody may read this" * 64
"""What lies beside the model's folder, and is long enough to be taken for weights."""


@dataclass(frozen=True)
class Link:
    """A symbolic link in place of a file; relative ones start at the link."""

    target: str


@dataclass(frozen=True)
class Pipe:
    """A named pipe that nobody writes to."""


@dataclass(frozen=True)
class Case:
    """An input.

    Attributes:
        kind: of file, as the table calls it.
        what: which change was made of which file.
        files: by their path in the folder ``in``; others of the case lie there unchanged.
        command: of pdv, run in ``work`` beside ``in``; it may write what starts with ``out`` there.
        room: bytes of the largest file that may be written, as on a disk that is nearly full; 0: any.
    """

    kind: str
    what: str
    files: Mapping[str, bytes | Link | Pipe]
    command: Sequence[str]
    room: int = 0

    def write(self, folder: Path) -> None:
        """``in`` with the files, an empty ``work``, and ``outside``, which nobody may read."""
        for name in ("in", "work", "outside", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "outside" / "secret.bin").write_bytes(SECRET)
        for name, content in self.files.items():
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            match content:
                case Link(target):
                    path.symlink_to(target)
                case Pipe():
                    os.mkfifo(path)
                case _:
                    path.write_bytes(content)


def flipped(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Bytes with something wrong, and what."""
    if not data:
        return "a byte where there was none", bytes([rng.randrange(256)])
    place, length = rng.randrange(len(data)), rng.choice([1, 1, 4, 64, 1024])
    match rng.randrange(7):
        case 0:
            return "cut off", data[:place]
        case 1:
            return "bytes left out", data[:place] + data[place + length :]
        case 2:
            return "bytes put in", data[:place] + rng.randbytes(length) + data[place:]
        case 3:
            return "bytes twice", data[: place + length] + data[place:]
        case 4:
            return "zeros", data[:place] + bytes(length) + data[place + length :]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return "bits flipped", bytes(changed)
