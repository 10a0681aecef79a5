"""Weights that inference computes from weights alone are computed once, when the package is written.

A convolution's weight scaled by a norm's, or a table of positions, does not depend on what the caller passes. Entry
point: ``fold``; what counts as such a value is decided by ``pdv.pcg.plan_cost.is_fixed``, so that it is priced so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.builder import Builder
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node, unmoved
from ir.mesh import Mesh
from ir.sharding import Invariant, Shard, Sharding, format_sharding
from ir.verify import infer_shardings
from ir.views import sources_of
from pdv.emit.analysis.names import unique
from pdv.frontend.program import Weights
from pdv.pcg.plan_cost import is_fixed

FOLDED = "folded"  # last word of the stored name of what was computed, where no parameter has that name

Array = np.ndarray[Any, Any]  # Any: the element type is known only when a tensor is read


def fold(pcg: Graph, mesh: Mesh) -> tuple[Graph, dict[str, Node]]:
    """The PCG with every value that depends on weights alone as a stored tensor, and these values by name."""
    shardings = infer_shardings(pcg, mesh)
    moving = _moving(pcg)
    chosen = {node for node in pcg.nodes if node not in moving and _is_read(pcg, node) and _may_rest(shardings[node])}
    k = Builder()
    new: dict[Node, Node] = {}
    values: dict[str, Node] = {}
    for node in pcg.inputs:
        new[node] = k.copy(node, ())
    needed = _find_needed(pcg, chosen)
    taken = {name for param in pcg.params for name in (param.attr("name"), *sources_of(param))}
    for node in (node for node in pcg.nodes if node in needed):
        if node in chosen:
            name = unique(_name(node), [*values, *taken])
            whole = all(state == Invariant() for state in shardings[node])
            stored = "" if whole else format_sharding(shardings[node])
            column = node.type.rank == 3 and node.type.shape[1:] == (1, 1)  # a bias of channels is kept as a vector
            view = (("reshape", node.type.shape),) if column else ()
            new[node] = k.param(name, node.type, stored=stored, source=name, view=view)
            values[name] = node
        elif node not in new:
            new[node] = k.copy(node, tuple(new[operand] for operand in node.operands))
    outputs = {name: new[node] for name, node in pcg.outputs}
    return k.graph(outputs, {name: new[node] for name, node in pcg.updates}, pcg.name), values


def _moving(pcg: Graph) -> set[Node]:
    """What depends on a buffer that the program overwrites."""
    updated = {name for name, _ in pcg.updates}
    found: set[Node] = set()
    for node in pcg.nodes:
        if (node.is_param and node.attr("name") in updated) or any(x in found for x in node.operands):
            found.add(node)
    return found


def _is_read(pcg: Graph, node: Node) -> bool:
    """True for a value of weights alone, computed and not only moved, that something else reads."""
    if node.is_leaf or not node.type.dtype.is_floating or not is_fixed(node) or not _computes(node):
        return False
    return node not in pcg.roots and not all(is_fixed(user) for user in pcg.users[node])


def _computes(node: Node) -> bool:
    """False of leaves that are only moved."""
    return not unmoved(node).is_leaf


def _may_rest(sharding: Sharding) -> bool:
    return all(isinstance(state, Shard | Invariant) for state in sharding)


def _find_needed(pcg: Graph, chosen: set[Node]) -> set[Node]:
    """What is still computed, or read."""
    found: set[Node] = set(pcg.inputs)
    stack = list(pcg.roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if node in chosen else node.operands)
    return found


def _name(node: Node) -> str:
    """After the first parameter that it is made of."""
    while not node.is_leaf:
        node = node.operands[0]
    return f"{sources_of(node)[0] if node.is_param else node.name or 'constant'}.{FOLDED}"


def value_of(node: Node, weights: Weights) -> Array:
    """[*shape]: the value, computed in float64 on one device."""
    from pdv.frontend.torch.opaque import call_torch  # torch is imported where it is needed

    k = Builder()
    graph = k.graph({"value": _serial(k, node, {})})
    sources = dict.fromkeys(source for param in graph.params for source in sources_of(param))
    values: Mapping[str, Array] = {source: np.asarray(weights.load(source)).astype(np.float64) for source in sources}
    value = evaluate(graph, values, field=FloatField(foreign=call_torch)).gather()["value"]
    return value.reshape(-1) if value.ndim == 3 and value.shape[1:] == (1, 1) else value


def _serial(k: Builder, node: Node, made: dict[Node, Node]) -> Node:
    """The same value without operators between devices."""
    if node.op.kind == "parallel":
        return _serial(k, node.operands[0], made)
    if node not in made:
        if node.is_param:
            attrs: dict[str, Any] = {**node.attrs, "stored": "", "regather": False}
            made[node] = k.param(attrs.pop("name"), node.type, **attrs)
        else:
            made[node] = k.copy(node, tuple(_serial(k, operand, made) for operand in node.operands))
    return made[node]
