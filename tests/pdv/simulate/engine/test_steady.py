"""Long steps from a few of their rounds, beside all their passes composed."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from pdv.problem.workload import FOLDED, ONE_EACH, STALE, Order
from pdv.schedule.order import Pipeline, why_not
from pdv.simulate.engine import steady
from pdv.simulate.engine.pipeline import Durations, Sends, compose

ORDERS = [order for order in get_args(Order) if order not in STALE]


def drawn(rng: random.Random, order: Order, spread: float, sent: float) -> tuple[Pipeline, list[Durations], Sends]:
    """A pipeline of many micro-batches, with chunks as unequal, and sends as long, as is said."""
    ranks = rng.choice([2, 3, 4, 8])
    each = 2 if order in FOLDED else 1 if order in ONE_EACH else rng.choice([2, 3])
    count = ranks * rng.randint(14, 20) + (0 if order in ("interleaved", "zero-bubble") else rng.randrange(ranks))
    assert not why_not(order, ranks, each, count, recomputes=False)
    chunks = []
    for _ in range(ranks * each):
        forward, backward, more = (base + spread * rng.random() for base in (1.0, 2.0, 0.0))
        chunks.append(Durations(forward, backward, backward + more, rng.random(), 0.4 * backward))
    sends = [sent * rng.random() for _ in chunks[1:]]
    return Pipeline(ranks, each, count, order), chunks, Sends(sends, sends)


def apart(pipeline: Pipeline, chunks: list[Durations], sends: Sends) -> float:
    """By how much ends and collectives are apart, as a share of the step."""
    found = steady.done(pipeline, chunks, sends)
    full = compose(pipeline, chunks, sends, blocking=False, record=False, several=0)
    both = zip([*found.ends, *found.behind], [*full.ends, *full.behind], strict=True)
    return max(abs(one - other) for one, other in both) / max(full.ends)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("spread", "sent", "most"), [(0.0, 0.0, 1e-9), (0.02, 0.01, 5e-3), (0.3, 0.5, 4e-2)])
def test_rounds_left_out_take_a_period_each(order: Order, spread: float, sent: float, most: float) -> None:
    """Exactly in equal stages; in the worst pipelines some settle late."""
    rng = random.Random(order)
    assert max(apart(*drawn(rng, order, spread, sent)) for _ in range(6)) <= (1e-9 if order == "gpipe" else most)


def test_most_passes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []
    monkeypatch.setattr(
        steady, "compose", lambda pipeline, *of, **how: composed.append(pipeline) or compose(pipeline, *of, **how)
    )
    equal = [Durations(1.0, 2.0, 2.0)] * 4
    steady.done(Pipeline(4, 1, 1026, "1f1b"), equal, Sends([0.0] * 3, [0.0] * 3))
    assert [one.micro_batches for one in composed] == [26]
