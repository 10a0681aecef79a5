"""Stored tensors that torch's older exporter computed, and of which the file does not say of what.

It folds what depends on stored tensors alone, and calls the result ``onnx::Add_36``: rows of a table of positions, be
it a parameter or a buffer, a table of biases looked up by known places. At the place of a weight it is one, moved;
anywhere else it may be what is not trained, or many elements that are trained as one. Equal ones of two modules are one
weight, or those of layers that were copied from one another. Entry points: ``of_unknown_origin``, ``may_be_another``.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir

_NAME = "onnx::"
_GATES = (1, 2, 3)
_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "MatMul": (1,), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "PRelu": (1,), "LSTM": _GATES, "GRU": _GATES,
    "RNN": _GATES,
}  # fmt: skip
"""The operands that are weights, which are moved to where ONNX has them."""


def of_unknown_origin(graph: onnx_ir.Graph) -> list[str]:
    """What is not known of such tensors, in words."""
    norms = {_module(node) for node in graph if node.op_type == "InstanceNormalization"}
    found = []
    for name, value in sorted(graph.initializers.items()):
        tensor, uses = value.const_value, list(value.uses())
        if not name.startswith(_NAME) or tensor is None or not tensor.dtype.is_floating_point():
            continue
        readers = {_module(use.node) for use in uses}
        moved = all(use.idx in _WEIGHTS.get(use.node.op_type, ()) or _module(use.node) in norms for use in uses)
        if tensor.shape.rank() and not moved:
            found.append(f"what {name} was made of")
        elif len(readers) > 1:
            found.append(f"whether {name} of {' and '.join(sorted(readers))} is one")
    return found


def may_be_another(value: onnx_ir.Value, other: onnx_ir.Value) -> bool:
    """Whether two equal tensors, moved alike for two modules, may be of two parameters that start out equal."""
    if not all((each.name or "").startswith(_NAME) for each in (value, other)):
        return False
    modules = [{_module(use.node) for use in each.uses()} for each in (value, other)]
    return not modules[0] & modules[1]


def _module(node: onnx_ir.Node) -> str:
    """The path of the module that a node is of; of a norm over groups scale and shift, too."""
    return (node.name or "").rpartition("/")[0]
