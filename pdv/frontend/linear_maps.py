"""Linear maps by known matrices over some dims: Fourier transforms, averages. Shared by the frontends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ir.graph import Node
from pdv.frontend.lowering import Lowering
from pdv.passes.fold_constants import Array


def applied(k: Lowering, x: Node, over: Sequence[int], matrix: Array, sizes: Sequence[int]) -> Node:
    """matrix: [m, n] over the dims, flat; ``sizes``: theirs afterwards."""
    shape, rank = x.type.shape, x.type.rank
    others = [dim for dim in range(rank) if dim not in over]
    flat = k.reshape(k.permute(x, (*others, *over)), (*(shape[dim] for dim in others), matrix.shape[1]))
    y = k.apply("linear", flat, k.const(matrix.astype(np.float64), x.type.dtype))
    order = (*others, *over)
    wide = k.reshape(y, (*(shape[dim] for dim in others), *sizes))
    return k.permute(wide, tuple(order.index(dim) for dim in range(rank)))


def fourier_matrix(length: int, size: int, parts: int, *, inverse: bool, one_sided: bool) -> Array:
    """[frequencies and parts, elements and parts]: a discrete Fourier transform of so many elements, then zeros."""
    frequencies = length // 2 + 1 if one_sided else length
    angles = (2 if inverse else -2) * np.pi * (np.outer(np.arange(frequencies), np.arange(size)) % length) / length
    real, imaginary = (part / (length if inverse else 1) for part in (np.cos(angles), np.sin(angles)))
    each = [np.stack([real, imaginary], 1), np.stack([-imaginary, real], 1)][:parts]  # [frequencies, 2, size]
    return np.stack(each, -1).reshape(2 * frequencies, size * parts)
