"""Stored tensors of which one was computed of another, or both of parts of a third that the file has not.

Exporters and optimizers of files fold what depends on weights alone: slices of one weight that overlap, ``2 * w``
beside ``w``. What is left are tensors that would be trained apart. They are known by their values: between neighbours
along a dim, the ratio of one difference to the next stays what it is where elements are moved together, scaled, or
shifted. Four such ratios in a row that are the same in two tensors, several times over, are no chance. Entry point:
``related``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.signature import Signature
from pdv.passes.fold_constants import Array

_COMPUTED = ("onnx::", "val_", "/", "::")
"""What the names of tensors that a tool computed begin with, or have in them; a module's names have none of it."""
_LEAST = 64  # elements of a tensor that is looked at, as of one that is tied
_DROPPED_BITS = 11  # of a ratio's float32: rounding moves it by less than is left
_ROW = 4  # ratios in a row, of six neighbours
_FEW = 1 << 16  # elements up to which every row counts; beyond, those whose first ratio ends in zeros
_RATE = 32
_CACHED = 1 << 16  # elements
_SAMPLE = 4096  # elements of a tensor that tell whether its values are chance
_SHARED = 4  # rows that two tensors have in common by no chance
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4)


def related(graph: onnx_ir.Graph) -> list[str]:
    """Tensors, one of two computed by a tool, that have elements in common but for a factor and a shift, in words.

    None where the file says itself of what its tensors were made.
    """
    stored = [(name, value.const_value) for name, value in sorted(graph.initializers.items()) if value.uses()]
    floats = [(name, x) for name, x in stored if x is not None and x.dtype.is_floating_point() and x.size >= _LEAST]
    if len(floats) < 2 or not any(_is_computed(name) for name, _ in floats) or Signature.of(graph) is not None:
        return []
    pairs = [(floats[one][0], floats[other][0]) for one, other in _pairs([_rows(x.numpy()) for _, x in floats])]
    return [
        f"whether {one} and {other}, which have values in common, are one"
        for one, other in pairs
        if _is_computed(one) or _is_computed(other)
    ]


def _is_computed(name: str) -> bool:
    return any(mark in name for mark in _COMPUTED)


def _pairs(rows: Sequence[Array]) -> list[tuple[int, int]]:
    """Numbers of those that share at least ``_SHARED`` rows."""
    found, owner = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    order = np.argsort(found, kind="stable")
    found, owner = found[order], owner[order]
    same = found[1:] == found[:-1]
    ends = np.stack([owner[:-1][same], owner[1:][same]], 1)
    pairs, counts = np.unique(ends, axis=0, return_counts=True)
    return [(int(one), int(other)) for (one, other), count in zip(pairs, counts, strict=True) if count >= _SHARED]


def _rows(x: Array) -> Array:
    """Of a tensor the distinct rows of ratios along each of its dims, mixed to one number each; none of few values."""
    sample = x.reshape(-1)[:: max(x.size // _SAMPLE, 1)]
    if len(np.unique(sample)) <= len(sample) // 4:
        return np.zeros(0, np.uint64)
    wide = x if x.dtype.itemsize >= np.dtype(np.float32).itemsize else x.astype(np.float32)
    with np.errstate(all="ignore"):
        found = [_mixed(part, x.size > _FEW) for dim in range(x.ndim) for part in _parts(wide, dim)]
    rows = np.sort(np.concatenate(found)) if found else np.zeros(0, np.uint64)
    distinct: Array = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]
    return distinct


def _parts(x: Array, dim: int) -> Iterator[Array]:
    """A tensor as [a, size, b] with its dim in the middle, in parts that stay in a processor's cache."""
    size, inner = x.shape[dim], math.prod(x.shape[dim + 1 :])
    if size < _ROW + 2:
        return
    whole = x.reshape(-1, size, inner)
    across = max(_CACHED // (size * inner), 1)
    for start in range(0, len(whole), across):
        part = whole[start : start + across]
        for left in range(0, inner, columns := max(_CACHED // size, 16)):
            yield part[:, :, left : left + columns]


def _mixed(x: Array, few: bool) -> Array:
    """Rows along the dim in the middle; a ``few`` of them: those whose first ratio ends in zeros."""
    _, size, inner = x.shape
    steps = np.diff(x, axis=1)
    ratios = np.divide(steps[:, 1:], steps[:, :-1], dtype=steps.dtype).astype(np.float32, copy=False).reshape(-1)
    kept = (ratios.view(np.uint32) + np.uint32(1 << (_DROPPED_BITS - 1))) >> np.uint32(_DROPPED_BITS)
    places = np.flatnonzero((kept & np.uint32(_RATE - 1)) == 0) if few else np.arange(len(kept))
    places = places[(places // inner) % (size - 2) < size - 1 - _ROW]
    row = [kept[places + number * inner] for number in range(_ROW)]
    told = np.isfinite(ratios[places + (_ROW - 1) * inner])
    for one, other in itertools.pairwise(row):
        told &= (one != other) & (one % (1 << 12) != 0)  # neither a ramp nor steps of one size
    mixed = np.zeros(len(places), np.uint64)
    for each in row:
        mixed = (mixed ^ each.astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    found: Array = mixed[told]
    return found
