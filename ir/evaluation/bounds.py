"""Between which numbers elements lie, whatever a model is given.

Of what a program computes of floats nothing is known but what it says itself: a clamp, a rest, a choice by comparing.
Entry point: ``bounds``. The others are what operators declare (``Operator.between``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ir.graph import Node

Bounds = tuple[float, float]
"""The least, and the most."""
Known = Callable[[Node], Bounds]

_WIDE = 32  # bits: no number that chooses rows is too large for so many
_ANY: Bounds = (-math.inf, math.inf)
_BY_NUMBER = re.compile(r"\{0\}, (\d+)")
_NOT = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_WHOLE: Mapping[str, Callable[[float], int]] = {
    f"torch.ops.aten.{whole.__name__}.default": whole for whole in (math.floor, math.ceil, math.trunc, round)
}


def bounds(node: Node) -> Bounds:
    """Of a tensor: its least and its most element, infinite where nothing is known."""
    known: dict[Node, Bounds] = {}
    left = [node]
    while left:
        one = left[-1]
        wanted = [x for x in one.operands if x not in known] if one not in known and _follows(one) else []
        if wanted:
            left += wanted
            continue
        known.setdefault(one, _of(one, lambda x: known.get(x, _ANY)))
        left.pop()
    return known[node]


def _follows(node: Node) -> bool:
    """Whether a node's elements lie where its operands say."""
    return node.op.between is not None or node.op.kind in ("move", "parallel", "index")


def _of(node: Node, of: Known) -> Bounds:
    if node.type.dtype.value == "bool":
        return 0, 1
    if node.is_const:
        array = node.attr("value").array
        return (float(array.min()), float(array.max())) if array.size and np.isfinite(array).all() else _ANY
    if node.op.between is not None:
        found: Bounds = node.op.between(node, of)
        return found
    if not node.operands or not _follows(node):
        return _ANY
    return of(node.operands[0]) if node.op.kind == "index" else union(map(of, node.operands))


def union(given: Iterable[Bounds]) -> Bounds:
    """Of what is taken of several."""
    least, most = zip(*given, strict=True)
    return min(least), max(most)


def with_zeros(node: Node, of: Known) -> Bounds:
    """Of what zeros are put around."""
    return union([of(node.operands[0]), (0, 0)])


def scaled(node: Node, of: Known) -> Bounds:
    """``factor`` times the operand."""
    return _times(node.attr("factor"), of(node.operands[0]))


def divided(node: Node, of: Known) -> Bounds:
    """The operand by ``number``."""
    return _times(1 / node.attr("number"), of(node.operands[0]))


def negated(node: Node, of: Known) -> Bounds:
    """The operand's negative."""
    return _times(-1, of(node.operands[0]))


def _times(factor: float, given: Bounds) -> Bounds:
    ends = [0.0 if factor == 0 else end * factor for end in given]
    return min(ends), max(ends)


def shifted(node: Node, of: Known) -> Bounds:
    """``offset_by`` more than the operand."""
    low, high = of(node.operands[0])
    return low + node.attr("offset_by"), high + node.attr("offset_by")


def added(node: Node, of: Known) -> Bounds:
    """A sum of two."""
    one, two = map(of, node.operands)
    return one[0] + two[0], one[1] + two[1]


def subtracted(node: Node, of: Known) -> Bounds:
    """A difference of two."""
    one, two = map(of, node.operands)
    return one[0] - two[1], one[1] - two[0]


def folded_up(node: Node, of: Known) -> Bounds:
    """An absolute value."""
    low, high = of(node.operands[0])
    return max(0, low, -high), max(abs(low), abs(high))


def clamped(node: Node, of: Known) -> Bounds:
    """Between ``minimum`` and ``maximum``."""
    (low, high), least, most = of(node.operands[0]), float(node.attr("minimum")), float(node.attr("maximum"))
    return min(max(low, least), most), max(min(high, most), least)


def above_zero(node: Node, of: Known) -> Bounds:
    """Of a number or zero, the larger."""
    low, high = of(node.operands[0])
    return max(0, low), max(0, high)


def held(node: Node, of: Known) -> Bounds:
    """In another type: what that does not hold wraps."""
    (low, high), name = of(node.operands[0]), node.type.dtype.value
    if name[0] not in "iu":
        return low, high
    type_ = np.iinfo(name.replace("i", "int").replace("u", "uint"))
    if not node.operands[0].type.dtype.is_floating:
        return (low, high) if type_.min <= low and high <= type_.max else (type_.min, type_.max)
    low, high = (end if math.isinf(end) else math.trunc(end) for end in (low, high))
    return (low, high) if type_.bits >= _WIDE else (max(low, type_.min), min(high, type_.max))


def rest(node: Node, of: Known) -> Bounds:
    """Of a division by what is positive."""
    low, high = of(node.operands[1])
    return (0, high) if low > 0 else _ANY


def chosen(node: Node, of: Known) -> Bounds:
    """Of both choices, of what the mask's comparison with a number lets through of each."""
    mask, *choices = node.operands
    compared = _compared(mask)
    if compared is None:
        return union(map(of, choices))
    what, relation, number = compared
    step, found = 0 if what.type.dtype.is_floating else 1, []
    for choice, holds in zip(choices, (relation, _NOT[relation]), strict=True):
        left = _kept(of(what), holds, number, step)
        is_moved = what in choice.operands and "offset_by" in choice.attrs
        moved = float(choice.attr("offset_by")) if is_moved else 0.0
        own = (left[0] + moved, left[1] + moved) if choice is what or is_moved else of(choice)
        found += [own] if left[0] <= left[1] else []  # nothing is left of a choice that is never taken
    return union(found or map(of, choices))


def _compared(mask: Node) -> tuple[Node, str, float] | None:
    """(what, how, with which number) a mask compares."""
    relation, number = mask.attrs.get("relation"), mask.attrs.get("number")
    if relation is None:
        return None
    if number is None:
        other = mask.operands[1]
        if not other.is_const or other.type.num_elements != 1:
            return None
        number = other.attr("value").array.flat[0]
    return mask.operands[0], str(relation), float(number)  # type: ignore[arg-type]


def _kept(given: Bounds, relation: str, number: float, step: int) -> Bounds:
    """What a comparison lets through; step: from one number to the next, of integers."""
    low, high = given
    if relation in ("<", "<="):
        return low, min(high, math.ceil(number) - 1 if step and relation == "<" else number)
    if relation in (">", ">="):
        return max(low, math.floor(number) + 1 if step and relation == ">" else number), high
    return given


def of_torch(node: Node, of: Known) -> Bounds:
    """Of torch's functions that are run as they are: of integers rests, and bits of a number; whole floats."""
    name, said = node.attr("function"), _BY_NUMBER.fullmatch(str(node.attr("arguments")))
    if whole := _WHOLE.get(name):
        low, high = (end if math.isinf(end) else whole(end) for end in of(node.operands[0]))
        return low, high
    number = int(said[1]) if said and not node.type.dtype.is_floating else 0
    if name == "torch.ops.aten.remainder.Scalar" and number > 0:
        return 0, number - 1
    if name in ("torch.ops.aten.__and__.Scalar", "torch.ops.aten.bitwise_and.Scalar") and number > 0:
        return 0, number
    return _ANY
