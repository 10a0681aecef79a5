"""Moves where a run of equal layers begins stand in the model's own forward, so that all layers are one class."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.types import DType, TensorType
from pdv.check import check_text
from pdv.emit.emission import Emission
from tests.pdv.emit.graphs import emitted, floats, random_weights

LAYERS, SEQUENCE, WIDTH = 4, 8, 16


def layer(k: Builder, whole: Node, cut: Node, number: int) -> Node:
    """``cut``, the stream cut by positions, plus a product over features of ``whole``, the same put together."""
    h = k.layer_norm(
        whole, k.param(f"h.{number}.ln.weight", floats(WIDTH)), k.param(f"h.{number}.ln.bias", floats(WIDTH)), eps=1e-5
    )
    up = k.param(f"h.{number}.up.weight", floats(2 * WIDTH, WIDTH), stored="S0")
    down = k.param(f"h.{number}.down.weight", floats(WIDTH, 2 * WIDTH), stored="S1")
    h = k.linear(k.gelu(k.linear(k.replicate(h, axis="tp"), up)), down)
    return k.add(cut, k.reduce_scatter(h, dim=1, axis="tp"))


def stream(entry: str) -> Graph:
    """ids [b, s] -> logits: the stream is cut by positions behind each layer, and by ``entry`` before the first."""
    k = Builder()
    ids, table = k.input("ids", TensorType((4, SEQUENCE), DType.I64)), k.param("wte.weight", floats(32, WIDTH))
    x = k.embedding(table, ids)
    if entry == "whole":
        whole, cut = x, k.partition(x, dim=1, axis="tp")
    else:
        features = k.partition(x, dim=2, axis="tp")
        cut = k.all_to_all(features, dim=2, to_dim=1, axis="tp")
        whole = k.combine(features, dim=2, axis="tp")
    for number in range(LAYERS):
        cut = layer(k, whole, cut, number)
        whole = k.combine(cut, dim=1, axis="tp")
    return k.graph({"logits": k.linear(whole, table)}, name="stream")


def serial(pcg: Graph) -> Graph:
    """The same program on one device."""
    k = Builder()
    made: dict[Node, Node] = {}
    for node in pcg.nodes:
        if node.op.kind == "parallel":
            made[node] = made[node.operands[0]]
        elif node.is_param:
            made[node] = k.param(node.attr("name"), node.type)
        else:
            made[node] = k.copy(node, tuple(made[x] for x in node.operands))
    return k.graph({name: made[node] for name, node in pcg.outputs}, name=pcg.name)


@pytest.mark.parametrize("entry", ["whole", "features"])
def test_what_is_written_so_is_the_program(entry: str) -> None:
    pcg = stream(entry)
    found = check_text(serial(pcg), Emission.of(pcg, Mesh.of(tp=2), train=True), random_weights(serial(pcg)))
    assert "outputs, gradients and buffers" in found.statement


@pytest.mark.parametrize("entry", ["whole", "features"])
def test_all_layers_are_one_class_however_the_first_is_entered(entry: str, tmp_path: Path) -> None:
    text = emitted(stream(entry), Mesh.of(tp=2), tmp_path / "stream_pdv")
    assert text.count("nn.Module)") == 1
    assert f'Block(mesh, weights, f"h.{{i}}") for i in range({LAYERS})' in text
    block, model = text.split("class Model")
    assert ("partition(" if entry == "whole" else "all_to_all(") in model, "what the first layer needs is the model's"
    assert "partition(" not in block.partition("class Block")[2]
