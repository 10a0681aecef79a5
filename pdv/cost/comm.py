"""Seconds of a collective over one mesh axis: α–β, the cheapest of the algorithms that libraries have.

α is a link's latency per step, 1/β its bandwidth per device and direction. An axis may cross several levels (stages of
its route): then a *ring* runs through all of them at once, at the pace of the slowest; a *hierarchical* collective
takes them one after the other, with fewer and fewer bytes outwards, each level by *doubling* where it has a power of
two members; an all-reduce by *tree* sends the whole buffer up and down; pairs exchange (*pairwise*) over all levels
at once. gloo has rings alone, and scatters a sum by summing all of it; over several levels the emitted program takes
an all-reduce level by level itself (``AxisLink.levels``).

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 2005),
sections 4.1 to 4.5; for trees Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan" (Parallel Computing 2009); for the levels Cho et al., "BlueConnect" (MLSys 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ir.ops.parallel import transition_of
from ir.transition import Collective, Communication
from pdv.cluster import Device, Hop, Library, Link, Route
from pdv.cost.curves import Curves

# Share of a ring's bus bandwidth that a tree reaches: NCCL's own tuning model (src/graph/tuning.cc, 2.10 and later)
TREE_SHARE = 0.92
# Calling a collective on a CPU, beside the collective: autograd's function, gloo's request; and where processes share
# cores, on links that nobody measured: it ends when the last of them has had a core (benchmarks/cluster.py).
CALLED_S, TURN_S = 5e-5, 2e-3

Algorithm = Literal["ring", "doubling", "hierarchical", "tree", "pairwise", "measured", "learned"]
LEVELLED_BYTES = 2.0**20  # an all-reduce of so many bytes says whether all over an axis are taken level by level,
LEVELLED = 0.9  # where they take at most so much of a ring's time: three calls cost more than one beside their bytes


@dataclass(frozen=True, slots=True)
class AxisLink:
    """One mesh axis as collectives see it; ``curves``, where there are some, go before the link's α and β.

    ``stages`` are the levels that it crosses, outer to inner; without them it is one, ``size`` members on ``link``.
    ``parts`` are the axes of a joint one that is known by their curves; ``curves`` are then the least certain of them.
    ``wider`` are the curves of larger groups on the same link, by size: those of joint axes with others on it.
    ``called_s`` is what a call takes beside the collective, in a program that waits for it.
    """

    size: int
    link: Link
    curves: Curves | None = None
    stages: tuple[Hop, ...] = ()
    parts: tuple[AxisLink, ...] = ()
    library: Library = "nccl"
    wider: tuple[tuple[int, Curves], ...] = ()
    called_s: float = 0.0

    @property
    def levels(self) -> tuple[int, ...]:
        """Sizes of the levels, slow to fast, that the emitted program takes all-reduces through; empty: none."""
        return _levels(self) if self.library == "gloo" and len(self.stages) > 1 else ()


def axis_link(size: int, route: Route, *, library: Library = "nccl", called_s: float = 0.0) -> AxisLink:
    """The axis whose groups of ``size`` take this route."""
    plain = len(route.stages) < 2 and all(stage.exchange_bytes_per_s is None for stage in route.stages)
    return AxisLink(size, route.link, stages=() if plain else route.stages, library=library, called_s=called_s)


def calling_s(devices: Iterable[Device]) -> float:
    """What calling a collective takes of the slowest of some devices; a GPU's host calls ahead."""
    return max(0.0 if device.kind != "cpu" else TURN_S if device.share < 1.0 else CALLED_S for device in devices)


@cache
def joint_link(axes: tuple[AxisLink, ...]) -> AxisLink:
    """Several axes, slow to fast, as one: their levels, outer to inner.

    Where some have curves, the whole is known by them: as collectives that take one axis after the other.
    """
    if len(axes) == 1:
        return axes[0]
    slowest = min((axis.link for axis in axes), key=lambda link: link.bandwidth_bytes_per_s)
    size, library = math.prod(axis.size for axis in axes), axes[0].library
    called_s = max(axis.called_s for axis in axes)
    if (wide := _joint_curves(axes, size)) is not None:
        return AxisLink(size, slowest, wide, library=library, called_s=called_s)
    stages = tuple(stage for axis in axes for stage in _stages(axis))
    known = [axis.curves for axis in axes if axis.curves is not None]
    worst = max(known, key=lambda entry: entry.relative_std, default=None)
    return AxisLink(size, slowest, worst, stages, axes if known else (), library, called_s=called_s)


def _joint_curves(axes: Sequence[AxisLink], size: int) -> Curves | None:
    """Of axes on one link, if the whole is known."""
    if len({axis.link.name for axis in axes}) > 1 or any(len(axis.stages) > 1 for axis in axes):
        return None
    return dict(axes[0].wider).get(size)


@cache
def _levels(axis: AxisLink) -> tuple[int, ...]:
    sizes = tuple(link.size for link in _level_links(axis))
    if math.prod(sizes) != axis.size:
        return ()
    ring_s = 2 * _ring(axis, LEVELLED_BYTES)
    return sizes if _sum_by_levels(axis, LEVELLED_BYTES) < LEVELLED * ring_s else ()


def _level_links(axis: AxisLink) -> tuple[AxisLink, ...]:
    if axis.parts and all(len(part.stages) <= 1 for part in axis.parts):
        return axis.parts
    return tuple(AxisLink(hop.size, hop.link, library=axis.library) for hop in axis.stages)


def _sum_by_levels(axis: AxisLink, num_bytes: float) -> float:
    """An all-reduce as the emitted program takes it: scattered on the fastest level, summed on the others, gathered."""
    *slower, inner = _level_links(axis)
    summed = sum(all_reduce_seconds(link, num_bytes / inner.size) for link in slower)
    return reduce_scatter_seconds(inner, num_bytes) + summed + all_gather_seconds(inner, num_bytes)


def _by_axes(collective: Collective, axes: Sequence[AxisLink], num_bytes: float) -> float:
    """One axis after the other, inner ones first: of what is gathered or scattered, outer axes move a part each."""
    *outer, inner = axes
    if not outer:
        return _SECONDS[collective](inner, num_bytes)
    if collective == "all_to_all":
        return _by_axes(collective, outer, num_bytes) + all_to_all_seconds(inner, num_bytes)
    part = _by_axes(collective, outer, num_bytes / inner.size)
    if collective != "all_reduce":
        return part + _SECONDS[collective](inner, num_bytes)
    whole = _by_axes(collective, outer, num_bytes) + all_reduce_seconds(inner, num_bytes)
    return min(whole, part + reduce_scatter_seconds(inner, num_bytes) + all_gather_seconds(inner, num_bytes))


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The algorithm taken, or the source of a curve that went before all of them; and its seconds."""

    algorithm: Algorithm
    seconds: float


def choice(
    collective: Collective, axis: AxisLink, num_bytes: float, algorithm: Algorithm | None = None
) -> AlgorithmChoice:
    """The cheapest algorithm, or ``algorithm``, for a collective of ``num_bytes`` on an axis of at least two.

    ``num_bytes`` count the larger side: the result of an all-gather, the input of the others.

    Raises:
        ValueError: no such algorithm for this collective and axis.
    """
    if axis.library == "gloo":
        return AlgorithmChoice(_gloo_algorithm(collective, axis, num_bytes), _SECONDS[collective](axis, num_bytes))
    if algorithm is None and (known := _curve_choice(axis, collective, num_bytes)) is not None:
        assert axis.curves is not None, "known by its curves"
        return AlgorithmChoice("measured" if axis.curves.source == "measured" else "learned", known)
    choices = [entry for entry in _choices(collective, axis, num_bytes) if algorithm in {None, entry.algorithm}]
    if not choices:
        raise ValueError(f"no algorithm {algorithm!r} for {collective} over an axis of {axis.size}")
    return min(choices, key=lambda entry: entry.seconds)


def all_gather_seconds(axis: AxisLink, result_bytes: float) -> float:
    """Everyone ends with ``result_bytes``: (n - 1) / n of them arrive; ring (n - 1) steps, doubling log2 n."""
    if axis.size == 1:
        return 0.0
    if (known := _curve_choice(axis, "all_gather", result_bytes)) is not None:
        return known
    return _ring(axis, result_bytes) if axis.library == "gloo" else _half(axis, result_bytes).seconds


def reduce_scatter_seconds(axis: AxisLink, input_bytes: float) -> float:
    """The mirror of an all-gather: halving in place of doubling, the same bytes. By gloo an all-reduce."""
    if axis.size == 1:
        return 0.0
    if (known := _curve_choice(axis, "reduce_scatter", input_bytes)) is not None:
        return known
    return (2 if axis.library == "gloo" else 1) * all_gather_seconds(axis, input_bytes)


def all_reduce_seconds(axis: AxisLink, num_bytes: float) -> float:
    """Reduce-scatter, then all-gather (Rabenseifner), or a tree of the whole."""
    if axis.size == 1:
        return 0.0
    if axis.levels:
        return _sum_by_levels(axis, num_bytes)
    if (known := _curve_choice(axis, "all_reduce", num_bytes)) is not None:
        return known
    if axis.library == "gloo":
        return 2 * _ring(axis, num_bytes)
    halves_s = reduce_scatter_seconds(axis, num_bytes) + all_gather_seconds(axis, num_bytes)
    return halves_s if axis.curves is not None else min(halves_s, _tree(axis, num_bytes))


def all_to_all_seconds(axis: AxisLink, local_bytes: float) -> float:
    """Everyone sends (n - 1) / n of its ``local_bytes``, pairwise."""
    if axis.size == 1:
        return 0.0
    if (known := _curve_choice(axis, "all_to_all", local_bytes)) is not None:
        return known
    return _pairwise(axis, local_bytes)


def send_seconds(link: Link, num_bytes: float) -> float:
    """From one device to another."""
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def least_seconds(collective: Collective, axis: AxisLink, num_bytes: float) -> float:
    """What bandwidth allows no algorithm to beat: at each level, the bytes that must enter a part, over its links.

    Of an all-gather's result a part with m of the n members lacks at least what its neighbours on the level have.
    """
    if axis.size == 1:
        return 0.0
    least, below = 0.0, 1
    for stage in reversed(_stages(axis)):
        around = below * stage.size
        lacking = num_bytes * (around - below) / max(around, axis.size)
        entering = below * lacking if collective == "all_to_all" else lacking
        least = max(least, entering / (below * stage.link.bandwidth_bytes_per_s))
        below = around
    return 2 * least if collective == "all_reduce" else least


def _curve_choice(axis: AxisLink, collective: Collective, num_bytes: float) -> float | None:
    """From the axis's curve, if there is one; an axis of one device moves nothing."""
    if axis.size == 1 or axis.curves is None or num_bytes == 0:
        return None
    if axis.parts:
        return _by_axes(collective, axis.parts, num_bytes)
    return axis.curves.seconds(collective, num_bytes)


def _gloo_algorithm(collective: Collective, axis: AxisLink, num_bytes: float) -> Algorithm:
    if collective == "all_reduce" and axis.levels:
        return "hierarchical"
    if axis.curves is not None and num_bytes:
        return "measured" if axis.curves.source == "measured" else "learned"
    return "pairwise" if collective == "all_to_all" else "ring"


def _choices(collective: Collective, axis: AxisLink, num_bytes: float) -> Sequence[AlgorithmChoice]:
    if collective == "all_to_all":
        return (AlgorithmChoice("pairwise", _pairwise(axis, num_bytes)),)
    halves = [AlgorithmChoice("ring", _ring(axis, num_bytes))]
    stages = _stages(axis)
    if len(stages) > 1:
        halves.append(AlgorithmChoice("hierarchical", _by_levels(stages, num_bytes)))
    elif _is_power_of_two(axis.size):
        halves.append(AlgorithmChoice("doubling", _by_levels(stages, num_bytes)))
    if collective != "all_reduce":
        return halves
    return (
        *(AlgorithmChoice(half.algorithm, 2 * half.seconds) for half in halves),
        AlgorithmChoice("tree", _tree(axis, num_bytes)),
    )


def _half(axis: AxisLink, num_bytes: float) -> AlgorithmChoice:
    """The cheaper all-gather or reduce-scatter."""
    if len(axis.stages) <= 1:  # the usual case, on which searches spend their time
        doubling = _is_power_of_two(axis.size)
        steps = math.ceil(math.log2(axis.size)) if doubling else axis.size - 1
        moved = num_bytes * (axis.size - 1) / axis.size
        seconds = steps * axis.link.latency_s + moved / axis.link.bandwidth_bytes_per_s
        return AlgorithmChoice("doubling" if doubling else "ring", seconds)
    return min(_choices("all_gather", axis, num_bytes), key=lambda entry: entry.seconds)


def _ring(axis: AxisLink, num_bytes: float) -> float:
    """n - 1 steps; a block crosses each level as often as a nested ring does."""
    latency_s, outside = 0.0, 1
    for place, stage in enumerate(stages := _stages(axis)):
        hops = stage.size if place == 0 else outside * (stage.size - 1)
        latency_s += hops * stage.link.latency_s
        outside *= stage.size
    if len(stages) == 1:
        latency_s = axis.size * stages[0].link.latency_s
    moved = num_bytes * (axis.size - 1) / axis.size
    return latency_s * (axis.size - 1) / axis.size + moved / axis.link.bandwidth_bytes_per_s


def _by_levels(stages: Sequence[Hop], num_bytes: float) -> float:
    """All-gather level by level, outer to inner, each among members that hold the same part of it."""
    seconds, held = 0.0, num_bytes / math.prod(stage.size for stage in stages)
    for stage in stages:
        steps = math.ceil(math.log2(stage.size)) if _is_power_of_two(stage.size) else stage.size - 1
        moved = held * (stage.size - 1)
        seconds += steps * stage.link.latency_s + moved / stage.link.bandwidth_bytes_per_s
        held *= stage.size
    return seconds


def _tree(axis: AxisLink, num_bytes: float) -> float:
    """All-reduce: the whole buffer up a tree and down again, in pieces, so that depth costs latency alone."""
    depth_s = sum(math.ceil(math.log2(stage.size)) * stage.link.latency_s for stage in _stages(axis))
    return 2 * (depth_s + num_bytes / (TREE_SHARE * axis.link.bandwidth_bytes_per_s))


def _pairwise(axis: AxisLink, local_bytes: float) -> float:
    """All-to-all: an n-th to each other member; the levels carry their shares at the same time.

    All sends are posted at once, so that their latencies overlap: small exchanges among 2, 4 and 8 A100 take 10.8, 12.6
    and 13.2 us (NCCL, AIConfigurator's measurements), which n - 1 steps one after the other would not.
    """
    latency_s, slowest_s, below = 0.0, 0.0, 1
    for stage in reversed(_stages(axis)):
        partners = below * (stage.size - 1)
        rate = stage.exchange_bytes_per_s or stage.link.bandwidth_bytes_per_s
        latency_s += (stage.size - 1).bit_length() * stage.link.latency_s
        slowest_s = max(slowest_s, local_bytes * partners / axis.size / rate)
        below *= stage.size
    return latency_s + slowest_s


def _stages(axis: AxisLink) -> tuple[Hop, ...]:
    return axis.stages or (Hop(axis.size, axis.link),)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def move_seconds(name: str, axis: AxisLink, local_bytes: float) -> tuple[float, float]:
    """(forward, backward) seconds of a parallel operator on a tensor of which a device holds ``local_bytes`` before it.

    The backward is that of the operator's dual (docs/architecture.md, States).
    """
    transition = transition_of(name)
    larger = local_bytes * axis.size if transition.forward is Communication.ALL_GATHER else local_bytes
    forward, backward = (_called_seconds(communication, axis, larger) for communication in transition.communications)
    return forward, backward


def sum_seconds(name: str, axis: AxisLink, local_bytes: float, bucket_bytes: float) -> float:
    """Seconds of the sum of a gradient that is one of a bucket's: its share of the sum of so many bytes at once.

    (Li et al., "PyTorch Distributed", VLDB'20, section 3.2.3.)
    """
    together = max(local_bytes, bucket_bytes)
    return move_seconds(name, axis, together)[1] * (local_bytes / together if together else 1.0)


def _called_seconds(communication: Communication, axis: AxisLink, num_bytes: float) -> float:
    collective = communication.collective
    if collective is None or axis.size < 2:
        return 0.0
    return axis.called_s + _SECONDS[collective](axis, num_bytes)


_SECONDS: Mapping[Collective, Callable[[AxisLink, float], float]] = {
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_reduce": all_reduce_seconds,
    "all_to_all": all_to_all_seconds,
}
