"""What a stored tensor is where its file does not say: a parameter, a buffer, or a constant.

Entry points: ``kind_by_use``, ``part_statistics``, ``is_exponent``, ``levels``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.signature import kind_of
from pdv.frontend.onnx.origins.unnamed import TORCH, is_computed, is_newer, was_constant

_STATISTICS: Mapping[str, Sequence[int]] = {"BatchNormalization": (3, 4)}
_UNSCALED: Mapping[str, Sequence[int]] = {"InstanceNormalization": (1, 2)}  # of norms over groups, ones and zeros
_SCALES = (1, 4, 6)
_FEW = 256  # elements that tell most weights from masks
_HIDES = -9999.0  # what is added where nothing is to be seen, or less
_FILLED = {"full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"}
_CHOSEN = {"masked_fill", "tril", "triu", "where"}  # of numbers, as masks are, or of other tensors
_TABLES: Mapping[str, Sequence[int]] = {
    "RotaryEmbedding": (1, 2, 3), "QuantizeLinear": (1,), "DequantizeLinear": (1,), "QLinearMatMul": _SCALES,
    "QLinearConv": _SCALES, "Resize": (1, 2), "Upsample": (1,), "OneHot": (2,), "Pad": (2,), "Dropout": (1,),
    "Range": (0, 1, 2), "STFT": (2,), "NonMaxSuppression": (3, 4),
}  # fmt: skip
"""Operands that are no parameters where they are stored: angles, scales of quantized values and of sizes, what stands
for on and off, or around a tensor, shares, windows, thresholds."""


def kind_by_use(value: onnx_ir.Value, producer: str) -> tuple[str, bool]:
    """The kind, in torch's words, and whether it is of the module's state.

    Floats are parameters, but for statistics of batch norms, tables, numbers of no dims that torch has not named, and
    what was a constant of the module's code, exponents, and masks that hide.
    """
    name, tensor = value.name or "", value.const_value
    if _is_read_as(value, _STATISTICS):
        return "BUFFER", True
    unnamed = producer != TORCH or is_computed(name) or is_newer(name)
    is_number = unnamed and tensor is not None and not tensor.shape.rank()
    known = is_number or was_constant(name) or _is_read_as(value, _TABLES) or is_exponent(value, producer)
    known = known or (is_newer(name) and (_is_read_as(value, _UNSCALED) or _is_filled(value)))
    known = known or any(level <= _HIDES for level in levels(value))
    return ("BUFFER" if known else "PARAMETER"), False


def part_statistics(graph: onnx_ir.Graph) -> dict[str, str]:
    """Statistics of batch norms that a tool stores as one with scales and shifts; what is stored, by their own names.

    Fresh norms have scales and variances of ones, shifts and means of zeros. What only holds statistics stays: a norm
    may be called several times. Changes the graph.
    """
    found = {}
    for name, value in list(graph.initializers.items()):
        kept = [use for use in value.uses() if use.idx in _STATISTICS.get(use.node.op_type, ())]
        if not kept or len(kept) == len(value.uses()):
            continue
        own = f"{name} as statistics"
        each = onnx_ir.Value(name=own, shape=value.shape, type=value.type, const_value=value.const_value)
        graph.register_initializer(each)
        for use in kept:
            use.node.replace_input_with(use.idx, each)
        found[own] = name
    return found


def is_exponent(value: onnx_ir.Value, producer: str) -> bool:
    """Whether one number, which torch has not named, says to which power something is raised, and no more.

    A square whose exponent is trained has no gradient below zero.
    """
    alone = value.const_value is not None and value.const_value.size == 1 and producer != TORCH
    return alone and bool(value.uses()) and all(use.node.op_type == "Pow" and use.idx == 1 for use in value.uses())


def levels(value: onnx_ir.Value) -> tuple[float, ...]:
    """The two numbers of which a mask of several dims is made, zero and another; none of anything else."""
    tensor = value.const_value
    if tensor is None or tensor.shape.rank() < 2 or not tensor.dtype.is_floating_point() or tensor.size < 4:
        return ()
    first = np.unique(tensor.numpy().reshape(-1)[:_FEW].astype(np.float64))
    if len(first) > 2:  # as weights are, which are not read to their end
        return ()
    found = np.unique(tensor.numpy().astype(np.float64))
    return tuple(map(float, found)) if len(found) == 2 and 0 in found else ()


def _is_filled(value: onnx_ir.Value) -> bool:
    """Whether torch's operator, after which a value is called, made it of one number, or of two."""
    kind, tensor = kind_of(value.name or ""), value.const_value
    return kind in _FILLED or (kind in _CHOSEN and tensor is not None and len(np.unique(tensor.numpy())) <= 2)


def _is_read_as(value: onnx_ir.Value, places: Mapping[str, Sequence[int]]) -> bool:
    """Whether some operator has a value as one of these operands."""
    return any(use.idx in places.get(use.node.op_type, ()) for use in value.uses())
