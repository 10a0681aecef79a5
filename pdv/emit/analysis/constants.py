"""Constants of the program: what they are called, and how they are cut when the model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.graph import Node
from ir.mesh import JOINT
from ir.ops.parts import table_below
from ir.transition import Communication
from ir.views import sources_of
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.names import module_name, string, unique

STORED = "constants."
"""Prefix of constants in the weights file."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A constant, cut in one way: the model's attribute, the stored tensor, the cuts as text (``{"tp": 0}``)."""

    attribute: str
    stored: str
    cuts: str


def constant_buffers(reading: Reading) -> dict[Node, Buffer]:
    """The buffer of each leaf that is a constant; one for each way that a constant is cut."""
    names = constant_names(reading)
    results = {reading.resolve(node) for _, node in reading.graph.outputs}
    found: dict[Node, Buffer] = {}
    for node in reading.graph.nodes:
        leaf = reading.leaf(node)
        if leaf is None or not leaf.base.is_const or reading.resolve(node) is not node:
            continue
        if node not in results and not any(reading.is_own(user) for user in reading.users[node]):
            continue
        cut = all(link.op.transition.forward is Communication.SLICE for link in leaf.chain)
        assert cut, f"a constant is only ever cut: {leaf}"
        pairs = [(axis, link.attr("dim")) for link in leaf.chain for axis in link.attr("axis").split(JOINT)]
        cuts = ", ".join(f"{string(axis)}: {dim}" for axis, dim in pairs)
        attribute = unique(names[leaf.base], [buffer.attribute for buffer in found.values()])
        found[node] = Buffer(attribute, STORED + names[leaf.base], f"{{{cuts}}}" if cuts else "")
    return found


def constant_names(reading: Reading) -> dict[Node, str]:
    """A name for every constant, in order: by what it is used for; no parameter is stored by it."""
    names: dict[Node, str] = {}
    sources = [source for param in reading.graph.params for source in sources_of(param)]
    taken = [source.removeprefix(STORED) for source in sources if source.startswith(STORED)]
    for node in reading.graph.nodes:
        if node.is_const:
            names[node] = unique(_constant_name(reading, node), [*names.values(), *taken])
    return names


def _constant_name(reading: Reading, node: Node) -> str:
    for user in _readers(reading, node):
        name, first = user.op.constant_name, reading.leaf(reading.operands(user)[0])
        if first is not None and not first.base.is_const:
            name = name.format(module_name(first.base))
        if name and "{" not in name:
            return name
    return _rotary_name(node.attr("value").array) or "constant"


def _readers(reading: Reading, node: Node) -> list[Node]:
    """What computes with a constant, or with a part of it."""
    found: list[Node] = []
    for user in reading.readers(node):
        found += _readers_of_part(reading, user) if table_below(user) is not None else [user]
    return found


def _readers_of_part(reading: Reading, part: Node) -> list[Node]:
    return [
        below
        for user in reading.users[part]
        for below in (_readers_of_part(reading, user) if user.op.kind == "parallel" or table_below(user) else [user])
    ]


def _rotary_name(array: np.ndarray[Any, Any]) -> str | None:
    """cos or sin, as tables of rotary embeddings look: a row per position, angle zero first."""
    if array.ndim < 2 or array.dtype.kind != "f" or np.abs(array).max() > 1:
        return None
    first = array.reshape(-1, array.shape[-1])[0]
    return "cos" if (first == 1).all() else "sin" if (first == 0).all() else None
