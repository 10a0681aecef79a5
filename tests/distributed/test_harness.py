"""The harness itself: results in rank order, and failures that say where."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import PRELOADED, RankError, run_ranks

pytestmark = pytest.mark.distributed


def add_ranks(base: int) -> tuple[int, int]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a mistake of rank one")
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(300)


def loaded() -> set[str]:
    return set(sys.modules)


def test_ranks_start_with_what_is_preloaded() -> None:
    """The server passes over what it cannot import."""
    assert set(PRELOADED) <= run_ranks(loaded, 1)[0]


def test_results_come_in_rank_order() -> None:
    assert run_ranks(add_ranks, 2, 10) == [(0, 21), (1, 21)]


def test_a_failure_carries_the_worker_s_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*fail_on_rank_one.*a mistake of rank one"):
        run_ranks(fail_on_rank_one, 2)


def test_a_dead_or_silent_rank_does_not_hang_the_parent() -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        run_ranks(die_on_rank_one, 2)
    with pytest.raises(RankError, match=r"did not answer in time"):
        run_ranks(time.sleep, 2, 300, timeout_s=3)
