"""ONNX models made to hurt, each by what is wrong with it. Entry point: ``HOSTILE``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.fuzz_runs.case import Link, Pipe
from benchmarks.fuzz_runs.onnx_bombs import (
    X,
    Y,
    bomb,
    call,
    chain,
    constant,
    counted,
    doubled,
    functions,
    loops,
    made,
    metadata,
    named,
    nested_if,
    on_input,
    outputs,
    renamed,
    sparse,
    stored_at,
    wide,
)
from benchmarks.fuzz_runs.onnx_models import MODELS, F, I, ints, model, stored, value

Made = Any  # a model, bytes, or a model with further files and options
_LOCATIONS = {
    "beside the folder": "../outside/secret.bin",
    "absolute": "/etc/passwd",
    "a folder": ".",
    "nowhere": "absent.bin",
    "a link out": "link.bin",
    "a link to a folder out": "linked/secret.bin",
    "a pipe": "pipe",
    "a device": "zero",
    "no text": "a\x00b",
    "empty": "",
    "percent": "%2e%2e/outside/secret.bin",
    "backslash": "..\\outside\\secret.bin",
    "a circle": "round.bin",
}
_BESIDE = {
    "link.bin": Link("../outside/secret.bin"),
    "linked": Link("../outside"),
    "pipe": Pipe(),
    "zero": Link("/dev/zero"),
    "round.bin": Link("round.bin"),
    "w.bin": bytes(256),
}
_PLACES = ("initializer", "constant", "function", "branch", "branch constant")

HOSTILE: dict[str, Callable[[], Made]] = {
    "a function that calls itself": lambda: functions({"f0": [call("f0", "a", "b")]}),
    "two functions that call each other": lambda: functions(
        {"f0": [call("f1", "a", "b")], "f1": [call("f0", "a", "b")]}
    ),
    "a chain of 500 functions": partial(bomb, 500, 1),
    **{
        f"a bomb of functions, {width} to the {depth}": partial(bomb, depth, width)
        for width, depth in ((2, 10), (2, 40), (10, 8), (100, 3))
    },
    **{
        f"a chain of {count} {op}": partial(chain, op, count)
        for op, count in (("Relu", 300), ("Relu", 3_000), ("Relu", 100_000), ("Identity", 5_000))
    },
    "a chain of 2000 products": lambda: chain("MatMul", 2_000, "w"),
    **{
        f"{op} of itself, {count} times": partial(doubled, op, count, **attrs)
        for op, count, attrs in (
            ("Concat", 60, {"axis": 0}),
            ("Concat", 10, {"axis": 1}),
            ("Add", 60, {}),
            ("Mul", 2_000, {}),
            ("Pow", 40, {}),
        )
    },
    **{f"If in If, {depth} deep": partial(nested_if, depth) for depth in (5, 20, 28)},
    "a tree of Ifs": lambda: nested_if(7, 4),
    **{
        f"loops of {rounds}, {depth + 1} deep": partial(loops, depth, rounds)
        for depth, rounds in ((0, 1_000), (0, 1 << 40), (1, 1_000), (4, 100), (2, -1))
    },
    "a loop that never ends": lambda: loops(0, 1, trip=False),
    **{
        f"{op} of {size}": partial(made, op, size)
        for op in ("ConstantOfShape", "Expand", "Tile")
        for size in ([1 << 40], [-1], [0], [1 << 20, 1 << 20, 1 << 30], [1 << 62, 4], [20_000, 20_000], [1] * 70)
    },
    "Range of 1e30": lambda: counted(0, 1e30, 1),
    "Range by zero": lambda: counted(0, 1, 0),
    "Range of nan": lambda: counted(0, float("nan"), 1),
    "Range to infinity": lambda: counted(0, float("inf"), 1),
    "Range of integers": lambda: counted(0, (1 << 62), 1, "i8"),
    "Pad by 2 to the 40": lambda: on_input("Pad", weights=[ints("p", 0, 1 << 40, 0, 0)], of=["p"]),
    "Pad by what is negative": lambda: on_input("Pad", weights=[ints("p", 0, -9, 0, 0)], of=["p"]),
    "Reshape to 2 to the 62": lambda: on_input("Reshape", weights=[ints("p", 1 << 62, -1)], of=["p"]),
    "Reshape to minus two": lambda: on_input("Reshape", weights=[ints("p", -2, -1)], of=["p"]),
    "Tile by 2 to the 40": lambda: on_input("Tile", weights=[ints("p", 1 << 40, 1)], of=["p"]),
    "Tile by nothing": lambda: on_input("Tile", weights=[ints("p", 0, 1)], of=["p"]),
    "Expand to much": lambda: on_input("Expand", weights=[ints("p", 1 << 30, 1 << 30, 4, 8)], of=["p"]),
    "Resize to much": lambda: on_input(
        "Resize", weights=[numpy_helper.from_array(np.array([1e9, 1e9], "f"), "p")], of=["", "p"], mode="nearest"
    ),
    "OneHot of much": lambda: model(
        [helper.make_node("OneHot", ["i", "d", "v"], ["y"])],
        [value("i", 4, kind=I)],
        [helper.make_tensor_value_info("y", F, None)],
        [
            numpy_helper.from_array(np.array(1 << 40, np.int64), "d"),
            numpy_helper.from_array(np.array([0, 1], "f"), "v"),
        ],
    ),
    "TopK of too many": lambda: on_input("TopK", weights=[ints("p", 1 << 40)], of=["p"]),
    "an input of 2 to the 60": lambda: model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x", 1 << 30, 1 << 30)], [value("y", 1 << 30, 1 << 30)]
    ),
    "an input of 2 to the 62, cast": lambda: model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x", 1 << 62)], [value("y", 1 << 62)]
    ),
    "an input of negative size": lambda: model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x", -4, 8)], [value("y", -4, 8)]
    ),
    "an input of rank 70": lambda: model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x", *[1] * 70)], [value("y", *[1] * 70)]
    ),
    "a product of 2 to the 33": lambda: model(
        [helper.make_node("MatMul", ["x", "x"], ["y"])], [value("x", 2048, 2048)], [value("y", 2048, 2048)]
    ),
    "a convolution of much": lambda: model(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1 << 30] * 4)],
        [value("x", 1, 3, 8, 8)],
        [helper.make_tensor_value_info("y", F, None)],
        [stored("w", 2, 3, 3, 3)],
    ),
    "a convolution by 0": lambda: model(
        [helper.make_node("Conv", ["x", "w"], ["y"], strides=[0, 0])],
        [value("x", 1, 3, 8, 8)],
        [helper.make_tensor_value_info("y", F, None)],
        [stored("w", 2, 3, 3, 3)],
    ),
    "a pool of nothing": lambda: model(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[0, 0])],
        [value("x", 1, 3, 8, 8)],
        [helper.make_tensor_value_info("y", F, None)],
    ),
    "groups of 0": lambda: model(
        [helper.make_node("Conv", ["x", "w"], ["y"], group=0)],
        [value("x", 1, 3, 8, 8)],
        [helper.make_tensor_value_info("y", F, None)],
        [stored("w", 2, 3, 3, 3)],
    ),
    "no operator: the input returned": lambda: model([], [X], [value("x", 4, 8)]),
    "no operator: a weight returned": lambda: model([], [X], [value("w", 4, 8)], [stored("w", 4, 8)]),
    "no operator: an identity": lambda: model([helper.make_node("Identity", ["x"], ["y"])], [X], [Y]),
    "no operator left: constants": lambda: model([helper.make_node("Neg", ["c"], ["y"])], [X], [Y], [ints("c", 1)]),
    "no input": lambda: model([helper.make_node("Relu", ["w"], ["y"])], [], [Y], [stored("w", 4, 8)]),
    "nothing at all": lambda: b"",
    "no graph": lambda: onnx.ModelProto(ir_version=10),
    "no node": lambda: model([], [], []),
    "an output twice": lambda: outputs("r", "r"),
    "an output of nobody": lambda: outputs("none"),
    "an input and an output": lambda: outputs("r", "x"),
    "a weight as output": lambda: outputs("r", "w"),
    "an input twice": lambda: model([helper.make_node("Relu", ["x"], ["y"])], [X, X], [Y]),
    "an input without a name": lambda: model([helper.make_node("Relu", [""], ["y"])], [value("", 4, 8)], [Y]),
    "a circle": lambda: model(
        [helper.make_node("Add", ["x", "y"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], [X], [Y]
    ),
    "a node that reads itself": lambda: model([helper.make_node("Add", ["x", "y"], ["y"])], [X], [Y]),
    "names in no encoding": lambda: renamed(b"act", b"\xff\xfe\xfd"),
    "an operator in no encoding": lambda: renamed(b"Relu", b"\xff\xfe\xfd\xfc"),
    "a weight in no encoding": lambda: renamed(b"w1", b"\xc0\x80"),
    "an input in no encoding": lambda: renamed(b"\x01x", b"\x01\xff"),
    **{
        f"named {name!r}"[:40]: partial(named, name)
        for name in (
            "x'\"\\",
            "x\n",
            "__class__",
            "self",
            "torch",
            "F",
            "é\u202e",
            "0",
            "x; import os",
            "n" * 5_000,
            "\\N{x}",
            "{x}",
            "%s",
        )
    },
    **{
        f"a constant of {n} {op}": partial(constant, n, op)
        for n in (float("inf"), float("-inf"), float("nan"))
        for op in ("Add", "Mul", "Max")
    },
    "sparse weights": sparse,
    "many inputs": lambda: wide(2_000),
    "metadata that nests": lambda: metadata("[" * 5_000),
    "metadata of code": lambda: metadata("__import__('os').mkdir('pwned')"),
    "metadata of bytes": lambda: metadata("[b'x', 1, None, {}]"),
    "metadata that is much": lambda: metadata("[" + "'x'," * 100_000 + "]"),
    "of opset 9999": lambda: helper.make_model(
        MODELS["mlp"]().graph, opset_imports=[helper.make_opsetid("", 9999)], ir_version=10
    ),
    "of no opset": lambda: helper.make_model(MODELS["mlp"]().graph, opset_imports=[], ir_version=10),
    "training information": lambda: onnx.ModelProto(
        ir_version=10, graph=MODELS["mlp"]().graph, training_info=[onnx.TrainingInfoProto()]
    ),
    "padding beyond half a kernel": lambda: model(
        [
            helper.make_node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["x", "w"], ["c"]),
        ],
        [value("x", 2, 3, 6, 6)],
        [helper.make_tensor_value_info("y", F, None)],
        [stored("w", 4, 3, 3, 3)],
    ),
    **{
        f"weights at {name} in {where}": (
            lambda location=location, where=where: (stored_at(location, where), _BESIDE, ())
        )
        for name, location in _LOCATIONS.items()
        for where in _PLACES
        if where == "initializer" or name in ("beside the folder", "absolute", "a link out", "a pipe", "a device")
    },
    **{
        f"weights with {key} {text[:20]}": (lambda key=key, text=text: (stored_at("w.bin", **{key: text}), _BESIDE, ()))
        for key, text in (
            ("offset", "-1"),
            ("offset", "x"),
            ("offset", "1e3"),
            ("offset", str(1 << 70)),
            ("length", "-1"),
            ("length", "x"),
            ("length", "0"),
            ("length", "9" * 30),
        )
    },
}
