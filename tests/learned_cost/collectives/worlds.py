"""Made-up systems whose collectives follow a law, so that what a model learned of them can be checked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from learned_cost.collectives.rows import Floats
from learned_cost.data.table import COLLECTIVE_COLUMNS, Array, Table, not_applicable

# system: (gpu, interconnect, seconds of a call, share of the nominal rate that is reached)
SYSTEMS = {
    "fast": ("A100-SXM4-80GB", "NVLink3+NVSwitch", 9e-6, 0.72, 300e9),
    "faster": ("H200-SXM-141GB", "NVLink4+NVSwitch", 8e-6, 0.75, 450e9),
    "slow": ("L40S", "PCIe4", 12e-6, 0.6, 32e9),
}
# One of its own: starts take five times as long and half of the rate is reached.
ODD = ("A100-SXM4-80GB", "NVLink3+NVSwitch", 45e-6, 0.3, 300e9)
SIZES = tuple(2.0**power for power in range(9, 29, 2))


def table_of(systems: Mapping[str, tuple[str, str, float, float, float]], seed: int = 0, noise: float = 0.02) -> Table:
    """all_reduce and all_gather of each system, of 2 and 8 devices, by NCCL."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for system, (gpu, interconnect, start, reached, rate) in systems.items():
        for collective, factor in (("all_reduce", 2.0), ("all_gather", 1.0)):
            for devices in (2, 8):
                for size in SIZES:
                    wire = factor * (devices - 1) / devices * size
                    seconds = start + 1e-6 * factor * (devices - 1) + wire / (reached * rate)
                    seconds *= float(np.exp(noise * random.standard_normal()))
                    rows.append(
                        {
                            "system": system, "gpu": gpu, "interconnect": interconnect, "collective": collective,
                            "algo_lib": "nccl", "n_devices": devices, "devices_per_node": devices, "n_nodes": 1,
                            "bytes": int(size), "latency_us": seconds * 1e6,
                        }
                    )  # fmt: skip
    return rows_table(rows)


def rows_table(rows: list[dict[str, object]]) -> Table:
    """Rows as columns; what a row does not say does not apply."""
    columns: dict[str, Array] = {}
    vocab: dict[str, tuple[str, ...]] = {}
    for column in COLLECTIVE_COLUMNS:
        values = [row.get(column.name) for row in rows]
        if all(value is None for value in values):
            columns[column.name] = not_applicable(column.kind, len(rows))
            vocab |= {column.name: ()} if column.kind == "text" else {}
        elif column.kind == "text":
            names = tuple(sorted({str(value) for value in values}))
            vocab[column.name] = names
            columns[column.name] = np.array([names.index(str(value)) for value in values], dtype=np.int32)
        else:
            columns[column.name] = np.array(values, dtype=np.float64 if column.kind == "float" else np.int64)
    return Table(columns, vocab)


def errors(mean: Floats, table: Table) -> Floats:
    """Relative to the measurement."""
    return np.abs(np.exp(mean) / table.latency_s - 1.0)
