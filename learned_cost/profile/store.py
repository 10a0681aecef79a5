"""Measurements on disk: appended, and not lost when the process is killed or the disk is full.

A row goes to a journal the moment it is measured (a line of JSON, in space reserved before the measurement). Every few
seconds the journal's rows join the run's Parquet file, written anew beside it and renamed, and the journal is emptied.
Files of earlier runs are not touched. What a killed run left in the journal becomes a file when the folder is opened
again. Entry point: ``Store``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ir.errors import WriteError
from learned_cost.data.dataset import parts_of, read_parquet
from learned_cost.data.table import COLLECTIVE_COLUMNS, KERNEL_COLUMNS, Column

Row = Mapping[str, Any]  # Any: text, numbers or None, by column
SCHEMAS: Mapping[str, Sequence[Column]] = {"kernels": KERNEL_COLUMNS, "collectives": COLLECTIVE_COLUMNS}
PART_S = 10.0  # the journal's rows join a part that often
PART_ROWS = 5000  # of a part, after which the next one is begun
ROOM_BYTES = 1 << 16  # reserved for the next row: the largest, a subgraph, takes some 4 KiB


class Store:
    """The rows of one kind ("kernels", "collectives") in a folder, open for one run at a time.

    Args:
        write: writes rows to a path; replaced where a test fills the disk.

    Raises:
        WriteError: if the folder cannot be written to, or another run has it open.
    """

    def __init__(
        self, folder: Path, name: str = "kernels", *, write: Callable[[Path, Sequence[Row]], None] | None = None
    ) -> None:
        self.folder = folder
        self.name = name
        self.rows: list[Row] = []  # in the journal, in no part yet
        self._part: list[Row] = []  # of the part that this run is writing
        self._path: Path | None = None
        self._write = write or (lambda path, rows: write_parquet(path, rows, SCHEMAS[name]))
        self._flushed = time.monotonic()
        self._journal = folder / f"{name}.journal"
        with _told(folder, "be written to"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._journal, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(self._file, folder)
        self.rows = self._recover()
        self.flush()
        self._empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if not isinstance(error, WriteError):
                self.flush()
        finally:
            os.close(self._file)

    def reserve(self) -> None:
        """Make sure that the next row can be kept; call it before measuring.

        Raises:
            WriteError: if the disk is full.
        """
        with _told(self._journal, f"grow ({len(self.rows)} rows are safe in it)"):
            os.posix_fallocate(self._file, os.lseek(self._file, 0, os.SEEK_CUR), ROOM_BYTES)

    def append(self, row: Row) -> None:
        """Keep a row: from here on it survives the process. Now and then, the rows so far join a part.

        Raises:
            WriteError: if the disk is full; the row is in the journal all the same.
        """
        line = (json.dumps(dict(row), allow_nan=False) + "\n").encode()
        with _told(self._journal, "be written"):
            os.write(self._file, line)
        self.rows.append(row)
        if time.monotonic() - self._flushed >= PART_S:
            self.flush()

    def flush(self) -> None:
        """Put the journal's rows into this run's part.

        Raises:
            WriteError: if it cannot be written; the rows stay in the journal.
        """
        self._flushed = time.monotonic()
        if not self.rows:
            return
        path = self._path or self.folder / f"{self.name}-{self._next_number():04}.parquet"
        beside = path.with_suffix(f".tmp{os.getpid()}")
        try:
            with _told(path, f"be written: its {len(self.rows)} rows stay in {self._journal.name}"):
                self._write(beside, [*self._part, *self.rows])
                beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        self._empty()
        self._path, self._part, self.rows = path, [*self._part, *self.rows], []
        if len(self._part) >= PART_ROWS:
            self._path, self._part = None, []

    def read(self) -> list[Row]:
        """Every row of the folder: of all parts, and of the journal.

        Raises:
            DataError: if a part is no Parquet file.
        """
        return [*read_rows(self.folder, self.name), *self.rows]

    def _empty(self) -> None:
        """Nothing in the journal, nor room reserved: the next row comes first."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)

    def _next_number(self) -> int:
        taken = [path.stem.rpartition("-")[2] for path in self.folder.glob(f"{self.name}-*.parquet")]
        return 1 + max((int(number) for number in taken if number.isdigit()), default=0)

    def _recover(self) -> list[Row]:
        """Rows that an ended run left in the journal; a line cut short is one that was not measured to its end."""
        kept: list[Row] = []
        written = {_identity(row) for row in read_rows(self.folder, self.name, last=True)}
        for line in self._journal.read_bytes().split(b"\n"):
            try:
                row = json.loads(line.strip(b"\0"))
            except ValueError:
                continue
            if isinstance(row, dict) and _identity(row) not in written:  # a kill between rename and emptying
                kept.append(row)
        return kept


def read_rows(folder: Path, name: str, *, last: bool = False) -> list[Row]:
    """Rows of the parts of a folder, or of the last part alone; empty cells are left out.

    Raises:
        DataError: if a part is no Parquet file.
    """
    paths = parts_of(folder, name)
    return [
        {key: value for key, value in row.items() if value is not None}
        for path in (paths[-1:] if last else paths)
        for row in read_parquet(path).to_pylist()
    ]


def write_parquet(path: Path, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Rows as Parquet, columns in the given order, those without any value left out; on disk when it returns.

    Raises:
        OSError: if it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    unknown = {key for row in rows for key in row} - {column.name for column in columns}
    assert not unknown, f"rows have columns that no profile has: {sorted(unknown)}"
    types = {
        "text": pa.dictionary(pa.int32(), pa.string()),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
    }
    used = [column for column in columns if any(row.get(column.name) is not None for row in rows)]
    arrays = [pa.array([row.get(column.name) for row in rows], types[column.kind]) for column in used]
    with path.open("wb") as file:
        pq.write_table(pa.table(arrays, names=[column.name for column in used]), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())


def _identity(row: Row) -> str:
    return json.dumps({key: row[key] for key in ("op", "collective", "date", "run", "latency_us") if key in row})


class _told:  # noqa: N801  # reads as a phrase
    """Turns an ``OSError`` into the one error that the user sees."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise WriteError(
                f"{self.path} cannot {self.what} ({error.strerror or error})",
                mend="Make room, or allow writing, and run the same command again: it goes on where it stopped",
            ) from error


def _lock(file: int, folder: Path) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise WriteError(
            f"{folder} is in use: another run is writing to it", mend="Wait for it, or give another folder"
        ) from error
