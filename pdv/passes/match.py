"""Small questions about nodes that several laws ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from ir.graph import Node


def is_op(node: Node, *names: str) -> bool:
    """True if the node is one of these operators."""
    return node.op.name in names


def array_of(node: Node) -> np.ndarray[Any, Any] | None:  # Any: constants come in every element type
    """The value of a constant, None for other nodes."""
    return cast("np.ndarray[Any, Any]", node.attr("value").array) if node.is_const else None


def either_order(node: Node) -> Iterator[tuple[Node, Node]]:
    """The two operands of a commutative operator, both ways round."""
    x, y = node.operands
    yield x, y
    if x is not y:
        yield y, x


def close(actual: object, expected: float) -> bool:
    """True for an attribute that is `expected` to the precision of a float32 literal."""
    return isinstance(actual, int | float) and math.isclose(actual, expected, rel_tol=1e-5)
