"""A random key of the user's own, outside of every cache: what is stored under it was stored by this user.

Made once, readable by its user alone, and never sent or written anywhere else. Entry point: ``own_key``.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

SIZE = 32  # bytes, as many as SHA-256 gives
FILE = "cache.key"


def own_key(folder: Path | None, warn: Callable[[str], None]) -> bytes | None:
    """The key in a folder, made if there is none; without one there is a warning that says why.

    ``folder``: of the user's state (``pdv.folders``); None if there is no such folder.
    """
    if folder is None:
        warn("there is no home folder for a key of your own: searches are not kept")
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _read(folder / FILE) or _make(folder)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        warn(f"no key of your own can be had from {folder / FILE} ({said}): searches are not kept")
        return None


def _read(path: Path) -> bytes | None:
    """The key of a file, if there is one.

    Raises:
        OSError: if it cannot be read.
        ValueError: if others could have read or written it, or it is none.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no file")
        if hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or facts.st_mode & 0o077):
            raise ValueError("it belongs to another user, or others may read it; remove it, and a new one is made")
        key = file.read(SIZE + 1)
    if len(key) != SIZE:
        raise ValueError("it is no key; remove it, and a new one is made")
    return key


def _make(folder: Path) -> bytes:
    """A new key, or the one that another run made meanwhile: a key appears whole, and the first one stays."""
    handle, name = tempfile.mkstemp(prefix=".", dir=folder)  # readable by its user alone
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SIZE))
        try:
            os.link(name, folder / FILE)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            Path(name).replace(folder / FILE)
    finally:
        Path(name).unlink(missing_ok=True)
    key = _read(folder / FILE)
    if key is None:
        raise ValueError("it vanished")
    return key
