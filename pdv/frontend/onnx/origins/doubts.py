"""What of a file would not be trained as the module is, and cannot be had back: in words, for who asks for training.

Entry points: ``untrained``, ``doubts``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.kinds import is_exponent, kind_by_use, levels
from pdv.frontend.onnx.origins.signature import CLASSES, SCOPES, SIGNATURE, is_drawn
from pdv.frontend.onnx.origins.unnamed import TORCH, WEIGHTS, is_held, is_newer, was_constant

OURS = "pdv.export_onnx"  # metadata of files that our own export wrote
EXPORT = "Export the module in training mode with pdv.frontend.onnx.export.export_onnx"
_CONVOLUTIONS = ("Conv", "FusedConv")
_MAY_HOLD_NORMS = (*_CONVOLUTIONS, "ConvTranspose", "Gemm", "FusedGemm")
_NORMED = re.compile(r"^getitem(_\d+)?$|^(/.*)?/BatchNormalization(_\d+)?_output_0$")
"""What torch's exporters call the result of a batch norm; the newer one after the first result of a tuple."""
_FUSED = re.compile(r"^(ConvBn|MatMulBn)Fusion_")  # what ONNX Runtime's optimizer made of one
_PAIR = (1, 2)
_WEIGHTED: Mapping[str, Sequence[int]] = {
    **WEIGHTS, "Gemm": _PAIR, "Conv": _PAIR, "ConvTranspose": _PAIR, "Gather": (0,), "RMSNormalization": (1,),
    "LayerNormalization": _PAIR, "GroupNormalization": _PAIR, "InstanceNormalization": _PAIR,
    "BatchNormalization": _PAIR,
}  # fmt: skip
"""The operands that are weights, biases and scales."""
_INTEGERS = {onnx_ir.DataType[name] for name in ("INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "INT32")}
_QUANTIZED = {
    "DequantizeLinear": (0,), "MatMulInteger": (1,), "ConvInteger": (1,), "QLinearMatMul": (3,), "QLinearConv": (3, 8),
}  # fmt: skip


def folded_norms(model: onnx_ir.Model) -> list[str]:
    """Convolutions and products that hold the batch norms behind them, by their modules or names."""
    folded = []
    for node in model.graph:
        weight = node.inputs[1] if node.op_type in _CONVOLUTIONS and len(node.inputs) > 1 else None
        computed = weight is not None and (weight.name or "").startswith("onnx::Conv")
        if node.op_type in _CONVOLUTIONS and any(
            "batchnorm" in each.lower() for each in names_under(node, CLASSES)[-2:-1]
        ):
            folded.append(module_path(node))
        elif computed or _has_bias_of_norm(node) or _stands_for_norm(node):
            folded.append(node.name or node.op_type)
    return folded


def _stands_for_norm(node: onnx_ir.Node) -> bool:
    """Whether a node gives what a batch norm gave, or has weights of which one is a part, by their names."""
    if node.op_type not in _MAY_HOLD_NORMS:
        return False
    result, given = node.outputs[0], [value.name or "" for value in node.inputs if value is not None]
    written = any(use.node.op_type == "BatchNormalization" for use in result.uses())  # again, behind it
    return any(map(_FUSED.match, given)) or (_NORMED.match(result.name or "") is not None and not written)


def _has_bias_of_norm(node: onnx_ir.Node) -> bool:
    """Whether a node has the bias that the newer exporter makes of a batch norm, by its name."""
    names = [(value.name or "") if value is not None else "" for value in node.inputs]
    return node.op_type in _MAY_HOLD_NORMS and len(names) > 2 and names[1] != "" and names[2] == f"{names[1]}_bias"


def untrained(model: onnx_ir.Model) -> dict[str, Any]:  # Any: as ``dataclasses.replace`` takes fields of a program
    """The fields of a program that say what of it cannot be trained as the module is."""
    return {"folded": tuple(folded_norms(model)), "quantized": tuple(quantized(model))}


def quantized(model: onnx_ir.Model) -> list[str]:
    """Stored tensors of integers that stand for weights of floats."""
    return [
        name
        for name, value in sorted(model.graph.initializers.items())
        if value.const_value is not None
        and value.const_value.size > 1
        and value.const_value.dtype in _INTEGERS
        and any(use.idx in _QUANTIZED.get(use.node.op_type, ()) for use in value.uses())
    ]


def doubts(model: onnx_ir.Model) -> Iterator[str]:
    """What of a file would not be trained, though the module might have it trained, in words."""
    norms = [node for node in model.graph if node.op_type == "BatchNormalization"]
    # before opset 14 further results say that a norm trains, later ones only go with the attribute
    trains = [node.attributes.get_int("training_mode", 0) or len(node.outputs) > 1 for node in norms]
    fixed = [node.name or "BatchNormalization" for node, moves in zip(norms, trains, strict=True) if not moves]
    written = [node.outputs[0] for node in model.graph if node.op_type == "Constant"]
    written += [value for name, value in model.graph.initializers.items() if was_constant(name)]
    held = [value.name or "" for value in written if _is_weight(value) and not _is_of_one_number(value)]
    given = [value.name or "" for value in model.graph.inputs if _is_weight(value) and is_held(value.name or "", model)]
    if given := [name for name in given if name not in model.graph.initializers]:
        yield (
            f"{len(given)} weights are inputs of the file ({some_of(given)}), which has no values of them: they are "
            "passed in each step, and not trained. Export with export_params=True, if they are to be trained"
        )
    if held:
        yield (
            f"{len(held)} weights are constants of the file ({', '.join(held[:3])}, …): training would keep them as "
            f"they are. {EXPORT}, if they are to be trained"
        )
    if numbers := _numbers(model):
        yield (
            f"{len(numbers)} stored numbers of no dims ({some_of(numbers)}) are constants: one that is to be trained "
            "is written with a dim of size one"
        )
    stored, producer = model.graph.initializers.items(), model.producer_name or ""
    if powers := [
        name
        for name, x in stored
        if x.const_value is not None and x.const_value.shape.rank() and is_exponent(x, producer)
    ]:
        yield f"{len(powers)} stored exponents ({some_of(powers)}) are constants: torch's export writes trained ones"
    if masks := _masks(model):
        yield (
            f"{len(masks)} stored tensors of zeros and ones are trained ({some_of(masks)}): the file does not say "
            f"whether they are masks. If so, {' '.join(f'--freeze {name}' for name in masks[:3])}"
        )
    if drawn := [name for name, value in model.graph.initializers.items() if value.uses() and is_drawn(value)]:
        yield (
            f"torch's exporter drew {some_of(drawn)} once, and the file has what came out: every step would have "
            "the same masks. Export with optimize=False, or write them as dropout"
        )
    if fixed:
        yield (
            f"{len(fixed)} batch norms use their running statistics ({', '.join(fixed[:3])}, …): training would keep "
            f"these as they are. {EXPORT}, if they are to be trained"
        )


def _is_weight(value: onnx_ir.Value) -> bool:
    """Whether some operator reads a value as a weight, a bias or a scale."""
    return any(use.idx in _WEIGHTED.get(use.node.op_type, ()) or _is_bias(value, use.node) for use in value.uses())


def _is_bias(value: onnx_ir.Value, node: onnx_ir.Node) -> bool:
    """Whether a node adds a value of one dim to a product, as the older exporter writes linear layers."""
    others = [each.producer() for each in node.inputs if each is not None and each is not value]
    before = node.op_type == "Add" and any(each is not None and each.op_type == "MatMul" for each in others)
    tensor = _tensor_of(value)
    return before and tensor is not None and tensor.shape.rank() == 1


def _is_of_one_number(value: onnx_ir.Value) -> bool:
    """Whether a constant of one dim is one number throughout, as scales and shifts of norms that have none are."""
    tensor = _tensor_of(value)
    return tensor is not None and tensor.shape.rank() == 1 and len(np.unique(tensor.numpy())) < 2


def _tensor_of(value: onnx_ir.Value) -> onnx_ir.TensorProtocol | None:
    """What is stored under a value, beside the graph or in a node."""
    held = None if (node := value.producer()) is None else node.attributes.get("value")
    return value.const_value if held is None else held.as_tensor()


def _masks(model: onnx_ir.Model) -> list[str]:
    """Stored tensors of zeros and ones, masks or matrices that a weight starts as, of which the file does not say."""
    if SIGNATURE in model.graph.metadata_props:
        return []
    return [
        name
        for name, value in model.graph.initializers.items()
        if value.uses()
        and not value.metadata_props
        and kind_by_use(value, model.producer_name or "")[0] == "PARAMETER"
        and levels(value) == (0, 1)
    ]


def _numbers(model: onnx_ir.Model) -> list[str]:
    """Stored floats of no dims, of which nothing says what they are; of torch those that a tool computed."""
    if SIGNATURE in model.graph.metadata_props:
        return []
    found, of_torch = model.graph.initializers.items(), model.producer_name == TORCH
    return [
        name
        for name, value in found
        if value.uses()
        and not was_constant(name)
        and (not of_torch or name.startswith("/") or is_newer(name))
        and not value.metadata_props
        and value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and not value.const_value.shape.rank()
    ]


def some_of(names: Sequence[str]) -> str:
    """The first three of some names."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def module_path(node: onnx_ir.Node) -> str:
    """The module that a node is of, as torch's newer exporter says."""
    return ".".join(part for part in names_under(node, SCOPES)[-2:-1])


def names_under(node: onnx_ir.Node, key: str) -> list[str]:
    """The list of names that is under a key of a node's metadata; empty if there is none."""
    try:
        found = ast.literal_eval(node.metadata_props.get(key, "[]"))
    except (ValueError, SyntaxError):
        return []
    return [str(part) for part in found] if isinstance(found, list) else []
