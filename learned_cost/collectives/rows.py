"""Collectives as columns of numbers and names: what the collective model reads of a row.

Decides how a row's names are understood: the class of its library, of its link, and the rates of the links it uses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord, find, load_records

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = NDArray[np.object_]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "ep_dispatch", "ep_combine")
EXPERTS = ("ep_dispatch", "ep_combine")
# Classes of libraries: NCCL timed in graphs or by its own benchmark, from PyTorch, one-shot kernels started one by one,
# in graphs, TensorRT-LLM's, MPI, oneCCL, DeepEP for throughput and for latency, gloo.
LIBRARIES = ("nccl", "torch", "eager", "graph", "trtllm", "mpi", "oneccl", "deepep", "deepep_ll", "gloo")
_LIBRARY_SIGNS = (
    ("deepep_ll", "deepep_ll"), ("deepep", "deepep"), ("gloo", "gloo"), ("mpi", "mpi"), ("baidu", "mpi"),
    ("osu", "mpi"), ("oneccl", "oneccl"), ("trtllm", "trtllm"), ("graph", "graph"), ("eager", "eager"),
    ("custom", "graph"), ("torch", "torch"),
)  # fmt: skip
LINKS = ("nvlink", "pcie", "between", "memory")
# Bytes/s per direction and device. NVLink: NVIDIA's architecture white papers, half of the total; PCIe x16 nominal.
NVLINK = {"2": 150e9, "3": 300e9, "4": 450e9, "5": 900e9}
PCIE = {"3": 16e9, "4": 32e9, "5": 64e9, "6": 128e9}
UNNAMED_NETWORK = 6e9  # a device's share of a network that nothing names (the median of those measured)
DEFAULT_LINK = 32e9  # PCIe 4: of a device that nothing describes


@dataclass(frozen=True)
class Cases:
    """Collectives to be priced, by columns of equal length.

    Attributes:
        system, gpu, interconnect, collective, library, version, dtype: as in a profile; "" where a row says nothing.
        n, per_node, nodes: devices in all, on each node, and nodes.
        bytes: of the buffer, in the convention of nccl-tests: of an all-gather the result, of a reduce-scatter the
            input.
    """

    system: Names
    gpu: Names
    interconnect: Names
    collective: Names
    library: Names
    version: Names
    dtype: Names
    n: Floats
    per_node: Floats
    nodes: Floats
    bytes: Floats

    def __len__(self) -> int:
        return len(self.bytes)

    def take(self, rows: Any) -> Cases:  # Any: indices or a mask
        """Some rows."""
        return Cases(*(getattr(self, column.name)[rows] for column in fields(self)))

    def with_bytes(self, sizes: Floats) -> Cases:
        """The same at other sizes."""
        return replace(self, bytes=sizes)

    def curves(self) -> tuple[Ints, Ints]:
        """Rows that differ in nothing but bytes: (a row of each curve, the curve of each row)."""
        return distinct(*(getattr(self, column.name) for column in fields(self)[:-1]))


def distinct(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """(first row of each distinct combination, in order of appearance; the combination of each row)."""
    seen: dict[tuple[object, ...], int] = {}
    first: list[int] = []
    codes = np.empty(len(columns[0]), dtype=np.int64)
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        code = seen.setdefault(key, len(seen))
        if code == len(first):
            first.append(row)
        codes[row] = code
    return np.array(first, dtype=np.int64), codes


def cases_of(table: Table) -> Cases:
    """The rows of a table; a node count or devices per node that is missing is filled in from the other."""
    rows = len(table)

    def text(name: str) -> Names:
        if name not in table:
            return np.full(rows, "", dtype=object)
        found = table.text(name)
        return np.array(["" if name is None else name for name in found.tolist()], dtype=object)

    n = table["n_devices"].astype(np.float64)
    per_node = np.minimum(_known_value(table, "devices_per_node", rows), n)
    nodes = _known_value(table, "n_nodes", rows)
    nodes = np.where(np.isfinite(nodes), nodes, np.where(np.isfinite(per_node), np.ceil(n / per_node), 1.0))
    per_node = np.where(np.isfinite(per_node), per_node, np.ceil(n / nodes))
    return Cases(
        text("system"),
        text("gpu"),
        text("interconnect"),
        text("collective"),
        text("algo_lib"),
        text("lib_version"),
        text("dtype"),
        n,
        per_node,
        nodes,
        np.maximum(table["bytes"].astype(np.float64), 1.0),
    )


def _known_value(table: Table, name: str, rows: int) -> Floats:
    column = table[name].astype(np.float64) if name in table else np.full(rows, -1.0)
    return np.where(column >= 1.0, column, np.nan)


def library_class(name: str) -> int:
    """Index into ``LIBRARIES``; a name without a sign of any counts as NCCL."""
    lower = name.lower()
    return LIBRARIES.index(next((kind for sign, kind in _LIBRARY_SIGNS if sign in lower), "nccl"))


def blocks_used(name: str) -> float:
    """The SMs that a library's name says it uses ("…_sms20"), else 0."""
    found = re.search(r"sms(\d+)", name)
    return float(found.group(1)) if found else 0.0


@functools.cache
def device_of(gpu: str) -> DeviceRecord | None:
    """The record of a device that one of ours describes."""
    return find(gpu, _records())


@functools.cache
def _records() -> Sequence[DeviceRecord]:
    return tuple(load_records().values())


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """How a case's devices are joined.

    Attributes:
        kind: index into ``LINKS``, of the slowest link on the way; inner: of that within a node.
        rate: bytes/s per device and direction.
        ports: of a node that a ring over whole nodes sends by at once, at that rate.
        switched: each reaches every other at the full rate (NVSwitch), and from NVLink 4 on the switch can add.
        clock: of the devices, Hz.
    """

    kind: int
    rate: float
    switched: bool
    clock: float
    inner: int
    ports: float = 1.0


@functools.lru_cache(maxsize=4096)
def link_facts(gpu: str, interconnect: str, n: float, nodes: float) -> LinkFacts:
    """From the interconnect's name, then the device's record. Of bridged pairs only two devices share a bridge."""
    record = device_of(gpu)
    name = interconnect.lower() or ((record.link or "") if record else "").lower()
    clock = (record.boost_hz or 1.8e9) if record else 1.8e9
    within, _, across = name.partition(";")
    if record is not None and record.kind == "cpu":
        memory = LINKS.index("memory")
        return LinkFacts(memory, record.memory_bandwidth_bytes_per_s, switched=False, clock=clock, inner=memory)
    nvlink, pcie = re.search(r"nvlink-?(\d)", within), re.search(r"pcie(\d)(?:x(\d+))?", within)
    paired = "pair" in within or "bridge" in within
    switched = "nvswitch" in within or "nvl72" in within
    rack = "nvl72" in within
    joined = nvlink is not None and (n <= 2 or not paired)
    if nvlink and joined:
        kind, rate = LINKS.index("nvlink"), NVLINK.get(nvlink.group(1), NVLINK["5"])
        if record and record.link and "nvlink" in record.link.lower() and record.link_bytes_per_s:
            rate = record.link_bytes_per_s
    elif pcie:
        kind = LINKS.index("pcie")
        rate = PCIE.get(pcie.group(1), PCIE["5"]) * (float(pcie.group(2)) / 16.0 if pcie.group(2) else 1.0)
    else:
        rate = (record.link_bytes_per_s or record.host_link_bytes_per_s or DEFAULT_LINK) if record else DEFAULT_LINK
        kind = LINKS.index("nvlink" if rate > 100e9 else "pcie")
    if nodes > 1 and not (joined and rack):
        ports = np.ceil(n / nodes) if switched else 1.0  # boxes with switches have a port a device, others one a node
        between = LINKS.index("between")
        return LinkFacts(between, _between(across, record), switched=False, clock=clock, inner=kind, ports=float(ports))
    return LinkFacts(kind, rate, switched and joined, clock, inner=kind)


def _between(across: str, record: DeviceRecord | None) -> float:
    """A device's share of the network between nodes."""
    if "fdr" in across:
        return 6.8e9  # InfiniBand FDR 4x, 54.5 Gbit/s
    if record is not None and record.internode_bytes_per_s:
        return record.internode_bytes_per_s
    return UNNAMED_NETWORK
