"""Nothing that was measured is lost: not when the process is killed, not when the disk is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ir.errors import DataError, WriteError
from learned_cost.profile import store as module
from learned_cost.profile.store import Row, Store, read_rows

ROOT = Path(__file__).parents[3]


def row(number: int) -> Row:
    return {"op": "linear", "gpu": "T4", "dtype": "fp32", "m": number, "latency_us": number + 0.5, "date": f"{number}"}


def numbers(rows: Sequence[Row]) -> list[Any]:
    return [found["m"] for found in rows]


def test_rows_are_appended_as_parts(tmp_path: Path) -> None:
    for run in range(3):
        with Store(tmp_path) as store:
            store.reserve()
            store.append(row(2 * run))
            store.append(row(2 * run + 1))
            assert numbers(store.read()) == list(range(2 * run + 2))
    assert [path.name for path in sorted(tmp_path.glob("*.parquet"))] == [f"kernels-000{i}.parquet" for i in (1, 2, 3)]
    assert read_rows(tmp_path, "kernels")[0] == row(0)
    assert (tmp_path / "kernels.journal").stat().st_size == 0


KILLED = """
import sys
from pathlib import Path
from learned_cost.profile.store import Store
store = Store(Path(sys.argv[1]))
number = 0
while True:
    store.reserve()
    store.append({"op": "linear", "gpu": "T4", "dtype": "fp32", "m": number, "latency_us": 1.0, "date": str(number)})
    if number == 40:
        store.flush()
    print(number, flush=True)
    number += 1
"""


def test_a_run_has_one_part_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 4)
    with Store(tmp_path) as store:
        for number in range(6):
            store.append(row(number))
            store.flush()
    assert [len(pq.ParquetFile(path).read()) for path in sorted(tmp_path.glob("*.parquet"))] == [4, 2]
    assert numbers(read_rows(tmp_path, "kernels")) == list(range(6))


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 90:
                process.send_signal(signal.SIGKILL)
                break
        told = [int(line) for line in process.stdout.read().splitlines()]
    least = max(told, default=90)
    assert len(read_rows(tmp_path, "kernels")) == 41
    with Store(tmp_path) as store:
        found = numbers(store.read())
    assert found == list(range(len(found)))
    assert len(found) > least


def test_room_that_a_kill_left_hides_no_rows(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.reserve()  # and killed before anything was measured
    os.close(first._file)
    second = Store(tmp_path)
    second.append(row(0))
    second.reserve()  # and killed again
    os.close(second._file)
    with Store(tmp_path) as store:
        assert numbers(store.read()) == [0]


def test_a_kill_between_part_and_journal_repeats_nothing(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(row(0))
        store.append(row(1))
        journal = (tmp_path / "kernels.journal").read_bytes()
    (tmp_path / "kernels.journal").write_bytes(journal + b'{"op": "linear", "gpu"')  # and a row cut short
    with Store(tmp_path) as store:
        assert numbers(store.read()) == [0, 1]


def test_a_full_disk_is_one_error_and_the_rows_wait(tmp_path: Path) -> None:
    def full(path: Path, rows: Sequence[Row]) -> None:
        path.write_bytes(b"half of a")
        raise OSError(errno.ENOSPC, "No space left on device")

    def measure() -> None:
        with Store(tmp_path, write=full) as store:
            store.append(row(0))
            store.append(row(1))

    with pytest.raises(WriteError, match=r"kernels-0001.*its 2 rows stay in kernels.journal.*goes on where it"):
        measure()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.journal"]
    with Store(tmp_path) as store:
        assert numbers(store.read()) == [0, 1]


def test_room_is_asked_for_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(tmp_path)
    store.append(row(0))
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="1 rows are safe"):
        store.reserve()
    os.close(store._file)
    with Store(tmp_path) as store:
        assert numbers(store.read()) == [0]


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(WriteError, match="in use"):
        Store(tmp_path)


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written to"):
        Store(tmp_path / "file" / "folder")
    (tmp_path / "kernels-0001.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match="no Parquet file"):
        Store(tmp_path)


def test_columns_that_no_profile_has_are_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="speed"), Store(tmp_path) as store:
        store.append({**row(0), "speed": 1.0})
