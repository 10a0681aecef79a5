"""Stored tensors of files of torch's exporters that are none of the module's, and of which the file does not say of
what they were made.

The exporter folds what depends on stored tensors alone, and calls the result ``onnx::Add_36``: rows of a table of
positions, be it a parameter or a buffer, a table of biases looked up by known places. At the place of a weight it is
one, moved; anywhere else it may be what is not trained, or many elements that are trained as one. Equal ones of two
modules are one weight, or those of layers that were copied from one another. Tools that go over a file (ONNX Runtime's
optimizer, onnxsim, onnxslim) fold more, by the names that the file has for values, ``/attn/Slice_1_output_0``, and
store its constants beside its parameters, ``/norm/Constant_1_output_0``: exponents, epsilons, masks.

The newer exporter calls values, folded ones too, ``val_12`` or after torch's operator, ``expand_1``, and says in the
file's metadata what they are of. Tools that leave metadata out (onnx's version converter, ONNX Runtime's optimizer)
leave files of which no more is known than of the older one's.

A file may store a tensor beside its graph or in a node (``Constant``), and tools move it from one to the other: under
the name of what a module holds it is the same.

Entry points: ``promote``, ``is_held``, ``is_of_torch``, ``is_computed``, ``is_newer``, ``was_constant``,
``of_unknown_origin``, ``may_be_another``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx_ir

from pdv.frontend.onnx.origins.signature import SIGNATURE, Signature, is_float, kind_of

TORCH = "pytorch"  # the producer of its files
_NAME = "onnx::"
_VALUE = "/"  # what names of values begin with: the path of the module that computes them
_NEWER = re.compile(r"^val_\d+$")  # a value of the newer exporter's graph that is none of torch's
_OPERATORS = {
    "add", "alias", "arange", "bmm", "cat", "clone", "contiguous", "copy", "cos", "cumsum", "detach", "div", "einsum",
    "embedding", "exp", "expand", "flatten", "full", "full_like", "lift_fresh_copy", "log", "masked_fill", "matmul",
    "mul", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "pow", "reciprocal", "repeat",
    "reshape", "rsqrt", "rsub", "scalar_tensor", "select", "sigmoid", "sin", "slice", "softmax", "sqrt", "squeeze",
    "stack", "sub", "t", "tanh", "to", "transpose", "tril", "triu", "unsqueeze", "view", "where", "zeros", "zeros_like",
    "_to_copy", "_unsafe_view",
}  # fmt: skip
"""Operators of torch by which constants are made and weights moved; no parameter of a module itself is called so."""
_CONSTANT = re.compile(r"^/(.*/)?Constant(_\d+)?_output_\d+$|^ortshared_")  # by the exporter; by ONNX Runtime
_PATH = re.compile(r"^[^\W\d]\w*(\.\w+)+$")  # as torch names what a module in another holds
_GATES = (1, 2, 3)
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "MatMul": (1,), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "PRelu": (1,), "LSTM": _GATES, "GRU": _GATES,
    "RNN": _GATES,
}  # fmt: skip
"""The operands that are weights, which are moved to where ONNX has them."""
_MOVED: Mapping[str, tuple[int, ...]] = {**WEIGHTS, "FusedMatMul": (1,), "FusedGemm": (1,), "FusedConv": (1,)}


def promote(model: onnx_ir.Model) -> None:
    """Constants in nodes that go by names of what a module holds become stored tensors; changes the model.

    Where the file says what the module holds, the others of several elements do: of these it is asked what they were.
    """
    signature, graph = Signature.of(model.graph), model.graph
    for node in [each for each in graph if each.op_type == "Constant" and each.domain == ""]:
        value, held = node.outputs[0], node.attributes.get("value")
        name = value.name or ""
        if held is None or name in graph.initializers or value.is_graph_output():
            continue
        tensor = held.as_tensor()
        known = tensor.size > 1 or name in signature.targets if signature is not None else is_held(name, model)
        if not known:
            continue
        shape = onnx_ir.Shape(tensor.shape.numpy())
        own = onnx_ir.Value(name=name, shape=shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor)
        if is_float(own):
            value.replace_all_uses_with(own)
            graph.remove(node)
            graph.register_initializer(own)


def is_held(name: str, model: onnx_ir.Model) -> bool:
    """Whether a name in a file of torch is one of a parameter or buffer of a module in another."""
    return model.producer_name == TORCH and _PATH.match(name) is not None


def is_of_torch(model: onnx_ir.Model) -> bool:
    """Whether one of torch's exporters wrote a file, be it that another tool signed it since."""
    if model.producer_name == TORCH or SIGNATURE in model.graph.metadata_props:
        return True
    names = (name for node in model.graph for name in ((value.name or "") for value in node.outputs))
    return any(is_computed(name) for name in (*model.graph.initializers, *names))


def is_computed(name: str) -> bool:
    """Whether a name is of a value of an exporter's graph; no parameter of a module has such a name."""
    return name.startswith((_NAME, _VALUE)) or _NEWER.match(name) is not None


def is_newer(name: str) -> bool:
    """Whether a name is what the newer exporter calls a value: a number, or torch's operator that computes it."""
    return _NEWER.match(name) is not None or kind_of(name).removesuffix("_default") in _OPERATORS


def was_constant(name: str) -> bool:
    """Whether a stored tensor was a constant of the module's code, by its name."""
    return _CONSTANT.match(name) is not None


def of_unknown_origin(graph: onnx_ir.Graph) -> dict[str, str]:
    """The tensors of which something is not known, and what, in words."""
    norms = {module_of(node) for node in graph if node.op_type == "InstanceNormalization"}
    found = {}
    for name, value in sorted(graph.initializers.items()):
        tensor, uses = value.const_value, list(value.uses())
        if not uses or not (is_computed(name) or is_newer(name)) or was_constant(name):
            continue
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        readers = {module_of(use.node) for use in uses}
        moved = all(
            use.idx in _MOVED.get(use.node.op_type, ()) or module_of(use.node) in norms or _is_behind_norm(use.node)
            for use in uses
        )
        if tensor.shape.rank() and not moved:
            found[name] = f"what {name} was made of"
        elif len(readers) > 1 and (name.startswith(_NAME) or (tensor.shape.rank() and not name.startswith(_VALUE))):
            found[name] = f"whether {name} of {' and '.join(sorted(readers))} is one"
    return found


def _is_behind_norm(node: onnx_ir.Node) -> bool:
    """Whether a node scales or shifts what a norm over groups gives, in another shape."""
    for op_types in (("Add", "Mul"), ("Mul", "Reshape"), ("Reshape",)):
        if node.op_type not in op_types:
            continue
        before = [made for value in node.inputs if value is not None and (made := value.producer()) is not None]
        if not before:
            return False
        node = before[0]
    return node.op_type == "InstanceNormalization"


def may_be_another(value: onnx_ir.Value, other: onnx_ir.Value) -> bool:
    """Whether two equal tensors, moved alike for two modules, may be of two parameters that start out equal."""
    if not all(is_computed(each.name or "") for each in (value, other)):
        return False
    modules = [{module_of(use.node) for use in each.uses()} for each in (value, other)]
    return not modules[0] & modules[1]


def module_of(node: onnx_ir.Node) -> str:
    """The path of the module that a node is of, of a norm over groups scale and shift, too; else the node's name."""
    path, slash, last = (node.name or "").rpartition("/")
    return path if slash else last
