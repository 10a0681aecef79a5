"""Parameters that went with a node that torch's optimizer took for another's equal.

Two norms of one value whose scales start out as ones, two projections of one value that start out as zeros: equal
stored tensors become one, then equal nodes do, and the parameters of the second are nowhere any more. What is left of
them is the name by which their readers call what they read, and where the reader's line of source calls the module, the
node is had back. Nodes that the optimizer wrote anew say nothing; whose parameter they read is told by who reads them,
and by the module's weights. Entry points: ``part_nodes``, ``part_constants``, ``part_unsaid``, ``lost_with_nodes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.proofs.proved import Stored
from pdv.frontend.onnx.origins.signature import (
    FX_NODE,
    LINES,
    NAMED,
    READ,
    SCOPES,
    Signature,
    array_of,
    kind_of,
    names_of,
)

_PART = "getitem"  # of a result of several


def lost_with_nodes(signature: Signature, graph: onnx_ir.Graph) -> set[str]:
    """Parameters of modules of which no node is left, where a node is read under two names whose parameters are each
    of one number: those of a module with parameters of the same names may have been its equals, and others of its own.
    """
    there, gone = _read(graph), _find_gone(signature, graph)
    left = signature.targets - there - signature.mentioned(graph)
    found: set[str] = set()
    if not left:
        return found
    for node in _merged(signature, graph):
        own = {signature.parameters[name] for name in _names_in(node) if name in signature.parameters}
        values = [graph.initializers[name] for name in own & there]
        if len(values) == len(own) and all(map(_is_one_number, values)):
            leaves = {tuple(sorted(name.rpartition(".")[2] for name in own))}
            found |= {f"{module}.{name}" for module, names in gone.items() if names in leaves for name in names}
            modules = {name.rpartition(".")[0] for name in own}
            found |= {name for name in left if name.rpartition(".")[0] in modules}
    return found


def _read(graph: onnx_ir.Graph) -> set[str]:
    return {name for name, value in graph.initializers.items() if value.uses()}


def _find_gone(signature: Signature, graph: onnx_ir.Graph) -> Mapping[str, tuple[str, ...]]:
    """Modules of which neither a node nor a parameter is left -> the names of their parameters."""
    there, run = _read(graph), {scope for node in graph for scope in _scopes(node)}
    return {
        module: names
        for module, names in _modules(signature.targets).items()
        if module not in run and not any(f"{module}.{name}" in there for name in names)
    }


def _scopes(node: onnx_ir.Node) -> list[str]:
    return re.findall(r"'([^']*)'", node.metadata_props.get(SCOPES, ""))


def part_nodes(signature: Signature, graph: onnx_ir.Graph) -> dict[str, str]:
    """Give modules whose node became one with an equal one a node and parameters of their own; changes the graph.

    That a module was called is told by the source's line by which its reader is reached: ``self.mlp(self.norm(x))``.
    What was read of it has a name that is no node's. Parameter that is new -> that whose values it has.
    """
    gone, known, found = dict(_find_gone(signature, graph)), names_of(graph), dict[str, str]()
    for node in list(graph) if gone else []:
        own = [signature.parameters[name] for name in _names_in(node) if name in signature.parameters]
        modules = {name.rpartition(".")[0] for name in own}
        if (
            len(modules) != 1
            or len(node.outputs) != 1
            or not set(own) <= {value.name for value in node.inputs if value}
        ):
            continue
        readers: dict[str, set[onnx_ir.Node]] = {}
        for use in node.outputs[0].uses():
            names = {each for each in _names_in(use.node) if _is_called(each, node)}
            readers.setdefault(names.pop() if len(names) == 1 else "", set()).add(use.node)
        leaves = tuple(sorted(name.rpartition(".")[2] for name in own))
        for name in sorted(readers.keys() - known - {""}) if "" not in readers else []:
            fits = {each for each, names in gone.items() if names == leaves}
            called = [_called(reader, fits, *modules) for reader in readers[name]]
            if called[0] is not None and all(each == called[0] for each in called):
                del gone[called[0]]
                found |= _write_apart(signature, node, name, (*modules, called[0]), readers[name])
    return found


def part_constants(signature: Signature, graph: onnx_ir.Graph) -> list[str]:
    """Read a constant of its own where an exporter's constant became one with an equal parameter; changes the graph.

    The ones and zeros of a norm without weights are such: the operator that the node is of names all that it reads, and
    the parameter is not among it. Returns: the parameters that were read there.
    """
    words, there = {target: word for word, target in signature.parameters.items()}, _read(graph)
    known = names_of(graph) | {value.name for value in graph.inputs} | {*signature.parameters, *signature.buffers}
    found = []
    for node in graph:
        names = _names_in(node)
        if not names or not names <= known or not {signature.parameters.get(name) for name in names} - {None} <= there:
            continue
        for place, value in enumerate(node.inputs):
            if value is None or value.name not in words or words[value.name] in names or not _is_one_number(value):
                continue
            own = onnx_ir.Value(
                name=f"{node.outputs[0].name}.constant.{place}",
                shape=value.shape,
                type=value.type,
                const_value=value.const_value,
            )
            graph.initializers[own.name or ""] = own
            node.replace_input_with(place, own)
            found.append(value.name or "")
    return found


def part_unsaid(signature: Signature, graph: onnx_ir.Graph, stored: Stored) -> tuple[dict[str, str], set[str]]:
    """Parameters that are read as another's equals by nodes of which the exporter says nothing; changes the graph.

    Such a node is of the modules that read it. One that has a parameter of the same name, which is nowhere in the file,
    is given a node of its own if the weights that the module had, ``stored``, have that parameter with these values.

    Returns: parameter that is new -> that whose values it has; and those of which that is not shown.
    """
    missing, parted, lost = signature.targets - _read(graph), dict[str, str](), set[str]()
    for node in [node for node in graph if FX_NODE not in node.metadata_props] if missing else []:
        for place, value in enumerate(node.inputs):
            if value is None or value.name not in signature.targets:
                continue
            leaf = value.name.rpartition(".")[2]
            for module, readers in _readers_by_module(node).items():
                own = f"{module}.{leaf}".removeprefix(".")
                if own not in missing:
                    continue
                if own not in stored or not np.array_equal(stored[own](), array_of(value)):
                    lost.add(own)
                    continue
                parted[own] = value.name
                _copy_for(node, place, own, readers)
    return parted, lost


def _readers_by_module(node: onnx_ir.Node) -> Mapping[str, list[onnx_ir.Node]]:
    """Module -> its nodes that read a node."""
    found: dict[str, list[onnx_ir.Node]] = {}
    for output in node.outputs:
        for use in output.uses():
            (*_, module, _) = ["", "", *_scopes(use.node)]
            found.setdefault(module, []).append(use.node)
    return found


def _copy_for(node: onnx_ir.Node, place: int, name: str, readers: Sequence[onnx_ir.Node]) -> None:
    """Let ``readers`` read a copy of a node that has a parameter ``name`` for what it has at ``place``."""
    graph, value = node.graph, node.inputs[place]
    assert graph is not None, node
    assert value is not None, place
    like = graph.initializers.get(name) or onnx_ir.Value(
        name=name, shape=value.shape, type=value.type, const_value=value.const_value
    )
    graph.initializers[name] = like
    operands = [like if i == place else x for i, x in enumerate(node.inputs)]
    attributes = [*node.attributes.values()]
    copy = onnx_ir.Node(node.domain, node.op_type, operands, attributes, num_outputs=len(node.outputs))
    for output, before in zip(copy.outputs, node.outputs, strict=True):
        output.name, output.type, output.shape = f"{before.name} of {name}", before.type, before.shape
        for reader in readers:
            for i, x in enumerate(reader.inputs):
                if x is before:
                    reader.replace_input_with(i, output)
    graph.insert_after(node, copy)
    if not any(output.uses() or output.is_graph_output() for output in node.outputs):
        graph.remove(node, safe=True)


def say_parted(parted: Iterable[str]) -> list[str]:
    """What was had back, in words."""
    names = sorted(parted)
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    told = (
        "started out equal to others and went with their nodes: the source's lines tell where they are read, and they "
    )
    return [f"{some} {told}are parameters of their own here"] if names else []


def _is_called(name: str, node: onnx_ir.Node) -> bool:
    """Whether a name that a reader has may be of the node's result."""
    return bool(_kind(node)) and kind_of(name) == _kind(node)


def _called(reader: onnx_ir.Node, modules: set[str], own: str) -> str | None:
    """The one of these modules that a line of the reader's source calls, in a module that the reader is in."""
    scopes, found = _scopes(reader), set()
    for line in reader.metadata_props.get(LINES, "").splitlines():
        names = set(re.findall(r"\bself\.(\w+)\(", line))
        inside = {module for module in modules | {own} if module.rpartition(".")[2] in names}
        found |= {module for module in inside if module.rpartition(".")[0] in scopes}
    return found.pop() if len(found) == 1 and own not in found else None


def _write_apart(
    signature: Signature, node: onnx_ir.Node, name: str, modules: Sequence[str], readers: set[onnx_ir.Node]
) -> dict[str, str]:
    """Let ``readers`` read a node like ``node``, with parameters of the second module for the first's."""
    graph, found, text, (before, module) = node.graph, dict[str, str](), node.metadata_props[FX_NODE], modules
    assert graph is not None, node
    words = {target: word for word, target in signature.parameters.items()}
    operands = list(node.inputs)
    for place, value in enumerate(node.inputs):
        if value is None or value.name not in words:
            continue
        target = f"{module}.{value.name.rpartition('.')[2]}"
        found[target] = value.name
        own = graph.initializers.get(target) or onnx_ir.Value(
            name=target, shape=value.shape, type=value.type, const_value=value.const_value
        )
        graph.initializers[target] = own
        operands[place] = own
        text = re.sub(rf"%{words[value.name]}\b", f"%{words[target]}", text)
    like = onnx_ir.Node(node.domain, node.op_type, operands, [*node.attributes.values()], num_outputs=1)
    like.outputs[0].name, like.outputs[0].type, like.outputs[0].shape = (
        name,
        node.outputs[0].type,
        node.outputs[0].shape,
    )
    like.metadata_props.update(node.metadata_props | {FX_NODE: NAMED.sub(f"%{name} :", text)})
    like.metadata_props[SCOPES] = node.metadata_props.get(SCOPES, "").replace(f"'{before}'", f"'{module}'")
    graph.insert_after(node, like)
    for reader in readers:
        for place, value in enumerate(reader.inputs):
            if value is node.outputs[0]:
                reader.replace_input_with(place, like.outputs[0])
    return found


def _modules(targets: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Module -> the names that its parameters have in it."""
    found: dict[str, list[str]] = {}
    for target in sorted(targets):
        module, _, name = target.rpartition(".")
        found.setdefault(module, []).append(name)
    return {module: tuple(names) for module, names in found.items()}


def _merged(signature: Signature, graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    """Nodes with parameters that are read, themselves or what follows from them, under a name that is no node's."""
    known = names_of(graph)
    for node in graph:
        other = {kind_of(name) for name in _names_in(node) - known}
        for value in node.inputs:
            before = value.producer() if value is not None else None
            if before is not None and other & {_kind(before), _PART}:
                yield from _with_parameters(signature, before)


def _kind(node: onnx_ir.Node) -> str:
    """What names of torch's nodes for the same operator begin with."""
    match = NAMED.match(node.metadata_props.get(FX_NODE, ""))
    return kind_of(match[1]) if match is not None else ""


def _with_parameters(signature: Signature, node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The next nodes upwards that read parameters."""
    left, seen = [node], {node}
    while left:
        node = left.pop()
        if any(value is not None and value.name in signature.targets for value in node.inputs):
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
