"""onnx's own backend node tests. Entry points: ``cases``, ``survey``, ``survey_gradients``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx

from benchmarks.coverage_runs.apart import LATE, each_apart
from benchmarks.coverage_runs.gradients import NOTHING, run_gradients
from benchmarks.coverage_runs.running import TIME_OUT_S, WORST_FIRST, Case, read_case, run_case

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
COMMON = FLOATS | {getattr(onnx.TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
COMMON |= {onnx.TensorProto.BOOL}
GROUPS = ("direct, floats", "direct, others", "functions' bodies")


def cases() -> list[Case]:
    """All of them, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        found = load_model_tests(kind="node")
    return sorted((Case(t.name, t.model, t.data_sets or [], t.rtol, t.atol) for t in found), key=lambda case: case.name)


def group_of(case: Case) -> str:
    """Which share a case counts to."""
    return GROUPS[2] if "_expanded" in case.name else GROUPS[0] if _is_float(case) else GROUPS[1]


def _is_float(case: Case) -> bool:
    """Standard operators over tensors of floats, integers and truth values, some of them floats."""
    values = [*case.model.graph.input, *case.model.graph.output]
    kinds = {value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")}
    plain = all(value.type.HasField("tensor_type") for value in values)
    standard = all(node.domain in ("", "ai.onnx") for node in case.model.graph.node)
    return plain and standard and kinds <= COMMON and bool(kinds & FLOATS)


def _operator(case: Case) -> str:
    """What a test is of, as its nodes say."""
    names = sorted({node.op_type for node in case.model.graph.node})
    return "a function" if "_expanded" in case.name else "+".join(names)


def survey(chosen: Sequence[Case], *, quick: bool = False, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each case, as it ends: what came of it on one process and cut over two, the worse of both first.

    quick: it is only read, and evaluated as it was read.
    """
    yield from _rows(partial(_row, quick=quick), chosen, jobs)


def survey_gradients(chosen: Sequence[Case], *, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each case with gradients, as it ends: its inputs of floats parameters, on one process and on two."""
    plain = [case for case in chosen if group_of(case) != GROUPS[1]]
    yield from (row for row in _rows(_gradients_row, plain, jobs) if row.get("judge") != NOTHING)


def _rows(run: Callable[[Case], dict[str, Any]], chosen: Sequence[Case], jobs: int) -> Iterator[dict[str, Any]]:
    for number, found in each_apart(run, chosen, seconds=10 * TIME_OUT_S, jobs=jobs):
        if isinstance(found, str):
            what = "timed out" if found == LATE else "crashed"
            yield {**_head(chosen[number]), "outcome": what, "why": found, "cut": False}
        else:
            yield found


def _head(case: Case) -> dict[str, Any]:
    return {"test": case.name, "operator": _operator(case), "group": group_of(case)}


def _gradients_row(case: Case) -> dict[str, Any]:
    found, judge = run_gradients(case)
    return {**_head(case), "outcome": found.what, "why": found.why, "cut": found.cut, "judge": judge}


def _row(case: Case, *, quick: bool) -> dict[str, Any]:
    one = read_case(case) if quick else run_case(case, 1)
    two = one if quick or one.what == "refused" else run_case(case, 2)
    worse = min(one, two, key=lambda outcome: WORST_FIRST.index(outcome.what))
    return {**_head(case), "outcome": worse.what, "why": worse.why, "cut": two.cut}


def refusals(rows: Sequence[Mapping[str, Any]], groups: Sequence[str] = GROUPS[:1]) -> list[tuple[str, str, str]]:
    """What is refused of some groups: how many tests, of which operator, why first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["group"] in groups and row["outcome"] == "refused":
            found.setdefault(row["operator"], []).append(row["why"])
    ordered = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))
    return [(str(len(whys)), operator, min(whys)) for operator, whys in ordered]
