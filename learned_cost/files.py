"""Files that appear whole or not at all, and one error where they cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

from ir.errors import WriteError


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the place, then move there: what was there is replaced by the whole, or stays.

    Raises:
        WriteError: if the disk is full, or the folder may not be written to.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise unwritable(path, error) from error
    except BaseException:  # interrupted: leave nothing half-written
        beside.unlink(missing_ok=True)
        raise


def unwritable(path: Path, error: OSError) -> WriteError:
    """The one error of a write that failed."""
    there = "what was there before is unchanged" if path.exists() else "nothing was written"
    return WriteError(
        f"{path} cannot be written ({error.strerror or error}); {there}",
        "A folder that exists, with room, and that may be written to",
        "Free some room or write elsewhere",
    )
