"""Random modules under random legal plans on real processes, and what failed once (tests/property/fuzzed)."""

from __future__ import annotations

import pytest

from benchmarks.fuzz_programs_runs.campaign import judge_module
from benchmarks.fuzz_programs_runs.judge import Judge, silent
from benchmarks.fuzz_programs_runs.spec import Program
from tests.property.test_fuzz import KEPT

pytestmark = pytest.mark.distributed
SEED = 8
KEPT_ON_RANKS = [
    (path, program)
    for path, program in ((path, Program.parse(path.read_text(encoding="utf-8"))) for path in KEPT)
    if program.plan.devices in (2, 4, 8)
]


@pytest.mark.parametrize(("path", "program"), KEPT_ON_RANKS, ids=[path.stem for path, _ in KEPT_ON_RANKS])
def test_what_failed_once(path: object, program: Program) -> None:
    verdict = Judge(program.module, program.plan.devices).judge(program.plan)
    assert not verdict.failed, f"{verdict.signature}: {verdict.text}"


@pytest.mark.parametrize("number", range(1, 3))
def test_drawn_programs_equal_their_modules(number: int) -> None:
    for result in judge_module(SEED, number, 0, 1, (2, 4), real=True, progress=silent):
        assert not result.verdict.failed, f"{result.name} {result.verdict.signature}: {result.verdict.text}"
        assert result.verdict.ranks > 1


@pytest.mark.parametrize("number", [1, 2])
def test_programs_in_parts_equal_their_modules(number: int) -> None:
    for result in judge_module(77, number, 0, 1, (4,), real=True, progress=silent, parts=True):
        assert result.program is not None
        assert result.program.plan.run.cuts
        assert not result.verdict.failed, f"{result.name} {result.verdict.signature}: {result.verdict.text}"
        assert result.verdict.ranks == 4
