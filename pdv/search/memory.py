"""The best plan within a limit of memory: the price at which memory is worth its limit, then parts of several plans.

The price that gives the best bound is found by Kelley's cutting planes: the plan that is too large and the one that
fits are two lines over the price, and where they meet is tried next (Kelley, SIAM 1960). At that price both cost alike,
and equal blocks do the same in each; a plan in which some blocks do as in one and some as in the other is a chain over
the *Pareto front* of seconds and bytes, which closes what the price alone leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.errors import NoPlanFitsError
from ir.sharding import Sharding
from pdv.search.priced_chain import Priced, PricedChain
from pdv.search.refine import Part
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


def fitting(solver: PricedChain, limit: float) -> tuple[Priced, float]:
    """(the best plan found that fits, what every plan that fits costs at least).

    Raises:
        NoPlanFitsError: saying by how much the smallest plan is too large.
    """
    small = min(_within(solver, limit), key=_cost, default=None) or _small_enough(solver, limit)
    large = min((plan for plan in solver.plans if plan.memory_bytes > limit), key=lambda plan: plan.memory_bytes)
    for _ in range(PRICES):
        bound = _bound(solver, limit)
        if small.cost_s - bound <= GAP * small.cost_s or solver.late or large.memory_bytes <= small.memory_bytes:
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
    if best.cost_s - bound > GAP * best.cost_s:
        mixed = _mixed(solver, limit, best)
        if mixed is not None and mixed.memory_bytes <= limit and mixed.cost_s < best.cost_s:
            best = mixed
    return best, min(bound, best.cost_s)


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

    ``origin`` is [points, 3]: the front before (by number), its point, and the part taken.
    """

    seconds: Table
    num_bytes: Table
    origin: np.ndarray[Any, np.dtype[np.int64]]


def _mixed(solver: PricedChain, limit: float, best: Priced) -> Priced | None:
    """The best plan whose blocks each do as in some of the plans (tied parameters as in ``best``)."""
    plans = [plan for plan in solver.plans if plan.tables.ties.fixed == best.tables.ties.fixed]
    options = _options(solver, plans, best.states)
    room = limit - solver.own(best.tables.ties, best.states)[1]
    fronts: dict[Sharding | None, _Front] = {None: _Front(np.zeros(1), np.zeros(1), np.zeros((1, 3), dtype=np.int64))}
    history = []
    for block in solver.blocks:
        history.append(fronts)
        fronts = _advanced(fronts, options[block.key], room)
        if not fronts:
            return None
    ends = [(front.seconds[0], sharding, 0) for sharding, front in fronts.items()]
    _, at, point = min(ends, key=lambda end: (end[0], str(end[1])))
    parts: list[Part] = []
    for block, before in zip(reversed(solver.blocks), reversed(history), strict=True):
        number, earlier, taken = fronts[at].origin[point]
        parts.append(options[block.key][taken])
        fronts, at, point = before, list(before)[number], int(earlier)
    return solver.assembled(parts[::-1], best.states, best.price, best.value, best.tables)


def _options(solver: PricedChain, plans: Sequence[Priced], states: tuple[int, ...]) -> dict[str, list[Part]]:
    """By block key: what equal blocks do in any plan, and what they would do between any of their shardings there."""
    sources: dict[str, dict[Sharding | None, None]] = {}
    sinks: dict[str, dict[Sharding | None, None]] = {}
    for plan in plans:
        for block, part in zip(solver.blocks, plan.parts, strict=True):
            sources.setdefault(block.key, {})[part.source] = None
            sinks.setdefault(block.key, {})[part.sink] = None
    found: dict[str, list[Part]] = {}
    for block in solver.blocks:
        if block.key not in found:
            parts: list[Part] = []
            for plan in plans:
                known_sources, known_sinks = plan.tables.boundary(block.key)
                rows = [known_sources.index(s) for s in sources[block.key] if s in known_sources] or [0]
                columns = [known_sinks.index(s) for s in sinks[block.key] if s in known_sinks] or [0]
                reached = [plan.tables.part(block, row, column, states) for row in rows for column in columns]
                parts += [part for part in reached if part is not None]
            found[block.key] = _best_parts(parts)
    return found


def _best_parts(parts: Iterable[Part]) -> list[Part]:
    """Those that no other part between the same shardings beats."""
    kept: list[Part] = []
    for part in sorted(parts, key=lambda p: (str(p.source), str(p.sink), p.seconds, p.num_bytes)):
        last = kept[-1] if kept else None
        same = last is not None and (last.source, last.sink) == (part.source, part.sink)
        if last is None or not same or part.num_bytes < last.num_bytes:
            kept.append(part)
    return kept


def _advanced(
    fronts: dict[Sharding | None, _Front], parts: Sequence[Part], room: float
) -> dict[Sharding | None, _Front]:
    """The fronts behind one more block."""
    numbers = {sharding: number for number, sharding in enumerate(fronts)}
    found: dict[Sharding | None, list[_Front]] = {}
    for taken, part in enumerate(parts):
        front = fronts.get(part.source)
        if front is None:
            continue
        points = np.arange(len(front.seconds))
        origin = np.stack([np.full_like(points, numbers[part.source]), points, np.full_like(points, taken)], axis=1)
        after = _Front(front.seconds + part.seconds, front.num_bytes + part.num_bytes, origin)
        found.setdefault(part.sink, []).append(after)
    joined = {sharding: _undominated(reached, room) for sharding, reached in found.items()}
    return {sharding: front for sharding, front in joined.items() if len(front.seconds)}


def _undominated(fronts: Sequence[_Front], room: float) -> _Front:
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
