"""The cache: a second search replays the first, an interrupted one resumes, and damage costs time alone."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ir.errors import NoPlanFitsError
from ir.mesh import Mesh
from pdv import cache as module
from pdv.cache import Cache, cached, default_directory, problem_key
from pdv.cost.compute import ComputeModel
from pdv.derivation import to_steps
from pdv.problem import Problem, Solution
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_meshes
from pdv.search.strategies import Budget, Strategy
from pdv.search.strategies.backtrack import backtrack
from tests.pdv import worlds

GRAPH = worlds.attention_block()
PROBLEMS = tuple(worlds.problem(GRAPH, mesh, rules=RULES) for mesh in (Mesh.of(a=2), Mesh.of(a=3)))


class Counted:
    """A strategy that counts how often it is asked."""

    def __init__(self, answer: Strategy = backtrack) -> None:
        self.times = 0
        self._answer = answer

    def __call__(self, problem: Problem, budget: Budget) -> Solution:
        self.times += 1
        return self._answer(problem, budget)


def silent(message: str) -> None:
    raise AssertionError(message)


def store(directory: Path, warn: Callable[[str], None] = silent) -> Cache:
    return Cache(directory, warn)


def test_a_second_search_is_a_replay(tmp_path: Path) -> None:
    counted = Counted()
    strategy = cached(counted, "backtrack", store(tmp_path), None)
    first = search_meshes(PROBLEMS, strategy=strategy)
    assert counted.times == 2
    second = search_meshes(PROBLEMS, strategy=strategy)
    assert counted.times == 2
    assert second.pcg.digest == first.pcg.digest
    assert to_steps(second.solution) == to_steps(first.solution)
    assert (second.cost.seconds, second.lower_bound_s, second.states) == (
        first.cost.seconds, first.lower_bound_s, first.states,
    )  # fmt: skip


def test_an_interrupted_search_resumes(tmp_path: Path) -> None:
    def interrupted(problem: Problem, budget: Budget) -> Solution:
        if problem is PROBLEMS[1]:
            raise KeyboardInterrupt
        return backtrack(problem, budget)

    with pytest.raises(KeyboardInterrupt):
        search_meshes(PROBLEMS, strategy=cached(interrupted, "backtrack", store(tmp_path), None))
    counted = Counted()
    search_meshes(PROBLEMS, strategy=cached(counted, "backtrack", store(tmp_path), None))
    assert counted.times == 1


def test_a_refusal_is_remembered(tmp_path: Path) -> None:
    tight = replace(PROBLEMS[0], memory_limit=10.0)
    counted = Counted()
    strategy = cached(counted, "backtrack", store(tmp_path), None)
    messages = []
    for _ in range(2):
        with pytest.raises(NoPlanFitsError) as caught:
            strategy(tight, Budget())
        messages.append((str(caught.value), caught.value.needed_bytes, caught.value.bound_s))
    assert counted.times == 1
    assert messages[0] == messages[1]


def test_what_a_budget_cut_short_is_not_kept(tmp_path: Path) -> None:
    counted = Counted(lambda problem, budget: replace(backtrack(problem, budget), complete=False))
    strategy = cached(counted, "backtrack", store(tmp_path), None)
    for _ in range(2):
        strategy(PROBLEMS[0], Budget())
    assert counted.times == 2


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[0]
    compute = problem.compute
    assert isinstance(compute, ComputeModel)
    device = replace(compute.devices[0], memory_bandwidth_bytes_per_s=2e9)
    others = [
        replace(problem, mode="infer"),
        replace(problem, memory_limit=1e9),
        replace(problem, working_limit=1e9),
        replace(problem, rules=RULES[:-1]),
        replace(problem, graph=worlds.attention_block(fused=False)),
        replace(problem, compute=replace(compute, devices=(device,))),
        PROBLEMS[1],
    ]
    keys = [problem_key(entry, "backtrack", Budget(), None) for entry in (problem, *others)]
    keys += [problem_key(problem, "ilp", Budget(), None), problem_key(problem, "backtrack", Budget(seed=1), None)]
    keys += [problem_key(problem, "backtrack", Budget(), "{}")]
    monkeypatch.setattr(module, "code_digest", lambda: "another version")
    keys += [problem_key(problem, "backtrack", Budget(), None)]
    assert len(set(keys)) == len(keys)


def test_what_another_version_wrote_is_written_anew_without_complaint(tmp_path: Path) -> None:
    store(tmp_path).put("abc", {"x": 1})
    (entry,) = tmp_path.rglob("*.json")
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "format": module.FORMAT + 1}))
    assert store(tmp_path).get("abc") is None
    store(tmp_path).put("abc", {"x": 2})
    assert store(tmp_path).get("abc") == {"x": 2}


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no-json": lambda text: "not JSON",
    "a-list": lambda text: "[]",
    "changed": lambda text: text.replace("lower_bound_s", "lower_bound_x"),
    "binary": lambda text: "\0" * 40,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_ignored_and_written_again(name: str, tmp_path: Path) -> None:
    warnings: list[str] = []
    counted = Counted()
    strategy = cached(counted, "backtrack", store(tmp_path, warnings.append), None)
    first = strategy(PROBLEMS[0], Budget())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(DAMAGE[name](path.read_text()))
    assert strategy(PROBLEMS[0], Budget()).cost_s == first.cost_s
    assert counted.times == 2
    assert len(warnings) == 1
    strategy(PROBLEMS[0], Budget())
    assert (counted.times, len(warnings)) == (2, 1)


def test_an_entry_that_does_not_replay_is_ignored(tmp_path: Path) -> None:
    warnings: list[str] = []
    kept = store(tmp_path, warnings.append)
    key = problem_key(PROBLEMS[0], "backtrack", Budget(), None)
    entry = {"steps": [{"rule": "split-linear-q", "bindings": {"axis": "a"}, "sites": [0]}], "algebra": []}
    kept.put(key, {"solution": entry | dict.fromkeys(["cost_s", "memory_bytes", "lower_bound_s"], 1.0)})
    counted = Counted()
    cached(counted, "backtrack", kept, None)(PROBLEMS[0], Budget())
    assert (counted.times, len(warnings)) == (1, 1)
    assert "does not replay" in warnings[0]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings: list[str] = []
    cached(backtrack, "backtrack", store(tmp_path / "file", warnings.append), None)(PROBLEMS[0], Budget())
    assert any("cannot be written" in warning for warning in warnings)


def write_many(directory: str) -> None:
    kept = store(Path(directory))
    for number in range(50):
        kept.put("0" * 64, {"number": number, "text": "x" * 10_000})
        assert kept.get("0" * 64) is not None


def test_runs_may_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=write_many, args=(str(tmp_path),)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert len(list(tmp_path.rglob("*"))) == 2  # a folder and one whole entry, nothing left aside
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text())["entry"]["number"] == 49


def test_the_default_folder() -> None:
    assert default_directory({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/pdv")
    assert default_directory({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/pdv"
    assert default_directory({}) == Path.home() / ".cache/pdv"
