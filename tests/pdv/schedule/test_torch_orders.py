"""Interleaved passes are in the order in which torch.distributed.pipelining runs them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdv.schedule.order import Pass, Pipeline, orders

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 4), (2, 10), (4, 4), (4, 8), (4, 16)])
def test_interleaved_passes_are_in_the_order_of_torch(stages: int, virtual: int, micro_batches: int) -> None:
    rounds = max(1, micro_batches // stages)
    given = SimpleNamespace(
        n_local_stages=virtual,
        pp_group_size=stages,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    ours = orders(Pipeline(stages, virtual, micro_batches, "interleaved"))
    for rank in range(stages):
        taken = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(given, rank)
        theirs = [Pass(one.stage_index, one.microbatch_index, "F" not in str(one)) for one in taken if one is not None]
        assert list(ours[rank]) == theirs
