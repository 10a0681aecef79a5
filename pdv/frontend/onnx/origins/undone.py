"""A parameter had back from what torch's optimizer computed of it alone, by steps that can be taken back.

Dims of size one that come and go, other shapes, a tensor that is repeated; ``exp(p)``, ``-exp(p)``, ``exp(-p)``, of
which the sign tells which it was; and ``1 + p``, where the source's line that reads it says the number. The steps are
known by the names of the file's values, which are those of torch's operators. What was computed in another way, of
bounds, of other tensors or by steps whose order matters, is not touched. Entry point: ``undo``.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from ir.dims import Shape
from pdv.frontend.onnx.origins.made import Made, Step, inverted
from pdv.frontend.onnx.origins.signature import kind_of
from pdv.passes.fold_constants import Array

_SHAPES = {
    "unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "flatten", "unflatten", "clone", "contiguous", "alias",
    "detach", "lift_fresh_copy",
}  # fmt: skip
"""Operators of torch that leave elements in their order."""
_TURNS = {"permute", "transpose", "t", "numpy_T"}
_REPEATS = {"expand", "repeat"}
_CASTS = {"float", "to", "type_as"}  # methods; where they change a type they are among the steps
DISTINCT = 0.6  # of elements by chance: of those that are all there twice at most half are
CHANCE = 8  # distinct elements that are equal to others by no chance
_CLOSE = 1e-5  # of what is computed again to what the file has: some steps of float32


def undo(parameter: str, array: Array, steps: Iterable[str], lines: Iterable[str]) -> tuple[Made, Array] | None:
    """How a stored tensor was made of a parameter, and the parameter.

    steps: names of all that was computed on the way, the tensor's own included; lines: of the source, which read it.
    """
    kinds = Counter(kind_of(step) for step in steps)
    found = _functions(array, kinds, parameter, lines)
    if found is None:
        return None
    functions, inner = found
    once = without_repeats(inner) if _REPEATS & kinds.keys() else inner
    if once is None or (_TURNS & kinds.keys() and sum(size > 1 for size in once.shape) > 1):
        return None
    shape = _less_ones(once.shape, kinds["unsqueeze"] - kinds["squeeze"])
    made = Made((parameter,), None, once.shape, array.shape, steps=functions)
    own = np.ascontiguousarray(once.reshape(shape), array.dtype).reshape(shape)
    again = made.of({parameter: own})
    return (made, own) if np.allclose(again, array, rtol=_CLOSE, atol=0) else None


def _functions(
    array: Array, kinds: Counter[str], parameter: str, lines: Iterable[str]
) -> tuple[tuple[Step, ...], Array] | None:
    """The functions that were computed of a parameter's elements, and what is left without them."""
    computed = {kind: n for kind, n in kinds.items() if kind not in _SHAPES | _TURNS | _REPEATS}
    if any(n > 1 for n in computed.values()) or not array.size or not np.isfinite(array).all():
        return None
    steps: tuple[Step, ...] | None = None
    match sorted(computed):
        case []:
            return (), array
        case ["neg"]:
            steps = (("neg", 0.0),)
        case ["exp"] if (array > 0).all():
            steps = (("exp", 0.0),)
        case ["exp", "neg"] if (array < 0).all():
            steps = (("exp", 0.0), ("neg", 0.0))
        case ["exp", "neg"] if (array > 0).all():
            steps = (("neg", 0.0), ("exp", 0.0))
        case ["add"]:
            number = _added(parameter.rpartition(".")[2], lines)
            steps = None if number is None else (("add", number),)
        case _:
            pass
    return None if steps is None else (steps, inverted(array, steps))


def _added(leaf: str, lines: Iterable[str]) -> float | None:
    """The number that each of the lines adds to ``self.leaf``, which it reads in this one place."""
    numbers = {_added_in(leaf, line) for line in lines}
    return numbers.pop() if len(numbers) == 1 else None


def _added_in(leaf: str, line: str) -> float | None:
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError):
        return None
    if sum(isinstance(node, ast.Attribute) and node.attr == leaf for node in ast.walk(tree)) != 1:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(one, ast.Constant) and isinstance(one.value, int | float) and _is_own(other, leaf):
                    return float(one.value)
    return None


def _is_own(node: ast.expr, leaf: str) -> bool:
    """Whether an expression is ``self.leaf``, of whatever type."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CASTS:
        node = node.func.value
    own = isinstance(node, ast.Attribute) and node.attr == leaf
    return own and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_chance(array: Array) -> bool:
    """Whether values are such that two tensors have the same by no chance, and a bound or a sign would show."""
    distinct = np.unique(array)
    return len(distinct) >= CHANCE and bool(distinct[0] < 0 < distinct[-1]) and bool((array != 0).all())


def without_repeats(array: Array) -> Array | None:
    """A tensor without its repetitions along whole dims; None where equal elements need not be repetitions."""
    first = [array.take([0], axis=dim) for dim in range(array.ndim)]
    dims = [array.shape[dim] > 1 and bool((array == first[dim]).all()) for dim in range(array.ndim)]
    once = array[tuple(slice(0, 1) if repeated else slice(None) for repeated in dims)]
    distinct = len(np.unique(once))
    return once if distinct >= max(CHANCE, math.ceil(DISTINCT * once.size)) else None


def _less_ones(shape: Shape, count: int) -> Shape:
    """A shape without its first ``count`` dims of size one, of those that it has."""
    ones = [dim for dim, size in enumerate(shape) if size == 1][: max(count, 0)]
    return tuple(size for dim, size in enumerate(shape) if dim not in ones)
