"""Quantiles along a dim of known size: rows sorted by torch, and what lies between two places of them.

Entry point: ``quantile``.
"""

from __future__ import annotations

import math

import numpy as np

from ir.graph import Node
from ir.types import DType
from pdv.frontend.lowering import Lowering, Unsupported

_SORT = "aten::sort.stable"


def quantile(
    k: Lowering,
    x: Node,
    q: float | Node,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Node:
    """x: [..., n, ...], q known, of rank 0 or 1 -> [(q,) ..., ...]; not a number where one of the n is none.

    Raises:
        Unsupported: if ``q`` is not known, or what lies between two elements is not their mixture.
    """
    from pdv.frontend.torch.opaque import find, opaque  # torch is imported where it is needed

    known = k.value(q) if isinstance(q, Node) else np.asarray(q)
    if known is None or interpolation != "linear":
        raise Unsupported("by shares that are not known" if known is None else f"with {interpolation} interpolation")
    rank = x.type.rank
    if dim is None:
        x, kept = k.reshape(x, (-1,)), (1,) * rank if keepdim else ()
        dim = 0
    else:
        dim %= max(rank, 1)
        kept = tuple(1 if i == dim else n for i, n in enumerate(x.type.shape) if keepdim or i != dim)
        x = x if rank else k.reshape(x, (1,))
    values, _ = opaque(k, find(_SORT), (x,), {"stable": True, "dim": dim, "descending": False})
    k.foreign[f"aten.quantile for {k.name!r} (sorted rows)"] = None
    found = [k.reshape(_at(k, values, dim, share), kept) for share in known.reshape(-1)]
    return found[0] if not known.ndim else k.concat([k.reshape(one, (1, *kept)) for one in found], 0)


def _at(k: Lowering, values: Node, dim: int, share: np.floating) -> Node:
    """Between two neighbours of sorted rows, as torch computes the place: in the type of the elements."""
    last = values.type.shape[dim] - 1
    kind = np.float64 if values.type.dtype is DType.F64 else np.float32
    place = float(kind(share) * kind(last))
    if not 0 <= place <= last:
        raise ValueError(f"a share of {share}")
    below, weight = math.floor(place), place - math.floor(place)
    found = k.slice(values, dim, below, below + 1)
    if weight:
        above = k.slice(values, dim, below + 1, below + 2)
        found = k.add(found, k.scale(k.sub(above, found), weight))
    end = k.slice(values, dim, last, last + 1)  # where numbers that are none are sorted to
    return k.apply("where", k.apply("compare", end, end, relation="!="), end, found)
