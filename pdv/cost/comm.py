"""Seconds of a collective over one mesh axis: α–β, the better of ring and tree.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 2005),
sections 4.1 to 4.5. α is a link's latency per step, 1/β its bandwidth per device and direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdv.cluster import Link
from pdv.cost.curves import Curves

# Operators whose result is a copy that a device has to hold, or to make again where it was dropped.
GATHERS = ("combine", "all_gather", "all_to_all")


@dataclass(frozen=True, slots=True)
class AxisLink:
    """One mesh axis as collectives see it; ``curves``, where there are some, go before the link's α and β."""

    size: int
    link: Link
    curves: Curves | None = None


def all_gather_seconds(axis: AxisLink, result_bytes: float) -> float:
    """Everyone ends with ``result_bytes``: (n - 1) / n of them arrive; ring (n - 1) steps, doubling log2 n."""
    if axis.size == 1:
        return 0.0
    if (known := _known(axis, "all_gather", result_bytes)) is not None:
        return known
    steps = math.ceil(math.log2(axis.size)) if axis.size & (axis.size - 1) == 0 else axis.size - 1
    moved = result_bytes * (axis.size - 1) / axis.size
    return steps * axis.link.latency_s + moved / axis.link.bandwidth_bytes_per_s


def reduce_scatter_seconds(axis: AxisLink, input_bytes: float) -> float:
    """The mirror of an all-gather: halving in place of doubling, the same bytes."""
    if (known := _known(axis, "reduce_scatter", input_bytes)) is not None:
        return known
    return all_gather_seconds(axis, input_bytes)


def all_reduce_seconds(axis: AxisLink, num_bytes: float) -> float:
    """Reduce-scatter, then all-gather (Rabenseifner)."""
    if (known := _known(axis, "all_reduce", num_bytes)) is not None:
        return known
    return reduce_scatter_seconds(axis, num_bytes) + all_gather_seconds(axis, num_bytes)


def all_to_all_seconds(axis: AxisLink, local_bytes: float) -> float:
    """Everyone sends (n - 1) / n of its ``local_bytes``, pairwise."""
    if axis.size == 1:
        return 0.0
    if (known := _known(axis, "all_to_all", local_bytes)) is not None:
        return known
    moved = local_bytes * (axis.size - 1) / axis.size
    return (axis.size - 1) * axis.link.latency_s + moved / axis.link.bandwidth_bytes_per_s


def _known(axis: AxisLink, collective: str, num_bytes: float) -> float | None:
    """From the axis's curve, if there is one; an axis of one device moves nothing."""
    if axis.size == 1 or axis.curves is None or num_bytes == 0:
        return None
    return axis.curves.seconds(collective, num_bytes)


def move_seconds(name: str, axis: AxisLink, local_bytes: float) -> tuple[float, float]:
    """(forward, backward) seconds of a parallel operator on a tensor of which a device holds ``local_bytes`` before it.

    The backward is that of the operator's dual (DESIGN section 3).
    """
    whole = local_bytes * axis.size
    match name:
        case "partition":
            return 0.0, all_gather_seconds(axis, local_bytes)
        case "combine":
            return all_gather_seconds(axis, whole), 0.0
        case "replicate":
            return 0.0, all_reduce_seconds(axis, local_bytes)
        case "reduce":
            return all_reduce_seconds(axis, local_bytes), 0.0
        case "all_gather":
            return all_gather_seconds(axis, whole), reduce_scatter_seconds(axis, whole)
        case "reduce_scatter":
            return reduce_scatter_seconds(axis, local_bytes), all_gather_seconds(axis, local_bytes)
        case "reduce_replicate":
            seconds = all_reduce_seconds(axis, local_bytes)
            return seconds, seconds
        case "all_to_all":
            seconds = all_to_all_seconds(axis, local_bytes)
            return seconds, seconds
    raise AssertionError(f"no such parallel operator: {name}")
