"""Deep programs are proved short: what is left out is only what repeats, and mistakes in any layer are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ir.builder import Builder
from ir.errors import PdvError, VerificationError
from ir.evaluation.collectives import MOVES, Group
from ir.evaluation.einsum import Data
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.proof.depth import shorten
from ir.proof.exact import verify_equal
from ir.types import DType, TensorType

MESH = Mesh.of(a=2)
LAYERS = 9
Layer = Callable[[Builder, int, Node], Node]


def f32(*shape: int) -> TensorType:
    return TensorType(shape, DType.F32)


def program(layer: Layer, layers: int = LAYERS) -> Graph:
    """Embedded ids, ``layers`` layers, and a head with the embedding's weight."""
    k = Builder()
    table = k.param("table", f32(16, 8))
    h = k.embedding(table, k.input("ids", TensorType((4, 4), DType.I64)))
    for number in range(layers):
        h = layer(k, number, h)
    return k.graph({"y": k.linear(h, table)})


def serial(k: Builder, number: int, h: Node, act: str = "relu") -> Node:
    inner = k.linear(h, k.param(f"{number}.up", f32(12, 8)))
    return k.add(h, k.linear(getattr(k, act)(inner), k.param(f"{number}.down", f32(8, 12))))


def parallel(k: Builder, number: int, h: Node, up: int | None = None, act: str = "relu") -> Node:
    """Megatron's: up cut by its rows, down by its columns; ``up``: whose weight it reads."""
    first = k.param(f"{number if up is None else up}.up", f32(12, 8), stored="S0")
    inner = getattr(k, act)(k.linear(k.replicate(h, axis="a"), first))
    out = k.linear(inner, k.param(f"{number}.down", f32(8, 12), stored="S1"))
    return k.add(h, k.reduce(out, axis="a"))


def test_equal_layers_are_proved_once() -> None:
    source, pcg = program(serial), program(parallel)
    short = shorten(source, pcg, MESH)
    assert short.note == f"1 of {LAYERS} equal layers"
    assert len(short.source.nodes) == len(program(serial, 1).nodes)
    assert len(short.pcg.nodes) == len(program(parallel, 1).nodes)
    kept = {node.name for node in short.source.params}
    assert kept == {node.name for node in short.pcg.params} == {"table", "0.up", "0.down"}
    assert "1 of 9 equal layers" in str(verify_equal(source, pcg, MESH))


def test_a_layer_alone_is_evaluated() -> None:
    assert shorten(program(serial, 1), program(parallel, 1), MESH).note == ""


@pytest.mark.parametrize("wrong", range(LAYERS))
def test_another_function_in_one_layer_is_found(wrong: int) -> None:
    def layer(k: Builder, number: int, h: Node) -> Node:
        return parallel(k, number, h, act="tanh" if number == wrong else "relu")

    with pytest.raises(VerificationError, match="y of the plan"):
        verify_equal(program(serial), program(layer), MESH)


def test_exchanged_weights_are_found() -> None:
    """Layers 4 and 5 read each other's weights: each layer by itself looks like its neighbours."""

    def layer(k: Builder, number: int, h: Node) -> Node:
        return parallel(k, number, h, up={4: 5, 5: 4}.get(number, number))

    with pytest.raises(VerificationError, match="y of the plan"):
        verify_equal(program(serial), program(layer), MESH)


def test_a_cycle_of_weights_is_found() -> None:
    """Every layer reads the next one's weight, so that all layers are wrong in the same way."""

    def layer(k: Builder, number: int, h: Node) -> Node:
        return parallel(k, number, h, up=(number + 1) % LAYERS)

    with pytest.raises(VerificationError, match="y of the plan"):
        verify_equal(program(serial), program(layer), MESH)


def test_a_layer_left_out_is_found() -> None:
    def layer(k: Builder, number: int, h: Node) -> Node:
        return h if number == 4 else parallel(k, number, h)

    with pytest.raises(PdvError):
        verify_equal(program(serial), program(layer), MESH)


def test_all_layers_wrong_alike_are_found() -> None:
    def layer(k: Builder, number: int, h: Node) -> Node:
        return parallel(k, number, h, act="tanh")

    with pytest.raises(VerificationError, match="y of the plan"):
        verify_equal(program(serial), program(layer), MESH)


def test_a_layer_cut_otherwise_stays() -> None:
    """One layer of the middle is computed by all: runs on either side are shortened as far as they are equal."""

    def layer(k: Builder, number: int, h: Node) -> Node:
        return serial(k, number, h) if number == 4 else parallel(k, number, h)

    source, pcg = program(serial, 12), program(layer, 12)
    short = shorten(source, pcg, MESH)
    assert "4.up" in {node.name for node in short.pcg.params}
    assert len(short.pcg.nodes) < len(pcg.nodes)
    verify_equal(source, pcg, MESH)


def test_values_that_meet_elsewhere_are_evaluated_whole() -> None:
    """The plan carries twice the value between its layers: no value between is the source's, all outputs are."""

    def program_of(*, twice: bool) -> Graph:
        k = Builder()
        h = k.linear(k.input("x", f32(4, 8)), k.param("in", f32(8, 8)))
        h = k.scale(h, factor=2.0) if twice else h
        for number in range(6):
            h = k.linear(h, k.param(f"{number}.w", f32(8, 8)))
        out = k.linear(h, k.param("out", f32(8, 8)))
        return k.graph({"y": k.scale(out, factor=0.5) if twice else out})

    source, plan = program_of(twice=False), program_of(twice=True)
    assert shorten(source, plan, Mesh(())).note == "1 of 5 equal layers"
    proof = verify_equal(source, plan, Mesh(()))
    assert "equal layers" not in proof.scaled


def test_a_mask_and_shared_weights_do_not_hide_layers() -> None:
    """What every layer reads (a mask, a weight of all) is read anywhere."""

    def program_of(layers: int) -> Graph:
        k = Builder()
        bias = k.scale(k.input("bias", f32(8)), factor=3.0)
        shared = k.param("shared", f32(8, 8))
        h = k.linear(k.input("x", f32(4, 8)), k.param("in", f32(8, 8)))
        for number in range(layers):
            h = k.add(k.linear(k.tanh(h), k.param(f"{number}.w", f32(8, 8))), k.add(k.linear(h, shared), bias))
        return k.graph({"y": h})

    source = program_of(7)
    assert shorten(source, source, Mesh(())).note == "1 of 6 equal layers"
    verify_equal(source, source, Mesh(()))


@pytest.mark.parametrize("layers", [4, 9])
def test_what_goes_wrong_after_some_layers_is_found(layers: int) -> None:
    """The state holds six rows; a layer moves them on by one and makes the first anew.

    The plan's layer forgets the last row instead of passing it to the sum. Before the seventh layer that row is zero.
    """

    def program_of(*, forgetful: bool) -> Graph:
        k = Builder()
        first = k.linear(k.input("x", f32(1, 8)), k.param("in", f32(8, 8)))
        h = k.concat(first, *(k.scale(first, factor=0.0) for _ in range(5)), dim=0)
        for number in range(layers):
            new = k.linear(k.slice(h, dim=0, start=0, stop=1), k.param(f"{number}.w", f32(8, 8)))
            kept = k.slice(h, dim=0, start=0, stop=5)
            last = k.slice(h, dim=0, start=5, stop=6)
            h = k.concat(new if forgetful else k.add(new, last), kept, dim=0)
        return k.graph({"y": k.linear(h, k.param("out", f32(8, 8)))})

    source = program_of(forgetful=False)
    verify_equal(source, source, Mesh(()))
    if layers > 6:
        with pytest.raises(VerificationError):
            verify_equal(source, program_of(forgetful=True), Mesh(()))
    else:  # after four layers the row is still zero: the programs are equal, though their layers are not
        assert "equal layers" not in str(verify_equal(source, program_of(forgetful=True), Mesh(())))


@pytest.mark.parametrize("axis", ["b", "a"])
def test_gradients_between_layers_are_compared(axis: str) -> None:
    """A layer that reduces its gradient along the wrong axis passes values forward as they should be."""
    mesh = Mesh.of(a=2, b=2)

    def layer(k: Builder, number: int, h: Node) -> Node:
        first = k.param(f"{number}.up", f32(12, 8), stored="I,S0")
        inner = k.relu(k.linear(k.replicate(h, axis="b"), first))
        down = k.param(f"{number}.down", f32(8, 12), stored="I,S1")
        return k.add(h, k.reduce(k.linear(inner, down), axis="b"))

    def wrong(group: Group, x: Data, attrs: Mapping[str, Any]) -> Data:
        """The dual of replicate, along ``axis``."""
        return Group(group.mesh, group.mesh.positions(axis), group.trials, group.total).sum(x)

    moves = {**MOVES, "replicate": (MOVES["replicate"][0], wrong)}
    source = program(serial)
    verify_equal(source, program(layer), mesh)
    if axis == "a":
        with pytest.raises(VerificationError):
            verify_equal(source, program(layer), mesh, moves=moves)
    else:
        verify_equal(source, program(layer), mesh, moves=moves)


def unlike(k: Builder, number: int, h: Node, *, cut: bool) -> Node:
    """Its own width, and a square: each layer doubles the degree of what it takes."""
    width = 8 + 4 * (number % 5) + 4 * (number // 5)
    made = k.matmul(k.replicate(h, axis="a") if cut else h, whole(k, number, (h.type.shape[-1], width), cut))
    made = k.combine(made, axis="a", dim=1) if cut else made
    return k.mul(made, made)


def whole(k: Builder, number: int, shape: tuple[int, int], cut: bool) -> Node:
    return k.param(f"{number}.weight", f32(*shape), **({"stored": "S1"} if cut else {}))


def squares(layers: int, *, cut: bool, exchanged: bool = False) -> Graph:
    k = Builder()
    h = k.linear(k.input("x", f32(4, 8)), k.param("first", f32(8, 8)))
    for number in range(layers):
        h = unlike(k, number, h, cut=cut)
        h = k.mul(h, h) if exchanged and number == layers - 1 else h
    return k.graph({"y": h})


def test_programs_of_large_degree_are_proved_part_by_part() -> None:
    """40 layers of which none is like another: y is of degree 2^40, more than any prime of the proof."""
    proof = verify_equal(squares(40, cut=False), squares(40, cut=True), MESH)
    assert proof.error_bound < 1e-9
    with pytest.raises(VerificationError, match="y of the plan"):
        verify_equal(squares(40, cut=False), squares(40, cut=True, exchanged=True), MESH)
