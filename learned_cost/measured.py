"""Measured kernels by what they are: looked up before any model is asked. Entry point: ``Measurements.read``."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ir.errors import UsageError
from learned_cost.device import DeviceRecord
from learned_cost.kernel import DIMS, FUSED, Kernel

if TYPE_CHECKING:
    from learned_cost.table import Table

SHIPPED = Path(__file__).parent / "profiles"
Key = tuple[object, ...]


@dataclass(frozen=True)
class Measurements:
    """Medians and deviations in seconds, by device and kernel; of several rows of a kernel the median counts."""

    rows: Mapping[Key, tuple[float, float]]
    name: str
    digest: str

    @classmethod
    def read(cls, folders: Sequence[Path], name: str) -> Measurements:
        """Of the kernels in profile folders.

        Raises:
            UsageError: if what reads them is not installed.
            DataError: if a folder is no profile, or damaged.
        """
        try:
            from learned_cost.dataset import read_folder
        except ImportError as error:  # pricing without measurements does not need it
            what = f"profiles are Parquet, and {error.name} is not installed"
            raise UsageError(what, mend="Install pyarrow, or take --cost learned") from error

        found: dict[Key, list[tuple[float, float]]] = {}
        for folder in folders:
            table = read_folder(folder).kernels
            for key, row in () if table is None else _rows(table):
                found.setdefault(key, []).append(row)
        rows = {key: (statistics.median(m for m, _ in every), max(s for _, s in every)) for key, every in found.items()}
        total = hashlib.sha256(repr(sorted(rows.items(), key=repr)).encode()).hexdigest()
        return cls(rows, name, total)

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
