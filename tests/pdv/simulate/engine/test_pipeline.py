"""Passes through stages: bubbles as published, sends that hide or do not."""

from __future__ import annotations

import random

import pytest

from pdv.problem.workload import Order
from pdv.schedule.order import Pipeline, orders
from pdv.simulate.engine.pipeline import Durations, Sends, compose, sequence


def end(pipeline: Pipeline, send: int = 0, *, blocking: bool = False) -> int:
    chunks = pipeline.stages * pipeline.virtual
    sends = Sends([send] * (chunks - 1), [send] * (chunks - 1))
    return int(max(compose(pipeline, [Durations(100, 200, 200)] * chunks, sends, blocking=blocking).ends))


@pytest.mark.parametrize(
    ("stages", "virtual", "micro_batches", "order"),
    [(4, 1, 8, "gpipe"), (4, 1, 8, "1f1b"), (3, 1, 2, "1f1b"), (4, 2, 8, "interleaved"), (8, 3, 16, "interleaved")],
)
def test_bubbles_are_those_of_the_papers(stages: int, virtual: int, micro_batches: int, order: Order) -> None:
    """(p - 1) / m of the work, a v-th of it with v chunks a stage (Narayanan et al., SC'21, section 2.2)."""
    work = 300 * micro_batches * virtual
    assert end(Pipeline(stages, virtual, micro_batches, order)) == work + 300 * (stages - 1)


@pytest.mark.parametrize(("order", "virtual"), [("zero-bubble", 1), ("zbv", 2), ("dualpipev", 2)])
def test_gradients_of_weights_fill_bubbles(order: Order, virtual: int) -> None:
    """ZB-H1 has a third of 1F1B's bubble, ZBV none, where all thirds of a pass are equal (Qi et al., ICLR'24)."""
    work, bubble = 300 * 16 * virtual, {"zero-bubble": 100 * 3, "zbv": 100 * 3, "dualpipev": 100 * 6}[order]
    chunks = [Durations(100, 200, 200, 0, 100)] * (4 * virtual)
    line = compose(Pipeline(4, virtual, 16, order), chunks, Sends([0] * 7, [0] * 7), blocking=False)
    assert max(line.ends) <= work + bubble < end(Pipeline(4, virtual, 16, "interleaved" if virtual > 1 else "1f1b"))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 6), (8, 32)])
def test_a_pipeline_that_no_step_empties_has_no_bubble(stages: int, micro_batches: int) -> None:
    """Steps follow each other by the work of the slowest stage, with what is due once a step."""
    shape = Pipeline(stages, 1, micro_batches, "2bw")
    chunks = [Durations(100, 200, 200, tail=30)] * stages
    line = compose(shape, chunks, Sends([0] * stages, [0] * stages), blocking=False)
    work = [micro_batches * one.forward + (micro_batches - 1) * one.backward + one.last + 30 for one in chunks]
    assert line.period == max(work)
    own = line.last_step(shape, [30] * stages)
    for stage, passes in enumerate(own.passes):
        assert [one for one, *_ in passes] == list(orders(shape)[stage])
        assert sum(end - start for _, start, end in passes) == work[stage] - 30
        assert own.ends[stage] - sum(own.waits[stage].values()) == work[stage] - 30
    begun = compose(shape, chunks, Sends([0] * stages, [0] * stages), blocking=False, several=0)
    assert max(work) < max(begun.ends) < end(Pipeline(stages, 1, micro_batches, "1f1b")) + 40 * stages


def test_sends_are_a_part_of_what_steps_follow_by() -> None:
    """A micro-batch goes to the last stage and back while its stage runs what it has ahead."""
    shape = Pipeline(2, 1, 4, "2bw")
    assert compose(shape, [Durations(1, 2, 2)] * 2, Sends([9], [9]), blocking=False).period > 4 * 3


def test_sends_cost_less_beside_compute_than_before_it() -> None:
    shape = Pipeline(4, 1, 16, "gpipe")
    hidden, waited = end(shape, 30), end(shape, 30, blocking=True)
    assert end(shape) < hidden < waited
    assert hidden - end(shape) == 2 * 3 * 30  # once through the pipeline and back
    assert waited - end(shape) >= 2 * 15 * 30


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7, 12])
def test_every_schedule_gets_through(order: Order, stages: int, virtual: int, micro_batches: int) -> None:
    """Each pass once, forward before backward, whatever divides what."""
    shape = Pipeline(stages, virtual, micro_batches, order)
    assert len(sequence(shape)) == 2 * stages * virtual * micro_batches
    for stage, passes in enumerate(orders(shape)):
        assert len(set(passes)) == len(passes) == 2 * virtual * micro_batches
        assert all(step.chunk % stages == stage for step in passes)
        for step in passes:
            if step.backward:
                assert passes.index(step._replace(backward=False)) < passes.index(step)


def test_waits_and_passes_fill_the_time() -> None:
    shape = Pipeline(3, 2, 6, "interleaved")
    for blocking in (False, True):
        line = compose(shape, [Durations(70, 130, 150)] * 6, Sends([20] * 5, [30] * 5), blocking=blocking)
        for stage in range(3):
            busy = sum(finish - start for _, start, finish in line.passes[stage])
            assert busy + sum(line.waits[stage].values()) == line.ends[stage]
            assert line.passes[stage] == sorted(line.passes[stage], key=lambda entry: entry[1])


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zbv", "2bw"])
def test_ends_of_passes_are_those_of_the_same_recorded(order: Order) -> None:
    """To the last picosecond, with links that take turns, gradients' sums and what a stage does behind them."""
    draw = random.Random(order)
    for _ in range(20):
        each = {"interleaved": 2, "zbv": 2}.get(order, 1)
        stages = draw.randint(2, 4)
        shape = Pipeline(stages, each, stages * draw.randint(1, 3), order)
        chunks = [
            Durations(*(draw.randint(2, 50) for _ in range(3)), 3, 1, draw.randint(0, 5)) for _ in range(stages * each)
        ]
        sends = Sends(*([draw.choice((0, draw.randint(1, 60))) for _ in chunks[1:]] for _ in range(2)))
        plain, told = (compose(shape, chunks, sends, blocking=False, record=record) for record in (False, True))
        assert (plain.ends, plain.behind, plain.arrived) == (told.ends, told.behind, told.arrived)
        assert [[one[0] for one in steps] for steps in plain.steps] == [
            [one[0] for one in steps] for steps in told.steps
        ]
