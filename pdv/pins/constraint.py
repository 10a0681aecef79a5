"""One pin as predicates, and several as the ``Pins`` that a search obeys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ir.graph import Node
from ir.operator import Split
from ir.sharding import State
from ir.views import sources_of
from pdv.pins.names import Key, key_of
from pdv.pins.roles import RoleOf
from pdv.problem import Pins, Storage
from pdv.problem.problem import allow_all


def no_traces(node: Node) -> frozenset[Hashable]:
    """Of what nobody singles out."""
    return frozenset()


@dataclass(frozen=True)
class Constraint:
    """One pin on one graph and mesh.

    Attributes:
        label: where it stands and what it says, for messages.
        split, storage, rests, gathers: as in ``Pins``.
        keys: values and operators that it singles out by name; ``sources``: parameters.
        traces: what a rewrite must leave of a node that it singles out, for the pin would go with it.
        does: whether a node run so does what it asks for; some node of a plan must. None: it asks for nothing.
        follows: whether it depends on roles, so that equal nodes may differ by where their operands come from.
    """

    label: str
    split: Callable[[Node, str, Split], bool] = allow_all
    storage: Callable[[Node, str, State], bool] = allow_all
    rests: Callable[[Node, Storage], bool] = allow_all
    gathers: Callable[[Node, str, bool], bool] = allow_all
    keys: frozenset[Key] = frozenset()
    sources: frozenset[str] = frozenset()
    traces: Callable[[Node], frozenset[Hashable]] = no_traces
    does: Callable[[Node, str, Split], bool] | None = None
    follows: bool = False

    def traces_of(self, nodes: Sequence[Node]) -> frozenset[Hashable]:
        """What rewrites must leave of these nodes."""
        return frozenset().union(*map(self.traces, nodes))


@dataclass(frozen=True)
class Joined(Pins):
    """All of several constraints."""

    constraints: tuple[Constraint, ...] = ()
    role: RoleOf | None = None


def join(constraints: Sequence[Constraint], role: RoleOf, name: str) -> Joined:
    """Pins that keep every constraint."""
    every = tuple(constraints)
    by_split = [entry.split for entry in every if entry.split is not allow_all]
    by_storage = [entry.storage for entry in every if entry.storage is not allow_all]
    by_rest = [entry.rests for entry in every if entry.rests is not allow_all]
    by_gather = [entry.gathers for entry in every if entry.gathers is not allow_all]
    traced = [entry for entry in every if entry.traces is not no_traces]
    return Joined(
        split=lambda node, axis, split: all(allowed(node, axis, split) for allowed in by_split),
        storage=lambda param, axis, state: all(allowed(param, axis, state) for allowed in by_storage),
        name=name,
        rests=lambda param, storage: all(allowed(param, storage) for allowed in by_rest),
        gathers=lambda param, axis, regather: all(allowed(param, axis, regather) for allowed in by_gather),
        mark=lambda nodes: _mark(nodes, every, role),
        loses=lambda before, after: any(not one.traces_of(before) <= one.traces_of(after) for one in traced),
        constraints=every,
        role=role,
    )


def _mark(nodes: Sequence[Node], constraints: Sequence[Constraint], role: RoleOf) -> str:
    """Which constraints single out which of the nodes, and what their operands carry; empty if nothing is said."""
    inside = set(nodes)
    follows = any(entry.follows for entry in constraints)
    said: list[object] = []
    for node in nodes:
        for value in (node, *(operand for operand in node.operands if operand not in inside)):
            said.append(tuple(number for number, entry in enumerate(constraints) if _names(entry, value)))
            if follows and value not in inside:
                said.append([sorted(places) for places in role.carry(value)])
    if not any(said):
        return ""
    return ":" + hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def _names(entry: Constraint, value: Node) -> bool:
    if value.is_param:
        return not entry.sources.isdisjoint(sources_of(value))
    return key_of(value) in entry.keys
