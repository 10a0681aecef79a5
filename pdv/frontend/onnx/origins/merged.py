"""Parameters that went with a node that torch's optimizer took for another's equal.

Two norms of one value whose scales start out as ones, two projections of one value that start out as zeros: equal
stored tensors become one, then equal nodes do, and the parameters of the second are nowhere any more. What is left of
them is the name by which their readers call what they read. Entry point: ``lost_with_nodes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import onnx_ir

from pdv.frontend.onnx.origins.signature import FX_NODE, NAMED, NUMBER, READ, SCOPES, Signature, names_of

_PART = "getitem"  # of a result of several


def lost_with_nodes(signature: Signature, graph: onnx_ir.Graph) -> set[str]:
    """Parameters of modules of which no node is left, where a node is read under two names whose parameters are each
    of one number: those of a module with parameters of the same names may have been its equals.
    """
    there = {name for name, value in graph.initializers.items() if value.uses()}
    run = {scope for node in graph for scope in re.findall(r"'([^']*)'", node.metadata_props.get(SCOPES, ""))}
    modules = _modules(signature.targets)
    gone = {
        module: names
        for module, names in modules.items()
        if module not in run and not any(f"{module}.{name}" in there for name in names)
    }
    if not gone:
        return set()
    found: set[str] = set()
    for node in _merged(graph):
        own = {signature.parameters[name] for name in _names_in(node) if name in signature.parameters}
        values = [graph.initializers[name] for name in own & there]
        if len(values) == len(own) and all(map(_is_one_number, values)):
            leaves = {tuple(sorted(name.rpartition(".")[2] for name in own))}
            found |= {f"{module}.{name}" for module, names in gone.items() if names in leaves for name in names}
    return found


def _modules(targets: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Module -> the names that its parameters have in it."""
    found: dict[str, list[str]] = {}
    for target in sorted(targets):
        module, _, name = target.rpartition(".")
        found.setdefault(module, []).append(name)
    return {module: tuple(names) for module, names in found.items()}


def _merged(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    """Nodes with parameters that are read, themselves or what follows from them, under a name that is no node's."""
    known = names_of(graph)
    for node in graph:
        other = {NUMBER.sub("", name) for name in _names_in(node) - known}
        for value in node.inputs:
            before = value.producer() if value is not None else None
            if before is not None and other & {_kind(before), _PART}:
                yield from _with_parameters(before)


def _kind(node: onnx_ir.Node) -> str:
    """What names of torch's nodes for the same operator begin with."""
    match = NAMED.match(node.metadata_props.get(FX_NODE, ""))
    return NUMBER.sub("", match[1]) if match is not None else ""


def _with_parameters(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The next nodes upwards that read parameters."""
    left, seen = [node], {node}
    while left:
        node = left.pop()
        if any(value is not None and value.is_initializer() and "." in (value.name or "") for value in node.inputs):
            yield node
            continue
        above = {before for value in node.inputs if value is not None and (before := value.producer()) is not None}
        left += above - seen
        seen |= above


def _names_in(node: onnx_ir.Node) -> set[str]:
    """The names that a node of torch reads."""
    _, _, call = node.metadata_props.get(FX_NODE, "").partition("(args = ")
    return set(READ.findall(call))


def _is_one_number(value: onnx_ir.Value) -> bool:
    assert value.const_value is not None, value
    array = value.const_value.numpy().reshape(-1)
    return bool((array == array[:1]).all())
