"""How passes of stages follow one another, and how pieces are cut among stages: no order and no cut takes less."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from ir.proof.repeats import Repeat
from pdv.pipelines.bounding.least import sum_runs
from pdv.pipelines.bounding.packing import Heights, Packing, Pieces, Turns, heights, held, rounds
from pdv.pipelines.profile import Numbers
from pdv.problem.workload import SEARCHED, Order
from pdv.schedule.lines import lines
from pdv.schedule.order import Pipeline, orders
from pdv.simulate.engine.pipeline import Durations, Sends, compose

ORDERS = (
    ("gpipe", 1),
    ("eager-1f1b", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
)  # with stages on each rank


def random_pipeline(order: Order, each: int, draw: random.Random) -> Pipeline:
    stages = draw.randint(2, 6)
    return Pipeline(stages, each, stages * draw.randint(1, 4) if each > 1 else draw.randint(1, 3 * stages), order)


@pytest.mark.parametrize(("order", "each"), ORDERS)
def test_filling_and_draining_cannot_be_cut_away(order: Order, each: int) -> None:
    """However the work of a micro-batch is cut among the stages, equally or not; nor by any one stage."""
    draw = random.Random(order + str(each))
    for _ in range(300):
        pipeline = random_pipeline(order, each, draw)
        passes = [[draw.choice((1.0, draw.random())) for _ in range(pipeline.stages * each)] for _ in range(2)]
        chunks = [Durations(forward, backward, backward) for forward, backward in zip(*passes, strict=True)]
        sends = Sends([0] * (len(chunks) - 1), [0] * (len(chunks) - 1))
        line = compose(pipeline, chunks, sends, blocking=False, record=False)
        whole = sum(map(sum, passes))
        assert max(line.ends) >= rounds(pipeline) / pipeline.stages * whole * (1 - 1e-12)
        for stage in range(pipeline.stages if each == 1 else 0):
            (forward, *later), (backward, *back) = (way[stage:] for way in passes)
            for one in lines(order, pipeline.stages, pipeline.micro_batches, stage):
                least = one.rest * (whole - forward - backward) + one.forward * forward + one.backward * backward
                least += one.behind * sum(later + back)
                assert max(line.ends) >= least * (1 - 1e-12)


def test_one_stage_longer_than_the_others_costs_what_a_line_says() -> None:
    """In 1F1B, wherever it is: no more can be said of it."""
    draw = random.Random(0)
    for _ in range(100):
        stages = draw.randint(2, 8)
        pipeline, stage = Pipeline(stages, 1, draw.randint(2, 6) * stages, "1f1b"), draw.randrange(stages)
        forward, backward, longer = draw.uniform(0.5, 1.5), draw.uniform(0.5, 3.0), draw.uniform(1.0, 1.3)
        own = forward * longer, backward * longer
        each = [own if at == stage else (forward, backward) for at in range(stages)]
        sends = Sends([0] * (stages - 1), [0] * (stages - 1))
        chunks = [Durations(one, other, other) for one, other in each]
        step = max(compose(pipeline, chunks, sends, blocking=False, record=False).ends)
        rest, behind = ((forward + backward) * count for count in (stages - 1, stages - 1 - stage))
        of_stage = lines("1f1b", stages, pipeline.micro_batches, stage)
        least = [
            one.rest * rest + one.forward * own[0] + one.backward * own[1] + one.behind * behind for one in of_stage
        ]
        assert max(least) == pytest.approx(step)


@pytest.mark.parametrize(("order", "each"), ORDERS)
def test_a_stage_holds_what_is_said_at_least(order: Order, each: int) -> None:
    """Of its chunks, whatever these keep, at some time after its first backward pass."""
    draw = random.Random(order + str(each))
    for _ in range(100):
        pipeline = random_pipeline(order, each, draw)
        stage = draw.randrange(pipeline.stages)
        kept = {chunk: draw.choice((1.0, draw.random())) for chunk in pipeline.layout.chunks_on(stage)}
        now = most = 0.0
        begun = False
        for step in orders(pipeline)[stage]:
            begun = begun or step.backward
            now += -kept[step.chunk] if step.backward else kept[step.chunk]
            most = max(most, now) if begun else 0.0
        assert most >= held(pipeline, stage) * sum(kept.values()) - 1e-9


def test_interleaved_stages_hold_what_the_fullest_moment_says() -> None:
    """Of each of its stages so many micro-batches at one time."""
    assert [held(Pipeline(8, 4, 64, "interleaved"), stage) for stage in (0, 4, 7)] == [8.0, 7.0, 1.0]


@pytest.mark.parametrize("each", [2, 3, 8])
def test_each_group_of_micro_batches_does_alike(each: int) -> None:
    """What interleaved stages hold is settled after a few groups of as many micro-batches as there are ranks."""
    for ranks, count in ((2, 14), (3, 12), (5, 25), (8, 64)):
        pipeline = Pipeline(ranks, each, count, "interleaved")
        for rank, steps in enumerate(orders(pipeline)):
            chunks = pipeline.layout.chunks_on(rank)
            now, most, begun = dict.fromkeys(chunks, 0), 0, False
            for step in steps:
                begun = begun or step.backward
                now[step.chunk] += -1 if step.backward else 1
                most = max(most, min(now.values())) if begun else 0
            assert held(pipeline, rank) == most
            every = _held_by_time(pipeline, rank)
            least, beyond = max(heights(pipeline, rank, 1e3), key=sum)
            assert (each * least + beyond) * 1e3 == pytest.approx(max(map(sum, every)))


def _held_by_time(pipeline: Pipeline, rank: int) -> list[tuple[int, ...]]:
    """By stage of a rank, micro-batches held once backward has begun, pass by pass."""
    now, found, begun = dict.fromkeys(pipeline.layout.chunks_on(rank), 0), list[tuple[int, ...]](), False
    for step in orders(pipeline)[rank]:
        begun = begun or step.backward
        now[step.chunk] += -1 if step.backward else 1
        found += [tuple(now.values())] if begun else []
    return found


@pytest.mark.parametrize("order", SEARCHED)
def test_no_cut_beats_a_packing(order: Order) -> None:
    """Nor any way to run each piece, of those that are within every stage's memory."""
    draw = random.Random(order)
    tight = 0
    for _ in range(60):
        stages, count = draw.randint(2, 3), draw.randint(2, 6)
        ways = [[(draw.random(), draw.random(), 4 * draw.random()) for _ in range(2)] for _ in range(5)]
        rooms = [draw.uniform(3.0, 9.0) for _ in range(stages)]
        runs = {price: run_table(ways, price) for price in (0.0, 0.1, 0.3, 1.0)}
        least = [np.array([min(way[at] for way in each) for each in ways]) for at in range(2)]
        pieces = Pieces(runs, least[0], least[1])
        packing = Packing([(pieces, lines(order, stages, count, stage), rooms[stage]) for stage in range(stages)])
        found = packing.least_s
        best = math.inf
        for chosen in itertools.product(*ways):
            for cut in itertools.combinations(range(1, 5), stages - 1):
                parts = [chosen[a:b] for a, b in itertools.pairwise([0, *cut, 5])]
                if all(sum(one[2] for one in part) <= room for part, room in zip(parts, rooms, strict=True)):
                    chunks = [Durations(*(sum(one[at] for one in part) for at in (0, 1, 1))) for part in parts]
                    sends = Sends([0] * (stages - 1), [0] * (stages - 1))
                    pipeline = Pipeline(stages, 1, max(count, stages), order)
                    if pipeline.micro_batches == count:
                        best = min(best, max(compose(pipeline, chunks, sends, blocking=False, record=False).ends))
        assert found <= best * (1 + 1e-9)
        tight += found > 0.7 * best
    assert tight > 5


def test_no_cut_beats_turns() -> None:
    """The same of two ranks that have two runs of pieces each, in turns: all pieces but the ends are counted alike."""
    draw = random.Random(0)
    tight = 0
    for _ in range(40):
        pipeline, layer = Pipeline(2, 2, 2 * draw.randint(1, 3), "interleaved"), (draw.random(), draw.random())
        pieces = [(draw.random(), draw.random()), *[layer] * 6, (draw.random(), draw.random())]
        ways = [[(*piece, draw.random()), (2 * piece[0], piece[1], 0.1)] for piece in pieces]
        room = draw.uniform(1.0, 4.0)
        times = [[[draw.random() for _ in range(2)] for _ in range(2)] for _ in range(2)]  # by rank, what chunks hold
        runs = {price: run_table(ways, price) for price in (0.0, 0.1, 0.3, 1.0)}
        taken_by = Pieces(runs, *np.zeros((2, 8)))
        shares = [[Heights(min(each), sum(each) - 2 * min(each)) for each in of] for of in times]
        found = Turns([(taken_by, each) for each in shares], room, pipeline.micro_batches).least_s(1e-9, 1e3)
        best = math.inf
        for chosen in itertools.product(range(2), repeat=3):  # of the first piece, of layers, of the last
            taken = [ways[at][chosen[(at > 0) + (at == 7)]] for at in range(8)]
            for cut in itertools.combinations(range(1, 8), 3):
                parts = [taken[a:b] for a, b in itertools.pairwise([0, *cut, 8])]
                size = [sum(one[2] for one in part) for part in parts]
                held = [each[0] * size[at] + each[1] * size[at + 2] for at, of in enumerate(times) for each in of]
                if max(held) <= room:
                    chunks = [Durations(*(sum(one[at] for one in part) for at in (0, 1, 1))) for part in parts]
                    line = compose(pipeline, chunks, Sends([0] * 3, [0] * 3), blocking=False, record=False)
                    best = min(best, max(line.ends))
        assert found <= best * (1 + 1e-9)
        tight += math.isfinite(best) and found > 0.7 * best
    assert tight > 5


def run_table(ways: list[list[tuple[float, float, float]]], price: float) -> Numbers:
    """[start, stop] of pieces that are each as cheap as can be."""
    each = [min(forward + backward + price * held for forward, backward, held in way) for way in ways]
    sums = np.append(0.0, np.cumsum(each))
    return np.asarray(np.maximum(0.0, sums[None, :] - sums[:-1, None]))


def test_runs_of_what_repeats_are_those_of_the_same_written_out() -> None:
    """To the last digit, wherever a stretch begins, blocks of several pieces and several blocks of one included."""
    draw = np.random.default_rng(0)
    for _ in range(60):
        start, period, turns, behind, states = (int(draw.integers(low, 5)) for low in (0, 1, 2, 0, 1))
        keys = [*range(start), *[start + at for at in range(period)] * (turns + 1)]
        keys += [start + period + at for at in range(behind)]
        tables = {(-1, keys[0]): draw.random((1, states))}
        tables |= {pair: draw.random((states, states)) for pair in itertools.pairwise(keys)}
        pieces, spans, at = [int(one) for one in draw.integers(0, 3, start + period + behind)], [], 0
        for key in keys:
            spans.append(range(at, at + pieces[key] + 1))
            at += pieces[key]
        steps = [tables[pair] for pair in itertools.pairwise([-1, *keys])]
        repeats = [Repeat(start, period, turns + 1)]
        plain, found = (sum_runs(steps, spans, at + 1, known) for known in ([], repeats))
        assert np.array_equal(found, plain)
