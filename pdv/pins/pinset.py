"""Pins as read, and bound to one graph and mesh."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ir.errors import PinsError, did_you_mean
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Shard, State
from ir.views import sources_of
from pdv.cluster.source import Source
from pdv.pins.constraint import Constraint, join, no_traces
from pdv.pins.names import Names
from pdv.pins.read import read_spec
from pdv.pins.roles import RoleOf
from pdv.pins.select import Selected, select
from pdv.pins.spec import ForbidPin, OperatorPin, PinsSpec
from pdv.pins.states import forbidden_state, tensor_constraints
from pdv.pins.techniques import TECHNIQUES, find_followers, follows, rests_so, scores_of, splits_allowed, traces_of
from pdv.problem import Pins, Storage

# forbidden techniques that are about parameters at rest: whether they are gathered again in backward, None for either
AT_REST: Mapping[str, bool | None] = {"zero": None, "zero-2": False, "zero-3": True, "fsdp": True}


def load_pins(pins: str | os.PathLike[str] | Mapping[str, Any] | PinSet) -> PinSet:  # Any: plain data
    """The pins of a YAML file, of the same data as a mapping, or ``pins`` itself.

    Raises:
        PinsError: naming the file, the line and the mend.
    """
    return pins if isinstance(pins, PinSet) else PinSet(*read_spec(pins))


@dataclass(frozen=True)
class PinSet:
    """Pins, of no graph yet."""

    spec: PinsSpec
    source: Source

    @property
    def mesh(self) -> Mapping[str, int] | None:
        """The pinned mesh, axis sizes slow to fast."""
        return self.spec.mesh

    @cached_property
    def content(self) -> str:
        """What is pinned, as canonical JSON: equal for equal pins, whatever file they stand in."""
        return json.dumps(self.spec.model_dump(exclude_defaults=True), sort_keys=True)

    @cached_property
    def axes(self) -> dict[str, str]:
        """Every axis that is named, and where first."""
        found: dict[str, str] = {}
        for key, group in (("axes", self.spec.axes), ("techniques", self.spec.techniques)):
            found |= {axis: self.source.where((key, axis)) for axis in group if axis not in found}
        for pattern, states in self.spec.tensors.items():
            found |= {axis: self.source.where(("tensors", pattern, axis)) for axis in states if axis not in found}
        entries: list[tuple[str, int, OperatorPin | ForbidPin]] = [
            ("operators", number, pin) for number, pin in enumerate(self.spec.operators)
        ]
        entries += [("forbid", number, pin) for number, pin in enumerate(self.spec.forbid)]
        for key, number, pin in entries:
            if pin.axis is not None and pin.axis not in found:
                found[pin.axis] = self.source.where((key, number))
        return found

    @property
    def singles_out(self) -> bool:
        """Whether anything is named of which a deep model's equal layers may have some."""
        chosen = [*self.spec.operators, *self.spec.forbid]
        named = any(one.param or one.module or one.name for one in chosen)
        return bool(self.spec.tensors) or named or any(one.tensor for one in self.spec.forbid)

    def speaks_of(self, mesh: Mesh) -> bool:
        """True if a mesh has all axes that are named."""
        return all(any(axis.name == name for axis in mesh.axes) for name in self.axes)

    def on(self, graph: Graph, mesh: Mesh) -> Pins:
        """The pins as predicates over a graph's nodes and a mesh's axes; the free ones where there is none.

        Raises:
            PinsError: if a name is none of the graph's or of the mesh's.
        """
        known = [axis.name for axis in mesh.axes]
        for name, where in self.axes.items():
            if name not in known:
                raise PinsError(
                    f"{where}: no mesh axis is called {name!r}",
                    f"Axes: {', '.join(known) or 'none, on one device'}",
                    did_you_mean(name, known) or "Pin the mesh too, `mesh: {dp: 2, tp: 4}` or --mesh dp=2,tp=4",
                )
        binding = _Binding(self, Names(graph), mesh, RoleOf())
        constraints = binding.constraints()
        return join(constraints, binding.role, self.source.name) if constraints else Pins()


@dataclass(frozen=True)
class _Binding:
    pins: PinSet
    names: Names
    mesh: Mesh
    role: RoleOf

    def constraints(self) -> list[Constraint]:
        spec = self.pins.spec
        found = [self._axis(axis, frozenset(roles)) for axis, roles in spec.axes.items()]
        found += [self._technique(axis, name) for axis, name in spec.techniques.items()]
        for pattern, states in spec.tensors.items():
            where = self.pins.source.where(("tensors", pattern))
            found += tensor_constraints(where, pattern, states, self.names)
        found += [self._operators(number, pin) for number, pin in enumerate(spec.operators)]
        found += [self._forbidden(number, pin) for number, pin in enumerate(spec.forbid)]
        return found

    def _axis(self, axis: str, roles: frozenset[str]) -> Constraint:
        """What an axis may be used for; doing the same work everywhere, or letting a sum pass, is always allowed."""

        def split(node: Node, on: str, option: Split) -> bool:
            return on != axis or option.loop is None or self.role(node, option) in roles

        label = f"{self.pins.source.where(('axes', axis))} ({' or '.join(sorted(roles)) or 'nothing'})"
        told = ("sequence" in roles) != ("context" in roles)  # the same cut, of attention or of anything else
        return Constraint(label, split=split, traces=scores_of if told else no_traces, follows=True)

    def _technique(self, axis: str, name: str) -> Constraint:
        technique, size = TECHNIQUES[name], self.mesh.size(axis)
        position, rests = self.mesh.index(axis), rests_so(technique, size)
        followers = find_followers(technique, size, self.role, self.names.operators)
        if followers is None:
            where, roles = self.pins.source.where(("techniques", axis)), " or ".join(technique.roles)
            none = f"has a cut for {roles} that divides by {size}" if roles else "is one that it cuts"
            what = f"{where}: {name} cuts nothing here: no operator {none}"
            raise PinsError(what, mend="Choose another technique, or another size of the axis")
        allowed = splits_allowed(technique, size, self.role, followers)

        def split(node: Node, on: str, option: Split) -> bool:
            return on != axis or allowed(node, option)

        def storage(param: Node, on: str, state: State) -> bool:
            return on != axis or rests(param, state)

        def at_rest(param: Node, kept: Storage) -> bool:
            cut = isinstance(kept.sharding[position], Shard)
            return not cut or technique.regather is None or kept.regather == technique.regather

        def followed(node: Node, on: str, option: Split) -> bool:
            return on == axis and follows(technique, node, option, self.role, followers)

        return Constraint(
            f"{self.pins.source.where(('techniques', axis))} ({name})", split=split, storage=storage, rests=at_rest,
            traces=traces_of(technique, self.role.weights), does=followed, follows=True,
        )  # fmt: skip

    def _operators(self, number: int, pin: OperatorPin) -> Constraint:
        where = self.pins.source.where(("operators", number))
        chosen = select(pin.given(), self.names, where)
        self._check_cut(where, chosen, pin.loop, pin.role)

        def split(node: Node, on: str, option: Split) -> bool:
            if on != pin.axis or node not in chosen or not self._cuts(node, pin.loop, pin.role):
                return True
            return self._is_cut(node, option, pin.loop, pin.role)

        def does(node: Node, on: str, option: Split) -> bool:
            return on == pin.axis and node in chosen and self._is_cut(node, option, pin.loop, pin.role)

        return Constraint(
            f"{where} ({_words(pin)})", split=split, keys=chosen.keys, sources=chosen.params, does=does,
            traces=self._traces(chosen, pin.loop, pin.role), follows=pin.role is not None,
        )  # fmt: skip

    def _traces(self, chosen: Selected, loop: str | None, role: str | None) -> Callable[[Node], frozenset[Hashable]]:
        """What rewrites must leave of the selected operators that have such a cut."""

        def traces(node: Node) -> frozenset[Hashable]:
            found = chosen.traces(node)
            return found if found and self._cuts(node, loop, role) else frozenset()

        return traces

    def _forbidden(self, number: int, pin: ForbidPin) -> Constraint:
        where = self.pins.source.where(("forbid", number))
        label = f"{where} (forbid {_words(pin)})"
        if pin.tensor is not None and pin.state is not None:
            return forbidden_state(label, pin.tensor, pin.state, pin.axis, self.names)
        chosen = select(pin.given(), self.names, where)
        if pin.technique in AT_REST:
            return self._forbidden_at_rest(label, where, pin, chosen)
        self._check_cut(where, chosen, pin.loop, None)  # what cannot happen may be forbidden

        def split(node: Node, on: str, option: Split) -> bool:
            if pin.axis not in (None, on) or node not in chosen:
                return True
            if pin.loop is None and pin.technique is None:
                return option.loop is None
            return not self._is_cut(node, option, pin.loop, pin.technique)

        follows = pin.technique is not None
        everywhere = scores_of if pin.technique in ("sequence", "context") else no_traces
        traces = self._traces(chosen, pin.loop, pin.technique) if pin.given() else everywhere
        return Constraint(label, split=split, keys=chosen.keys, sources=chosen.params, traces=traces, follows=follows)

    def _forbidden_at_rest(self, label: str, where: str, pin: ForbidPin, chosen: Selected) -> Constraint:
        if chosen.op is not None or chosen.named is not None or pin.loop is not None:
            raise PinsError(
                f"{where}: {pin.technique} is about parameters, not about operators or loops",
                "Allowed with it: axis, param, module",
            )
        sources = None if chosen.sources is None and chosen.module is None else chosen.params
        again = AT_REST[str(pin.technique)]

        def gathers(param: Node, on: str, regather: bool) -> bool:
            meant = pin.axis in (None, on) and (sources is None or not sources.isdisjoint(sources_of(param)))
            return not meant or (again is not None and regather != again)

        return Constraint(label, gathers=gathers, sources=sources or frozenset())

    def _is_cut(self, node: Node, option: Split, loop: str | None, role: str | None) -> bool:
        return (loop is None or option.label == loop) and (role is None or self.role(node, option) == role)

    def _cuts(self, node: Node, loop: str | None, role: str | None) -> bool:
        """True if an operator has such a cut at all."""
        return any(self._is_cut(node, option, loop, role) for option in node.op.splits(node.loops))

    def _check_cut(self, where: str, chosen: Selected, loop: str | None, role: str | None) -> None:
        """Somebody is chosen, and a loop is one of theirs."""
        nodes = [node for node in self.names.operators if node in chosen]
        if not nodes:
            raise PinsError(f"{where}: no operator is all of what is given", mend="Leave one of the fields out")
        if (loop or role) and not any(self._cuts(node, loop, role) for node in nodes):
            labels = sorted({option.label for node in nodes for option in node.op.splits(node.loops)})
            what = f"loop {loop!r}" if loop else f"cut for {role}"
            near = did_you_mean(loop, labels) if loop else ""
            raise PinsError(
                f"{where}: none of {len(nodes)} operators has a {what}", f"Loops: {', '.join(labels)}", near
            )


def _words(pin: OperatorPin | ForbidPin) -> str:
    """The entry in short."""
    return ", ".join(f"{key}: {value}" for key, value in pin.model_dump(exclude_none=True).items())
