"""Whatever goes wrong inside is one error, and its report has what is needed and nothing that is the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdv
from ir.builder import Builder
from ir.errors import InternalError, PdvError, UsageError, WriteError
from ir.text import constants, parse_graph
from pdv.frontend.program import Program
from pdv.guard import MOST_REPORTS, guarded, note
from pdv.plan.package import Plan
from tests.pdv.emit.graphs import random_weights
from tests.pdv.worlds import cluster, f32, mlp

EVERY = (
    AssertionError("values"), MemoryError(), RecursionError("too deep"), KeyError("x"), ZeroDivisionError("by zero"),
    StopIteration(), OSError(5, "odd"), TypeError("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "y"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdv" / "reports"


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **named: object) -> None:
        raise error

    return fail


def program() -> Program:
    graph = mlp()
    return Program(graph, random_weights(graph))


def planned(**options: Any) -> Plan:
    return pdv.optimize(program(), cluster=cluster(2), mesh={"dp": 2}, **options)


def test_arguments_that_a_call_does_not_take_are_no_fault_of_ours(reports: Path) -> None:
    with pytest.raises(UsageError, match=r"unexpected keyword argument 'budget'\. .* Did you mean 'budget_s'\?"):
        planned(budget=5)
    with pytest.raises(UsageError, match=r"missing a required .*argument: 'cluster'"):
        pdv.optimize(program())  # type: ignore[call-arg]  # as a caller without a type checker writes it
    with pytest.raises(UsageError, match="too many positional arguments"):
        planned().save("there", "twice")  # type: ignore[call-arg]  # the same
    assert not reports.exists()


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_planning_fails_as_one_error(error: Exception, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdv.compile.search_problems", raising(error))
    with pytest.raises(InternalError, match=f"{type(error).__name__} at test_guard.py") as caught:
        planned()
    assert caught.value.__cause__ is error
    assert caught.value.exit_code == 70
    assert [str(folder) for folder in reports.iterdir()] == [caught.value.report]
    assert caught.value.report in str(caught.value)
    trace = (Path(caught.value.report) / "traceback.txt").read_text()
    assert trace.startswith("pdv.optimize\npdv ")
    assert "in optimize" in trace
    assert parse_graph((Path(caught.value.report) / "source.graph").read_text()).nodes


def test_saving_verifying_and_explaining_fail_as_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    folder = plan.save(tmp_path / "plan_pdv")
    with monkeypatch.context() as patch:
        patch.setattr("pdv.emit.package.write_weights", raising(KeyError("x")))
        with pytest.raises(InternalError):
            plan.save(tmp_path / "other_pdv")
    assert not (tmp_path / "other_pdv").exists()
    with monkeypatch.context() as patch:
        patch.setattr("pdv.verification.package.check_program", raising(MemoryError()))
        patch.setattr("pdv.report.saved.reasons", raising(RecursionError()))
        for function in (pdv.verify, pdv.explain):
            with pytest.raises(InternalError) as caught:
                function(folder)
            assert (Path(caught.value.report) / "source.graph").exists()
    pdv.verify(folder)


def test_places_that_nobody_gets_to_are_the_users(reports: Path) -> None:
    with pytest.raises(UsageError, match=f"{'d' * 300} cannot be reached .File name too long"), guarded("this"):
        Path("d" * 300).exists()
    with pytest.raises(UsageError, match=r"x cannot be reached .Permission denied"), guarded("this"):
        raise PermissionError(13, "Permission denied", "x")
    with pytest.raises(InternalError), guarded("this"):
        raise PermissionError(13, "Permission denied")
    assert len(list(reports.iterdir())) == 1


def test_errors_of_the_users_and_interrupts_pass(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        planned(search="guess")
    for error in (KeyboardInterrupt(), SystemExit(3)):
        monkeypatch.setattr("pdv.compile.search_problems", raising(error))
        with pytest.raises(type(error)):
            planned()
    assert not reports.exists()


def test_exceptions_of_the_users_progress_function_pass(reports: Path) -> None:
    class Enough(Exception):
        pass

    with pytest.raises(Enough):
        planned(progress=raising(Enough()))
    assert not reports.exists()


def test_a_report_has_no_weights_and_no_large_constants(reports: Path) -> None:
    k = Builder()
    secret = np.full((5, 5), 31415.5, dtype=np.float32)
    x = k.linear(k.input("x", f32(5, 5)), k.param("w", f32(5, 5)))
    graph = k.graph({"y": k.add(x, k.const(secret))})
    fail = guarded("test")(lambda: note(graph) and raising(KeyError())())
    with pytest.raises(InternalError) as caught:
        fail()
    text = (Path(caught.value.report) / "source.graph").read_text()
    assert "31415" not in text
    assert parse_graph(text, constants(graph)).digest == graph.digest


def test_without_a_place_the_error_still_says_what(reports: Path) -> None:
    reports.parent.parent.mkdir(parents=True)
    reports.parent.touch()
    with pytest.raises(InternalError, match="no report could be kept") as caught, guarded("test"):
        raise KeyError("surprise")
    assert caught.value.report == ""
    assert "surprise" in str(caught.value)


def test_equal_failures_have_one_report_and_old_ones_go(reports: Path) -> None:
    for number in range(MOST_REPORTS + 5):
        for _ in range(2):
            with pytest.raises(InternalError), guarded("test"):
                raise KeyError(number)
    assert len(list(reports.iterdir())) == MOST_REPORTS


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    folder = plan.save(tmp_path / "plan_pdv")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("pdv.emit.package.write_weights", raising(OSError(28, "No space left on device")))
        with pytest.raises(WriteError, match="No space left"):
            plan.save(folder, overwrite=True)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "package":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PdvError, match="Input/output error"):
        plan.save(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_warning_that_the_caller_made_an_error_is_raised_as_it_is() -> None:
    with pytest.raises(UserWarning, match="asked for"), guarded("pdv.optimize"):
        raise UserWarning("asked for")
