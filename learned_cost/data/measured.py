"""Measured kernels by what they are: looked up before any model is asked. Entry point: ``Measurements.read``."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import UsageError
from learned_cost.data.kernel import DIMS, FUSED, Kernel
from learned_cost.devices.device import DeviceRecord

if TYPE_CHECKING:
    from learned_cost.data.table import Table

SHIPPED = Path(__file__).parent.parent / "profiles"
Key = tuple[object, ...]
Moved = tuple[str, float, float]  # collective, bytes, seconds
Group = tuple[str, str, int, float]  # device, interconnect, devices, cores of each process: at most one

ON_CORES = "loopback"  # the interconnect of processes
PROFILED_CORES = 2  # of a node whose profile does not tell
NEAREST = 5  # measured kernels that say what a larger one takes
FAMILY = 5  # parts of a key that say what is measured, before its sizes
ALIKE = 1.1  # times the bytes of a measured lookup, whose sizes do not say how large its table is


@dataclass(frozen=True)
class Row:
    """One measured kernel: its sizes by name, arithmetic and bytes, and seconds with their deviation."""

    dims: tuple[tuple[str, float], ...]
    flops: float
    bytes: float
    seconds: float
    std_s: float

    def far(self, kernel: Kernel) -> float:
        """Distance between sizes, in doublings of each."""
        return sum(abs(math.log2(max(size, 1) / max(kernel.dims.get(name, 1), 1))) for name, size in self.dims)


@dataclass(frozen=True)
class Measurements:
    """Medians and deviations in seconds, by device and kernel; of several rows of a kernel the median counts.

    ``collectives`` are by device, interconnect, number of devices in one node and, of processes on cores, the share of
    a core that each of the node's has.
    """

    rows: Mapping[Key, Row]
    name: str
    digest: str
    collectives: Mapping[Group, tuple[Moved, ...]] = field(default_factory=dict)

    @cached_property
    def families(self) -> Mapping[Key, Sequence[Row]]:
        """The rows by device, operator, type, direction and stack."""
        found: dict[Key, list[Row]] = {}
        for key, row in self.rows.items():
            found.setdefault(key[:FAMILY], []).append(row)
        return found

    @cached_property
    def largest(self) -> Mapping[Key, Mapping[str, float]]:
        """By family, the largest of each size, and of bytes ("")."""
        found: dict[Key, dict[str, float]] = {}
        for family, rows in self.families.items():
            of = found.setdefault(family, {"": max(row.bytes for row in rows)})
            for row in rows:
                for name, size in row.dims:
                    of[name] = max(of.get(name, 0), size)
        return found

    @property
    def devices(self) -> set[str]:
        """What was measured."""
        return {str(key[0]) for key in (*self.rows, *self.collectives)}

    @classmethod
    def read(cls, folders: Sequence[Path], name: str) -> Measurements:
        """Of the kernels in profile folders.

        Raises:
            UsageError: if what reads them is not installed.
            DataError: if a folder is no profile, or damaged.
        """
        try:
            from learned_cost.data.dataset import read_folder
        except ImportError as error:  # pricing without measurements does not need it
            what = f"profiles are Parquet, and {error.name} is not installed"
            raise UsageError(what, mend="Install pyarrow, or take --cost learned") from error

        found: dict[Key, list[Row]] = {}
        moved: dict[Group, list[Moved]] = {}
        for folder in folders:
            read = read_folder(folder)
            for key, row in () if read.kernels is None else _rows(read.kernels):
                found.setdefault(key, []).append(row)
            for place, collective in () if read.collectives is None else _move(read.collectives):
                moved.setdefault(place, []).append(collective)
        rows = {key: _median(every) for key, every in found.items()}
        whole = {place: _medians(every) for place, every in moved.items()}
        total = hashlib.sha256(repr((sorted(rows.items(), key=repr), sorted(whole.items()))).encode()).hexdigest()
        return cls(rows, name, total, whole)

    def seconds(self, kernel: Kernel, device: DeviceRecord) -> tuple[float, float] | None:
        """Median and deviation of this very kernel on this device, if it was measured."""
        dims = sizes_of({name: kernel.dims[name] for name in DIMS if name in kernel.dims}, kernel.flops)
        found = (self.rows.get((*family, dims)) for family in _families(kernel, device))
        row = next((row for row in found if row is not None), None)
        if row is None or (kernel.kind == "index" and not row.bytes / ALIKE < kernel.bytes < row.bytes * ALIKE):
            return None
        return row.seconds, row.std_s

    def beyond(self, kernel: Kernel, device: DeviceRecord) -> tuple[float, float] | None:
        """Seconds and deviation of a kernel larger than all of its family that were measured: at the rate of the
        nearest ones, of arithmetic for contractions, else of memory. None if it is within what was measured.

        A model that was trained on smaller kernels alone says nothing of it: it does not foretell beyond its data.
        """
        key = next((key for key in _families(kernel, device) if key in self.families), None)
        family = () if key is None else self.families[key]
        if key is None or len(family) < NEAREST or not _is_beyond(kernel, self.largest[key]):
            return None
        near = sorted(family, key=lambda row: (row.far(kernel), -row.bytes))[:NEAREST]
        if kernel.kind == "contraction":
            seconds = [row.seconds * kernel.flops / max(row.flops, 1.0) for row in near]
        else:
            seconds = [row.seconds * kernel.bytes / max(row.bytes, 1.0) for row in near]
        middle = statistics.median(seconds)
        return (middle, statistics.pstdev(seconds)) if middle > 0.0 else None


def _is_beyond(kernel: Kernel, largest: Mapping[str, float]) -> bool:
    """Whether a kernel moves more bytes, or has a larger size, than any of a family."""
    if kernel.bytes > largest[""]:
        return True
    return any(size > largest.get(name, math.inf) for name, size in kernel.dims.items())


def _families(kernel: Kernel, device: DeviceRecord) -> list[Key]:
    """What measures such kernels, the nearest to a running program first: on a GPU, whose host runs ahead of it, what
    was replayed without launches.
    """
    stacks = ["cudagraph"] if device.kind == "gpu" and kernel.stack == "torch" else []
    return [(device.name, kernel.op, kernel.dtype, kernel.direction, stack) for stack in (*stacks, kernel.stack)]


def sizes_of(dims: Mapping[str, float], flops: float) -> tuple[tuple[str, float], ...]:
    """Dims as a key; of windows with their arithmetic, by which those of groups of channels differ from whole ones."""
    return (*dims.items(), *([("flops", round(flops))] if "ksize" in dims and math.isfinite(flops) else []))


def share_of(share: float) -> float:
    """What a process has of a core, as a key: 2/3 is what a cluster file says in two digits."""
    return round(min(share, 1.0), 2)


def _median(rows: Sequence[Row]) -> Row:
    seconds = statistics.median(row.seconds for row in rows)
    return replace(rows[0], seconds=seconds, std_s=max(row.std_s for row in rows))


def _rows(table: Table) -> list[tuple[Key, Row]]:
    texts = [table.text(name).tolist() for name in ("gpu", "op", "dtype", "direction", "stack")]
    caches = table.text("l2").tolist()
    sizes = {name: table[name].tolist() for name in DIMS if name in table}
    stds, suspect = table["std_us"].tolist(), table["suspect"].tolist()
    flops, moved = table["flops"].tolist(), table["bytes"].tolist()
    found: list[tuple[Key, Row]] = []
    for row, seconds in enumerate(table.latency_s.tolist()):
        gpu, op, dtype, direction, stack = (column[row] for column in texts)
        if suspect[row] or op == FUSED or direction is None or caches[row] == "cold":
            continue  # a consumer meets what was just made, not an empty cache
        dims = {name: column[row] for name, column in sizes.items() if column[row] >= 0}
        std_s = stds[row] * 1e-6 if math.isfinite(stds[row]) else 0.0
        one = Row(tuple(dims.items()), flops[row], moved[row], seconds, std_s)
        found.append(((gpu, op, dtype, direction, stack, sizes_of(dims, flops[row])), one))
    return found


def _medians(rows: Sequence[Moved]) -> tuple[Moved, ...]:
    """Of several measurements of a collective of a size, the median."""
    found: dict[tuple[str, float], list[float]] = {}
    for name, num_bytes, seconds in rows:
        found.setdefault((name, num_bytes), []).append(seconds)
    return tuple((*key, statistics.median(seconds)) for key, seconds in sorted(found.items()))


def _move(table: Table) -> list[tuple[Group, Moved]]:
    """Collectives among the devices of one node."""
    texts = [table.text(name).tolist() for name in ("gpu", "interconnect", "collective")]
    names = "bytes", "n_devices", "devices_per_node", "n_nodes", "cores"
    sizes, devices, beside, nodes, cores = (table[name].tolist() for name in names)
    found: list[tuple[Group, Moved]] = []
    for row, seconds in enumerate(table.latency_s.tolist()):
        gpu, link, name = (column[row] for column in texts)
        of_node = cores[row] if cores[row] > 0 else PROFILED_CORES
        share = of_node / max(beside[row], devices[row]) if link == ON_CORES else 1.0
        if nodes[row] <= 1 and sizes[row] > 0:
            found.append(((gpu, link or "", devices[row], share_of(share)), (name, float(sizes[row]), seconds)))
    return found
