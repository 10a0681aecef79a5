"""What graphs within nodes, and functions, have of their own, put where all readers look for it: stored tensors beside
those of the file's own graph, each under one name, and operators in the file's own opset.

Entry point: ``lift``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx

from ir.errors import ModelError


def lift(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, changed in place.

    Raises:
        ModelError: if a function has an operator as another opset than the file's has it.
    """
    names = Counter(_defined(model.graph))
    for graph in _within(model.graph.node):
        model.graph.initializer.extend(_taken(graph, names))
    for function in model.functions:
        for graph in _within(function.node):
            _as_constants(graph)
        _align(function, model)
    return model


def _within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs within nodes, and those within theirs."""
    for node in nodes:
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield graph
                yield from _within(graph.node)


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of values, once for each place that defines one; those of other kinds of operands once more."""
    for each in (graph, *_within(graph.node)):
        yield from {value.name for value in (*each.input, *each.initializer)}
        yield from (name for node in each.node for name in node.output)


def _taken(graph: onnx.GraphProto, names: Counter[str]) -> Iterator[onnx.TensorProto]:
    """A graph's stored tensors, of which it has none any more: under a name of their own where another has theirs."""
    before, results = list(graph.initializer), {value.name for value in graph.output}
    del graph.initializer[:]
    declared = {value.name for value in graph.input}
    for tensor in before:
        name = tensor.name
        if name in declared:
            what = f"{name!r} is both an operand of a graph within a node, and stored in it"
            raise ModelError(what, mend="Export it again")
        if names[name] > 1 or name in results:
            own = next(each for i in range(2, 1 << 31) if (each := f"{name}_{i}") not in names)
            names[own] += 1
            graph.node.insert(0, onnx.helper.make_node("Identity", [own], [name]))
            tensor.name = own
        yield tensor


def _as_constants(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    del graph.initializer[:]


def _align(function: onnx.FunctionProto, model: onnx.ModelProto) -> None:
    """Raises ModelError if an operator is another one in the function's opset than in the file's."""
    versions = {each.domain or "": each.version for each in model.opset_import}
    nodes = [*function.node, *(node for graph in _within(function.node) for node in graph.node)]
    for imported in function.opset_import:
        version = versions.get(imported.domain, imported.version)
        if imported.domain not in ("", "ai.onnx") or version == imported.version:
            continue
        for node in nodes:
            if node.domain in ("", "ai.onnx") and _form(node.op_type, version) != _form(node.op_type, imported.version):
                raise ModelError(
                    f"function {function.domain}::{function.name} has {node.op_type} of opset {imported.version}, "
                    f"which is another one in the file's opset {version}",
                    "Functions whose operators are those of the file's opset",
                    f"Export it with functions of opset {version}",
                )
        imported.version = version


def _form(op: str, opset: int) -> tuple[object, ...]:
    """What an operator takes and gives, and what its attributes are where they are left out; nothing of what is none.

    Versions of one form differ in the types that they take.
    """
    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return ()
    operands = tuple((each.name, each.option) for each in (*schema.inputs, *schema.outputs))
    attributes = [(x.name, x.type, x.required, x.default_value.SerializeToString()) for x in schema.attributes.values()]
    return operands, sorted(attributes, key=lambda x: x[0]), schema.deprecated
