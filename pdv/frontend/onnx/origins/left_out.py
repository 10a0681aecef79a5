"""Arguments of torch's operators that its newer exporter says beside a node, and leaves out of the file.

Dropout of attention, which it writes as for inference, and the smoothing of labels are put back; of others it is said
that training would do without. Entry points: ``put_back``, ``smoothing_of``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.signature import FX_NODE, call_in, call_of

LOSS = "SoftmaxCrossEntropyLoss"
SMOOTHED = "pdv.label_smoothing"  # of our own, on losses whose labels are smoothed
_ATTENTION, _ENTROPY = "scaled_dot_product_attention", "cross_entropy_loss"
_LOST: Mapping[str, tuple[int, str]] = {
    _ATTENTION: (4, "dropout_p={} of attention"),
    _ENTROPY: (5, "label_smoothing={} of cross entropy"),
    "avg_pool2d": (6, "divisor_override={} of a pool"),
    "avg_pool3d": (6, "divisor_override={} of a pool"),
}
"""Calls of torch, which of their arguments is lost, and what to call it (torch 2.13)."""


def put_back(graph: onnx_ir.Graph, *, ours: bool) -> tuple[list[str], list[str]]:
    """What of it is put back, and what is lost, in words; changes the graph.

    ours: whether our own export wrote the file, which smooths labels beside the operator.
    """
    calls: dict[str, list[onnx_ir.Node]] = {}
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        calls.setdefault(node.metadata_props.get(FX_NODE, ""), []).append(node)
    back, lost = list[str](), list[str]()
    for nodes in calls.values():
        call, given = call_of(nodes[0])
        if call not in _LOST or (ours and call == _ENTROPY) or any(map(_drops, nodes)):
            continue
        place, words = _LOST[call]
        number = _number(given, place)
        if not number:
            continue
        done = _drop(nodes, number) if call == _ATTENTION else call == _ENTROPY and _smooth(nodes, number)
        (back if done else lost).append(words.format(number))
    return [*dict.fromkeys(back)], [*dict.fromkeys(lost)]


def smoothing_of(told: Mapping[str, str]) -> float:
    """The smoothing of labels in torch's cross entropy, by the metadata of a node; zero where it says none."""
    call, given = call_in(told.get(FX_NODE, ""))
    return _number(given, _LOST[call][0]) if call == _ENTROPY else 0.0


def _number(given: Sequence[str], place: int) -> float:
    return float(given[place]) if place < len(given) and given[place] != "None" else 0.0


def _drops(node: onnx_ir.Node) -> bool:
    """Whether a node is dropout in training mode."""
    mode = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    return mode is not None and (mode.const_value is None or bool(mode.const_value.numpy().any()))


def _drop(nodes: Sequence[onnx_ir.Node], share: float) -> bool:
    """Drop what the last product of attention reads of the softmax; whether there is such a place."""
    for product in nodes:
        value = product.inputs[0] if product.op_type == "MatMul" else None
        made = value.producer() if value is not None else None
        behind = [made] if made is None or made.op_type != "Where" else [x.producer() for x in made.inputs if x]
        if value is None or not any(x in nodes and x.op_type in ("Softmax", "Dropout") for x in behind if x):
            continue
        numbers = np.asarray(share, np.float32), np.asarray(True)
        how = [onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", onnx_ir.Tensor(x))]) for x in numbers]
        dropped = onnx_ir.Node("", "Dropout", [value, *(each.outputs[0] for each in how)])
        for each, name in zip((*how, dropped), ("share", "training", "dropped"), strict=True):
            each.outputs[0].name = f"{product.name}.{name}"
        dropped.outputs[0].type, dropped.outputs[0].shape = value.type, value.shape
        dropped.metadata_props.update(product.metadata_props)
        graph = product.graph
        assert graph is not None, product
        graph.insert_before(product, [*how, dropped])
        product.replace_input_with(0, dropped.outputs[0])
        return True
    return False


def _smooth(nodes: Sequence[onnx_ir.Node], smoothing: float) -> bool:
    """Note on a loss that labels are smoothed; whether it is one of which classes have no weights."""
    (*_, node) = nodes
    weighted = len(node.inputs) > 2 and node.inputs[2] is not None
    read = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    if node.op_type != LOSS or "ignore_index" not in node.attributes or weighted or read:
        return False
    node.metadata_props[SMOOTHED] = str(smoothing)
    return True
