"""Steady noise in place of what an ONNX file draws at random: what the program's evaluation draws (`ir.ops.draws`).

Entry point: ``steady_nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ir.ops.draws import steady_uniform
from pdv.frontend.lowering import Drawn


def steady_nodes(node: onnx.NodeProto, number: Drawn) -> Iterator[onnx.NodeProto]:
    """What gives the output of a node that draws, of the shape and type of what it drew: ``<name> drawn``."""
    name = node.output[0].removesuffix(" drawn")

    def make(op: str, operands: Sequence[str], result: str, **attributes: Any) -> onnx.NodeProto:
        """Names that begin with a dot are the node's own."""
        own = [f"{name}{x}" if x.startswith(".") else x for x in operands]
        return helper.make_node(op, own, [f"{name}{result}"], **attributes)

    def constant(result: str, array: Any) -> onnx.NodeProto:  # Any: a number or an array
        return make("Constant", [], result, value=numpy_helper.from_array(np.asarray(array)))

    yield make("Shape", [node.output[0]], ".sizes")
    yield constant(".first", steady_uniform((1,) * number.rank))
    yield constant(".zero", np.int64(0))
    yield constant(".one", np.int64(1))
    total = ".first"
    for dim in range(1, number.rank):
        at = f" {dim}"
        step = steady_uniform([2 if i == dim else 1 for i in range(number.rank)]).reshape(-1)
        yield constant(f".step{at}", (step[1] - step[0]) % 1)
        yield constant(f".dim{at}", np.int64(dim))
        yield make("Gather", [".sizes", f".dim{at}"], f".size{at}")
        yield make("Range", [".zero", f".size{at}", ".one"], f".places{at}")
        yield make("Cast", [f".places{at}"], f".along{at}", to=onnx.TensorProto.DOUBLE)
        yield make("Mul", [f".along{at}", f".step{at}"], f".moved{at}")
        yield constant(f".shape{at}", np.array([-1, *[1] * (number.rank - dim - 1)], np.int64))
        yield make("Reshape", [f".moved{at}", f".shape{at}"], f".line{at}")
        yield make("Add", [total, f".line{at}"], f".total{at}")
        total = f".total{at}"
    yield make("Floor", [total], ".whole")
    yield make("Sub", [total, ".whole"], ".part")
    yield make("Expand", [".part", ".sizes"], ".steady")
    yield from _made(node, number, make, constant)


def _made(node: onnx.NodeProto, number: Drawn, make: Any, constant: Any) -> Iterator[onnx.NodeProto]:
    """Numbers of its kind, of steady ones between 0 and 1."""
    if number.kind == "bernoulli":
        yield make("Cast", [node.input[0]], ".chance", to=onnx.TensorProto.DOUBLE)
        yield make("Less", [".steady", ".chance"], ".made")
    else:
        steady = ".steady"
        if number.kind == "normal":
            yield constant(".1", 1.0)
            yield make("Sub", [".1", steady], ".rest")
            yield make("Div", [steady, ".rest"], ".odds")
            yield make("Log", [".odds"], ".normal")
            steady = ".normal"
        yield constant(".scale", number.scale)
        yield constant(".offset", number.offset)
        yield make("Mul", [steady, ".scale"], ".scaled")
        yield make("Add", [".scaled", ".offset"], ".made")
    yield make("CastLike", [".made", node.output[0]], "")
