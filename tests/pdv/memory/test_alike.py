"""Chunks that are walked once for all that are alike need what each needs that is walked by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdv.memory import needed_bytes, step_memory
from pdv.memory.alike import first_alike
from pdv.memory.setting import Setting
from tests.pdv.memory.test_step import run_by

WAYS = (
    "pp=4,vp=2,schedule=interleaved,tp=2",
    "pp=4,recompute=full",
    "pp=2,vp=4,schedule=interleaved,recompute=selective",
    "pp=8",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("eager", [False, True])
def test_equal_chunks_are_walked_once(way: str, *, eager: bool) -> None:
    work = run_by(way, layers=16, micro_batch=1)
    work = replace(work, execution=replace(work.execution, eager=eager, fused=False)) if eager else work
    setting = Setting(work)
    firsts = first_alike(setting)
    assert len(set(firsts)) == (3 if eager else len(setting.chunks)), firsts
    assert needed_bytes(work) == step_memory(work).worst.least_bytes
    apart = [one.peak_bytes for one in step_memory(work).stages]
    assert [one.peak_bytes for one in step_memory(work, named=False).stages] == apart


def test_what_a_chunk_gives_tells_it_apart() -> None:
    """The first has the embedding, the last the loss; of stages that are unequal each is its own."""
    setting = Setting(run_by("pp=4", layers=6))
    eager = Setting(replace(setting.workload, execution=replace(setting.workload.execution, eager=True)))
    assert first_alike(eager) == (0, 1, 2, 3)
