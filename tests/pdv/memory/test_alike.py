"""Chunks that are walked once for all that are alike need what each needs that is walked by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdv.memory import KnownPasses, needed_bytes, step_memory
from pdv.memory.alike import marks
from pdv.memory.setting import Setting
from pdv.problem.precision import AS_EMITTED
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
    assert len(set(marks(setting))) == (3 if eager else len(setting.chunks))
    assert needed_bytes(work) == step_memory(work).worst.least_bytes
    apart = [one.peak_bytes for one in step_memory(work).stages]
    assert [one.peak_bytes for one in step_memory(work, named=False).stages] == apart


def test_what_a_chunk_gives_tells_it_apart() -> None:
    """The first has the embedding, the last the loss; of stages that are unequal each is its own."""
    setting = Setting(run_by("pp=4", layers=6))
    eager = Setting(replace(setting.workload, execution=replace(setting.workload.execution, eager=True)))
    assert len(set(marks(eager))) == 4


@pytest.mark.parametrize("way", WAYS)
def test_what_is_known_of_another_cut_or_another_way_to_run_changes_nothing(way: str) -> None:
    known: KnownPasses = {}
    cuts = [run_by(way, layers=16, micro_batch=1), run_by("pp=4", layers=16, micro_batch=1), run_by("pp=8", layers=16)]
    for cut in cuts:
        for precision in (cut.execution.precision, AS_EMITTED):
            work = replace(cut, execution=replace(cut.execution, eager=True, fused=False, precision=precision))
            assert needed_bytes(work, known) == needed_bytes(work)
    before = len(known)
    assert needed_bytes(work, known) == needed_bytes(work)
    assert len(known) == before
