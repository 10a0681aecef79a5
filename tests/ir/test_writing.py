"""Where files are written: what stands there is replaced by the whole, but for what is no file."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ir.errors import WriteError
from ir.files.writing import write_whole


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"a page")
    reader.join(10)
    assert found == [b"a page"]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_device_stays() -> None:
    write_whole(Path("/dev/null"), b"a page")
    assert Path("/dev/null").is_char_device()


def test_a_file_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_bytes(b"before")
    before = page.stat().st_ino
    write_whole(page, b"after")
    assert page.read_bytes() == b"after"
    assert page.stat().st_ino != before


def test_a_disk_that_cannot_be_written_to_is_told_of_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the one beside it, which cannot even be removed."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match=r"page cannot be written \(Read-only file system\); nothing was written"):
        write_whole(tmp_path / "page", b"a page")
