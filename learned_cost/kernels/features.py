"""What the model reads of a kernel on a device: how long each resource would take alone, and the shape's numbers.

Resources (log seconds): arithmetic at the peak rate of the dtype, memory at its bandwidth, bytes through the units,
special functions or lanes, a step that nothing runs beside, and bytes at one unit's clock. They carry the device; the
``blind`` numbers beside them are the shape, and sizes relative to the device (waves of tiles, bytes over cache), so a
device that was never seen asks about things that were. ``own`` numbers are the device's, for kernels of seen devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import DIMS, ROLES, family
from learned_cost.devices.device import DeviceRecord
from learned_cost.kernels.nodes import EXTRA, TEXTS, Codes, Floats, Nodes
from learned_cost.kernels.products import Products, experts_of, products_of

Singles = NDArray[np.float32]

RESOURCES = ("arithmetic", "memory", "units", "lanes", "serial", "one_unit")
TILES = ((16, 64), (64, 64), (128, 64), (128, 128), (128, 256), (256, 128))
GRAPH_NUMBERS = ("nodes", "edges", "fused", "traffic", "intensity")
LAYOUT_VERSION = 1

PORT_BYTES = 64  # a clock, between a unit and the cache; CUDA programming guide, 128-byte lines at half rate
LANES = {"map": 128, "row": 16}  # a clock and unit: float lanes; special functions (CUDA programming guide, throughput)
# Float32 FLOP/s a watt that full-power cards of a year reach (device records): a card that promises much more than 1.5
# times that slows down under load (T4, P4, L4).
YEARS = (2015, 2017, 2018, 2020, 2022, 2025)
FLOPS_PER_WATT = (32e9, 45e9, 52e9, 95e9, 180e9, 190e9)
HEADROOM = 1.5
WINOGRAD = 2.25  # multiplications saved by F(2x2, 3x3): Lavin and Gray, CVPR 2016
CACHE_SPEEDUP = 6.0  # of the last cache over memory, at most (measured kernels of 96-128 MB caches)
PEAK_MARGIN = 1.5  # clocks above the stated boost and rounded rates: rows beyond it are marked suspect in the data

CHIP_RATES = ("fp32", "fp16", "bf16", "fp8")

PEAKS: Mapping[str, Sequence[str]] = {
    "fp64": ("fp64", "fp32"), "fp32": ("fp32_matrix", "fp32"), "fp16": ("fp16", "fp32"), "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"), "fp8_block": ("fp8", "bf16", "fp16", "fp32"),
    "nvfp4": ("fp4", "fp8", "bf16", "fp32"), "int4_wo": ("bf16", "fp16", "fp32"), "int8_wo": ("bf16", "fp16", "fp32"),
    "sq": ("int8", "fp16", "fp32"), "int8": ("int8", "fp16", "fp32"), "w4a16_mxfp4": ("bf16", "fp16", "fp32"),
    "w4a8_mxfp4_mxfp8": ("fp8", "bf16", "fp32"),
}  # fmt: skip


@dataclass(frozen=True)
class Features:
    """Of kernels (n) and of the subgraphs (g) that they make up.

    Attributes:
        resources: [n, len(RESOURCES)] log seconds.
        bound: [n] log seconds below which no kernel can be.
        blind: [n, f] numbers that say nothing of which device it is; own: [n, d] those that do.
        texts, graph, edges, device: as ``Nodes``; devices: their names.
        chips: of each device, what it computes with; devices that differ in memory alone have the same.
        graphs: [g, len(GRAPH_NUMBERS)].
    """

    resources: Singles
    bound: Singles
    blind: Singles
    own: Singles
    texts: Mapping[str, tuple[Codes, tuple[str, ...]]]
    graph: Codes
    edges: Codes
    graphs: Singles
    device: Codes
    devices: tuple[str, ...]
    chips: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.graphs)


def features_of(nodes: Nodes) -> Features:
    """Features of all kernels and subgraphs."""
    work = products_of(nodes)
    on = nodes.device[nodes.graph]
    records = nodes.devices

    def device(read: Callable[[DeviceRecord], float | None], otherwise: float) -> Floats:
        return np.array([read(record) or otherwise for record in records], dtype=np.float64)[on]

    sms = device(lambda r: r.sm_count, 1.0)
    clock = device(lambda r: r.boost_hz, 1.5e9)
    bandwidth = device(lambda r: r.memory_bandwidth_bytes_per_s, 1e11)
    cache = device(lambda r: r.l2_bytes, 4e6)
    peak = _peaks(nodes, on)
    resources, bound = _resources(nodes, work, sms, clock, bandwidth, cache, peak, device(_throttle, 1.0))
    blind = [*_shape(nodes, work), *_relative(work, resources, sms, cache), *_tiles(work, sms)]
    own = [
        *(np.log(value) for value in (sms, clock, bandwidth, peak, peak / sms / clock, cache)),
        *(np.log(value) for value in (bandwidth / sms, peak / bandwidth, cache / bandwidth)),
        np.log(device(lambda r: r.shared_memory_bytes_per_sm, 64e3)),
        np.log(device(lambda r: r.tdp_w, 250.0)),
        np.log(device(lambda r: r.peak("fp32"), 1e13) / sms / clock),
        device(lambda r: r.year, 2020) / 4.0 - 505.0,
        *(device(lambda r, v=vendor: float(r.vendor == v), 0.0) for vendor in ("nvidia", "amd", "intel")),  # type: ignore[misc]
        *(device(lambda r, a=arch: float(r.arch == a), 0.0) for arch in ("hopper", "blackwell")),  # type: ignore[misc]
        device(lambda r: float(r.kind == "cpu"), 0.0),
        resources[:, 0],
        resources[:, 1],
    ]
    return Features(
        resources.astype(np.float32),
        bound.astype(np.float32),
        _columns(blind),
        _columns(own),
        nodes.texts,
        nodes.graph,
        nodes.edges,
        _graphs(nodes, work),
        nodes.device,
        tuple(record.name for record in records),
        tuple(chip(record) for record in records),
    )


def chip(record: DeviceRecord) -> str:
    """What a device computes with, in a word: its architecture, units and rates."""
    rates = ",".join(f"{name}={rate:.3g}" for name, rate in sorted(record.peak_flops.items()) if name in CHIP_RATES)
    return f"{record.vendor}/{record.arch}/{record.sm_count}/{rates}"


def stand_ins(
    features: Features, devices: Sequence[str], known: Mapping[str, tuple[str, Sequence[str]]]
) -> NDArray[np.int64]:
    """[device, dtype + 1] who answers for a device and a dtype: one more than the place in ``devices``, 0 for nobody.

    A device that was trained on answers for itself; for another one, a device of the same chip that was trained on
    kernels of this dtype (``known``: chip and dtypes by device).
    """
    _, dtypes = features.texts["dtype"]
    found = np.zeros((len(features.devices), len(dtypes) + 1), dtype=np.int64)
    for row, (name, its_chip) in enumerate(zip(features.devices, features.chips, strict=True)):
        if name in devices:
            found[row] = devices.index(name) + 1
            continue
        for place, other in enumerate(devices):
            other_chip, covered = known.get(other, ("", ()))
            if other_chip == its_chip:
                here = [dtype in covered for dtype in dtypes]
                found[row, : len(dtypes)] = np.where(here, place + 1, found[row, : len(dtypes)])
    return found


def layout() -> str:
    """Hash of what the columns are: weights of another layout do not fit."""
    words = (LAYOUT_VERSION, RESOURCES, TILES, DIMS, EXTRA, ROLES, TEXTS, GRAPH_NUMBERS)
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _columns(values: Sequence[Floats]) -> Singles:
    return np.stack([np.asarray(value, dtype=np.float32) for value in values], axis=1)


def _peaks(nodes: Nodes, on: Codes) -> Floats:
    """[n] FLOP/s of each kernel's dtype on its device; what a device lacks runs in the next wider one it has."""
    codes, names = nodes.texts["dtype"]
    table = np.ones((len(nodes.devices), len(names) + 1))
    for row, record in enumerate(nodes.devices):
        fp32 = record.peak("fp32") or 1e12
        for column, name in enumerate((*names, "fp32")):
            rates = [record.peak(dtype) for dtype in PEAKS.get(name, ("fp32",))]
            best = next((rate for rate in rates if rate), fp32)
            table[row, column] = best if name == "fp64" else max(best, fp32)
    found: Floats = table[on, codes]
    return found


def _throttle(record: DeviceRecord) -> float:
    """How much slower than its peak a card of little power is under load."""
    fp32 = record.peak("fp32")
    if record.tdp_w is None or fp32 is None or record.kind != "gpu":
        return 1.0
    usual = np.exp(np.interp(record.year or 2020, YEARS, np.log(FLOPS_PER_WATT)))
    return max(1.0, fp32 / record.tdp_w / float(usual) / HEADROOM)


def _resources(
    nodes: Nodes,
    work: Products,
    sms: Floats,
    clock: Floats,
    bandwidth: Floats,
    cache: Floats,
    peak: Floats,
    throttle: Floats,
) -> tuple[Floats, Floats]:
    """[n, RESOURCES] and the bound, in log seconds."""
    arithmetic, memory = work.flops / peak, work.bytes / bandwidth
    points = work.b * work.m * work.n
    lanes = np.where(work.attention, LANES["row"], LANES["map"])
    seconds = (
        arithmetic * throttle,
        memory,
        work.bytes / (sms * clock * PORT_BYTES),
        points / (sms * clock * lanes),
        1000.0 / clock,
        work.bytes / (clock * 16.0 * PORT_BYTES),
    )
    codes, ops = nodes.texts["op"]
    convolution = np.isin(codes, [code for code, op in enumerate(ops) if family(op) == "convolution"])
    # of what was stated: work that was derived (mixed batches, recurrences) is an estimate, and bounds nothing
    least = np.maximum(
        nodes.flops / peak / np.where(convolution, WINOGRAD * PEAK_MARGIN, PEAK_MARGIN),
        nodes.bytes / bandwidth / np.where(work.bytes < 4 * cache, CACHE_SPEEDUP, PEAK_MARGIN),
    )
    return np.log(np.stack(seconds, axis=1) + 1e-12), np.log(np.maximum(least, 1e-12))


def _log(value: Floats) -> Floats:
    result: Floats = np.log(np.maximum(value, 1e-9))
    return result


def _shape(nodes: Nodes, work: Products) -> list[Floats]:
    """The shape alone."""
    s = nodes.sizes
    codes, names = nodes.texts["distribution"]
    skew = np.array([*(_skew(name) for name in names), 0.0])[codes]
    local, rows = experts_of(nodes)
    share = s["inter"] / np.maximum(s["tp"], 1)
    extents = [np.where(s["parallel"] > 0, s["parallel"], work.b * work.m * work.n)]
    extents += [np.maximum(s[role], work.k if role == "contracted" else 1.0) for role in ROLES[1:]]
    return [
        _log(work.flops),
        _log(work.bytes),
        *(_log(value) for value in (work.b, work.m, work.n, work.k)),
        *(np.log1p(s[name]) for name in (*DIMS, *EXTRA)),
        *(_log(extent) for extent in extents),
        *(_alignment(value) for value in (work.m, work.n, work.k, s["head_dim"])),
        *((np.maximum(value, 1) % 128) / 128.0 for value in (work.m, work.n, work.k)),
        np.where(s["kv_heads"] > 0, _log(s["heads"] / np.maximum(s["kv_heads"], 1)), 0.0),
        *(np.where(work.experts, _log(v), 0.0) for v in (local, rows / local, work.b, share)),
        skew,
        work.weight_bytes,
        work.activation_bytes,
    ]


def _skew(name: str) -> float:
    """The exponent in "power_law_1.2"."""
    try:
        return float(name.rsplit("_", 1)[-1])
    except ValueError:
        return 0.0


def _alignment(value: Floats) -> Floats:
    """Log of the largest power of two that divides it, of 256 at most."""
    whole = np.maximum(value, 1).astype(np.int64)
    result: Floats = np.log2(np.minimum(whole & -whole, 256)) / 8.0
    return result


def _relative(work: Products, resources: Floats, sms: Floats, cache: Floats) -> list[Floats]:
    """Sizes relative to the device."""
    seconds = resources[:, 0], resources[:, 1]
    weights = work.b * work.n * work.k * work.weight_bytes
    inputs = work.b * work.m * work.k * work.activation_bytes
    return [
        *seconds,
        np.maximum(*seconds),
        np.clip(seconds[0] - seconds[1], -10, 10),
        _log(work.bytes / cache),
        1 / (1 + work.bytes / cache),
        _log(weights / cache),
        _log(inputs / cache),
        _log(2 * work.b * work.m * work.n / cache),
        resources[:, 4] + _log(work.k),
        _log(work.b * work.m / sms),
        _log(work.b * work.m * work.n / sms / 2048),
        _log(work.b / sms),
    ]


def _tiles(work: Products, sms: Floats) -> list[Floats]:
    """Waves of tiles over the units, the part of the last one that is used, and of the tiles themselves."""
    values: list[Floats] = []
    for rows, columns in TILES:
        down, across = np.ceil(work.m / rows), np.ceil(work.n / columns)
        waves = work.b * down * across / sms
        values += [
            _log(waves),
            np.where(waves > 200, 1.0, waves / np.ceil(waves)),
            work.m * work.n / (down * rows * across * columns),
        ]
    return values


def _graphs(nodes: Nodes, work: Products) -> Singles:
    """[g, GRAPH_NUMBERS]; of a single kernel, zeros but for the first."""
    count = len(nodes.traffic)
    kernels = np.bincount(nodes.graph, minlength=count)
    edges = np.bincount(nodes.graph[nodes.edges[0]], minlength=count) if nodes.edges.size else np.zeros(count)
    inside = np.bincount(nodes.graph, weights=work.bytes, minlength=count)
    flops = np.bincount(nodes.graph, weights=work.flops, minlength=count)
    many = kernels > 1
    traffic = np.where(many, np.log(np.maximum(nodes.traffic, 1) / np.maximum(inside, 1)), 0.0)
    intensity = np.where(many, np.log(flops / np.maximum(nodes.traffic, 1)), 0.0)
    return _columns(
        [np.log(np.maximum(kernels, 1)), np.log1p(edges), nodes.fused.astype(np.float64), traffic, intensity]
    )
