"""Wrong files of every kind are answered, or refused by one error with its documented code (`benchmarks/fuzz.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fuzz import FAILURES, SHARES, drawn_case, draws
from benchmarks.fuzz_runs.case import Case
from benchmarks.fuzz_runs.onnx_files import TWO, hostile_cases, onnx_cases, plan_command
from benchmarks.fuzz_runs.onnx_hostile import HOSTILE
from benchmarks.fuzz_runs.onnx_models import MODELS
from benchmarks.fuzz_runs.run import CODES, Runner
from pdv.cli.output import print_error

SEED, OF_EACH = 7, 1
HURT = {  # each hung, crashed, or read what it must not; whether it takes long
    "a function that calls itself": False,
    "a bomb of functions, 2 to the 40": False,
    "loops of 1000, 2 deep": True,
    "an input of 2 to the 60": False,
    "an input of rank 70": False,
    "an input in no encoding": True,
    "Expand of [0]": True,
    "weights at beside the folder in function": False,
    "weights at a pipe in constant": False,
    "weights at a circle in initializer": True,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def check(runner: Runner, case: Case) -> None:
    result = runner(case)
    assert not result.failed, f"{case.kind}: {case.what}: {result.outcome}: {result.said}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in HURT.items()])
def test_models_made_to_hurt_are_refused_or_planned(runner: Runner, name: str) -> None:
    cases = {case.what: case for case in hostile_cases()}
    check(runner, cases[name])
    assert len(cases) == len(HOSTILE)


def test_drawn_files_are_refused_or_answered(runner: Runner) -> None:
    drawn = draws(runner)
    assert set(drawn) == set(SHARES)
    for kind in drawn:
        for number in range(OF_EACH):
            check(runner, drawn_case(drawn, kind, SEED, number))


def test_the_same_seed_draws_the_same_file() -> None:
    drawn = {"onnx": onnx_cases}
    assert drawn_case(drawn, "onnx", 1, 3) == drawn_case(drawn, "onnx", 1, 3) != drawn_case(drawn, "onnx", 2, 3)


def test_a_full_disk_is_exit_9(runner: Runner) -> None:
    files = {"m.onnx": MODELS["mlp"]().SerializeToString(), "c.yaml": TWO}
    result = runner(Case("disk", "", files, plan_command(), room=1 << 9))
    assert (result.outcome, CODES["cannot-write"]) == ("cannot-write", 9), result.said


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("optimize", "bad-model", "an operator called 'x\n\x1b'", 3, as_json=False)
    assert capsys.readouterr().err == "error: an operator called 'x\\n\\x1b'\n"


def test_failures_are_told_apart(runner: Runner) -> None:
    """An answer, a refusal, and a command that nobody knows: by documented codes alone."""
    assert runner(Case("", "", {}, ["cluster", "devices"])).outcome == "answer"
    assert runner(Case("", "", {}, ["cluster", "show", "../in/none.yaml"])).outcome == "bad-cluster"
    assert not CODES.keys() & set(FAILURES)
