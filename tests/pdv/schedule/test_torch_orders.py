"""Passes are in the order in which torch.distributed.pipelining runs them, wherever it works the order out itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdv.schedule.order import Pipeline, orders
from pdv.schedule.passes import Part, Pass

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

PARTS: dict[str, tuple[bool, Part]] = {
    "FORWARD": (False, "all"), "FULL_BACKWARD": (True, "all"),
    "BACKWARD_INPUT": (True, "values"), "BACKWARD_WEIGHT": (True, "weights"),
}  # fmt: skip


def torch_passes(kind: str, pipeline: Pipeline, rank: int) -> list[Pass]:
    """Of a rank, as torch's class has them."""
    rounds = max(1, pipeline.micro_batches // pipeline.stages)
    given = SimpleNamespace(
        n_local_stages=pipeline.virtual,
        num_stages=pipeline.virtual * pipeline.stages,
        pp_group_size=pipeline.stages,
        _n_microbatches=pipeline.micro_batches,
        microbatches_per_round=pipeline.micro_batches // rounds,
    )
    return [as_pass(one) for one in flat(getattr(schedules, kind)._calculate_single_rank_operations(given, rank))]


def flat(actions: list[Any]) -> list[Any]:  # Any: torch's actions, private
    """One behind the other, as torch's runtime runs those that may overlap."""
    return [part for one in actions if one is not None for part in one.sub_actions or (one,)]


def as_pass(action: Any) -> Pass:  # Any: torch's action, private
    """What we call it."""
    return Pass(action.stage_index, action.microbatch_index, *PARTS[action.computation_type.name])


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 4), (2, 10), (4, 4), (4, 8), (4, 16)])
def test_interleaved_passes_are_in_the_order_of_torch(stages: int, virtual: int, micro_batches: int) -> None:
    pipeline = Pipeline(stages, virtual, micro_batches, "interleaved")
    for rank in range(stages):
        assert list(orders(pipeline)[rank]) == torch_passes("ScheduleInterleaved1F1B", pipeline, rank)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 4), (2, 10), (4, 4), (4, 8), (4, 16)])
def test_zero_bubble_passes_are_in_the_order_of_torch(stages: int, virtual: int, micro_batches: int) -> None:
    pipeline = Pipeline(stages, virtual, micro_batches, "zero-bubble")
    for rank in range(stages):
        assert list(orders(pipeline)[rank]) == torch_passes("ScheduleInterleavedZeroBubble", pipeline, rank)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 3), (2, 4), (3, 6), (4, 8), (4, 11), (8, 32)])
def test_folded_passes_are_in_the_order_of_torch(stages: int, micro_batches: int) -> None:
    pipeline = Pipeline(stages, 2, micro_batches, "zbv")
    for rank in range(stages):
        assert list(orders(pipeline)[rank]) == torch_passes("ScheduleZBVZeroBubble", pipeline, rank)
    if micro_batches >= 2 * stages:
        pipeline = Pipeline(stages, 2, micro_batches, "dualpipev")
        for rank in range(stages):
            assert list(orders(pipeline)[rank]) == torch_passes("ScheduleDualPipeV", pipeline, rank)
