"""Random ONNX models, planned for two processes and run, give what ONNX Runtime does.

Hundreds of them: ``python benchmarks/coverage.py --parts random``.
"""

from __future__ import annotations

import pytest

from benchmarks.coverage_runs.random_models import model
from benchmarks.coverage_runs.running import run_case

FAULTY = {
    7: "a value without gradient was written before what it reads",
    22: "scales of a Resize were taken for parameters",
    27: "norms of opsets before 18 have no body",
    31: "truth values that became floats were compared as integers",
}


@pytest.mark.parametrize("seed", [1, *FAULTY])
def test_some(seed: int) -> None:
    case, mode = model(seed)
    found = run_case(case, 2, mode)
    assert (found.what, found.why) == ("passed", "")


@pytest.mark.slow
def test_few_of_fifty_are_refused_and_none_is_wrong() -> None:
    found = [run_case(case, 2, mode).what for case, mode in map(model, range(100, 150))]
    assert set(found) <= {"passed", "refused"}
    assert found.count("refused") <= 5
