"""Sums of products of two arrays as one batched matrix product: a field only has to give ``matmul`` and ``sum``.

The world axis (``recording.py``) leads every array and is a batch label of every product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Data = np.ndarray[Any, Any]
Labels = tuple[str, ...]
WORLD = "world"


@lru_cache(maxsize=4096)
def parse_spec(spec: str, ranks: tuple[int, ...]) -> tuple[tuple[Labels, ...], Labels]:
    """Labels of each operand and of the result, world axis first; ``...`` becomes one label per leading dim.

    >>> parse_spec("...ij,jk->...ik", (3, 2))
    ((('world', '_0', 'i', 'j'), ('world', 'j', 'k')), ('world', '_0', 'i', 'k'))
    """
    left, _, right = spec.partition("->")
    parts = left.split(",")
    leads = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    widest = max((lead for lead, part in zip(leads, parts, strict=True) if "..." in part), default=0)
    operands = tuple(_labels(part, lead) for part, lead in zip(parts, leads, strict=True))
    return operands, _labels(right, widest)


def _labels(part: str, lead: int) -> Labels:
    before, dots, after = part.partition("...")
    leading = tuple(f"_{lead - 1 - index}" for index in range(lead)) if dots else ()
    return (WORLD, *before, *leading, *after)


def drop_broadcast(x: Data, labels: Labels, extents: dict[str, int]) -> tuple[Data, Labels]:
    """``x`` without the dims of size one along which another operand is longer."""
    kept = tuple(at for at, label in enumerate(labels) if x.shape[at] == extents[label])
    if len(kept) == len(labels):
        return x, labels
    return x.reshape(tuple(x.shape[at] for at in kept)), tuple(labels[at] for at in kept)


def contract(
    a: Data,
    a_labels: Labels,
    b: Data,
    b_labels: Labels,
    out: Labels,
    matmul: Callable[[Data, Data], Data],
    total: Callable[[Data, tuple[int, ...]], Data],
) -> Data:
    """The sum over labels that are not in ``out`` of a · b; every label of ``out`` is in one of them."""
    a, a_labels = _sum_alone(a, a_labels, (*b_labels, *out), total)
    b, b_labels = _sum_alone(b, b_labels, (*a_labels, *out), total)
    extents = dict(zip((*a_labels, *b_labels), (*a.shape, *b.shape), strict=True))
    batch = [label for label in a_labels if label in b_labels and label in out]
    inner = [label for label in a_labels if label in b_labels and label not in out]
    rows = [label for label in a_labels if label not in b_labels]
    columns = [label for label in b_labels if label not in a_labels]
    left = _group(a, a_labels, (batch, rows, inner))
    right = _group(b, b_labels, (batch, inner, columns))
    found = [*batch, *rows, *columns]
    product = matmul(left, right).reshape([extents[label] for label in found])
    return product.transpose([found.index(label) for label in out])


def _sum_alone(
    x: Data, labels: Labels, elsewhere: Sequence[str], total: Callable[[Data, tuple[int, ...]], Data]
) -> tuple[Data, Labels]:
    alone = tuple(at for at, label in enumerate(labels) if label not in elsewhere)
    if not alone:
        return x, labels
    return total(x, alone), tuple(label for at, label in enumerate(labels) if at not in alone)


def _group(x: Data, labels: Labels, groups: Sequence[Sequence[str]]) -> Data:
    """``x`` with its dims gathered into one dim per group."""
    order = [labels.index(label) for group in groups for label in group]
    moved = x.transpose(order)
    sizes = dict(zip(labels, x.shape, strict=True))
    return moved.reshape([math.prod(sizes[label] for label in group) for group in groups])


def einsum_of_integers(spec: str, operands: Sequence[Any]) -> Data:
    """Integers may name rows of a table, which elements of a field cannot."""
    labels, out = parse_spec(spec, tuple(x.ndim - 1 for x in operands))
    numbers: dict[str, int] = {}
    given = [[numbers.setdefault(label, len(numbers)) for label in names] for names in labels]
    interleaved = [part for pair in zip(operands, given, strict=True) for part in pair]
    found: Data = np.einsum(*interleaved, [numbers[label] for label in out])
    return found
