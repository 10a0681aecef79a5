"""Random modules under random legal plans equal the modules; what failed once is kept in tests/property/fuzzed.

The tool is `benchmarks/fuzz_programs.py`; thousands are run by hand.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_programs_runs import judge as judging
from benchmarks.fuzz_programs_runs.assignment import draw_plan
from benchmarks.fuzz_programs_runs.campaign import judge_module
from benchmarks.fuzz_programs_runs.draw import draw_module
from benchmarks.fuzz_programs_runs.judge import Judge, Verdict, silent
from benchmarks.fuzz_programs_runs.shrink import shrunk
from benchmarks.fuzz_programs_runs.spec import Program
from ir.graph import Graph
from ir.mesh import Mesh
from ir.sharding import invariant
from ir.verify import infer_shardings

KEPT = sorted((Path(__file__).parent / "fuzzed").glob("*.json"))
SEED, PLANS = 7, 2
LONG = {"output-moved-twice-behind-stages", "powers-of-powers"}


def often(numbers: range, of: int) -> list[Any]:
    """So many of the first are drawn in every run."""
    return [number if number < of else pytest.param(number, marks=pytest.mark.slow) for number in numbers]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in KEPT],
)
def test_what_failed_once(path: Path) -> None:
    program = Program.parse(path.read_text(encoding="utf-8"))
    verdict = Judge(program.module).judge(program.plan)
    assert not verdict.failed, f"{verdict.signature}: {verdict.text}"


@pytest.mark.parametrize("number", often(range(15), 5))
def test_drawn_programs_equal_their_modules(number: int) -> None:
    for result in judge_module(SEED, number, 0, PLANS, (2, 3, 4, 6), real=False, progress=silent):
        assert not result.verdict.failed, f"{result.name} {result.verdict.signature}: {result.verdict.text}"


@pytest.mark.parametrize("number", [3, 2, 1, pytest.param(0, marks=pytest.mark.slow)])
def test_programs_in_parts_equal_their_modules(number: int) -> None:
    """In micro-batches, stages cut anywhere, and with recomputation."""
    for result in judge_module(SEED, 20 + number, 0, 1, (4, 6), real=False, progress=silent, parts=True):
        assert not result.verdict.failed, f"{result.name} {result.verdict.signature}: {result.verdict.text}"


def drawn(number: int) -> Program:
    module = draw_module(SEED, number)
    loaded = Judge(module).loaded
    assert not isinstance(loaded, Verdict)
    return Program(module, draw_plan(loaded.graph, 4, random.Random(number)))


def test_the_same_seed_draws_the_same_program() -> None:
    program = drawn(0)
    assert program.text() == drawn(0).text() == Program.parse(program.text()).text()
    assert program.text() != drawn(1).text()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that breaks where a linear map is cut."""

    def refuse(graph: Graph, pcg: Graph, mesh: Mesh, *, gradients: bool) -> None:
        states = infer_shardings(pcg, mesh)
        cut = [node for node in pcg.nodes if node.op.name == "linear" and states[node] != invariant(mesh)]
        assert not cut, "a linear map is cut"

    monkeypatch.setattr(judging, "verify_equal", refuse)


@pytest.mark.slow
def test_failures_are_shrunk(broken: None) -> None:
    """To one linear map, cut along one axis."""
    found = (drawn(number) for number in range(40))
    program = next(p for p in found if len(p.module.steps) > 4 and Judge(p.module).judge(p.plan).stage == "prove")
    verdict = Judge(program.module).judge(program.plan)
    small, same = shrunk(program, verdict, 0, silent)
    assert same.signature == verdict.signature
    assert len(small.module.steps) <= 2
    assert [set(labels) - {"none"} != set() for _, labels in small.plan.splits].count(True) == 1
    assert len(small.plan.mesh) == 1
    assert small == Program.parse(small.text())


def test_a_difference_is_found() -> None:
    """Outputs, gradients and buffers that are off are told apart."""
    program = drawn(2)
    program = replace(program, plan=replace(program.plan, mode="train"))
    judge = Judge(program.module)
    own = judge._own(train=True)
    for change, where in (
        ({"outputs": [y + 1 for y in own[0].outputs]}, "forward"),
        ({"gradients": {name: 2 * g for name, g in own[0].gradients.items()}}, "gradient"),
        ({"loss": own[0].loss + 1}, "loss"),
    ):
        verdict = judge.compared("alone", program.plan, [[replace(own[0], **change), own[1]]])
        assert (verdict.outcome, verdict.kind) == ("wrong", where)
    assert not judge.compared("alone", program.plan, [own]).failed
