"""What protobuf lets a file say and no reader of it should have to choose between: two payloads, one name twice.

Entry point: ``check_proto``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import onnx
from onnx import TensorProto

from ir.errors import ModelError

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


def check_proto(model: onnx.ModelProto) -> None:
    """Whether every name is given once, and every tensor has one payload, of its type and length.

    Raises:
        ModelError: naming the first that is not.
    """
    domains = Counter("" if each.domain == "ai.onnx" else each.domain for each in model.opset_import)
    _once(domains.elements(), "opset of domain")
    _check_graph(model.graph, "")
    for function in model.functions:
        _once((name for node in function.node for name in node.output if name), "value")
        for node in function.node:
            _check_node(node)
    keys = ((f.domain, f.name, getattr(f, "overload", "")) for f in model.functions)
    _once((":".join(key) for key in keys), "function")


def _check_graph(graph: onnx.GraphProto, where: str) -> None:
    if graph.sparse_initializer:
        raise ModelError("the model has sparse initializers", "Dense ones", "Export it again")
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
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
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
