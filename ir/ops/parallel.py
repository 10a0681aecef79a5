"""Partition, combine, replicate, reduce and their fusions: the only operators that name a mesh axis.

They never change a tensor's global value, only its state along one axis (docs/architecture.md, States);
``TRANSITIONS`` says how, and each one's backward is its dual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ir.operator import Attrs, Operator
from ir.sharding import Invariant, Partial, Replicate, Shard, State

Transition = tuple[State, State]


def _parallel(name: str, *attrs: str, emit: str) -> Operator:
    return Operator(name, "... -> ...", "parallel", attrs=attrs, emit=emit, flops_per_point=0.0)


OPS = (
    _parallel("partition", "dim", "axis", emit="partition({0}, {dim}, {axis})"),
    _parallel("combine", "dim", "axis", emit="combine({0}, {dim}, {axis})"),
    _parallel("replicate", "axis", emit="replicate({0}, {axis})"),
    _parallel("reduce", "axis", emit="reduce({0}, {axis})"),
    _parallel("all_gather", "dim", "axis", emit="all_gather({0}, {dim}, {axis})"),
    _parallel("reduce_scatter", "dim", "axis", emit="reduce_scatter({0}, {dim}, {axis})"),
    _parallel("reduce_replicate", "axis", emit="reduce_replicate({0}, {axis})"),
    _parallel("all_to_all", "dim", "to_dim", "axis", emit="all_to_all({0}, {dim}, {to_dim}, {axis})"),
)

TRANSITIONS: Mapping[str, Callable[[Attrs], Transition]] = MappingProxyType(
    {
        "partition": lambda a: (Invariant(), Shard(_dim(a, "dim"))),
        "combine": lambda a: (Shard(_dim(a, "dim")), Invariant()),
        "replicate": lambda a: (Invariant(), Replicate()),
        "reduce": lambda a: (Partial(), Invariant()),
        "all_gather": lambda a: (Shard(_dim(a, "dim")), Replicate()),
        "reduce_scatter": lambda a: (Partial(), Shard(_dim(a, "dim"))),
        "reduce_replicate": lambda a: (Partial(), Replicate()),
        "all_to_all": lambda a: (Shard(_dim(a, "dim")), Shard(_dim(a, "to_dim"))),
    }
)
"""Operator -> (state before, state after) along its axis."""


def _dim(attrs: Attrs, name: str) -> int:
    dim = attrs[name]
    assert isinstance(dim, int), attrs
    return dim


def move(before: State, after: State) -> tuple[str, dict[str, int]] | None:
    """The one operator (name, dims) that takes a state to another along an axis; None where there is none."""
    match before, after:
        case Invariant(), Shard(dim):
            return "partition", {"dim": dim}
        case Shard(dim), Invariant():
            return "combine", {"dim": dim}
        case Invariant(), Replicate():
            return "replicate", {}
        case Partial(), Invariant():
            return "reduce", {}
        case Shard(dim), Replicate():
            return "all_gather", {"dim": dim}
        case Partial(), Shard(dim):
            return "reduce_scatter", {"dim": dim}
        case Partial(), Replicate():
            return "reduce_replicate", {}
        case Shard(dim), Shard(to_dim) if dim != to_dim:
            return "all_to_all", {"dim": dim, "to_dim": to_dim}
        case _:
            return None
