"""Straight moves between any two shardings are legal chains that end where they should."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ir.builder import Builder
from ir.graph import Node
from ir.mesh import Mesh
from ir.ops.parallel import TRANSITIONS
from ir.sharding import Invariant, Partial, Replicate, Shard, Sharding, State, format_sharding
from ir.types import DType, TensorType
from ir.verify import infer_shardings
from pdv.manual.axis_moves import StraightMoves, as_made

MESH = Mesh.of(a=2, b=2, c=2)
TENSOR = TensorType((8, 8), DType.F32)
MADE: list[State] = [Invariant(), Shard(0), Shard(1)]
WANTED: list[State] = [*MADE, Replicate()]


def moved(before: Sharding, after: Sharding) -> Node:
    chain = StraightMoves(MESH, ()).chain(TENSOR, before, after, gradient=True)
    assert chain is not None
    k = Builder()
    node = k.param("w", TENSOR, stored=format_sharding(before))
    for step in chain.steps:
        node = getattr(k, step.name)(node, **dict(step.dims), axis=step.axis)
    assert infer_shardings(k.graph({"y": node}), MESH)[node] == after
    return node


@given(st.tuples(*[st.sampled_from(MADE)] * 3), st.tuples(*[st.sampled_from(WANTED)] * 3))
def test_any_cut_goes_to_any_other(before: Sharding, after: Sharding) -> None:
    moved(before, after)


@given(st.tuples(*[st.sampled_from([*MADE, Partial()])] * 3), st.tuples(*[st.sampled_from(WANTED)] * 3))
def test_pending_sums_are_taken(before: Sharding, after: Sharding) -> None:
    """Every step is one of the operators' transitions, and the last ends where it should."""
    chain = StraightMoves(MESH, ()).chain(TENSOR, before, after, gradient=True)
    assert chain is not None
    states = list(before)
    for step in chain.steps:
        position = MESH.index(step.axis)
        source, target = TRANSITIONS[step.name].states(dict(step.dims))
        assert states[position] == source
        states[position] = target
    assert tuple(states) == after


def test_a_change_of_one_axis_is_one_operator() -> None:
    chain = StraightMoves(MESH, ()).chain(
        TENSOR, (Shard(0), Invariant(), Partial()), (Shard(0), Invariant(), Shard(1)), gradient=True
    )
    assert chain is not None
    assert [(step.name, step.axis) for step in chain.steps] == [("reduce_scatter", "c")]


def test_outputs_leave_as_they_are_made() -> None:
    node = Builder().param("w", TENSOR)
    assert as_made(node, (Shard(0), Partial(), Shard(1))) == (Shard(0), Invariant(), Shard(1))
