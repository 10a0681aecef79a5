"""Subgraphs: the same for the same seed, described by their kernels, run as ir says, compiled to the same values."""

from __future__ import annotations

import pytest
import torch

from benchmarks.profile_shapes import cuts, write
from ir.builder import Builder
from ir.graph import Graph
from ir.types import DType, TensorType
from learned_cost.data.kernel import Subgraph
from learned_cost.profile.programs.planned import of_pcg, read_shipped, segments
from learned_cost.profile.programs.subgraphs import (
    FAMILIES,
    callable_of,
    compile_graph,
    describe_graph,
    eager,
    inputs_of,
    random_pattern,
)

CPU = torch.device("cpu")
X = TensorType((6, 8), DType.F32)


def block() -> Graph:
    """A norm, a product with bias and gelu, and a residual."""
    k = Builder()
    x = k.input("x", X)
    vector = TensorType((8,), DType.F32)
    normed = k.layer_norm(x, k.param("w", vector), k.param("b", vector), eps=1e-5)
    up = k.linear(normed, k.param("up", TensorType((8, 8), DType.F32)))
    active = k.gelu(k.add(up, k.param("bias", vector)), approximate="tanh")
    return k.graph({"out": k.add(k.reshape(active, shape=(6, 8)), x)})


def test_described_by_kernels_and_edges() -> None:
    what = describe_graph(block(), fused=True, stack="inductor")
    assert [kernel.op for kernel in what.kernels] == ["layernorm", "linear", "add", "gelu", "add"]
    assert what.edges == ((0, 1), (1, 2), (2, 3), (3, 4))  # a view hands its edge on
    assert what.traffic == 4 * (2 * 48 + 64 + 3 * 8)  # x and the result, the matrix, three vectors
    assert what.traffic < sum(kernel.bytes for kernel in what.kernels)
    assert {kernel.stack for kernel in what.kernels} == {"inductor"}
    assert Subgraph.from_json(what.to_json()) == what


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_random_patterns_are_of_their_seed_and_run(seed: int) -> None:
    name, graph = random_pattern(seed, most=1 << 10)
    assert (name, graph.digest) == (FAMILIES[seed].__name__, random_pattern(seed, most=1 << 10)[1].digest)
    (out,) = callable_of(graph)(*inputs_of(graph, CPU))
    assert out.shape == graph.outputs[0][1].type.shape
    what = describe_graph(graph, fused=True, stack="inductor")
    assert 2 <= len(what.kernels) <= 12
    assert {end for edge in what.edges for end in edge} == set(range(len(what.kernels)))


def test_segments_are_what_a_compiler_fuses() -> None:
    parts = segments(block())
    ops = [[node.op.name for node in part.nodes if not node.is_leaf] for part in parts]
    assert ["layer_norm", "linear", "add", "gelu"] in ops or ["linear", "add", "gelu"] in ops
    assert all(len(part.outputs) == 1 for part in parts)


def test_cuts_are_local_shapes_each_once() -> None:
    pieces = cuts(block(), "mine", (2, 4))
    assert len(pieces) == len(set(pieces))
    linear = {(p.operands[0].shape, p.operands[1].shape) for p in pieces if p.op == "linear"}
    assert {((6, 8), (8, 8)), ((3, 8), (8, 8)), ((6, 4), (8, 4)), ((6, 8), (2, 8)), ((3, 8), (4, 8))} <= linear
    assert ((1, 8), (8, 8)) not in linear  # four does not divide six
    assert {p.plan for p in pieces} == {"mine"}


def test_shapes_are_kept_in_a_file(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "shapes.json.gz"
    pieces, parts = cuts(block(), "mine", (2,)), segments(block())
    write(path, pieces, [("mine", part) for part in parts])
    found, graphs = read_shipped(path)
    assert found == pieces
    assert [graph.digest for _, graph in graphs] == [part.digest for part in parts]


def test_a_plan_is_its_local_work() -> None:
    from ir.mesh import Mesh

    pieces = of_pcg(block(), Mesh(()), "serial")
    assert [piece.op for piece in pieces] == ["layer_norm", "linear", "add", "gelu", "add"]
    assert [piece.wanted for piece in pieces][1] == (True, True)


@pytest.mark.slow  # inductor takes seconds to start
def test_compiled_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from learned_cost.profile.programs import subgraphs as module

    graph = block()
    values = inputs_of(graph, CPU)
    monkeypatch.setattr(module, "inputs_of", lambda graph, device: values)
    run, plain = compile_graph(graph, CPU), eager(graph, CPU)
    torch.testing.assert_close(run()[0], plain()[0])
    fused, single = (
        describe_graph(graph, fused=True, stack="inductor"),
        describe_graph(graph, fused=False, stack="torch"),
    )
    assert fused.fused
    assert not single.fused
    assert fused.traffic < single.traffic
