"""The cache: a second search replays the first, an interrupted one resumes; damage and forgery cost time alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ir.errors import NoPlanFitsError, UsageError
from ir.mesh import Mesh
from pdv.cluster.host import slowest_host
from pdv.cost.compute import ComputeModel
from pdv.folders import cache_folder, state_folder
from pdv.own_key import own_key
from pdv.plan import cache as module
from pdv.plan.cache import Cache, open_cache, problem_key, with_cache
from pdv.plan.derivation import to_steps
from pdv.planning.search import cache_in
from pdv.problem import Problem, Solution
from pdv.problem.formats import FORMATS, Products
from pdv.problem.fused import Fused
from pdv.problem.precision import PRECISIONS
from pdv.problem.problem import idle, ungathered
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_meshes
from pdv.search.strategies import Budget, Strategy
from pdv.search.strategies.backtrack import backtrack
from tests.pdv import worlds

GRAPH = worlds.attention_block()
PROBLEMS = tuple(worlds.problem(GRAPH, mesh, rules=RULES) for mesh in (Mesh.of(a=2), Mesh.of(a=3)))


KEY, OTHER = b"k" * 32, b"o" * 32


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
    return Cache(directory, warn, KEY)


def test_a_second_search_is_a_replay(tmp_path: Path) -> None:
    counted = Counted()
    strategy = with_cache(counted, "backtrack", store(tmp_path), None)
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
        search_meshes(PROBLEMS, strategy=with_cache(interrupted, "backtrack", store(tmp_path), None))
    counted = Counted()
    search_meshes(PROBLEMS, strategy=with_cache(counted, "backtrack", store(tmp_path), None))
    assert counted.times == 1


def test_a_refusal_is_remembered(tmp_path: Path) -> None:
    tight = replace(PROBLEMS[0], memory_limit=10.0)
    counted = Counted()
    strategy = with_cache(counted, "backtrack", store(tmp_path), None)
    messages = []
    for _ in range(2):
        with pytest.raises(NoPlanFitsError) as caught:
            strategy(tight, Budget())
        messages.append((str(caught.value), caught.value.needed_bytes, caught.value.bound_s))
    assert counted.times == 1
    assert messages[0] == messages[1]


def test_what_a_budget_cut_short_is_not_kept(tmp_path: Path) -> None:
    counted = Counted(lambda problem, budget: replace(backtrack(problem, budget), complete=False))
    strategy = with_cache(counted, "backtrack", store(tmp_path), None)
    for _ in range(2):
        strategy(PROBLEMS[0], Budget())
    assert counted.times == 2


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[0]
    compute = problem.compute
    assert isinstance(compute, ComputeModel)
    device = replace(compute.devices[0], memory_bandwidth_bytes_per_s=2e9)
    axis, other = problem.axes[0], PROBLEMS[1]
    changed: dict[str, object] = {
        "graph": worlds.attention_block(fused=False), "mesh": other.mesh, "axes": (axis, axis), "mode": "infer",
        "compute": replace(compute, devices=(device,)), "memory_limit": 1e9, "working_limit": 1e9,
        "pins": ungathered(problem).pins, "rules": RULES[:-1], "leaving": problem.exits[0], "rows": not problem.rows,
        "once": 0.5, "several": True, "resting": 0.5, "bucket_bytes": 1e6, "adding_s": 1e-9, "hides": True,
        "lean": True, "precision": PRECISIONS["mixed"], "versions": 2,
        "products": Products(FORMATS["fp8"], frozenset()), "host": slowest_host([device]),
        "fused": Fused({"a": 0.5}), "slowed": 0.5, "last": problem.graph.nodes[-1],
    }  # fmt: skip
    assert changed.keys() == {entry.name for entry in fields(Problem)}
    others = [replace(problem, **{name: value}) for name, value in changed.items()]  # type: ignore[arg-type]
    keys = [problem_key(entry, "backtrack", Budget(), None) for entry in (problem, *others)]
    keys += [problem_key(problem, "ilp", Budget(), None), problem_key(problem, "backtrack", Budget(seed=1), None)]
    keys += [problem_key(problem, "backtrack", Budget(), "{}")]
    idles = [idle(problem, [axis.name]) for axis in problem.mesh.axes]
    keys += [problem_key(entry, "backtrack", Budget(), None) for entry in idles]
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
    strategy = with_cache(counted, "backtrack", store(tmp_path, warnings.append), None)
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
    with_cache(counted, "backtrack", kept, None)(PROBLEMS[0], Budget())
    assert (counted.times, len(warnings)) == (1, 1)
    assert "does not replay" in warnings[0]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings: list[str] = []
    with_cache(backtrack, "backtrack", store(tmp_path / "file", warnings.append), None)(PROBLEMS[0], Budget())
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


def forged(text: str) -> str:
    """An entry with a bound that was never found, and a checksum that fits."""
    stored = json.loads(text)
    stored["entry"]["solution"]["lower_bound_s"] = stored["entry"]["solution"]["cost_s"]
    canonical = json.dumps(stored["entry"], sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    return json.dumps({**stored, "check": digest, "mac": hmac.digest(OTHER, canonical, "sha256").hex()})


def test_a_forged_bound_is_not_believed(tmp_path: Path) -> None:
    warnings: list[str] = []
    counted = Counted(lambda problem, budget: replace(backtrack(problem, budget), lower_bound_s=1e-9))
    strategy = with_cache(counted, "backtrack", store(tmp_path, warnings.append), None)
    strategy(PROBLEMS[0], Budget())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(forged(path.read_text()))
    assert strategy(PROBLEMS[0], Budget()).lower_bound_s == 1e-9
    assert counted.times == 2
    assert ["written with another key" in warning for warning in warnings] == [True]


def test_an_entry_answers_its_own_problem_alone(tmp_path: Path) -> None:
    warnings: list[str] = []
    kept = store(tmp_path, warnings.append)
    kept.put("one", {"x": 1})
    (first,) = tmp_path.rglob("*.json")
    text = first.read_text()
    kept.put("two", {"x": 2})
    (second,) = set(tmp_path.rglob("*.json")) - {first}
    second.write_text(text)
    assert kept.get("two") is None
    assert len(warnings) == 1


def test_users_who_share_a_folder_read_their_own_entries_alone(tmp_path: Path) -> None:
    mine, theirs = store(tmp_path), Cache(tmp_path, silent, OTHER)
    mine.put("one", {"x": 1})
    assert theirs.get("one") is None
    theirs.put("one", {"x": 2})
    assert (mine.get("one"), theirs.get("one")) == ({"x": 1}, {"x": 2})


def test_without_a_key_nothing_is_read_or_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", silent, None)
    cache.put("one", {"x": 1})
    assert cache.get("one") is None
    assert not (tmp_path / "cache").exists()


def test_the_key_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    key = own_key(tmp_path / "state" / "pdv", silent)
    path = tmp_path / "state" / "pdv" / "cache.key"
    assert key == path.read_bytes() == own_key(tmp_path / "state" / "pdv", silent)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def make_key(folder: str, made: str) -> None:
    Path(made).write_bytes(own_key(Path(folder), silent) or b"")


def test_runs_that_make_the_key_at_once_have_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=make_key, args=(str(tmp_path / "s"), str(tmp_path / str(i)))) for i in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    keys = {(tmp_path / str(i)).read_bytes() for i in range(8)}
    assert len(keys) == 1
    assert len(keys.pop()) == 32


NO_KEYS: dict[str, Callable[[Path], object]] = {
    "readable by others": lambda path: (path.write_bytes(b"k" * 32), path.chmod(0o644)),
    "short": lambda path: (path.write_bytes(b"k"), path.chmod(0o600)),
    "long": lambda path: (path.write_bytes(b"k" * 33), path.chmod(0o600)),
    "a link": lambda path: (path.with_name("x").write_bytes(b"k" * 32), path.symlink_to(path.with_name("x"))),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("name", NO_KEYS)
def test_what_is_no_key_of_ones_own_is_a_warning(name: str, tmp_path: Path) -> None:
    NO_KEYS[name](tmp_path / "cache.key")
    warnings: list[str] = []
    assert own_key(tmp_path, warnings.append) is None
    assert ["searches are not kept" in warning for warning in warnings] == [True]


def test_no_place_for_a_key_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        warnings: list[str] = []
        assert own_key(folder, warnings.append) is None
        assert len(warnings) == 1


def test_the_oldest_entries_go_and_nothing_else(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(4):
        kept.put(str(number), {"number": number})
        (path,) = (
            path for path in tmp_path.rglob("*.json") if json.loads(path.read_text())["entry"]["number"] == number
        )
        os.utime(path, (1e9 + number, 1e9 + number))
    (tmp_path / "notes.json").write_text("the user's")
    (path.parent / "mine.txt").write_text("the user's")
    size = path.stat().st_size
    kept.prune(most_bytes=2 * size, most_seconds=math.inf)
    assert [kept.get(str(number)) is not None for number in range(4)] == [False, False, True, True]
    kept.prune(most_seconds=60.0)
    assert [kept.get(str(number)) for number in range(4)] == [None] * 4
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"notes.json", "mine.txt"}


def test_a_search_prunes(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.put("old", {"x": 1})
    (path,) = tmp_path.rglob("*.json")
    os.utime(path, (1e9, 1e9))
    with_cache(backtrack, "backtrack", kept, None)
    assert not path.exists()


def test_a_cache_is_opened_with_the_key_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cache = open_cache(tmp_path / "cache", silent)
    assert cache.key == (tmp_path / "state/pdv/cache.key").read_bytes()


def test_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for folder, variable, usual in (
        (cache_folder, "XDG_CACHE_HOME", ".cache"),
        (state_folder, "XDG_STATE_HOME", ".local/state"),
    ):
        assert folder({variable: "/somewhere"}) == Path("/somewhere/pdv")
        assert folder({variable: "relative"}) == folder({}) == Path.home() / usual / "pdv"

    for home in ("", "relative"):  # which would be folders of the root, and of wherever one is
        monkeypatch.setenv("HOME", home)
        assert (cache_folder(os.environ), state_folder(os.environ)) == (None, None)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert (cache_folder({}), state_folder({})) == (None, None)


def test_what_is_no_directory_is_no_cache() -> None:
    with pytest.raises(UsageError, match="cache False is no directory"):
        cache_in(False)  # type: ignore[arg-type]
