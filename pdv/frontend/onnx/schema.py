"""ONNX's own schemas, held to every node: before its reader runs, what the node may say; afterwards, that the reader
took all that it says.

Entry points: ``schema_of``, ``check_form``, ``check_types``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
import onnx_ir

from ir.types import DType
from pdv.frontend.lowering import Unsupported

OpSchema = onnx.defs.OpSchema
_EARLIER = {"LayerNormalization": 17}  # ONNX Runtime writes them into files of opsets that have none yet
NEWEST_OPSET = onnx.defs.onnx_opset_version()
_NAMES = {
    DType.F64: "double",
    DType.F32: "float",
    DType.BF16: "bfloat16",
    DType.F16: "float16",
    DType.BOOL: "bool",
    **{dtype: dtype.torch_name.replace("float8_", "float8") for dtype in DType if "float8" in dtype.torch_name},
}


@lru_cache(maxsize=1 << 10)
def schema_of(op: str, opset: int) -> OpSchema:
    """What an operator of ONNX's standard domain takes at this opset.

    Raises:
        Unsupported: if there is no such operator, or no longer.
    """
    try:
        schema = onnx.defs.get_schema(op, max(opset, _EARLIER.get(op, 0)), "")
    except onnx.defs.SchemaError:
        raise Unsupported(f"opset {opset} has no such operator") from None
    if schema.deprecated:
        raise Unsupported(f"no longer part of opset {opset}")
    return schema


@lru_cache(maxsize=1 << 10)
def defaults_of(schema: OpSchema) -> Mapping[str, Any]:  # Any: int, float, string, or lists of them
    """The values of attributes that a node leaves out, where the schema gives them."""
    found = {name: onnx.helper.get_attribute_value(a.default_value) for name, a in schema.attributes.items()
             if a.default_value.name}  # fmt: skip
    return {name: _text(value) for name, value in found.items()}


def _text(value: Any) -> Any:  # Any: as ``defaults_of``
    if isinstance(value, list):
        return [_text(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def dtype_of(number: int) -> DType:
    """The element type with ONNX's number."""
    name = onnx_ir.DataType(number).name
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    try:
        return DType.from_name(names.get(name, name.lower().replace("float8", "float8_")))
    except KeyError:
        raise Unsupported(f"element type {name}") from None


def check_form(schema: OpSchema, node: onnx_ir.Node) -> None:
    """Whether a node has the operands, results and attributes that its operator may have.

    Raises:
        ValueError: saying what it lacks, or has too much.
    """
    given = len(node.inputs)
    if not schema.min_input <= given <= schema.max_input:
        raise ValueError(f"{given} operands, where {_range(schema.min_input, schema.max_input)} are allowed")
    if not schema.min_output <= len(node.outputs) <= schema.max_output:
        allowed = _range(schema.min_output, schema.max_output)
        raise ValueError(f"{len(node.outputs)} results, where {allowed} are allowed")
    for index, value in enumerate(node.inputs):
        if value is None and formal(schema, index).option == OpSchema.FormalParameterOption.Single:
            raise ValueError(f"operand {index} ({formal(schema, index).name}) is missing")
    for name, attribute in node.attributes.items():
        declared = schema.attributes.get(name)
        if declared is None:
            raise ValueError(f"attribute {name!r}, which {schema.name} of opset {schema.since_version} does not have")
        kind = declared.type.name  # type: ignore[attr-defined]  # onnx's stubs do not say that it is an enum
        if attribute.type.name != kind:
            raise ValueError(f"attribute {name!r} is of type {attribute.type.name}, not {kind}")
    missing = [name for name, declared in schema.attributes.items() if declared.required]
    if missing := [name for name in missing if name not in node.attributes]:
        raise ValueError(f"attribute {missing[0]!r} is missing")


def formal(schema: OpSchema, index: int) -> Any:  # Any: onnx's classes have no types
    """What the schema says of an operand; variadic ones share the last entry."""
    return schema.inputs[min(index, len(schema.inputs) - 1)]


def check_types(schema: OpSchema, operands: Sequence[DType | None], results: Sequence[DType | None] = ()) -> None:
    """Whether operands, and results, are of element types that the operator takes together; None: of none, or unknown.

    Raises:
        ValueError: naming the first that is not.
    """
    allowed = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
    bound: dict[str, str] = {}
    for what, types, formals in (("operand", operands, schema.inputs), ("result", results, schema.outputs)):
        for index, dtype in enumerate(types):
            if dtype is None:
                continue
            each, found = formals[min(index, len(formals) - 1)], f"tensor({_onnx_name(dtype)})"
            may_be = allowed.get(each.type_str, [each.type_str])
            if found not in may_be and f"optional({found})" not in may_be:  # one that holds something
                raise ValueError(f"{what} {index} ({each.name}) is {found}, not one of {', '.join(sorted(may_be))}")
            is_bound = each.option != OpSchema.FormalParameterOption.Variadic or each.is_homogeneous
            if is_bound and bound.setdefault(each.type_str, found) != found:
                raise ValueError(f"{what} {index} ({each.name}) is {found}, and others are {bound[each.type_str]}")


def _onnx_name(dtype: DType) -> str:
    return _NAMES.get(dtype, dtype.torch_name)


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
