"""Small tables of kernels whose times follow a simple law, to train on in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from learned_cost.data.kernel import FUSED, Kernel, Subgraph
from learned_cost.data.table import KERNEL_COLUMNS, Table, not_applicable
from learned_cost.devices.device import DeviceRecord, load_records

DEVICES = ("A100-PCIE-40GB", "T4", "V100-PCIE-32GB", "L40S")


def kernel(m: int, n: int, k: int = 0, *, op: str = "linear", stack: str = "torch") -> Kernel:
    """A product, or with no ``k`` an element-wise operator of m rows of n."""
    if k:
        dims = {"b": 1, "m": m, "n": n, "k": k}
        flops, moved = 2.0 * m * n * k, 4.0 * (m * k + n * k + m * n)
        return Kernel(op, "contraction", "fp32", dims, (m * n, k, 1, 1), flops, moved, stack=stack)
    return Kernel(op, "map", "fp32", {"m": m, "n": n}, (m * n, 1, 1, 1), float(m * n), 8.0 * m * n, stack=stack)


def chain(*kernels: Kernel) -> Subgraph:
    """One after the other, fused: what enters and leaves is moved."""
    edges = tuple((i, i + 1) for i in range(len(kernels) - 1))
    return Subgraph(kernels, edges, fused=True, bytes=kernels[0].bytes)


def seconds(subgraph: Subgraph, device: DeviceRecord) -> float:
    """The law: 5 us, arithmetic at 80 % and memory at 90 % of their peaks, one after the other."""
    peak = device.peak("fp32")
    assert peak is not None
    return 5e-6 + subgraph.flops / peak / 0.8 + subgraph.traffic / device.memory_bandwidth_bytes_per_s / 0.9


def table(entries: Sequence[tuple[Subgraph, str, float]]) -> Table:
    """Rows (subgraph, device, seconds)."""
    rows = len(entries)
    columns = {column.name: not_applicable(column.kind, rows) for column in KERNEL_COLUMNS}
    texts: dict[str, list[str | None]] = {
        column.name: [None] * rows for column in KERNEL_COLUMNS if column.kind == "text"
    }
    for row, (subgraph, device, latency_s) in enumerate(entries):
        first = subgraph.kernels[0]
        alone = len(subgraph.kernels) == 1
        texts["gpu"][row], texts["source"][row], texts["stack"][row] = device, "test", first.stack
        texts["op"][row], texts["dtype"][row] = first.op if alone else FUSED, first.dtype
        texts["dims_json"][row] = None if alone else subgraph.to_json()
        for name, size in first.dims.items() if alone else ():
            columns[name][row] = size
        columns["flops"][row], columns["bytes"][row] = subgraph.flops, subgraph.traffic
        columns["latency_us"][row], columns["fold"][row] = latency_s * 1e6, row // 3 % 5
    vocab: dict[str, tuple[str, ...]] = {}
    for name, values in texts.items():
        vocab[name] = tuple(sorted({value for value in values if value is not None}))
        places: Mapping[str | None, int] = {**{word: i for i, word in enumerate(vocab[name])}, None: -1}
        columns[name] = np.array([places[value] for value in values], dtype=np.int32)
    return Table(columns, vocab)


def world(rows: int, seed: int = 0, *, fused: bool = True, devices: Sequence[str] = DEVICES) -> Table:
    """Products, element-wise operators and (a tenth) fused chains of both, on each device."""
    random = np.random.default_rng(seed)
    records = load_records()
    entries = []
    for number in range(rows):
        m, n, k = (int(2**size) for size in random.uniform(5, 12, size=3))
        product, sum_, gelu = kernel(m, n, k), kernel(m, n, op="add"), kernel(m, n, op="gelu")
        choices = [Subgraph.of(product), Subgraph.of(sum_), Subgraph.of(gelu)]
        subgraph = chain(product, gelu, sum_) if fused and number % 10 == 0 else choices[number % 3]
        device = devices[number % len(devices)]
        entries.append((subgraph, device, seconds(subgraph, records[device])))
    return table(entries)
