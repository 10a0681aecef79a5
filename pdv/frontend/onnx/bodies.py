"""Bodies of ONNX's own functions: what an operator without a reader is made of, in smaller operators.

Entry point: ``body_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir
from onnx import FunctionProto, NodeProto, helper

from ir.types import DType, TensorType
from pdv.frontend.onnx.schema import OpSchema

_NUMBERS = {
    DType.F64: onnx.TensorProto.DOUBLE,
    DType.F32: onnx.TensorProto.FLOAT,
    DType.BF16: onnx.TensorProto.BFLOAT16,
    DType.F16: onnx.TensorProto.FLOAT16,
    DType.BOOL: onnx.TensorProto.BOOL,
}


def body_of(
    schema: OpSchema, node: onnx_ir.Node, types: Sequence[TensorType | None], opset: int
) -> tuple[onnx_ir.Graph, int, Sequence[int]] | None:
    """The body of a node's function, the opset that it is written in, and which results it gives; None if it has none.

    types: of the operands; None where one is left out. The graph's inputs are the operands that are there.
    """
    proto = onnx_ir.to_proto(node)
    function = _function(schema, proto, types, opset)
    if function is None:
        return None
    formals = list(function.input)
    there = [name for name, each in zip(formals, types, strict=False) if each is not None]
    absent = set(formals) - set(there)
    given = {attribute.name: attribute for attribute in proto.attribute}
    defaults = {name: each.default_value for name, each in schema.attributes.items() if each.default_value.name}
    attributes = {**defaults, **{each.name: each for each in function.attribute_proto}, **given}
    nodes = [_instance(inner, attributes, absent) for inner in function.node]
    values = [helper.make_empty_tensor_value_info(name) for name in there]
    made = {*function.input, *(name for inner in function.node for name in inner.output)}
    given_back = [i for i, name in enumerate(list(function.output)[: len(node.outputs)]) if name in made]
    results = [helper.make_empty_tensor_value_info(function.output[i]) for i in given_back]
    graph = onnx_ir.serde.deserialize_graph(helper.make_graph(nodes, schema.name, values, results))
    versions = {each.domain: each.version for each in function.opset_import}
    return graph, versions.get("", opset), given_back


def _function(schema: Any, node: NodeProto, types: Sequence[TensorType | None], opset: int) -> FunctionProto | None:
    """The newest body that this opset has; ``schema``: whose stubs lack what is asked here."""
    function = FunctionProto()
    if schema.has_context_dependent_function:
        protos = [b"" if each is None else _type_proto(each).SerializeToString() for each in types]
        for version in sorted(
            (v for v in schema.context_dependent_function_opset_versions if v <= opset), reverse=True
        ):
            text = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), protos)
            if text:
                function.ParseFromString(text)
                return function
    versions = sorted(schema.function_opset_versions, key=lambda v: (v > opset, abs(opset - v)))
    for version in versions:  # the newest that this opset has, else the oldest of later ones, of the same operator
        if text := schema.get_function_with_opset_version(version):
            function.ParseFromString(text)
            return function
    return None


def _type_proto(tensor: TensorType) -> onnx.TypeProto:
    dtype = tensor.dtype
    number = _NUMBERS.get(dtype) or onnx.TensorProto.DataType.Value(
        dtype.torch_name.upper().replace("FLOAT8_", "FLOAT8")
    )
    return helper.make_tensor_type_proto(number, tensor.shape)


def _instance(node: NodeProto, attributes: dict[str, onnx.AttributeProto], absent: set[str]) -> NodeProto:
    """A node of a body with the values of the function's attributes in it, and without operands that are left out."""
    found = NodeProto()
    found.CopyFrom(node)
    del found.attribute[:], found.input[:]
    found.input.extend("" if name in absent else name for name in node.input)
    while found.input and not found.input[-1]:
        del found.input[-1]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            found.attribute.append(attribute)
        elif attribute.ref_attr_name in attributes:
            each = found.attribute.add()
            each.CopyFrom(attributes[attribute.ref_attr_name])
            each.name = attribute.name
    return found
