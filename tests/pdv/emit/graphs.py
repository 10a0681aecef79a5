"""Small graphs for the emitter's tests, and packages emitted from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.measured.parity import load_package
from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.frontend.program import Array, Weights

F32 = DType.F32


def build(folder: Path) -> Any:  # Any: an emitted module
    """The model of a package, on this process."""
    return load_package(folder).build(device="cpu")


def floats(*shape: int) -> TensorType:
    return TensorType(shape, F32)


def stack(layers: int, batch: int = 4, sequence: int = 8, width: int = 16, heads: int = 4) -> Graph:
    """A causal transformer without parallelism: ids [b, s] -> logits [b, s, 32]."""
    k = Builder()
    ids = k.input("ids", TensorType((batch, sequence), DType.I64))
    table = k.param("wte.weight", floats(32, width))
    x = k.embedding(table, ids)
    for i in range(layers):
        x = _layer(k, x, f"h.{i}", batch, sequence, width, heads)
    return k.graph({"logits": k.linear(x, table)}, name="stack")


def _layer(k: Builder, x: Node, prefix: str, batch: int, sequence: int, width: int, heads: int) -> Node:
    def param(name: str, *shape: int) -> Node:
        return k.param(f"{prefix}.{name}", floats(*shape))

    h = k.layer_norm(x, param("ln.weight", width), param("ln.bias", width), eps=1e-5)
    qkv = k.add(k.linear(h, param("qkv.weight", 3 * width, width)), param("qkv.bias", 3 * width))
    parts = [k.chunk(qkv, dim=2, parts=3, index=i) for i in range(3)]
    shape = (batch, sequence, heads, width // heads)
    q, key, v = (k.permute(k.reshape(part, shape=shape), perm=(0, 2, 1, 3)) for part in parts)
    h = k.attention(q, key, v, causal=True, scale=1 / math.sqrt(width // heads))
    h = k.reshape(k.permute(h, perm=(0, 2, 1, 3)), shape=(batch, sequence, width))
    return k.add(x, k.add(k.linear(h, param("proj.weight", width, width)), param("proj.bias", width)))


def random_weights(graph: Graph) -> Weights:
    """Values for every stored tensor of a graph whose parameters are whole views; buffers of ones."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for param in graph.params:
        shape = param.type.shape
        for step in reversed(param.attr("view")):
            assert step[0] == "permute", step
            shape = tuple(shape[step[1].index(dim)] for dim in range(len(shape)))
        arrays.setdefault(param.attr("source"), rng.normal(size=shape).astype(np.float32) * 0.3)
    return Weights({name: lambda array=array: array for name, array in arrays.items()})  # type: ignore[misc]


def emitted(graph: Graph, mesh: Mesh, folder: Path) -> str:
    """Emit a graph into a folder; model.py's text."""
    folder.mkdir(parents=True, exist_ok=True)
    emit_package(graph, mesh, {"source": {"name": graph.name}}, random_weights(graph), folder)
    return (folder / "model.py").read_text(encoding="utf-8")


def of_module(module: nn.Module, x: Tensor, folder: Path) -> tuple[Any, str]:  # Any: an emitted module
    """The package of a module for one device, built, and its text."""
    program = load_program(module, (x,))
    folder.mkdir()
    emit_package(program.graph, Mesh.of(), {"mode": "train"}, program.weights, folder)
    return build(folder), (folder / "model.py").read_text()


def cut_batch(graph: Graph, *, whole: bool = False, axis: str = "dp") -> Graph:
    """Inputs cut over an axis, parameters replicated along it; ``whole``: the outputs put together."""
    k = Builder()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        made[node] = k.copy(node, tuple(made[x] for x in node.operands))
        if node.op.name == "input":
            made[node] = k.partition(made[node], dim=0, axis=axis)
        elif node.op.name == "param":
            made[node] = k.replicate(made[node], axis=axis)
    outputs = {name: made[node] for name, node in graph.outputs}
    if whole:
        outputs = {name: k.combine(node, dim=0, axis=axis) for name, node in outputs.items()}
    return k.graph(outputs, name=graph.name)
