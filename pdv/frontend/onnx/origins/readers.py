"""Whose parameter a stored tensor is at each place that reads it.

Equal tensors become one in a file, also those that torch's optimizer computed of two parameters that start out equal.
A reader still says by which names torch's operators call what they read: those of one name are of one parameter, and of
which one is told by the module that reads, and by the line of its source. Entry point: ``readings``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir

from pdv.frontend.onnx.origins.signature import CLASSES, FX_NODE, LINES, READ, SCOPES, Signature, kind_of, names_of

_QUOTED = re.compile(r"'([^']*)'")

Use = Any  # what onnx_ir says of a value's users: the node, and which of its operands


@dataclass(frozen=True)
class Reading:
    """Places that read a stored tensor as what was computed of one parameter, and the source's lines there."""

    parameter: str
    uses: tuple[Use, ...]
    lines: frozenset[str]


class Readers:
    """What is still in a file, by names of torch's operators and by parameters."""

    def __init__(self, graph: onnx_ir.Graph, signature: Signature) -> None:
        self.known = names_of(graph) | {*graph.initializers, *signature.parameters, *signature.buffers}
        there = {name for name, value in graph.initializers.items() if value.uses()}
        self.missing = set(signature.targets) - there

    def readings(self, value: onnx_ir.Value, origin: str, *, chance: Callable[[], bool]) -> list[Reading] | None:
        """Those of a tensor that was computed of the parameter ``origin`` or of its equals; None if it is not told.

        chance: whether its values are such that no other tensor has the same.
        """
        groups: dict[str, list[Use]] = {}
        for use in value.uses():
            name = self.name_of(use, value) or (value.name if chance() else None)
            if name is None:
                return None
            groups.setdefault(name, []).append(use)
        own = groups.get(value.name or "")
        if value.is_graph_output() or own is None:
            return None
        found = {value.name or "": origin}
        for name, uses in groups.items():
            if name not in found:
                owner = self._owner(uses, own, origin, [groups[other] for other in groups if other != name])
                if owner is None or (owner != origin and owner in found.values()):
                    return None
                found[name] = owner
        whole: dict[str, list[Use]] = {}
        for name, owner in found.items():
            whole.setdefault(owner, []).extend(groups[name])
        return [Reading(owner, tuple(uses), _lines(uses)) for owner, uses in whole.items()]

    def name_of(self, use: Use, value: onnx_ir.Value) -> str | None:
        """By which name the operator of torch that a node is of calls what the node reads."""
        _, _, call = use.node.metadata_props.get(FX_NODE, "").partition("(args = ")
        kind = kind_of(value.name or "")
        names: list[str] = [
            name
            for name in READ.findall(call)
            if name == value.name or (name not in self.known and kind_of(name) == kind)
        ]
        places = sorted(other.idx for other in value.uses() if other.node is use.node)
        if len(set(names)) == 1:
            return names[0]
        return names[places.index(use.idx)] if len(names) == len(places) else None

    def _owner(
        self, uses: Sequence[Use], own: Sequence[Use], origin: str, others: Sequence[Sequence[Use]]
    ) -> str | None:
        """The missing parameter of the reading module whose part is that of ``origin`` in its own."""
        modules = {_module(use) for use in uses}
        if len(modules) != 1 or {class_of(use.node) for use in uses} != {class_of(use.node) for use in own}:
            return None
        (module,), (_, _, leaf) = modules, origin.rpartition(".")
        near = [name for name in self.missing if name.rpartition(".")[0] == module and name != origin]
        alone = not any(_module(use) == module for other in others for use in other)
        like = f"{module}.{leaf}" if module else leaf
        if alone and like in near and _lines(uses) == _lines(own):
            return like
        how = {_about(leaf, line_of(use.node)) for use in own}
        for name in near:
            if (
                how == {_about(name.rpartition(".")[2], line_of(use.node)) for use in uses}
                and len(how) == 1
                and "" not in how
            ):
                return name
        in_turn = [name for name in near if _is_in_turn(leaf, own, name.rpartition(".")[2], uses)]
        if len(in_turn) == 1:
            return in_turn[0]
        elsewhere = [name for name in self.missing if name.rpartition(".")[2] == leaf and name != origin]
        return None if near or elsewhere else origin


def _lines(uses: Sequence[Use]) -> frozenset[str]:
    return frozenset(line_of(use.node) for use in uses)


def line_of(node: onnx_ir.Node) -> str:
    """The source's line that a node is of, as it was exported."""
    lines: Mapping[str, str] = node.metadata_props
    return (lines.get(LINES, "").strip().splitlines() or [""])[-1].strip()


def _is_in_turn(leaf: str, own: Sequence[Use], other: str, uses: Sequence[Use]) -> bool:
    """Whether a line says two parameters, or what is called after them, in the order in which its node reads them."""
    if len(own) != 1 or len(uses) != 1 or own[0].node is not uses[0].node:
        return False
    words = re.findall(r"\w+", line_of(own[0].node))
    places = [[i for i, word in enumerate(words) if word.startswith(name)] for name in (leaf, other)]
    if [len(each) for each in places] != [1, 1]:
        return False
    return bool((places[0] < places[1]) == (own[0].idx < uses[0].idx))


def _about(leaf: str, line: str) -> str:
    """What a line calls of ``self.leaf`` before it goes with others; empty where that is not one thing."""
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError):
        return ""
    above = {id(inner): node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == leaf]
    if len(found) != 1 or not isinstance(found[0].value, ast.Name):
        return ""
    node: ast.AST = found[0]
    while isinstance(above.get(id(node)), ast.Attribute | ast.Call | ast.Subscript | ast.UnaryOp):
        node = above[id(node)]
    found[0].attr = ""
    return ast.dump(node)


def _module(use: Use) -> str:
    scopes = _QUOTED.findall(use.node.metadata_props.get(SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else ""


def class_of(node: onnx_ir.Node) -> str:
    """The class of the module that a node is of; empty where the file does not say."""
    classes = _QUOTED.findall(node.metadata_props.get(CLASSES, ""))
    return classes[-2] if len(classes) > 1 else ""
