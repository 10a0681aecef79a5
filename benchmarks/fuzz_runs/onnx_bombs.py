"""What makes ONNX models that hurt: bombs of functions, loops and sizes, weights that lie elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.fuzz_runs.onnx_models import MODELS, F, I, ints, model, stored, value

X, Y = value("x", 4, 8), value("y", 4, 8)
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
SIZE = len("../outside/secret.bin")


def functions(nodes: Mapping[str, list[onnx.NodeProto]], first: str = "f0") -> onnx.ModelProto:
    own = [helper.make_function("own", name, ["a"], ["b"], body, OPSETS) for name, body in nodes.items()]
    return model([helper.make_node(first, ["x"], ["y"], domain="own")], [X], [Y], functions=own)


def call(name: str, x: str, y: str) -> onnx.NodeProto:
    return helper.make_node(name, [x], [y], domain="own")


def bomb(depth: int, width: int) -> onnx.ModelProto:
    """Each function calls the next one ``width`` times: width ** depth operators."""
    bodies = {}
    for level in range(depth):
        names = ["a", *(f"v{i}" for i in range(width - 1)), "b"]
        bodies[f"f{level}"] = [call(f"f{level + 1}", x, y) for x, y in itertools.pairwise(names)]
    bodies[f"f{depth}"] = [helper.make_node("Relu", ["a"], ["b"])]
    return functions(bodies)


def chain(op: str, count: int, *more: str) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node(op, [a, *more], [b]) for a, b in itertools.pairwise(names)]
    return model(nodes, [X], [Y], [stored(name, 8, 8) for name in more])


def doubled(op: str, count: int, **attrs: Any) -> onnx.ModelProto:
    """v = op(v, v), again and again."""
    names = ["x", *(f"v{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node(op, [a, a], [b], **attrs) for a, b in itertools.pairwise(names)]
    return model(nodes, [X], [helper.make_tensor_value_info("y", F, None)], [])


def nested_if(depth: int, width: int = 1) -> onnx.ModelProto:
    yes = numpy_helper.from_array(np.array(True), "yes")

    def graph(level: int, tag: str) -> onnx.GraphProto:
        out = f"o{tag}"
        if level == 0:
            return helper.make_graph([helper.make_node("Relu", ["x"], [out])], f"g{tag}", [], [value(out, 4, 8)])
        inner = [
            helper.make_node("If", ["yes"], [f"{out}_{i}"], then_branch=graph(level - 1, f"{tag}a{i}"),
                             else_branch=graph(0, f"{tag}b{i}"))
            for i in range(width)
        ]  # fmt: skip
        inner.append(helper.make_node("Identity", [f"{out}_0"], [out]))
        return helper.make_graph(inner, f"g{tag}", [], [value(out, 4, 8)])

    node = helper.make_node("If", ["yes"], ["y"], then_branch=graph(depth, "t"), else_branch=graph(0, "e"))
    return model([node], [X], [Y], [yes])


def loops(depth: int, rounds: int, trip: bool = True) -> onnx.ModelProto:
    """Loops in loops; without ``trip`` they never end."""
    bools = TensorProto.BOOL

    def loop(level: int, x: str, y: str) -> onnx.NodeProto:
        i, go, h, out = (f"{name}{level}" for name in ("i", "go", "h", "out"))
        inner = loop(level - 1, h, out) if level else helper.make_node("Relu", [h], [out])
        body = helper.make_graph(
            [inner, helper.make_node("Identity", [go], [f"{go}_"])],
            f"body{level}",
            [value(i, kind=I), value(go, kind=bools), value(h, 4, 8)],
            [value(f"{go}_", kind=bools), value(out, 4, 8)],
        )
        return helper.make_node("Loop", ["n" if trip else "", "yes", x], [y], body=body)

    known = [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array(rounds, np.int64), "n")]
    return model([loop(depth, "x", "y")], [X], [Y], known)


def made(op: str, size: list[int], **attrs: Any) -> onnx.ModelProto:
    """A constant of this size, made in the file and added to the input."""
    shape = numpy_helper.from_array(np.array(size, np.int64), "size")
    one = numpy_helper.from_array(np.ones([1] * min(len(size), 60), "f"), "one")
    if op == "ConstantOfShape":
        node = helper.make_node(op, ["size"], ["c"], **attrs)
    else:
        node = helper.make_node(op, ["one", "size"], ["c"], **attrs)
    nodes = [node, helper.make_node("ReduceSum", ["c"], ["s"], keepdims=0), helper.make_node("Add", ["x", "s"], ["y"])]
    return model(nodes, [X], [Y], [shape, one])


def counted(start: float, limit: float, delta: float, kind: str = "f") -> onnx.ModelProto:
    known = [numpy_helper.from_array(np.array(n, kind), name) for name, n in (("a", start), ("b", limit), ("c", delta))]
    nodes = [
        helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("Cast", ["r"], ["f"], to=F),
        helper.make_node("ReduceSum", ["f"], ["s"], keepdims=0), helper.make_node("Add", ["x", "s"], ["y"]),
    ]  # fmt: skip
    return model(nodes, [X], [Y], known)


def on_input(
    op: str, *, weights: list[onnx.TensorProto], of: list[str], shape: Any = None, **attrs: Any
) -> onnx.ModelProto:
    return model(
        [helper.make_node(op, ["x", *of], ["y"], **attrs)], [X], [helper.make_tensor_value_info("y", F, shape)], weights
    )


def stored_at(location: str, where: str = "initializer", **said: str) -> onnx.ModelProto:
    """``x + w`` whose w lies elsewhere."""
    tensor = TensorProto(name="w", data_type=F, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, "offset": "0", "length": "128", **said}.items():
        tensor.external_data.add(key=key, value=text)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    if where == "initializer":
        return model([add], [X], [Y], [tensor])
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    if where == "constant":
        return model([constant, add], [X], [Y])
    if where == "function":
        body = [constant, helper.make_node("Add", ["a", "w"], ["b"])]
        return functions({"f0": body})
    yes = numpy_helper.from_array(np.array(True), "yes")
    weights = [tensor] if where == "branch" else []
    nodes = (
        [helper.make_node("Add", ["x", "w"], ["t"])]
        if weights
        else [constant, helper.make_node("Add", ["x", "w"], ["t"])]
    )
    inner = helper.make_graph(nodes, "then", [], [value("t", 4, 8)], weights)
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [value("e", 4, 8)])
    return model([helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=other)], [X], [Y], [yes])


def sparse() -> onnx.ModelProto:
    found = model([helper.make_node("Add", ["x", "w"], ["y"])], [X], [Y])
    found.graph.sparse_initializer.add(dims=[4, 8], values=helper.make_tensor("w", F, [1], [1.0]), indices=ints("i", 3))
    return found


def named(name: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", [name, f"{name}w"], [f"{name}h"], name=name),
        helper.make_node("Relu", [f"{name}h"], ["y"]),
    ]
    return model(nodes, [value(name, 4, 8)], [Y], [stored(f"{name}w", 8, 8)])


def constant(number: float, op: str = "Add") -> onnx.ModelProto:
    array = np.full((4, 8), number, "f")
    array[0, 0] = 1.0
    nodes = [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array)),
             helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(op, ["h", "c"], ["y"])]  # fmt: skip
    return model(nodes, [X], [Y], [stored("w", 8, 8)])


def metadata(text: str) -> onnx.ModelProto:
    found = MODELS["mlp"]()
    found.producer_name = "pytorch"
    for node in found.graph.node:
        for key in ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"):
            node.metadata_props.add(key=key, value=text)
    return found


def wide(inputs: int) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(inputs)]
    return model([helper.make_node("Sum", names, ["y"])], [value(name, 4, 8) for name in names], [Y])


def renamed(old: bytes, new: bytes) -> bytes:
    data: bytes = MODELS["mlp"]().SerializeToString()
    return data.replace(old, new)


def outputs(*names: str) -> onnx.ModelProto:
    return model(
        [helper.make_node("Relu", ["x"], ["r"])], [X], [value(name, 4, 8) for name in names], [stored("w", 4, 8)]
    )
