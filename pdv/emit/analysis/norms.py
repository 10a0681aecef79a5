"""A batch norm in training whose running statistics move as torch's own call moves them.

Sources write that norm as: the mean and the variance of all points, the norm by these, and two buffers that move
towards them. Where the program does no more than that, it is one call of torch's. Entry point: ``tracking``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.graph import Node
from pdv.emit.analysis.leaves import Reading

TOLERANCE = 1e-6  # relative, of factors that were computed in double precision from the momentum


@dataclass(frozen=True, slots=True)
class Tracking:
    """The buffers of a norm, mean and variance, how far they move in a call, and the steps that say so."""

    buffers: tuple[Node, Node]
    momentum: float
    steps: frozenset[Node]


def tracking(norm: Node, reading: Reading, updates: Mapping[Node, str]) -> Tracking | None:
    """running == (1 - m) * running + m * statistic, unbiased for the variance, if that is all that statistics are for.

    norm: a batch norm by the mean and variance of all points of its operand; updates: new value -> its buffer.
    """
    x, mean, variance, *_ = reading.operands(norm)
    points = x.type.num_elements // x.type.shape[1]
    unbiased = _only([user for user in reading.users[variance] if user is not norm], "points")
    if unbiased is None or unbiased.attr("points") != points:
        return None
    first, second = (_move(mean, (norm, variance), reading, updates), _move(unbiased, (), reading, updates))
    if first is None or second is None:
        return None
    momentum = first.factor
    alike = math.isclose(second.factor, momentum, rel_tol=TOLERANCE)
    if not alike or not all(math.isclose(part.kept, 1 - momentum, rel_tol=TOLERANCE) for part in (first, second)):
        return None
    return Tracking((first.buffer, second.buffer), momentum, frozenset((unbiased, *first.steps, *second.steps)))


@dataclass(frozen=True, slots=True)
class _Move:
    """buffer == kept * buffer + factor * statistic"""

    buffer: Node
    kept: float
    factor: float
    steps: tuple[Node, ...]


def _move(statistic: Node, norm: Sequence[Node], reading: Reading, updates: Mapping[Node, str]) -> _Move | None:
    """How a buffer follows a statistic that ``norm`` (itself and its variance) reads besides."""
    scaled = _only([user for user in reading.users[statistic] if user not in norm], "factor")
    if scaled is None or len(reading.users[scaled]) != 1:
        return None
    (moved,) = reading.users[scaled]
    if not moved.op.adds or moved not in updates or reading.users[moved]:
        return None
    kept = _only([term for term in reading.operands(moved) if term is not scaled], "factor")
    if kept is None or reading.users[kept] != (moved,):
        return None
    buffer = reading.operands(kept)[0]
    returned = {reading.resolve(node) for _, node in reading.graph.outputs}
    if not buffer.is_param or buffer.attr("name") != updates[moved] or reading.readers(buffer) != (kept,):
        return None
    if not returned.isdisjoint((statistic, scaled, kept, moved)):
        return None
    return _Move(buffer, float(kept.attr("factor")), float(scaled.attr("factor")), (scaled, kept, moved))


def _only(nodes: Sequence[Node], attr: str) -> Node | None:
    """The node, if it is one alone, with that attribute."""
    return nodes[0] if len(nodes) == 1 and attr in nodes[0].attrs else None
