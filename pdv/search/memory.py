"""The best plan within a limit of memory: the price at which memory is worth its limit, then parts of several plans.

The price that gives the best bound is found by Kelley's cutting planes: the plan that is too large and the one that
fits are two lines over the price, and where they meet is tried next (Kelley, SIAM 1960). At that price both cost alike,
and equal blocks do the same in each; a plan in which some blocks do as in one and some as in the other is a chain over
the *Pareto front* of seconds and bytes, which closes what the price alone leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ir.errors import NoPlanFitsError
from ir.proof.repeats import Repeat
from ir.sharding import Sharding
from pdv.config import UNIFORM_GAP
from pdv.search.priced_chain import Priced, PricedChain
from pdv.search.refine import BlockChoice
from pdv.search.refusals import too_large
from pdv.search.solver.tables import Table

# Prices tried at most; each is a new corner of the lower hull of (bytes, seconds), of which few matter.
PRICES = 12
# A plan this close to the bound is good enough.
GAP = 1e-4
# How much dearer memory is made each time while nothing fits; the first price is that of (the free plan / the limit).
STEEPER = 16.0
# Nothing fits if what does would have to be this many times slower than the free plan.
HOPELESS = 100.0
# Points of the front that are kept: the limit cut into so many steps of bytes.
STEPS = 4096


def fitting(solver: PricedChain, limit: float, gap: float = GAP) -> tuple[Priced, float]:
    """(the best plan found that fits, what every plan that fits costs at least); this close is good enough.

    Raises:
        NoPlanFitsError: saying by how much the smallest plan is too large.
    """
    small = min(_within(solver, limit), key=_cost, default=None) or _small_enough(solver, limit)
    large = min((plan for plan in solver.plans if plan.memory_bytes > limit), key=lambda plan: plan.memory_bytes)
    for _ in range(PRICES):
        bound = _bound(solver, limit)
        if small.cost_s - bound <= gap * small.cost_s or solver.late or large.memory_bytes <= small.memory_bytes:
            break
        price = (small.cost_s - large.cost_s) / (large.memory_bytes - small.memory_bytes)
        if any(abs(price - plan.price) <= 1e-9 * price for plan in solver.plans):
            break
        found = solver.at_price(price)
        if found.memory_bytes > limit:
            large = found
        elif found.cost_s < small.cost_s:
            small = found
        else:
            break
    bound = _bound(solver, limit)
    best = min(_within(solver, limit), key=_cost)
    if best.cost_s - bound > gap * best.cost_s:
        mixed = _mix(solver, limit, best)
        if mixed is not None and mixed.memory_bytes <= limit and mixed.cost_s < best.cost_s:
            best = mixed
    best = _uniform(solver, limit, best)
    return best, min(bound, best.cost_s)


def _uniform(solver: PricedChain, limit: float, best: Priced) -> Priced:
    """A plan that costs little more and in which layers do alike, else in which they do in two ways, else the best."""
    most = best.cost_s * (1 + UNIFORM_GAP)
    for kinds in (1, 2):
        if best.changes(solver.repeats) < kinds * len(solver.repeats):
            break
        plans = [_mix(solver, limit, best, kinds), *map(solver.alike, solver.plans if kinds == 1 else ())]
        near = [plan for plan in plans if plan and plan.memory_bytes <= limit and plan.cost_s <= most]
        if near:
            return min(near, key=_cost)
    return best


def _cost(plan: Priced) -> float:
    return plan.cost_s


def _within(solver: PricedChain, limit: float) -> list[Priced]:
    return [plan for plan in solver.plans if plan.memory_bytes <= limit]


def _bound(solver: PricedChain, limit: float) -> float:
    return max(plan.value - plan.price * limit for plan in solver.plans)


def _small_enough(solver: PricedChain, limit: float) -> Priced:
    """A plan that fits, memory made dearer until there is one, or none can be hoped for."""
    free = solver.plans[0]
    price = free.cost_s / max(limit, 1.0)
    while True:
        found = solver.at_price(price)
        if found.memory_bytes <= limit:
            return found
        if found.value - price * limit > HOPELESS * free.cost_s or not free.cost_s:
            raise _refusal(solver, limit, found.value - price * limit)
        price *= STEEPER


def _refusal(solver: PricedChain, limit: float, bound_s: float) -> NoPlanFitsError:
    """What fits, if anything, takes ``bound_s`` at least, of the variants that were looked at."""
    needed = min(plan.memory_bytes for plan in solver.plans)
    return NoPlanFitsError(
        f"the smallest plan on {solver.problem.mesh} {too_large(needed, limit)}",
        mend=f"Use about {needed / limit:.1f} times as many devices, a smaller batch, or a narrower type",
        needed_bytes=needed,
        bound_s=0.0 if solver.cut else max(0.0, bound_s),
        cut=solver.cut,
    )


@dataclass(frozen=True)
class _Front:
    """Undominated ways to reach one sharding: seconds, bytes, and for each where it comes from.

    ``origin`` is [points, 3]: the front before (by number), its point, and the way taken.
    """

    seconds: Table
    num_bytes: Table
    origin: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _Way:
    """What some blocks behind each other do, between two shardings; their seconds and bytes."""

    parts: tuple[BlockChoice, ...]
    seconds: float
    num_bytes: float

    @classmethod
    def of(cls, parts: Sequence[BlockChoice]) -> _Way:
        return cls(tuple(parts), sum(part.seconds for part in parts), sum(part.num_bytes for part in parts))

    def times(self, count: int) -> _Way:
        return _Way(self.parts * count, self.seconds * count, self.num_bytes * count)

    def then(self, other: _Way) -> _Way:
        return _Way(self.parts + other.parts, self.seconds + other.seconds, self.num_bytes + other.num_bytes)

    @property
    def source(self) -> Sharding | None:
        return self.parts[0].source

    @property
    def sink(self) -> Sharding | None:
        return self.parts[-1].sink


def _mix(solver: PricedChain, limit: float, best: Priced, kinds: int | None = None) -> Priced | None:
    """The best plan whose blocks each do as in some of the plans (tied parameters as in ``best``).

    Of a stretch that repeats, those that do alike follow each other, in as many ``kinds`` as are allowed, one or two.
    """
    plans = [plan for plan in solver.plans if plan.tables.ties.fixed == best.tables.ties.fixed]
    options = _options(solver, plans, best.states)
    room = limit - solver.own(best.tables.ties, best.states)[1]
    links = [options[block.key] for block in solver.blocks]
    for repeat in reversed(solver.repeats if kinds else ()):
        links[repeat.start : repeat.stop] = [_find_repeat(links[repeat.start : repeat.stop], repeat, room, kinds or 1)]
    fronts = _fronts(links, None, room)
    if not fronts[-1]:
        return None
    parts = _trace(links, fronts, min(fronts[-1], key=lambda sink: (fronts[-1][sink].seconds[0], str(sink))), 0)
    for repeat in solver.repeats:
        parts[repeat.start : repeat.stop] = _group(parts[repeat.start : repeat.stop], repeat.period)
    return solver.assemble(parts, best.states, best.price, best.value, best.tables)


def _group(parts: Sequence[BlockChoice], period: int) -> list[BlockChoice]:
    """The same parts of a stretch that repeats, those that do alike between the same shardings behind each other."""
    turns = [tuple(parts[at : at + period]) for at in range(0, len(parts), period)]
    loops: dict[Sharding | None, list[tuple[BlockChoice, ...]]] = {}
    for turn in turns:
        if turn[0].source == turn[-1].sink:
            loops.setdefault(turn[0].source, []).append(turn)
    grouped: list[tuple[BlockChoice, ...]] = []
    for turn in turns:
        grouped += sorted(loops.pop(turn[0].source, []), key=turns.index)
        if turn[0].source != turn[-1].sink:
            grouped.append(turn)
    grouped += sorted(loops.pop(turns[-1][-1].sink, []), key=turns.index)
    return [part for turn in grouped for part in turn]


def _enter(way: _Way, firsts: Sequence[_Way]) -> list[_Way]:
    """The same way from each source from which its first block can do the same."""
    like = [first.parts[0] for first in firsts if first.parts[0].is_like(way.parts[0])]
    return [_Way.of((part, *way.parts[1:])) for part in like]


def _find_repeat(links: Sequence[Sequence[_Way]], repeat: Repeat, room: float, kinds: int) -> list[_Way]:
    """Each way through a stretch and back to the same sharding, as often as it repeats, from wherever it is entered.

    With two ``kinds`` also each such way some times and then another, which takes less memory.
    """
    period = links[: repeat.period]
    found: list[_Way] = []
    for source in sorted({way.source for way in links[0]}, key=str):
        fronts = _fronts(period, source, room / repeat.count if kinds == 1 else room)
        points = range(len(fronts[-1][source].seconds) if source in fronts[-1] else 0)
        around = [_Way.of(_trace(period, fronts, source, point)) for point in points]
        found += [first.then(way.times(repeat.count - 1)) for way in around for first in _enter(way, links[0])]
        for one, other in pairwise(_hull(around) if kinds > 1 else ()):
            for first in _enter(one, links[0]):
                for count in range(1, repeat.count):
                    found.append(first.then(one.times(count - 1)).then(other.times(repeat.count - count)))
    return _best_ways(found)


def _hull(ways: Sequence[_Way]) -> list[_Way]:
    """Of undominated ways, cheapest first, those that cost less than any two others taken in part."""
    found: list[_Way] = []
    for way in ways:
        while len(found) > 1 and not _turns(found[-2], found[-1], way):
            found.pop()
        found.append(way)
    return found


def _turns(a: _Way, b: _Way, c: _Way) -> bool:
    """Whether ``b`` lies below the line from ``a`` to ``c``, bytes over seconds."""
    return (b.seconds - a.seconds) * (c.num_bytes - a.num_bytes) > (c.seconds - a.seconds) * (b.num_bytes - a.num_bytes)


def _options(solver: PricedChain, plans: Sequence[Priced], states: tuple[int, ...]) -> dict[str, list[_Way]]:
    """By block key: what equal blocks do in any plan, and what they would do between any of their shardings there."""
    sources: dict[str, dict[Sharding | None, None]] = {}
    sinks: dict[str, dict[Sharding | None, None]] = {}
    for plan in plans:
        for block, part in zip(solver.blocks, plan.parts, strict=True):
            sources.setdefault(block.key, {})[part.source] = None
            sinks.setdefault(block.key, {})[part.sink] = None
    found: dict[str, list[_Way]] = {}
    for block in solver.blocks:
        if block.key not in found:
            parts: list[BlockChoice] = []
            for plan in plans:
                known_sources, known_sinks = plan.tables.boundary(block.key)
                rows = [known_sources.index(s) for s in sources[block.key] if s in known_sources] or [0]
                columns = [known_sinks.index(s) for s in sinks[block.key] if s in known_sinks] or [0]
                reached = [plan.tables.part(block, row, column, states) for row in rows for column in columns]
                parts += [part for part in reached if part is not None]
            found[block.key] = _best_ways(_Way.of([part]) for part in parts)
    return found


def _best_ways(ways: Iterable[_Way]) -> list[_Way]:
    """Those that no other way between the same shardings beats."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda w: (str(w.source), str(w.sink), w.seconds, w.num_bytes)):
        last = kept[-1] if kept else None
        same = last is not None and (last.source, last.sink) == (way.source, way.sink)
        if last is None or not same or way.num_bytes < last.num_bytes:
            kept.append(way)
    return kept


def _fronts(
    links: Sequence[Sequence[_Way]], source: Sharding | None, room: float
) -> list[dict[Sharding | None, _Front]]:
    """Before and behind each link, the undominated ways there from ``source``, by sharding."""
    fronts = [{source: _Front(np.zeros(1), np.zeros(1), np.zeros((1, 3), dtype=np.int64))}]
    for link in links:
        fronts.append(_advance(fronts[-1], link, room))
    return fronts


def _trace(
    links: Sequence[Sequence[_Way]], fronts: Sequence[dict[Sharding | None, _Front]], sink: Sharding | None, point: int
) -> list[BlockChoice]:
    """What the blocks do on the way to a point of the last front."""
    taken: list[_Way] = []
    for number in range(len(links), 0, -1):
        before, earlier, way = fronts[number][sink].origin[point]
        taken.append(links[number - 1][way])
        sink, point = list(fronts[number - 1])[before], int(earlier)
    return [part for way in reversed(taken) for part in way.parts]


def _advance(fronts: dict[Sharding | None, _Front], ways: Sequence[_Way], room: float) -> dict[Sharding | None, _Front]:
    """The fronts behind one more link."""
    numbers = {sharding: number for number, sharding in enumerate(fronts)}
    found: dict[Sharding | None, list[_Front]] = {}
    for taken, way in enumerate(ways):
        front = fronts.get(way.source)
        if front is None:
            continue
        points = np.arange(len(front.seconds))
        origin = np.stack([np.full_like(points, numbers[way.source]), points, np.full_like(points, taken)], axis=1)
        after = _Front(front.seconds + way.seconds, front.num_bytes + way.num_bytes, origin)
        found.setdefault(way.sink, []).append(after)
    joined = {sharding: _drop_dominated(reached, room) for sharding, reached in found.items()}
    return {sharding: front for sharding, front in joined.items() if len(front.seconds)}


def _drop_dominated(fronts: Sequence[_Front], room: float) -> _Front:
    """The points that fit and that no other beats, cheapest first; of those in one step of bytes the cheapest."""
    seconds = np.concatenate([front.seconds for front in fronts])
    num_bytes = np.concatenate([front.num_bytes for front in fronts])
    origin = np.concatenate([front.origin for front in fronts])
    order = np.lexsort((num_bytes, seconds))
    order = order[num_bytes[order] <= room]
    steps = np.ceil(num_bytes[order] / room * STEPS)
    least = np.minimum.accumulate(np.concatenate(([np.inf], steps)))[:-1]
    kept = order[steps < least]
    return _Front(seconds[kept], num_bytes[kept], origin[kept])
