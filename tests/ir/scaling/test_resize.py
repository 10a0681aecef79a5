"""Sizes that change together, and programs at other sizes."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.errors import ShapeError
from ir.graph import Graph
from ir.scaling.resize import Sizes
from ir.scaling.size_factors import Atoms
from ir.types import DType, TensorType


def floats(*shape: int) -> TensorType:
    return TensorType(shape, DType.F32)


def test_an_atom_that_a_dim_has_twice_is_unified_twice() -> None:
    atoms = Atoms()
    a, p, q = atoms.new(8), atoms.new(8), atoms.new(8)
    atoms.unify((a, a), (p, q))
    assert atoms.flat((a,)) == atoms.flat((p,)) == atoms.flat((q,))


def model(rows: int) -> Graph:
    """[b, 6, 4] -> [b*6 + 1, 4], through a token for each row and all rows together."""
    k = Builder()
    x = k.input("x", floats(rows, 6, 4))
    token = k.expand(k.param("token", floats(1, 1, 4)), shape=(rows, 1, 4))
    h = k.slice(k.concat(token, x, dim=1), dim=1, start=1, stop=7)
    h = k.reshape(h, shape=(rows * 6, 4))
    return k.graph({"y": k.concat(h, k.param("last", floats(1, 4)), dim=0)})


def test_a_program_at_another_batch_is_the_one_made_at_it() -> None:
    graph = model(8)
    sizes = Sizes(graph)
    (batch,) = sizes.open_atoms(graph.inputs[0], 0)
    assert sizes.open_atoms(graph.inputs[0], 1)  # the sequence is open too, until it is left as it is
    sizes.fix_others([batch])
    assert not sizes.open_atoms(graph.inputs[0], 1)
    for rows in (16, 3):
        assert sizes.resize({batch: rows})[0].digest == model(rows).digest


def test_what_a_parameter_fixes_is_told() -> None:
    k = Builder()
    x = k.input("x", floats(8, 4))
    graph = k.graph({"y": k.add(x, k.param("table", floats(8, 4)))})
    sizes = Sizes(graph)
    assert not sizes.open_atoms(graph.inputs[0], 0)
    assert sizes.why_fixed(graph.inputs[0], 0) == "a parameter table of shape [8, 4] has 8 there"


def test_sizes_that_follow_from_each_other_must_agree() -> None:
    k = Builder()
    x, y = k.input("x", floats(8, 4)), k.input("y", floats(7, 4))
    graph = k.graph({"y": k.add(k.slice(x, dim=0, start=1, stop=8), y)})
    sizes = Sizes(graph)
    (rows,), (fewer,) = (sizes.open_atoms(node, 0) for node in graph.inputs)
    small, _ = sizes.resize({rows: 4})
    assert [node.type.shape for node in small.inputs] == [(4, 4), (3, 4)]
    with pytest.raises(ShapeError, match="does not follow its operands"):
        sizes.resize({rows: 4, fewer: 7})
