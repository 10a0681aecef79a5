"""Files that appear whole or not at all, one error where they cannot be written, and folders to write to."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ir.errors import UsageError, WriteError
from ir.files.signals import ENDING, handled

_STREAMS = {Path("/dev"), Path("/dev/fd")}  # /dev/stdout may lead to a file, of which it is but a name


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the place, then move there: what was there is replaced by the whole, or stays.

    A device or a pipe (/dev/stdout, /dev/null) is written to as it is, and never replaced by a file.

    Raises:
        WriteError: if the disk is full, or the folder may not be written to.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Several files that belong together: none is moved to its place before all are written.

    Raises:
        WriteError: if the disk is full, or a folder may not be written to; then all stays as it was.
    """
    whole = {path for path in contents if _is_replaced(path)}
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in contents if path in whole}
    path = Path()
    try:
        for path, content in contents.items():
            with beside.get(path, path).open("wb") as file:
                file.write(content)
                file.flush()
                if path in whole:
                    os.fsync(file.fileno())
        for path, part in beside.items():
            part.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:  # interrupted, too: leave nothing half-written
        for part in beside.values():
            with suppress(OSError):  # of a disk that cannot be written to: what is told is why
                part.unlink()


def _is_replaced(path: Path) -> bool:
    """Whether another file may take this place: not that of a device, a pipe, or a stream of the process."""
    if path.absolute().parent in _STREAMS:
        return False
    return path.is_file() or not path.exists()


@contextmanager
def undisturbed() -> Iterator[None]:
    """The moment in which files change places: Ctrl-C, and an order to end, come too late for it."""
    with handled(signal.SIG_IGN, signal.SIGINT, *ENDING):
        yield


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What is said of a file system that takes nothing more, whatever was to be written."""


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room, or none for files so large: no fault of who wrote."""
    return error.errno in NO_ROOM


def unwritable(path: Path, error: OSError) -> WriteError:
    """The one error of a write that failed."""
    there = "what was there before is unchanged" if path.exists() else "nothing was written"
    return WriteError(
        f"{path} cannot be written ({error.strerror or error}); {there}",
        "A folder that exists, with room, and that may be written to",
        "Free some room or write elsewhere",
    )


def make_folder(path: Path) -> None:
    """A folder, and those around it, if it is not there.

    Raises:
        WriteError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Before the work starts.

    Raises:
        UsageError: if the result could not go there.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"-o: {str(folder)!r} is a file", mend="Choose another name")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"-o: {str(folder)!r} exists and is not empty", mend="Choose another, or add --overwrite")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"-o: the folder {str(folder.parent)!r} does not exist", mend="Make it first")
