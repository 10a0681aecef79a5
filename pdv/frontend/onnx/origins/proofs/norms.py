"""Batch norms that torch's optimizer folded into the convolutions before them, written as layers again.

The convolution's node says of which norm it is, with its momentum and whether it trains; the weights that the module
had when it was exported show what was folded. Entry point: ``unfold_norms``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.proofs.proved import CLOSE, Stored, register
from pdv.frontend.onnx.origins.signature import FX_NODE, Signature, array_of
from pdv.passes.fold_constants import Array

_NORMED = re.compile(r"batch_norm\w*(?:\.\w+)?\]\(args = \(([^()]*)\)")
_CALLED = {"weight": 1, "bias": 2, "mean": 3, "variance": 4, "training": 5, "momentum": 6, "epsilon": 7}
"""Of torch's functional batch norm."""


def unfold_norms(graph: onnx_ir.Graph, signature: Signature, stored: Stored) -> list[str]:
    """Write batch norms behind convolutions that hold them; which ones. Changes the graph.

    conv(x, w * s, b + (c - m) * s) == batch_norm(conv(x, w, c)), s = weight / sqrt(variance + epsilon).
    """
    named = {**signature.parameters, **signature.buffers}
    found = []
    for node in list(graph):
        call = _NORMED.search(node.metadata_props.get(FX_NODE, "")) if node.op_type == "Conv" else None
        given = [text.strip().removeprefix("%") for text in call[1].split(",")] if call else []
        if len(given) <= _CALLED["epsilon"]:
            continue
        names = [named.get(given[_CALLED[part]], "") for part in ("weight", "bias", "mean", "variance")]
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        before = _before(weight, signature, stored)
        if before is None or not {*names} <= stored.keys() or weight is None:
            continue
        epsilon = float(given[_CALLED["epsilon"]])
        if not _is_folded(weight, bias, before, [stored[name]() for name in names], epsilon, stored):
            continue
        attributes = [
            onnx_ir.AttrFloat32("epsilon", epsilon),
            onnx_ir.AttrFloat32("momentum", 1 - float(given[_CALLED["momentum"]])),
            onnx_ir.AttrInt64("training_mode", int(given[_CALLED["training"]] == "True")),
        ]
        _write_norm(graph, node, before, names, stored, attributes)
        found.append(names[0].rpartition(".")[0])
    return found


def _before(weight: onnx_ir.Value | None, signature: Signature, stored: Stored) -> tuple[str, ...] | None:
    """The convolution's own weight, and its bias if it has one, by names."""
    name = (weight.name or "") if weight is not None else ""
    if weight is None or not weight.is_initializer() or len(weight.uses()) != 1 or name not in signature.targets:
        return None
    bias = f"{name.rpartition('.')[0]}.bias".removeprefix(".")
    both = (name, bias) if bias in signature.targets else (name,)
    return both if {*both} <= stored.keys() else None


def _is_folded(
    weight: onnx_ir.Value,
    bias: onnx_ir.Value | None,
    before: Sequence[str],
    norm: Sequence[Array],
    epsilon: float,
    stored: Stored,
) -> bool:
    """Whether what a convolution has is what folding makes of a weight [n, ...], a bias [n] and a norm."""
    scale, shift, mean, variance = (each.astype(np.float64) for each in norm)
    own = stored[before[0]]().astype(np.float64)
    if own.shape != array_of(weight).shape or scale.shape != own.shape[:1]:
        return False
    factor = scale / np.sqrt(variance + epsilon)
    added = stored[before[1]]().astype(np.float64) if len(before) > 1 else 0.0
    wanted = shift + (added - mean) * factor
    held = np.zeros(len(scale)) if bias is None else array_of(bias)
    size = np.abs(shift) + np.abs((added - mean) * factor)
    alike = np.allclose(array_of(weight), own * factor.reshape(-1, *(1,) * (own.ndim - 1)), rtol=CLOSE, atol=1e-30)
    return bool(alike and held.shape == wanted.shape and (np.abs(held - wanted) <= CLOSE * size).all())


def _write_norm(
    graph: onnx_ir.Graph,
    node: onnx_ir.Node,
    before: Sequence[str],
    names: Sequence[str],
    stored: Stored,
    attributes: Sequence[onnx_ir.Attr],
) -> None:
    weight, result = node.inputs[1], node.outputs[0]
    assert weight is not None, node
    for name in (*before[1:], *names):
        if name not in graph.initializers or name == before[-1]:
            register(graph, name, stored[name](), weight)
    own = onnx_ir.Value(name=before[0], type=weight.type)
    array = stored[before[0]]()
    own.shape, own.const_value = onnx_ir.Shape(array.shape), onnx_ir.Tensor(array, name=before[0])
    node.replace_input_with(1, own)
    del graph.initializers[before[0]]
    graph.initializers[before[0]] = own
    node.resize_inputs(1 + len(before))
    if len(before) > 1:
        node.replace_input_with(2, graph.initializers[before[1]])
    operands = [result, *(graph.initializers[name] for name in names)]
    norm = onnx_ir.Node("", "BatchNormalization", operands, attributes, num_outputs=3 if attributes[-1].as_int() else 1)
    norm.outputs[0].name, norm.outputs[0].type, norm.outputs[0].shape = f"{result.name}.norm", result.type, result.shape
    norm.metadata_props.update(node.metadata_props)
    node.metadata_props.clear()
    graph.insert_after(node, norm)
    onnx_ir.convenience.replace_all_uses_with(result, norm.outputs[0])
    norm.replace_input_with(0, result)
    for place, output in enumerate(graph.outputs):
        if output is result:
            graph.outputs[place] = norm.outputs[0]
