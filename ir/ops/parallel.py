"""Partition, combine, replicate, reduce and their fusions: the only operators that name a mesh axis.

They never change a tensor's global value, only its state along one axis (docs/architecture.md, States). An operator is
declared by the kinds of state before and after, from which all else follows (``ir/transition.py``): its dual, its
collectives, whether it sums or gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ir.operator import Operator
from ir.sharding import Invariant, Partial, Replicate, Shard, State
from ir.transition import Transition


def _parallel(name: str, before: type[State], after: type[State], *, emitted: bool = True) -> Operator:
    """``emitted``: whether programs have a function for it; one without is written as two, by way of Invariant."""
    transition = Transition(before, after)
    return Operator(
        name,
        "... -> ...",
        "parallel",
        emit=name if emitted else "",
        attrs=(*transition.dims, "axis"),
        flops_per_point=0.0,
        transition=transition,
    )


OPS = (
    _parallel("partition", Invariant, Shard),
    _parallel("combine", Shard, Invariant),
    _parallel("replicate", Invariant, Replicate),
    _parallel("reduce", Partial, Invariant),
    _parallel("all_gather", Shard, Replicate),
    _parallel("reduce_scatter", Partial, Shard),
    _parallel("reduce_replicate", Partial, Replicate, emitted=False),
    _parallel("all_to_all", Shard, Shard),
)

TRANSITIONS: Mapping[str, Transition] = MappingProxyType({op.name: op.transition for op in OPS})
_BETWEEN = {(transition.before, transition.after): name for name, transition in TRANSITIONS.items()}


def transition_of(name: str) -> Transition:
    """The transition of a parallel operator."""
    assert name in TRANSITIONS, f"no such parallel operator: {name}"
    return TRANSITIONS[name]


def move(before: State, after: State) -> tuple[str, dict[str, int]] | None:
    """The one operator (name, dims) that takes a state to another along an axis; None where there is none."""
    name = _BETWEEN.get((type(before), type(after)))
    if name is None or before == after:
        return None
    dims = [state.dim for state in (before, after) if isinstance(state, Shard)]
    return name, dict(zip(TRANSITIONS[name].dims, dims, strict=True))
