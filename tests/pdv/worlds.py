"""Small problems to plan: a device and links slow enough that every choice costs something, and tiny programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType
from pdv.cluster import Device, Link
from pdv.config import Mode
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.problem import Pins, Problem
from pdv.rewrite.rule import Rule

DEVICE = Device(
    "toy", 1 << 30, {"float32": 1e9}, memory_bandwidth_bytes_per_s=1e9, launch_latency_s=1e-7, efficiency=1.0
)
SLOW, FAST = Link("slow", 1e8, 2e-7), Link("fast", 1e9, 1e-7)


def problem(
    graph: Graph,
    mesh: Mesh,
    *,
    mode: Mode = "train",
    memory_limit: float = float("inf"),
    pins: Pins | None = None,
    rules: tuple[Rule, ...] = (),
    device: Device = DEVICE,
    links: Mapping[str, Link] | None = None,
) -> Problem:
    """A problem whose outermost of several axes is slow; ``links`` by axis name override."""
    default = [SLOW if position == 0 and len(mesh.axes) > 1 else FAST for position in range(len(mesh.axes))]
    given = links or {}
    axes = tuple(AxisLink(axis.size, given.get(axis.name, link)) for axis, link in zip(mesh.axes, default, strict=True))
    return Problem(graph, mesh, axes, ComputeModel((device,)), mode, memory_limit, pins or Pins(), rules)


def cluster(devices: int) -> dict[str, Any]:
    """Devices slow enough, and links fast enough, that cutting pays even for small models."""
    device = {
        "name": "slow",
        "memory": "1 GiB",
        "peak": {"float32": "1 GFLOP/s"},
        "memory_bandwidth": "20 GB/s",
        "launch_latency": "1 us",
        "efficiency": 1.0,
    }
    link = {"name": "wire", "bandwidth": "10 GB/s", "latency": "1 us"}
    return {"name": "fast", "nodes": [{"count": 1, "devices": devices, "device": device, "link": link}]}


def f32(*shape: int) -> TensorType:
    """A float32 tensor."""
    return TensorType(shape, DType.F32)


def mlp(batch: int = 12, width: int = 12, hidden: int = 24, layers: int = 1) -> Graph:
    """x + W₂ relu(W₁ x), ``layers`` times."""
    k = Builder()
    h = k.linear(k.input("x", f32(batch, width)), k.param("w_in", f32(width, width)))
    for i in range(layers):
        inner = k.relu(k.linear(h, k.param(f"{i}.up", f32(hidden, width))))
        h = k.add(h, k.linear(inner, k.param(f"{i}.down", f32(width, hidden))))
    return k.graph({"y": h}, name="mlp")


def attention_block(
    batch: int = 6, sequence: int = 12, heads: int = 6, width: int = 24, *, fused: bool = True
) -> Graph:
    """One pre-norm attention layer over embedded ids, its query, key and value in one product or in three."""
    k = Builder()
    ids = k.input("ids", TensorType((batch, sequence), DType.I64))
    h = k.embedding(k.param("wte", f32(48, width)), ids)
    n = k.layer_norm(h, k.param("ln.w", f32(width)), k.param("ln.b", f32(width)), eps=1e-5)
    if fused:
        qkv = k.add(k.linear(n, k.param("qkv.w", f32(3 * width, width))), k.param("qkv.b", f32(3 * width)))
        parts = [k.chunk(qkv, dim=2, parts=3, index=i) for i in range(3)]
    else:
        parts = [k.linear(n, k.param(f"{name}.w", f32(width, width))) for name in "qkv"]
    q, key, v = (
        k.permute(k.reshape(part, shape=(batch, sequence, heads, width // heads)), perm=(0, 2, 1, 3)) for part in parts
    )
    a = k.attention(q, key, v, causal=True, scale=(width // heads) ** -0.5)
    a = k.reshape(k.permute(a, perm=(0, 2, 1, 3)), shape=(batch, sequence, width))
    h = k.add(h, k.linear(a, k.param("proj.w", f32(width, width))))
    return k.graph({"logits": k.linear(h, k.param("head", f32(48, width)))}, name="attention")


def random_graph(seed: int, operators: int) -> Graph:
    """A program of a few operators: chains, residual sums, values with several readers, tied weights."""
    rng = np.random.default_rng(seed)
    k = Builder()
    rows, width = (int(rng.choice([6, 12])) for _ in range(2))
    values = [k.input("x", f32(rows, width))]
    weights: list[Node] = []
    while sum(not value.is_leaf for value in values) < operators:
        value = _grown(k, values, weights, rng)
        if value not in values:
            values.append(value)
    read = {operand for value in values for operand in value.operands}
    ends = [value for value in values if value not in read and not value.is_leaf]
    extra = [value for value in values[1:-1] if value in read and rng.random() < 0.15]
    return k.graph({f"y{i}": value for i, value in enumerate(ends + extra)})


def _grown(k: Builder, values: list[Node], weights: list[Node], rng: np.random.Generator) -> Node:
    """One more value over those there are."""
    x = values[int(rng.integers(max(0, len(values) - 3), len(values)))]
    alike = [value for value in values if value.type == x.type]
    y = alike[int(rng.integers(len(alike)))]
    match rng.choice(["linear", "linear", "linear", "tied", "add", "mul", "relu", "bias", "norm", "matmul", "permute"]):
        case "linear":
            size = (int(rng.choice([6, 12, 24])), x.type.shape[-1])
            weights.append(k.param(f"w{len(weights)}", f32(*size)))
            return k.linear(x, weights[-1])
        case "tied":
            fitting = [w for w in weights if w.type.rank == 2 and w.type.shape[-1] == x.type.shape[-1]]
            return k.linear(x, fitting[int(rng.integers(len(fitting)))]) if fitting else k.tanh(x)
        case "add":
            return k.add(x, y)
        case "mul":
            return k.mul(x, y)
        case "bias":
            weights.append(k.param(f"b{len(weights)}", f32(x.type.shape[-1])))
            return k.add(x, weights[-1])
        case "norm":
            weights.append(k.param(f"g{len(weights)}", f32(x.type.shape[-1])))
            return k.rms_norm(x, weights[-1], eps=1e-5)
        case "matmul" if x.type.shape[1] == y.type.shape[0]:
            return k.matmul(x, y)
        case "permute":
            return k.permute(x, perm=(1, 0))
    return k.relu(x)
