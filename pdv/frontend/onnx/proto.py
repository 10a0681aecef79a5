"""What protobuf lets a file say and no reader of it should have to choose between: two payloads, one name twice.

Entry points: ``check_proto``, and ahead of it ``fill_sparse``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ir.errors import ModelError

EXPORT = "Export it again"
MOST_OPERATORS = 1 << 15  # of a model: many times those of the largest, and what can be planned at all
MOST_FILLED = 1 << 28  # elements of a sparse tensor, which a file of some bytes may say to be any number
_PAYLOADS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_OF_TYPE = {
    "float_data": (TensorProto.FLOAT, TensorProto.COMPLEX64),
    "double_data": (TensorProto.DOUBLE, TensorProto.COMPLEX128),
    "int64_data": (TensorProto.INT64,),
    "uint64_data": (TensorProto.UINT64, TensorProto.UINT32),
    "string_data": (TensorProto.STRING,),
}
_OTHERS = {kind for kinds in _OF_TYPE.values() for kind in kinds}  # the rest is kept in int32_data
_ELEMENTS: dict[int, int] = {TensorProto.COMPLEX64: 2, TensorProto.COMPLEX128: 2}
_PACKED = frozenset(
    number for name, number in TensorProto.DataType.items() if name in {"INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"}
)


def fill_sparse(graph: onnx.GraphProto) -> None:
    """Put tensors with all their zeros in the place of the sparse initializers of a graph.

    Raises:
        ModelError: naming one that is malformed, too large, or stored in a file of its own.
    """
    for sparse in graph.sparse_initializer:
        values, indices, dims = sparse.values, sparse.indices, tuple(sparse.dims)
        what = f"the sparse initializer {values.name!r} of shape {list(dims)}"
        if TensorProto.EXTERNAL in (values.data_location, indices.data_location):
            raise ModelError(f"{what} is stored in a file of its own", "Dense ones", EXPORT)
        if not dims or min(dims) < 1 or math.prod(dims) > MOST_FILLED:
            raise ModelError(what, f"Dims of one or more, and {MOST_FILLED} elements at most", EXPORT)
        for part in (values, indices):
            _check_tensor(part, what)
        try:
            found, places = onnx.numpy_helper.to_array(values), onnx.numpy_helper.to_array(indices)
            whole = np.zeros(dims, found.dtype)
            at = np.ravel_multi_index(tuple(places.T), dims) if places.ndim == 2 else places
            if at.shape != found.shape or found.ndim != 1 or (at < 0).any() or len({*at.tolist()}) < len(at):
                raise ValueError(f"{found.shape} values at {places.shape} places, each of which is to be one element")
            whole.reshape(-1)[at] = found
        except (ValueError, IndexError, TypeError) as error:
            raise ModelError(f"{what} is malformed: {error}", mend=EXPORT) from error
        graph.initializer.append(onnx.numpy_helper.from_array(whole, values.name))
    del graph.sparse_initializer[:]


def check_proto(model: onnx.ModelProto) -> None:
    """Whether every name is given once, every tensor has one payload, of its type and length, and functions end.

    Raises:
        ModelError: naming the first that is not.
    """
    _check_texts(model)
    _check_calls(model)
    opsets = {("" if each.domain == "ai.onnx" else each.domain, each.version) for each in model.opset_import}
    _once((domain for domain, _ in opsets), "opset of domain")  # the same opset once more says nothing else
    _check_kinds(model.graph)
    _check_graph(model.graph, "")
    for function in model.functions:
        _once((name for node in function.node for name in node.output if name), "value")
        for node in function.node:
            _check_node(node)
    keys = ((f.domain, f.name, getattr(f, "overload", "")) for f in model.functions)
    _once((":".join(key) for key in keys), "function")
    _check_names(model)


def _check_names(model: onnx.ModelProto) -> None:
    """Whether no function has the name of an operator of ONNX: which of the two is run is left to who runs the file."""
    for function in model.functions:
        if function.domain in ("", "ai.onnx") and onnx.defs.has(function.name):
            raise ModelError(
                f"the function {function.name!r} has the name and the domain of an operator of ONNX, and runtimes run "
                "one or the other",
                "Functions of other names, or in a domain of their own",
                "Rename it, or leave it out",
            )


def _check_kinds(graph: onnx.GraphProto) -> None:
    """Whether values are tensors, or sequences of them: of maps nothing is read."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.WhichOneof("value")
        held = value.type.sequence_type.elem_type.WhichOneof("value") if kind == "sequence_type" else None
        if "map_type" in (kind, held):
            raise ModelError(
                f"{value.name!r} is {'a map' if kind == 'map_type' else 'a sequence of maps'}",
                "Tensors",
                'Export it without maps (of skl2onnx: options={"zipmap": False})',
            )


def _check_texts(model: onnx.ModelProto) -> None:
    """Whether every name is text: protobuf hands out what is in no encoding as bytes."""
    left: list[Any] = [model]
    while left:
        message = left.pop()
        for field, value in message.ListFields():
            values = value if field.is_repeated else (value,)
            if field.message_type is not None:
                left += values
            elif field.type == field.TYPE_STRING and any(isinstance(each, bytes) for each in values):
                wrong = next(each for each in values if isinstance(each, bytes))
                raise ModelError(f"{type(message).__name__}.{field.name} is {wrong[:80]!r}", "Text in UTF-8", EXPORT)


def external_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """All that are stored in files of their own, wherever they stand."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            nodes += graph.node
            found: Iterable[TensorProto] = graph.initializer
        else:
            node = nodes.pop()
            graphs += [graph for attribute in node.attribute for graph in _graphs(attribute)]
            found = [tensor for attribute in node.attribute for tensor in _tensors(attribute)]
        yield from (tensor for tensor in found if tensor.data_location == TensorProto.EXTERNAL)


def _check_calls(model: onnx.ModelProto) -> None:
    """Whether functions, put in place of their calls, come to an end, and to no more operators than are read."""
    own = {_key(f): Counter(_calls(f.node)) for f in model.functions}
    sizes: dict[_Key, int] = {}
    while len(sizes) < len(own):
        ready = [key for key, calls in own.items() if key not in sizes and all(x in sizes for x in calls if x in own)]
        if not ready:
            circle = next(key for key in own if key not in sizes)
            raise ModelError(
                f"the function {circle[1]!r} calls itself, if by others",
                "Functions that call others",
                "Export it again",
            )
        sizes |= {key: sum(sizes.get(x, 1) * count for x, count in own[key].items()) for key in ready}
    check_count(sum(sizes.get(key, 1) for key in _calls(model.graph.node)))


def check_count(operators: int) -> None:
    """Raises ModelError if a model has more operators than are read."""
    if operators > MOST_OPERATORS:
        count = str(operators) if operators < 1 << 60 else "more than 2^60"
        raise ModelError(
            f"the model has {count} operators, its functions and loops written out",
            f"At most {MOST_OPERATORS}",
            "Export it in parts, or without what is repeated",
        )


_Key = tuple[str, str, str]


def _key(named: onnx.NodeProto | onnx.FunctionProto) -> _Key:
    name = named.name if isinstance(named, onnx.FunctionProto) else named.op_type
    return ("" if named.domain == "ai.onnx" else named.domain, name, getattr(named, "overload", ""))


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[_Key]:
    """What nodes, and those of the graphs in them, are calls of, if of a function."""
    left = list(nodes)
    while left:
        node = left.pop()
        yield _key(node)
        for attribute in node.attribute:
            for graph in _graphs(attribute):
                left += graph.node


def _graphs(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    return (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)


def _check_graph(graph: onnx.GraphProto, where: str) -> None:
    if graph.sparse_initializer:
        raise ModelError("a graph within a node has sparse initializers", "Dense ones", EXPORT)
    _once((value.name for value in graph.input), "input")
    _once((tensor.name for tensor in graph.initializer), "initializer")
    made = [name for node in graph.node for name in node.output if name]
    _once([*made, *{value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}], "value")
    for tensor in graph.initializer:
        _check_tensor(tensor, f"initializer {tensor.name!r}")
    for node in graph.node:
        _check_node(node)


def _check_node(node: onnx.NodeProto) -> None:
    where = f"of node {node.name or node.op_type!r}"
    _once((attribute.name for attribute in node.attribute), "attribute")
    for attribute in node.attribute:
        for tensor in _tensors(attribute):
            _check_tensor(tensor, f"attribute {attribute.name!r} {where}")
        for graph in _graphs(attribute):
            _check_graph(graph, where)


def _tensors(attribute: onnx.AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def _check_tensor(tensor: TensorProto, what: str) -> None:
    found = [
        name for name in _PAYLOADS if (tensor.HasField(name) if name == "raw_data" else len(getattr(tensor, name)))
    ]
    if tensor.data_location == TensorProto.EXTERNAL:
        found.append("external_data")
    if len(found) > 1:
        raise ModelError(f"{what} has several payloads: {', '.join(found)}", "One", "Export it again")
    name = found[0] if found else ""
    if name in ("", "raw_data", "external_data"):
        return
    kind, kinds = int(tensor.data_type), _OF_TYPE.get(name)
    if kind in _PACKED:
        return
    if (kind in _OTHERS) if kinds is None else (kind not in kinds):
        raise ModelError(f"{what} of type {_type_name(kind)} keeps its values in {name}", mend="Export it again")
    wanted = math.prod(tensor.dims) * _ELEMENTS.get(kind, 1)
    if len(getattr(tensor, name)) != wanted:
        raise ModelError(
            f"{what} of shape {list(tensor.dims)} has {len(getattr(tensor, name))} values",
            f"{wanted} values",
            "Export it again; it may be truncated",
        )


def _type_name(kind: int) -> str:
    return TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)


def _once(names: Iterable[str], kind: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(f"{kind} {name!r} is there twice", "Each name once", "Export it again")
