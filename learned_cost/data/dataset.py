"""Folders of measurements, read and checked: ``read_folders`` is the entry point.

A folder has kernels.parquet or parts kernels-*.parquet, collectives.parquet or parts, and perhaps opgraphs.parquet;
devices that no record of ours describes come with it, in gpus.csv or as devices/*.yaml. Nothing is repaired: a file
that says what cannot be is refused with the place named, or, with ``skip_bad``, loses those rows, which are counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ir.errors import DataError, UsageError, did_you_mean
from learned_cost.data.kernel import DIMS, FUSED, ROLES, Subgraph
from learned_cost.data.plausible import Complaint, implausible
from learned_cost.data.table import (
    COLLECTIVE_COLUMNS,
    GRAPH_COLUMNS,
    KERNEL_COLUMNS,
    Array,
    Column,
    Table,
    concat,
    not_applicable,
)
from learned_cost.devices.device import DeviceRecord, load_records, read_record
from learned_cost.devices.device_table import read_device_table

if TYPE_CHECKING:
    import pyarrow as pa

FILES: Mapping[str, tuple[Column, ...]] = {
    "kernels": KERNEL_COLUMNS,
    "collectives": COLLECTIVE_COLUMNS,
    "opgraphs": GRAPH_COLUMNS,
}
SHIPPED = Path(__file__).parent.parent / "profiles"
LARGEST = 1e30  # of a size or an amount of work
SHOWN = 5  # rows that an error names


@dataclass(frozen=True)
class Dataset:
    """What folders of measurements hold.

    Attributes:
        kernels, collectives, graphs: their rows; None where no folder has such a file.
        devices: records by name, of all devices that rows name and others.
        files: sha256 of each file read, by path.
        skipped: rows, or columns, left out because they said what cannot be, by reason; empty unless asked for.
    """

    kernels: Table | None
    collectives: Table | None
    graphs: Table | None
    devices: Mapping[str, DeviceRecord]
    files: Mapping[str, str]
    skipped: Mapping[str, int] = field(default_factory=dict)


def read_folders(
    folders: Sequence[Path], *, devices: Mapping[str, DeviceRecord] | None = None, skip_bad: bool = False
) -> Dataset:
    """All of several folders, as one. ``devices`` are those known before (default: the shipped records).

    Raises:
        DataError: if a file cannot be read or says what cannot be.
    """
    parts = [read_folder(folder, devices=devices, skip_bad=skip_bad) for folder in folders]
    if len(parts) == 1:
        return parts[0]
    known: dict[str, DeviceRecord] = {}
    skipped: dict[str, int] = {}
    for part in parts:
        known.update(part.devices)
        for reason, count in part.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count

    def joined(name: str) -> Table | None:
        tables = [table for part in parts if (table := getattr(part, name)) is not None]
        return concat(tables) if tables else None

    files = {path: digest for part in parts for path, digest in part.files.items()}
    return Dataset(joined("kernels"), joined("collectives"), joined("graphs"), known, files, skipped)


def read_folder(path: Path, *, devices: Mapping[str, DeviceRecord] | None = None, skip_bad: bool = False) -> Dataset:
    """One folder; or, if it has none of the files itself, the folders directly in it.

    Raises:
        DataError: if it is no folder of measurements, or a file in it cannot be read or says what cannot be.
    """
    allowed = "Allowed: a folder with kernels.parquet, parts kernels-*.parquet or collectives.parquet"
    mend = f"`pdv profile -o {path}` makes one"
    if not path.is_dir():
        raise DataError(f"{path} is {'a file, not a folder' if path.exists() else 'no folder'}", allowed, mend)
    if not any(parts_of(path, name) for name in FILES):
        below = [inner for inner in sorted(path.iterdir()) if inner.is_dir() and any(parts_of(inner, n) for n in FILES)]
        if not below:
            raise DataError(f"{path} holds no measurements", allowed, mend)
        return read_folders(below, devices=devices, skip_bad=skip_bad)
    known = _devices(path, load_records() if devices is None else devices)
    files: dict[str, str] = {}
    skipped: dict[str, int] = {}
    tables: dict[str, Table | None] = {}
    for name, columns in FILES.items():
        found = [_table(part, columns, known, skipped, skip_bad=skip_bad) for part in parts_of(path, name)]
        files |= {str(part): hashlib.sha256(part.read_bytes()).hexdigest() for part in parts_of(path, name)}
        tables[name] = concat(found) if found else None
    return Dataset(tables["kernels"], tables["collectives"], tables["opgraphs"], known, files, skipped)


def parts_of(folder: Path, name: str) -> list[Path]:
    """The files of one kind of measurements, the latest part last."""
    whole = folder / f"{name}.parquet"
    return ([whole] if whole.is_file() else []) + sorted(folder.glob(f"{name}-*.parquet"))


def _devices(folder: Path, known: Mapping[str, DeviceRecord]) -> dict[str, DeviceRecord]:
    """Those known before win over gpus.csv, which only names what it is about; a record of one's own wins over both."""
    listed = read_device_table(folder / "gpus.csv") if (folder / "gpus.csv").is_file() else {}
    own = {}
    if (folder / "devices").is_dir():
        files = [read_record(path) for path in sorted((folder / "devices").glob("*.yaml"))]
        own = {entry.name: entry for entry in files}
    return {**listed, **known, **own}


def _table(
    path: Path,
    columns: Sequence[Column],
    devices: Mapping[str, DeviceRecord],
    skipped: dict[str, int],
    *,
    skip_bad: bool,
) -> Table:
    """One file, checked."""
    raw = read_parquet(path)
    twice = sorted(name for name, count in Counter(raw.column_names).items() if count > 1)
    if twice:
        raise DataError(
            f"{path.name} in {path.parent} has the columns {', '.join(twice)} twice", mend="Keep one of each"
        )
    unknown = sorted(set(raw.column_names) - {column.name for column in columns})
    if unknown and not skip_bad:
        known = [column.name for column in columns]
        what = f"{path.name} in {path.parent}: unknown columns {', '.join(unknown)}"
        raise DataError(what, f"Known: {', '.join(known)}", did_you_mean(unknown[0], known) or "Drop or rename them")
    for name in unknown:
        skipped[f"unknown column {name}"] = raw.num_rows
    missing = [column.name for column in columns if column.required and column.name not in raw.column_names]
    if missing:
        what = f"{path.name} in {path.parent} lacks the columns {', '.join(missing)}"
        needed = ", ".join(column.name for column in columns if column.required)
        raise DataError(what, f"Every such file has {needed}", "Write it with `pdv profile`, or add the columns")
    arrays: dict[str, Array] = {}
    vocab: dict[str, tuple[str, ...]] = {}
    for column in columns:
        if column.name not in raw.column_names:
            arrays[column.name] = not_applicable(column.kind, raw.num_rows)
            if column.kind == "text":
                vocab[column.name] = ()
        elif column.kind == "text":
            arrays[column.name], vocab[column.name] = _texts(raw[column.name], column.name, path)
        else:
            arrays[column.name] = _numbers(raw[column.name], column, path)
    table = Table(arrays, vocab)
    return _check(_by_record_name(table, devices), columns, devices, path, skipped, skip_bad=skip_bad)


def read_parquet(path: Path) -> pa.Table:
    """A file as Arrow has it.

    Raises:
        UsageError: if pyarrow is not installed.
        DataError: if it is no such file, or damaged.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            "reading measurements needs pyarrow, which is not installed", mend="pip install 'pipedejavu[learned]'"
        ) from None
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        table.validate(full=True)  # texts among it, which Arrow decodes when they are asked for
        return table
    except (pa.ArrowException, OSError, ValueError) as error:
        told = " ".join(str(error).split())[:160]
        raise DataError(
            f"{path} is no Parquet file, or a damaged one ({told})",
            "Allowed: Parquet, whole",
            "Write it again, or take it out of the folder",
        ) from error


def _wrong_type(path: Path, name: str, found: object, wanted: str) -> DataError:
    what = f"{path.name} in {path.parent}: column {name} holds {found}"
    return DataError(what, f"Allowed: {wanted}", "Convert the column, or take it out if it is optional")


def _texts(column: pa.ChunkedArray, name: str, path: Path) -> tuple[Array, tuple[str, ...]]:
    """Codes and the sorted texts that occur."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(kind):
        return not_applicable("text", len(column)), ()
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise _wrong_type(path, name, kind, "text")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if column.num_chunks == 0:
        return not_applicable("text", 0), ()
    whole = column.unify_dictionaries().combine_chunks()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    codes = whole.indices.cast(pa.int32()).fill_null(-1).to_numpy(zero_copy_only=False)
    spelled = whole.dictionary.to_pylist()
    used = sorted({spelled[code] for code in np.unique(codes[codes >= 0])} - {None})
    place = {text: code for code, text in enumerate(used)}
    renamed = np.array([*(place.get(text, -1) for text in spelled), -1], dtype=np.int32)
    return renamed[codes], tuple(used)


def _numbers(column: pa.ChunkedArray, wanted: Column, path: Path) -> Array:
    """A column as integers (-1 where null), floats (NaN where null) or booleans (False where null)."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_null(kind):
        return not_applicable(wanted.kind, len(column))
    if wanted.kind == "bool":
        if not pa.types.is_boolean(kind):
            raise _wrong_type(path, wanted.name, kind, "true or false")
        return np.asarray(column.fill_null(False).to_numpy(), dtype=bool)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise _wrong_type(path, wanted.name, kind, "numbers")
    if wanted.kind == "float":
        return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
    if pa.types.is_integer(kind):
        values = column.fill_null(-1).to_numpy()
    else:  # a whole number with gaps, as pandas keeps it
        values = column.cast(pa.float64()).to_numpy()
        values = np.where(np.isnan(values), -1.0, values)
        if not np.array_equal(values, np.floor(values)):
            raise _wrong_type(path, wanted.name, "fractions", "whole numbers")
    width = np.int64 if wanted.kind == "long" else np.int32
    if len(values) and (values.max() > np.iinfo(width).max or values.min() < np.iinfo(width).min):
        raise _wrong_type(path, wanted.name, values.max(), f"whole numbers below {np.iinfo(width).max}")
    return np.asarray(values, dtype=width)


def _by_record_name(table: Table, devices: Mapping[str, DeviceRecord]) -> Table:
    """Devices called by their records' names, where a row uses an alias."""
    if "gpu" not in table:
        return table
    names = {alias: name for name, record in devices.items() for alias in record.aliases} | {n: n for n in devices}
    spelled = [names.get(text, text) for text in table.vocab["gpu"]]
    used = sorted(set(spelled))
    renamed = np.array([*(used.index(text) for text in spelled), -1], dtype=np.int32)
    return Table({**table.columns, "gpu": renamed[table["gpu"]]}, {**table.vocab, "gpu": tuple(used)})


def _check(
    table: Table,
    columns: Sequence[Column],
    devices: Mapping[str, DeviceRecord],
    path: Path,
    skipped: dict[str, int],
    *,
    skip_bad: bool,
) -> Table:
    """The table without rows that say what cannot be; unless ``skip_bad``, there must be none."""
    good = np.ones(len(table), dtype=bool)
    for reason, allowed, mend, bad in _complaints(table, columns, devices):
        rows = np.flatnonzero(bad & good)
        if not len(rows):
            continue
        if not skip_bad:
            named = ", ".join(map(str, rows[:SHOWN])) + (", …" if len(rows) > SHOWN else "")
            what = f"{path.name} in {path.parent}: {reason} in {_count(len(rows))} (counted from 0: {named})"
            raise DataError(what, allowed, f"{mend}; --skip-bad leaves such rows out")
        skipped[reason] = skipped.get(reason, 0) + len(rows)
        good &= ~bad
    return table if good.all() else table.take(good)


def _complaints(table: Table, columns: Sequence[Column], devices: Mapping[str, DeviceRecord]) -> Iterable[Complaint]:
    """What is wrong, what is allowed, how to mend it, and in which rows."""
    for column in columns:
        values = table[column.name]
        if column.required and column.kind == "text":
            yield f"{column.name} is empty", "A name in every row", "Name it", values < 0
        if column.name == "gpu":
            yield from _unknown_devices(table, devices)
        if column.least is None:
            continue
        low, above = column.least, column.above
        with np.errstate(invalid="ignore"):
            bad = (values <= low) if above else (values < low)
            if column.kind == "float":
                bad |= np.isinf(values) | (np.isnan(values) & column.required)
            elif not column.required:
                bad &= values != -1
        allowed = f"Finite numbers {'above' if above else 'from'} {low:g}"
        yield f"{column.name} is no such number", allowed, "Measure them again, or take the rows out", bad
    if "dims_json" in table:
        yield from _broken_sizes(table)
    yield from implausible(table, devices)


def _unknown_devices(table: Table, devices: Mapping[str, DeviceRecord]) -> Iterable[Complaint]:
    for name in table.vocab["gpu"]:
        if name not in devices:
            near = did_you_mean(name, devices)
            mend = f"{near} Otherwise describe it" if near else "Describe it"
            yield (
                f"device {name!r} is described nowhere",
                f"The {len(devices)} devices of learned_cost/devices, and those of the folder's gpus.csv and devices/",
                f"{mend} in devices/{name}.yaml beside the measurements (docs/new-hardware.md)",
                table.is_text("gpu", name),
            )


def _broken_sizes(table: Table) -> Iterable[Complaint]:
    """Rows of fused subgraphs that do not say what they are made of, and of others whose further sizes are none."""
    codes, fused = table["dims_json"], table.is_text("op", FUSED)
    for is_fused, reason, allowed in (
        (True, f"dims_json of op {FUSED!r} is no subgraph", "What Subgraph.to_json writes"),
        (False, "dims_json holds no sizes", "A JSON object of numbers and texts; extents are four numbers"),
    ):
        rows = fused if is_fused else ~fused & (codes >= 0)
        parses = _is_subgraph if is_fused else _is_sizes
        used = np.unique(codes[rows])
        broken = [code for code in used if code < 0 or not parses(table.vocab["dims_json"][code])]
        yield reason, allowed, "Measure them again", rows & np.isin(codes, broken)


def _is_subgraph(text: str) -> bool:
    try:
        kernels = Subgraph.from_json(text).kernels
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return False
    sizes = [
        size for kernel in kernels for size in (*kernel.dims.values(), *kernel.extents, kernel.flops, kernel.bytes)
    ]
    named = all(name in DIMS for kernel in kernels for name in kernel.dims)
    return bool(kernels) and named and all(0 <= size < LARGEST for size in sizes)


def _is_sizes(text: str) -> bool:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(data, dict):
        return False
    extents = data.pop("extents", [0] * len(ROLES))
    if not isinstance(extents, list) or len(extents) != len(ROLES):
        return False
    numbers = [value for value in (*data.values(), *extents) if not isinstance(value, str)]
    return all(isinstance(value, int | float) and 0 <= value < LARGEST for value in numbers)


def _count(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"
