"""Small ONNX models that are right, each with what others lack. Entry point: ``MODELS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F, I = TensorProto.FLOAT, TensorProto.INT64
Files = Mapping[str, bytes]


def stored(name: str, *shape: int) -> onnx.TensorProto:
    """A weight of small numbers."""
    random = np.random.default_rng(sum(map(ord, name)))
    return numpy_helper.from_array(random.normal(0, 0.3, shape).astype("f"), name)


def ints(name: str, *values: int) -> onnx.TensorProto:
    """A shape, or axes."""
    return numpy_helper.from_array(np.array(values, np.int64), name)


def value(name: str, *shape: Any, kind: int = F) -> onnx.ValueInfoProto:
    """An input or an output."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    **more: Any,
) -> onnx.ModelProto:
    """A model of opset 18."""
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid("own", 1)] if more.get("functions") else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def _mlp() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="up", transB=1),
        helper.make_node("Relu", ["h"], ["r"], name="act"),
        helper.make_node("MatMul", ["r", "w2"], ["m"], name="down"),
        helper.make_node("LayerNormalization", ["m", "g", "b"], ["n"], axis=-1, epsilon=1e-5),
        helper.make_node("Softmax", ["n"], ["y"], axis=-1),
    ]
    weights = [stored("w1", 16, 8), stored("b1", 16), stored("w2", 16, 8), stored("g", 8), stored("b", 8)]
    return model(nodes, [value("x", 4, 8)], [value("y", 4, 8)], weights)


def _attention() -> onnx.ModelProto:
    heads = helper.make_node("Reshape", ["q", "shape"], ["q4"])
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], axis=0),
        helper.make_node("MatMul", ["e", "wq"], ["q"]),
        heads,
        helper.make_node("Transpose", ["q4"], ["qt"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["qt"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["qt", "kt"], ["s"]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(0.5, "f"))),
        helper.make_node("Mul", ["s", "c"], ["sc"]),
        helper.make_node("Softmax", ["sc"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "qt"], ["o"]),
        helper.make_node("ReduceMean", ["o", "axes"], ["y"], keepdims=0),
    ]
    weights = [stored("table", 12, 8), stored("wq", 8, 8), ints("shape", 0, 0, 2, 4), ints("axes", 1)]
    return model(nodes, [value("ids", "batch", "length", kind=I)], [value("y", "batch", "length", 4)], weights)


def _conv() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "t", "mean", "var"], ["n"]),
        helper.make_node("MaxPool", ["n"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["m"], ["f"], axis=1),
        helper.make_node("Gemm", ["f", "wl"], ["y"], transB=0),
    ]
    var = numpy_helper.from_array(np.ones(4, "f"), "var")
    weights = [stored("w", 4, 3, 3, 3), stored("s", 4), stored("t", 4), stored("mean", 4), var, stored("wl", 36, 5)]
    return model(nodes, [value("x", 2, 3, 6, 6)], [value("y", 2, 5)], weights)


def _shapes() -> onnx.ModelProto:
    """Constants of every form, and operators that compute sizes."""
    data = helper.make_tensor("fd", F, [3], [1.0, -2.0, 0.5])
    nodes = [
        helper.make_node("Constant", [], ["cf"], value_float=2.0),
        helper.make_node("Constant", [], ["ci"], value_ints=[4, 3]),
        helper.make_node("ConstantOfShape", ["ci"], ["z"], value=helper.make_tensor("", F, [1], [1.5])),
        helper.make_node("Shape", ["x"], ["sx"]),
        helper.make_node("Expand", ["fd", "sx"], ["ex"]),
        helper.make_node("Range", ["zero", "three", "one"], ["ids"]),
        helper.make_node("Slice", ["ex", "from", "to", "one1"], ["sl"]),
        helper.make_node("Pad", ["sl", "pads"], ["pa"], mode="constant"),
        helper.make_node("Add", ["x", "pa"], ["a"]),
        helper.make_node("Mul", ["a", "z"], ["b"]),
        helper.make_node("Cast", ["ids"], ["fi"], to=F),
        helper.make_node("Add", ["b", "fi"], ["c"]),
        helper.make_node("Concat", ["c", "x"], ["d"], axis=0),
        helper.make_node("Split", ["d", "parts"], ["e", "f"], axis=0),
        helper.make_node("Tile", ["e", "twice"], ["t"]),
        helper.make_node("Mul", ["t", "cf"], ["u"]),
        helper.make_node("MatMul", ["u", "w"], ["y"]),
    ]
    scalars = [
        numpy_helper.from_array(np.array(n, np.int64), name) for name, n in (("zero", 0), ("three", 3), ("one", 1))
    ]
    weights = [data, *scalars, ints("from", 0), ints("to", 3), ints("one1", 1), ints("pads", 0, 0, 1, 0),
               ints("parts", 4, 4), ints("twice", 1, 2), stored("w", 6, 4)]  # fmt: skip
    return model(nodes, [value("x", 4, 3)], [value("y", 4, 4)], weights)


def _branches() -> onnx.ModelProto:
    """``If`` and ``Loop`` with what is known, ``Scan`` over the input."""
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["t"])], "then", [], [value("t", 4, 8)])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [value("e", 4, 8)])
    body = helper.make_graph(
        [helper.make_node("MatMul", ["h", "w"], ["h2"]), helper.make_node("Identity", ["go"], ["go2"])],
        "body",
        [value("i", kind=I), value("go", kind=TensorProto.BOOL), value("h", 4, 8)],
        [value("go2", kind=TensorProto.BOOL), value("h2", 4, 8)],
    )
    nodes = [
        helper.make_node("If", ["yes"], ["a"], then_branch=inner, else_branch=other),
        helper.make_node("Loop", ["three", "yes", "a"], ["y"], body=body),
    ]
    yes, three = numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array(3, np.int64), "three")
    return model(nodes, [value("x", 4, 8)], [value("y", 4, 8)], [yes, three, stored("w", 8, 8)])


def _functions() -> onnx.ModelProto:
    """Functions that call one another."""
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    half = helper.make_function(
        "own", "half", ["a"], ["b"],
        [helper.make_node("Constant", [], ["k"], value_float=0.5), helper.make_node("Mul", ["a", "k"], ["b"])], opset,
    )  # fmt: skip
    both = helper.make_function(
        "own", "both", ["a", "w"], ["b"],
        [helper.make_node("half", ["a"], ["h"], domain="own"), helper.make_node("MatMul", ["h", "w"], ["b"])], opset,
    )  # fmt: skip
    calls = [
        helper.make_node("both", ["x", "w"], ["h"], domain="own", name="first"),
        helper.make_node("both", ["h", "v"], ["y"], domain="own", name="second"),
    ]
    return model(calls, [value("x", 4, 8)], [value("y", 4, 8)], [stored("w", 8, 8), stored("v", 8, 8)],
                 functions=[half, both])  # fmt: skip


def _external() -> onnx.ModelProto:
    found = _mlp()
    place = 0
    for tensor in found.graph.initializer:
        length = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, said in (("location", "data/w.bin"), ("offset", str(place)), ("length", str(length))):
            tensor.external_data.add(key=key, value=said)
        place += length
    return found


@cache
def external_data() -> bytes:
    """The weights of the model ``external``."""
    return b"".join(tensor.raw_data for tensor in _mlp().graph.initializer)


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "mlp": _mlp,
    "attention": _attention,
    "conv": _conv,
    "shapes": _shapes,
    "branches": _branches,
    "functions": _functions,
    "external": _external,
}
OPTIONS: Mapping[str, Sequence[str]] = {"attention": ("--batch", "2", "--dim", "length=4")}
"""What the command needs besides."""
