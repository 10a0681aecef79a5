"""Orders of passes, spelled out where they are short enough to read."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from pdv.problem.workload import AHEAD, Order
from pdv.schedule.order import Pipeline, in_flight, most_held, orders, why_not


def spelled(pipeline: Pipeline, stage: int) -> str:
    return " ".join(f"{'b' if p.backward else 'f'}{p.micro_batch}.{p.chunk}" for p in orders(pipeline)[stage])


def test_one_forward_one_backward() -> None:
    shape = Pipeline(2, 1, 3, "1f1b")
    assert spelled(shape, 0) == "f0.0 f1.0 b0.0 f2.0 b1.0 b2.0"
    assert spelled(shape, 1) == "f0.1 b0.1 f1.1 b1.1 f2.1 b2.1"


def test_eager_runs_twice_as_many_forward_ahead() -> None:
    shape = Pipeline(2, 1, 4, "eager-1f1b")
    assert spelled(shape, 0) == "f0.0 f1.0 f2.0 b0.0 f3.0 b1.0 b2.0 b3.0"
    assert spelled(shape, 1) == spelled(Pipeline(2, 1, 4, "1f1b"), 1)


def test_gpipe_runs_all_forward_first() -> None:
    assert spelled(Pipeline(2, 1, 2, "gpipe"), 0) == "f0.0 f1.0 b0.0 b1.0"


def test_interleaved_takes_groups_of_as_many_micro_batches_as_stages() -> None:
    """Figure 4 of Narayanan et al. (SC'21): two stages, two chunks each."""
    shape = Pipeline(2, 2, 4, "interleaved")
    assert spelled(shape, 1).startswith("f0.1 f1.1 f0.3 b0.3 f1.3 b1.3 f2.1 b0.1")


def test_inference_runs_forward_alone() -> None:
    assert spelled(Pipeline(2, 1, 2, "1f1b", train=False), 1) == "f0.1 f1.1"


def test_activations_in_flight() -> None:
    """All micro-batches in GPipe, as many as there are stages behind in 1F1B, a little more interleaved."""

    def held(order: Order, virtual: int = 1) -> list[int]:
        return [in_flight(Pipeline(4, virtual, 16, order), stage) for stage in range(4)]

    assert held("gpipe") == [16] * 4
    assert held("1f1b") == [4, 3, 2, 1]
    assert held("eager-1f1b") == [7, 5, 3, 1]
    assert held("interleaved", 2) == [11, 9, 7, 5]


@pytest.mark.parametrize("order", get_args(Order))
def test_what_long_steps_hold_is_held_by_short_ones(order: Order) -> None:
    """Counted pass by pass, where ``most_held`` looks at a few rounds of micro-batches."""
    for ranks, each, count in itertools.product((1, 2, 3, 5, 8), (1, 2, 3), (*range(1, 50, 3), 64, 90)):
        if why_not(order, ranks, each, count, recomputes=False) or (each > 1 and order in ("gpipe", "1f1b")):
            continue
        for moments in (1, 3) if each == 1 and order in AHEAD else (1,):
            pipeline = Pipeline(ranks, each, count, order, moments=moments)
            assert [most_held(pipeline, stage) for stage in range(ranks)] == [
                counted(pipeline, stage) for stage in range(ranks)
            ]


def counted(pipeline: Pipeline, stage: int) -> dict[int, int]:
    held, most = dict.fromkeys(pipeline.layout.chunks_on(stage), 0), dict[int, int]()
    for one in (*pipeline.ahead(stage), *orders(pipeline)[stage]):
        held[one.chunk] += -(one.part != "values") if one.backward else 1
        most = dict(held) if sum(held.values()) > sum(most.values()) else most
    return most
