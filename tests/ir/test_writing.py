"""Where files are written: what stands there is replaced by the whole, but for what is no file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

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
