"""Evaluate one ONNX node over known values with ONNX's own reference implementation: index arithmetic, masks, shapes.

Only standard operators without randomness are run, and none whose result would not fit (`check_foldable_size`). Entry
point: `evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir
from onnx import NodeProto, helper
from onnx.reference import ReferenceEvaluator

from pdv.passes.fold_constants import Array, check_foldable_size

_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
_BARELY = 1e-9  # of an element, by which a stretched dim has as many as it is to have
_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def can_evaluate(node: onnx_ir.Node) -> bool:
    """True for operators that always give the same for the same."""
    return node.domain in ("", "ai.onnx") and node.op_type not in _RANDOM | _SUBGRAPHS


def evaluate(
    node: onnx_ir.Node, operands: Sequence[Array | None], opset: int, *, of_torch: bool = False
) -> tuple[Any, ...]:
    """The node's outputs, in order: arrays, or lists of arrays for sequences.

    of_torch: whether torch's exporter wrote it, and means what torch does.

    Raises:
        ModelError: if the result is too big.
        Exception: whatever the reference implementation raises on malformed nodes.
    """
    check_foldable_size(_result_shape(node.op_type, operands), 8, node.name or node.op_type)
    if node.op_type == "GatherElements":
        return (_gather_elements(operands, node.attributes.get_int("axis", 0)),)
    proto = onnx_ir.to_proto(node)
    if node.op_type in ("Upsample", "Resize") and opset < 11:
        operands, opset = _resize_as_later(proto, operands), 13
    if proto.op_type == "Resize":
        operands = _resize_as_run(proto, operands, of_torch=of_torch)
    inputs = [f"in{i}" if value is not None else "" for i, value in enumerate(operands)]
    outputs = [f"out{i}" for i in range(len(node.outputs))]
    renamed = type(proto)()
    renamed.CopyFrom(proto)
    del renamed.input[:], renamed.output[:]
    renamed.input.extend(inputs)
    renamed.output.extend(outputs)
    graph = helper.make_graph(
        [renamed],
        "fold",
        [helper.make_empty_tensor_value_info(name) for name in inputs if name],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feeds = {f"in{i}": value for i, value in enumerate(operands) if value is not None}
    with np.errstate(all="ignore"):
        return tuple(ReferenceEvaluator(model).run(None, feeds))


def _resize_as_later(proto: NodeProto, operands: Sequence[Array | None]) -> list[Array | None]:
    """Write a resize of opset 7 to 10 as the one of 13 that it is; its operands there.

    The reference implementation knows of those only the nearest of all.
    """
    scales = [np.asarray(each.floats, np.float32) for each in proto.attribute if each.name == "scales"]
    kept = [each for each in proto.attribute if each.name != "scales"]
    proto.op_type = "Resize"
    del proto.attribute[:]
    proto.attribute.extend(kept)
    later = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    proto.attribute.extend(helper.make_attribute(name, value) for name, value in later.items())
    return [operands[0], None, scales[0] if scales else operands[1]]


def resized_to(size: int, scale: float) -> int:
    """What a dim has once it is stretched: of 10 by 0.7 it is 7, as ONNX Runtime counts, in float32."""
    return int(np.float32(size) * np.float32(scale))


def _resize_as_run(proto: NodeProto, operands: Sequence[Array | None], *, of_torch: bool) -> list[Array | None]:
    """Operands of a resize of which the reference implementation, which counts in float64, makes as many elements as
    ``resized_to``; its axes are counted from the front, as it takes them alone.

    Where corners are aligned the last of these lies at the last for torch, as for ONNX Runtime; onnx's own tests have
    it lie where it would be if their number were not rounded.
    """
    x, *rest = operands
    scales = rest[1] if len(rest) > 1 else None
    if x is None:
        raise ValueError("a resize of nothing")
    axes = list(range(x.ndim))
    aligned = of_torch and any(each.s == b"align_corners" for each in proto.attribute)
    for each in proto.attribute:
        if each.name == "axes":
            axes = [axis % x.ndim for axis in each.ints]
            each.ints[:] = axes
    if scales is None or not scales.size:
        return [x, *rest]
    wide = scales.astype(np.float64)
    for i, dim in enumerate(axes):
        size, wanted = x.shape[dim], resized_to(x.shape[dim], scales[i])
        if size and (aligned or int(wide[i] * size) != wanted):
            wide[i] = (wanted + _BARELY) / size
    return [x, rest[0], wide, *rest[2:]]


def _gather_elements(operands: Sequence[Array | None], axis: int) -> Array:
    """data[.., ids[..], ..]; the reference implementation (onnx 1.23) fails where ids are fewer than data."""
    data, ids = operands
    if data is None or ids is None or data.ndim != ids.ndim:
        raise ValueError("operands of different rank")
    axis %= data.ndim
    kept = tuple(slice(None) if dim == axis else slice(size) for dim, size in enumerate(ids.shape))
    return np.take_along_axis(data[kept], ids % data.shape[axis], axis)


def _result_shape(op: str, operands: Sequence[Array | None]) -> tuple[int, ...]:
    """Shape of the result of the operators that can make much out of little; for others, of broadcasting the
    operands.
    """
    known = [value for value in operands if value is not None]
    match op, known:
        case "Range", [start, limit, delta] if delta:
            return (max(int(np.ceil((limit - start) / delta)), 0),)
        case "ConstantOfShape", [shape]:
            return tuple(int(n) for n in shape)
        case "Expand", [x, shape]:
            return np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
        case "Tile", [x, repeats]:
            return tuple(int(n) * int(r) for n, r in zip(x.shape, repeats, strict=True))
        case "Pad", [x, pads, *_]:
            return (*x.shape, int(np.abs(pads).sum()) + 1)
        case "OneHot", [ids, depth, *_]:
            return (*ids.shape, int(depth.reshape(-1)[0]))
    try:
        return np.broadcast_shapes(*(value.shape for value in known))
    except ValueError:
        return ()
