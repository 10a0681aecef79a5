"""Small folders of measurements, as pdv profile would write them, for tests to read and to damage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GPUS = ("A100-SXM4-80GB", "T4", "L40S")


def kernel_columns(rows: int = 60, seed: int = 0) -> dict[str, Any]:
    """Products of plausible times on three devices, a few of them row functions."""
    rng = np.random.default_rng(seed)
    m, n, k = (2 ** rng.integers(5, 12, rows) for _ in range(3))
    linear = rng.random(rows) < 0.7
    flops = np.where(linear, 2.0 * m * n * k, 5.0 * m * n)
    moved = np.where(linear, 4.0 * (m * k + k * n + m * n), 8.0 * m * n)
    gpu = rng.integers(0, len(GPUS), rows)
    rate = np.array([15e12, 4e12, 40e12])[gpu]
    seconds = 5e-6 + flops / rate + moved / 3e11
    return {
        "source": ["test"] * rows, "gpu": [GPUS[i] for i in gpu],
        "op": ["linear" if flag else "layernorm" for flag in linear], "dtype": ["fp32"] * rows,
        "b": np.ones(rows, np.int32), "m": m.astype(np.int32), "n": n.astype(np.int32),
        "k": [int(size) if flag else None for size, flag in zip(k, linear, strict=True)],
        "flops": flops, "bytes": moved, "roofline_us": flops / rate * 0.8e6, "latency_us": seconds * 1e6,
        "suspect": [False] * rows, "fold": rng.integers(0, 5, rows).astype(np.int8),
    }  # fmt: skip


def collective_columns(rows: int = 30, seed: int = 0) -> dict[str, Any]:
    """All-reduces of one system over a range of sizes."""
    rng = np.random.default_rng(seed)
    size = 2 ** rng.integers(10, 28, rows)
    return {
        "source": ["test"] * rows, "gpu": ["A100-SXM4-80GB"] * rows, "system": ["a100_sxm"] * rows,
        "interconnect": ["NVLink3+NVSwitch"] * rows, "collective": ["all_reduce"] * rows, "algo_lib": ["nccl"] * rows,
        "lib_version": ["nccl 2.27.3"] * rows, "dtype": ["bf16"] * rows, "n_devices": np.full(rows, 8, np.int32),
        "devices_per_node": np.full(rows, 8, np.int32), "n_nodes": np.full(rows, 1, np.int32),
        "bytes": size.astype(np.int64), "latency_us": 12.0 + size / 2e5, "fold": rng.integers(0, 5, rows),
    }  # fmt: skip


def write(folder: Path, name: str = "kernels", columns: Mapping[str, Any] | None = None) -> Path:
    """Write a file of the folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if columns is None:
        columns = kernel_columns() if name.startswith("kernels") else collective_columns()
    pq.write_table(pa.table(dict(columns)), folder / f"{name}.parquet")
    return folder
