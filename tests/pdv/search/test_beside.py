"""Masks and the like, which all layers read: layers are equal blocks all the same, and nothing is lost by it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.types import DType, TensorType
from pdv.pcg.plan_cost import plan_cost
from pdv.search.blocks import longest_repeat, split_blocks
from pdv.search.chain import ChainSolver
from pdv.search.strategies import STRATEGIES, Budget
from pdv.search.strategies.together import together
from tests.pdv.worlds import f32, problem

ROWS, WIDTH = 12, 96
PAIR, SQUARE = Mesh.of(a=2), Mesh.of(a=2, b=2)


def masked(layers: int) -> Graph:
    """Residual layers, each of which hides what a mask made of an input says."""
    k = Builder()
    x = k.input("x", f32(ROWS, WIDTH))
    given = k.input("mask", TensorType((ROWS, 1), DType.I64))
    keep = k.compare_number(given, relation="!=", number=0)
    keep = k.expand(keep, shape=(ROWS, WIDTH))
    nothing = k.expand(k.const(np.zeros((1, 1), np.float32)), shape=(ROWS, WIDTH))
    for i in range(layers):
        h = k.relu(k.linear(x, k.param(f"{i}.up", f32(2 * WIDTH, WIDTH))))
        h = k.linear(h, k.param(f"{i}.down", f32(WIDTH, 2 * WIDTH)))
        x = k.add(x, k.where(keep, h, nothing))
    return k.graph({"y": x}, name="masked")


def test_layers_that_read_a_mask_are_equal_blocks() -> None:
    graph = masked(layers=6)
    beside, *blocks = split_blocks(graph)
    assert beside.beside
    assert {node.op.name for node in beside.nodes} == {"compare_number", "expand"}
    assert (beside.source, beside.sink) == (None, None)
    assert all(after.source is before.sink for before, after in pairwise(blocks))
    inside = [node for block in (beside, *blocks) for node in block.nodes]
    assert sorted(map(id, inside)) == sorted(id(node) for node in graph.nodes if not node.is_leaf)
    for block in blocks:
        assert set(block.read_beside) <= set(beside.nodes)
        known = {block.source, *beside.nodes, *block.nodes}
        assert all(x.is_leaf or x in known for node in block.nodes for x in node.operands)
    repeat = longest_repeat([block.key for block in blocks])
    assert repeat is not None
    assert repeat.count >= 4


def test_what_one_layer_reads_or_what_is_large_is_not_beside() -> None:
    assert not any(block.beside for block in split_blocks(masked(layers=1)))
    k = Builder()
    x, given = k.input("x", f32(ROWS, WIDTH)), k.input("given", f32(ROWS, 2048, WIDTH))
    large = k.reduce_sum(k.relu(given), dims=(1,), keepdim=False)
    for i in range(2):
        x = k.add(k.linear(x, k.param(f"{i}.w", f32(WIDTH, WIDTH))), large)
    assert not any(block.beside for block in split_blocks(k.graph({"y": x})))


@pytest.mark.parametrize(("mesh", "share"), [(PAIR, 1.0), (SQUARE, 1.0), (PAIR, 0.996), (SQUARE, 0.988)])
def test_a_plan_is_as_good_as_one_found_without_blocks(mesh: Mesh, share: float) -> None:
    of = problem(masked(layers=3), mesh)
    free = together(lambda way, _: ChainSolver(way).solve())(of, Budget())
    of = problem(masked(layers=3), mesh, memory_limit=share * free.memory_bytes)
    chained = together(lambda way, _: ChainSolver(way).solve())(of, Budget())
    flat = STRATEGIES["ilp"](of, Budget())
    assert chained.lower_bound_s <= flat.cost_s * (1 + 1e-9)
    assert chained.cost_s <= flat.cost_s * 1.02
    assert chained.memory_bytes <= of.memory_limit
    pcg = chained.realized.derived.pcg  # type: ignore[union-attr]
    assert plan_cost(of, pcg).seconds == chained.cost_s
    verify_equal(of.graph, pcg, mesh, gradients=True, trials=1)
