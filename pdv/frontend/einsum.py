"""Sums of products by labels of dims, as products of matrices. Entry point: ``einsum``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ir.graph import Node
from pdv.frontend import layers
from pdv.frontend.lowering import Lowering, Unsupported

Labelled = tuple[Node, str]


def einsum(k: Lowering, equation: str, xs: Sequence[Node]) -> Node:
    """``"bij,bjk->bik"`` over the operands; ``...`` stands for dims that are broadcast.

    Raises:
        ValueError: if the equation does not fit the operands.
    """
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(xs):
        raise ValueError(f"{len(terms)} terms for {len(xs)} operands")
    free = [chr(code) for code in range(0x391, 0x3A0) if chr(code) not in equation]
    most = max(
        (x.type.rank - len(term.replace("...", "")) for x, term in zip(xs, terms, strict=True) if "..." in term),
        default=0,
    )
    spread = "".join(free[:most])
    named = [_labelled(k, x, term, spread) for x, term in zip(xs, terms, strict=True)]
    if "->" in equation:
        result = right.replace("...", spread)
    else:
        letters = left.replace(",", "").replace("...", "")
        result = spread + "".join(sorted(label for label in set(letters) if letters.count(label) == 1))
    found = named[0]
    for number, other in enumerate(named[1:], 1):
        later = "".join(labels for _, labels in named[number + 1 :])
        found = _product(k, found, other, result + later)
    x, labels = _summed(k, *found, result)
    if set(labels) != set(result) or len(result) != len(labels):
        raise ValueError(f"{equation} names dims of its result that no operand has")
    return k.permute(x, [labels.index(label) for label in result])


def _labelled(k: Lowering, x: Node, term: str, spread: str) -> Labelled:
    """An operand with one label for each dim; a label that is there twice is its diagonal."""
    count = x.type.rank - len(term.replace("...", ""))
    if count < 0 or (count and "..." not in term):
        raise ValueError(f"{term} of an operand of rank {x.type.rank}")
    labels = term.replace("...", spread[len(spread) - count :])
    while len(set(labels)) < len(labels):
        label = next(each for each in labels if labels.count(each) > 1)
        first = labels.index(label)
        second = labels.index(label, first + 1)
        size = x.type.shape[first]
        if size != x.type.shape[second]:
            raise ValueError(f"{term} of {list(x.type.shape)}")
        rest = [dim for dim in range(x.type.rank) if dim not in (first, second)]
        x = k.permute(x, (first, second, *rest))
        x = k.reshape(x, (size * size, *x.type.shape[2:]))
        x = layers.index_select(k, x, 0, k.const(np.arange(size) * (size + 1)))
        labels = label + "".join(labels[dim] for dim in rest)
    return x, labels


def _summed(k: Lowering, x: Node, labels: str, kept: str) -> Labelled:
    """Without the dims that nobody asks for."""
    over = [dim for dim, label in enumerate(labels) if label not in kept]
    if not over:
        return x, labels
    return k.reduce("reduce_sum", x, over, keepdim=False), "".join(label for label in labels if label in kept)


def _product(k: Lowering, one: Labelled, other: Labelled, kept: str) -> Labelled:
    """Both, multiplied and summed over what is in both and not asked for: a product of matrices."""
    x, left = _summed(k, *one, kept + other[1])
    y, right = _summed(k, *other, kept + left)
    sizes: dict[str, int] = {}
    for node, labels in ((x, left), (y, right)):
        for label, size in zip(labels, node.type.shape, strict=True):
            if sizes.setdefault(label, size) not in (1, size) and size != 1:
                raise ValueError(f"dims of {sizes[label]} and {size} have one label")
            sizes[label] = max(sizes[label], size)
    both = [label for label in left if label in right]
    x, y = _widened(k, x, left, both, sizes), _widened(k, y, right, both, sizes)
    batch = [label for label in both if label in kept]
    inner = [label for label in both if label not in kept]
    rows, columns = ([label for label in labels if label not in both] for labels in (left, right))
    if not inner and not x.type.dtype.is_floating:
        raise Unsupported(f"an outer product of {x.type.dtype.value}")

    def arranged(node: Node, labels: str, groups: Sequence[Sequence[str]]) -> Node:
        order = [label for group in groups for label in group]
        moved = k.permute(node, [labels.index(label) for label in order])
        return k.reshape(moved, [math.prod(sizes[label] for label in group) for group in groups])

    a, b = arranged(x, left, (batch, rows, inner)), arranged(y, right, (batch, inner, columns))
    if not batch:
        a, b = (k.reshape(node, node.type.shape[1:]) for node in (a, b))
    found = layers.matmul(k, a, b)
    labels = "".join([*batch, *rows, *columns])
    return k.reshape(found, [sizes[label] for label in labels]), labels


def _widened(k: Lowering, x: Node, labels: str, both: Sequence[str], sizes: dict[str, int]) -> Node:
    return k.expand(x, [sizes[label] if label in both else -1 for label in labels])
