"""Stored tensors of files of torch's older exporter that are none of the module's, and of which the file does not say
of what they were made.

The exporter folds what depends on stored tensors alone, and calls the result ``onnx::Add_36``: rows of a table of
positions, be it a parameter or a buffer, a table of biases looked up by known places. At the place of a weight it is
one, moved; anywhere else it may be what is not trained, or many elements that are trained as one. Equal ones of two
modules are one weight, or those of layers that were copied from one another. Tools that go over a file (ONNX Runtime's
optimizer, onnxsim, onnxslim) fold more, by the names that the file has for values, ``/attn/Slice_1_output_0``, and
store its constants beside its parameters, ``/norm/Constant_1_output_0``: exponents, epsilons, masks.

Entry points: ``is_of_torch``, ``is_computed``, ``was_constant``, ``of_unknown_origin``, ``may_be_another``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx_ir

TORCH = "pytorch"  # the producer of its files
_NAME = "onnx::"
_VALUE = "/"  # what names of values begin with: the path of the module that computes them
_CONSTANT = re.compile(r"^/(.*/)?Constant(_\d+)?_output_\d+$|^ortshared_")  # by the exporter; by ONNX Runtime
_GATES = (1, 2, 3)
_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "MatMul": (1,), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "PRelu": (1,), "LSTM": _GATES, "GRU": _GATES,
    "RNN": _GATES, "FusedMatMul": (1,), "FusedGemm": (1,), "FusedConv": (1,),
}  # fmt: skip
"""The operands that are weights, which are moved to where ONNX has them."""


def is_of_torch(model: onnx_ir.Model) -> bool:
    """Whether torch's exporter wrote a file, be it that another tool signed it since."""
    names = (name for node in model.graph for name in ((value.name or "") for value in node.outputs))
    return model.producer_name == TORCH or any(is_computed(name) for name in (*model.graph.initializers, *names))


def is_computed(name: str) -> bool:
    """Whether a name is of a value of the older exporter's graph; no parameter of a module has such a name."""
    return name.startswith((_NAME, _VALUE))


def was_constant(name: str) -> bool:
    """Whether a stored tensor was a constant of the module's code, by its name."""
    return _CONSTANT.match(name) is not None


def of_unknown_origin(graph: onnx_ir.Graph) -> dict[str, str]:
    """The tensors of which something is not known, and what, in words."""
    norms = {_module(node) for node in graph if node.op_type == "InstanceNormalization"}
    found = {}
    for name, value in sorted(graph.initializers.items()):
        tensor, uses = value.const_value, list(value.uses())
        if not uses or not is_computed(name) or was_constant(name):
            continue
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        readers = {_module(use.node) for use in uses}
        moved = all(use.idx in _WEIGHTS.get(use.node.op_type, ()) or _module(use.node) in norms for use in uses)
        if tensor.shape.rank() and not moved:
            found[name] = f"what {name} was made of"
        elif len(readers) > 1 and name.startswith(_NAME):
            found[name] = f"whether {name} of {' and '.join(sorted(readers))} is one"
    return found


def may_be_another(value: onnx_ir.Value, other: onnx_ir.Value) -> bool:
    """Whether two equal tensors, moved alike for two modules, may be of two parameters that start out equal."""
    if not all(is_computed(each.name or "") for each in (value, other)):
        return False
    modules = [{_module(use.node) for use in each.uses()} for each in (value, other)]
    return not modules[0] & modules[1]


def _module(node: onnx_ir.Node) -> str:
    """The path of the module that a node is of; of a norm over groups scale and shift, too."""
    return (node.name or "").rpartition("/")[0]
