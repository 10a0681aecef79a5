"""Graphs within nodes: a branch whose condition is known, and a loop whose number of rounds is.

Entry points: ``branch_of``, ``unroll``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir

from ir.graph import Node
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import NeedsValueError, Value
from pdv.passes.fold_constants import Array

MOST_SIZES = 8
_DECIDING = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "Div", "Min", "Max"})
MOST_ROUNDS = 1 << 10  # of a loop that is written out
Run = Callable[[onnx_ir.Graph, Sequence[Value | None]], tuple[Value | None, ...]]
"""Lowers a graph on operands and gives its results."""


def branch_of(k: Lowering, node: onnx_ir.Node, operands: Sequence[Value | None], run: Run) -> tuple[Value | None, ...]:
    """The results of the branch of an ``If`` that is taken, whose condition must be known."""
    name = "then_branch" if bool(_known(k, operands, 0).reshape(-1)[0]) else "else_branch"
    return run(node.attributes[name].as_graph(), ())


def unroll(k: Lowering, node: onnx_ir.Node, operands: Sequence[Value | None], run: Run) -> tuple[Value | None, ...]:
    """The results of a ``Loop`` written out, round by round; the number of rounds must be known."""
    body = node.attributes["body"].as_graph()
    most = MOST_ROUNDS + 1 if operands[0] is None else int(_known(k, operands, 0).reshape(-1)[0])
    goes_on = True if operands[1] is None else bool(_known(k, operands, 1).reshape(-1)[0])
    carried = list(operands[2:])
    scanned: list[list[Node]] = [[] for _ in range(len(body.outputs) - 1 - len(carried))]
    rounds = 0
    while goes_on and rounds < most:
        if rounds >= MOST_ROUNDS:
            raise Unsupported(f"a loop of more than {MOST_ROUNDS} rounds")
        results = run(body, (k.const(np.asarray(rounds)), k.const(np.asarray(True)), *carried))
        goes_on = bool(_known(k, results, 0).reshape(-1)[0])
        carried = list(results[1 : 1 + len(carried)])
        for row, value in zip(scanned, results[1 + len(carried) :], strict=True):
            row.append(_tensor(value))
        rounds += 1
    read = [bool(each.uses()) or each.is_graph_output() for each in node.outputs[len(carried) :]]
    return (*carried, *(_stack(k, row) if row or wanted else None for row, wanted in zip(scanned, read, strict=False)))


def scan(k: Lowering, node: onnx_ir.Node, operands: Sequence[Value | None], run: Run) -> tuple[Value | None, ...]:
    """The results of a ``Scan`` written out: states go from slice to slice, results of slices are joined."""
    body = node.attributes["body"].as_graph()
    count = node.attributes.get_int("num_scan_inputs")
    if len(body.inputs) != len(operands):
        raise Unsupported("a scan of opset 8, over rows of several lengths")
    states, inputs = list(operands[:-count]), [_tensor(value) for value in operands[-count:]]
    outputs = len(body.outputs) - len(states)
    axes = _ints(node, "scan_input_axes", count)
    back = _ints(node, "scan_input_directions", count)
    joined, backward = _ints(node, "scan_output_axes", outputs), _ints(node, "scan_output_directions", outputs)
    length = inputs[0].type.shape[axes[0]]
    if length > MOST_ROUNDS:
        raise Unsupported(f"a scan of more than {MOST_ROUNDS} rounds")
    rows: list[list[Node]] = [[] for _ in range(outputs)]
    for i in range(length):
        parts = [
            k.select(x, axis, length - 1 - i if reverse else i)
            for x, axis, reverse in zip(inputs, axes, back, strict=True)
        ]
        results = run(body, (*states, *parts))
        states = list(results[: len(states)])
        for row, value in zip(rows, results[len(states) :], strict=True):
            row.append(_tensor(value))
    each = zip(rows, joined, backward, strict=True)
    return (*states, *(_stack(k, row[::-1] if reverse else row, axis) for row, axis, reverse in each))


def _ints(node: onnx_ir.Node, name: str, count: int) -> Sequence[int]:
    return cast("Sequence[int]", node.attributes[name].value) if name in node.attributes else [0] * count


def _stack(k: Lowering, row: Sequence[Node], axis: int = 0) -> Node:
    if not row:
        raise Unsupported("a loop of no rounds whose results are joined")
    rank = row[0].type.rank + 1
    axis %= rank
    return k.concat([k.reshape(x, (*x.type.shape[:axis], 1, *x.type.shape[axis:])) for x in row], axis)


def _tensor(value: Value | None) -> Node:
    if not isinstance(value, Node):
        raise Unsupported("a loop over what are no tensors")
    return value


def _known(k: Lowering, operands: Sequence[Value | None], index: int) -> Array:
    operand = _tensor(operands[index])
    array = k.value(operand)
    if array is None:
        raise NeedsValueError(index, operand)
    return array


def may_be_sizes(node: Node) -> bool:
    """True of a few integers, which are shapes or axes more often than not, and of single numbers."""
    few = node.type.rank <= 1 and node.type.num_elements <= MOST_SIZES
    return few and (not node.type.dtype.is_floating or node.type.rank == 0)


def compared(k: Lowering, op: str, operands: Sequence[Value | None]) -> list[tuple[list[Any], ...]]:  # Any: numbers
    """What known numbers that may be sizes are compared with, or divided by: at sizes where they are others, what
    comes of it may be another function of them. Of no size is what is compared with negative ones, as exporters do to
    find what is to stay as it is. Equal numbers, as of two shapes that are broadcast, are said to be that alone: while
    they are, what comes of them is the same function of them.
    """
    nodes = [value for value in operands if isinstance(value, Node)]
    if op not in _DECIDING or not all(map(may_be_sizes, nodes)):
        return []
    arrays = [array for node in nodes if (array := k.value(node)) is not None]
    if op == "Div" and any(array.dtype.kind == "f" for array in arrays):
        return []
    if op == "Equal" and any(bool((array < 0).all()) for array in arrays if array.dtype.kind in "if"):
        return []
    return [tuple([] if len({*row}) == 1 < len(row) else [*row] for row in _rows(arrays))]


def _rows(arrays: Sequence[Array]) -> Iterator[tuple[Any, ...]]:  # Any: numbers
    """The numbers that stand at one place, broadcast to each other."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return zip(*(np.broadcast_to(array, shape).reshape(-1).tolist() for array in arrays), strict=True)
