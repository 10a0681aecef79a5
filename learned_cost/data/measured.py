"""Measured kernels by what they are: looked up before any model is asked. Entry point: ``Measurements.read``."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Measurements:
    """Medians and deviations in seconds, by device and kernel; of several rows of a kernel the median counts.

    ``collectives`` are by device, interconnect and number of devices in one node.
    """

    rows: Mapping[Key, tuple[float, float]]
    name: str
    digest: str
    collectives: Mapping[tuple[str, str, int], tuple[Moved, ...]] = field(default_factory=dict)

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

        found: dict[Key, list[tuple[float, float]]] = {}
        moved: dict[tuple[str, str, int], list[Moved]] = {}
        for folder in folders:
            read = read_folder(folder)
            for key, row in () if read.kernels is None else _rows(read.kernels):
                found.setdefault(key, []).append(row)
            for place, one in () if read.collectives is None else _move(read.collectives):
                moved.setdefault(place, []).append(one)
        rows = {key: (statistics.median(m for m, _ in every), max(s for _, s in every)) for key, every in found.items()}
        whole = {place: _medians(every) for place, every in moved.items()}
        total = hashlib.sha256(repr((sorted(rows.items(), key=repr), sorted(whole.items()))).encode()).hexdigest()
        return cls(rows, name, total, whole)

    def seconds(self, kernel: Kernel, device: DeviceRecord) -> tuple[float, float] | None:
        """Median and deviation of this very kernel on this device, if it was measured."""
        dims = tuple((name, kernel.dims[name]) for name in DIMS if name in kernel.dims)
        return self.rows.get((device.name, kernel.op, kernel.dtype, kernel.direction, kernel.stack, dims))


def _rows(table: Table) -> list[tuple[Key, tuple[float, float]]]:
    texts = [table.text(name).tolist() for name in ("gpu", "op", "dtype", "direction", "stack")]
    caches = table.text("l2").tolist()
    sizes = {name: table[name].tolist() for name in DIMS if name in table}
    stds, suspect = table["std_us"].tolist(), table["suspect"].tolist()
    found: list[tuple[Key, tuple[float, float]]] = []
    for row, seconds in enumerate(table.latency_s.tolist()):
        gpu, op, dtype, direction, stack = (column[row] for column in texts)
        if suspect[row] or op == FUSED or direction is None or caches[row] == "cold":
            continue  # a consumer meets what was just made, not an empty cache
        dims = tuple((name, column[row]) for name, column in sizes.items() if column[row] >= 0)
        std_s = stds[row] * 1e-6 if math.isfinite(stds[row]) else 0.0
        found.append(((gpu, op, dtype, direction, stack, dims), (seconds, std_s)))
    return found


def _medians(rows: Sequence[Moved]) -> tuple[Moved, ...]:
    """Of several measurements of a collective of a size, the median."""
    found: dict[tuple[str, float], list[float]] = {}
    for name, num_bytes, seconds in rows:
        found.setdefault((name, num_bytes), []).append(seconds)
    return tuple((*key, statistics.median(seconds)) for key, seconds in sorted(found.items()))


def _move(table: Table) -> list[tuple[tuple[str, str, int], Moved]]:
    """Collectives among the devices of one node."""
    texts = [table.text(name).tolist() for name in ("gpu", "interconnect", "collective")]
    sizes, devices, nodes = (table[name].tolist() for name in ("bytes", "n_devices", "n_nodes"))
    return [
        ((texts[0][row], texts[1][row] or "", devices[row]), (texts[2][row], float(sizes[row]), seconds))
        for row, seconds in enumerate(table.latency_s.tolist())
        if nodes[row] <= 1 and sizes[row] > 0
    ]
