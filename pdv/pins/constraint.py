"""One pin as predicates, and several as the ``Pins`` that a search obeys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ir.graph import Node
from ir.operator import Split
from ir.sharding import State
from pdv.pins.names import Key, key_of, source_of
from pdv.pins.roles import RoleOf
from pdv.problem import Pins, Storage
from pdv.problem.problem import allow_all


@dataclass(frozen=True)
class Constraint:
    """One pin on one graph and mesh.

    Attributes:
        label: where it stands and what it says, for messages.
        split, storage, rests, gathers: as in ``Pins``.
        keys: values and operators that it singles out by name; ``sources``: parameters.
        kept: values that no rewrite may take away, for the pin would go with them.
        follows: whether it depends on roles, so that equal nodes may differ by where their operands come from.
    """

    label: str
    split: Callable[[Node, str, Split], bool] = allow_all
    storage: Callable[[Node, str, State], bool] = allow_all
    rests: Callable[[Node, Storage], bool] = allow_all
    gathers: Callable[[Node, str, bool], bool] = allow_all
    keys: frozenset[Key] = frozenset()
    sources: frozenset[str] = frozenset()
    kept: frozenset[Key] = frozenset()
    follows: bool = False


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
    kept = frozenset(key for entry in every for key in entry.kept)
    return Joined(
        split=lambda node, axis, split: all(allowed(node, axis, split) for allowed in by_split),
        storage=lambda param, axis, state: all(allowed(param, axis, state) for allowed in by_storage),
        name=name,
        rests=lambda param, storage: all(allowed(param, storage) for allowed in by_rest),
        gathers=lambda param, axis, regather: all(allowed(param, axis, regather) for allowed in by_gather),
        mark=lambda nodes: _mark(nodes, every, role),
        loses=lambda before, after: not _keep(before, kept) <= _keep(after, kept),
        constraints=every,
        role=role,
    )


def _keep(nodes: Sequence[Node], kept: frozenset[Key]) -> frozenset[Key]:
    return kept and kept & {key_of(node) for node in nodes}


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
        return source_of(value) in entry.sources
    return key_of(value) in entry.keys
