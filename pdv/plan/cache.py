"""Searches that were made before: one file for each problem solved, by a digest of all that the answer depends on.

A value is a derivation with its bound, as JSON; a hit is replayed, and its plan is priced and proved like any other. A
bound cannot be checked without searching again: entries are authenticated by a key of the user's own, which lies
outside of the cache, together with the problem that they answer. Of others' entries in a shared folder nothing is read.
Entries appear whole or not at all (written aside, then renamed), so runs may share a directory and may be interrupted:
what was solved before stays. A damaged entry is ignored with a warning and written again. The oldest go when the cache
is too large or they are too old.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache as remembered
from pathlib import Path
from typing import Any

from ir.errors import NoPlanFitsError, PdvError
from pdv import config
from pdv.folders import state_folder
from pdv.own_key import own_key
from pdv.plan.derivation import replay_steps, to_steps
from pdv.problem import AlgebraicStep, Problem, Solution
from pdv.problem.problem import allow_none
from pdv.search.strategies.budget import Budget, Strategy

FORMAT = 3
CODE = ("ir", "pdv", "learned_cost")  # packages whose code decides what a search finds
Entry = dict[str, Any]  # Any: JSON
ENTRY = re.compile(r"[0-9a-f]{62}\.json|\.[^/]*\.json")  # an entry, or one that an interrupted run left aside
FOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Cache:
    """A directory of solved problems; ``warn`` is told about entries that cannot be read or written.

    ``key`` authenticates entries; without one (None) nothing is read or kept.
    """

    directory: Path
    warn: Callable[[str], None]
    key: bytes | None

    def get(self, key: str) -> Entry | None:
        """What is known under a key, if it is whole and this user's."""
        path = self._path(key)
        if path is None:
            return None
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            self.warn(f"cache entry {path} cannot be read and is ignored: {error}")
            return None
        try:
            stored = json.loads(text)
            if stored["format"] != FORMAT:
                return None  # of another version, which wrote what it needs; this one writes it anew
            entry = stored["entry"]
            if not hmac.compare_digest(str(stored["mac"]), self._mac(key, entry)) or not isinstance(entry, dict):
                raise ValueError("it was changed, or written with another key")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self.warn(f"cache entry {path} is damaged and is ignored: {error}")
            return None
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry; a directory that cannot be written is a warning."""
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".", suffix=".json", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"format": FORMAT, "mac": self._mac(key, entry), "entry": entry}, file)
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self.warn(f"the cache {self.directory} cannot be written ({error.strerror}); nothing is kept there")

    def prune(self, most_bytes: int = config.CACHE_BYTES, most_seconds: float = config.CACHE_S) -> None:
        """Remove entries that are too old, and the oldest beyond ``most_bytes``; nothing that is no entry."""
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for folder in self.directory.iterdir():
                if FOLDER.fullmatch(folder.name) and folder.is_dir():
                    files = [path for path in folder.iterdir() if ENTRY.fullmatch(path.name)]
                    facts = [(path.lstat(), path) for path in files]
                    found += [(fact.st_mtime, fact.st_size, path) for fact, path in facts]
        kept, now = 0, time.time()
        for written, num_bytes, path in sorted(found, reverse=True):
            kept += num_bytes
            if kept > most_bytes or now - written > most_seconds:
                with suppress(OSError):  # another run removed it, or another user wrote it
                    path.unlink()

    def _path(self, key: str) -> Path | None:
        """Where an entry lies: only who has the user's key knows."""
        if self.key is None:
            return None
        name = hmac.digest(self.key, f"name {key}".encode(), "sha256").hex()
        return self.directory / name[:2] / f"{name[2:]}.json"

    def _mac(self, key: str, entry: object) -> str:
        """Of an entry as the answer to one problem."""
        assert self.key is not None, "asked only where there is a path"
        text = json.dumps(entry, sort_keys=True)
        return hmac.digest(self.key, f"entry {key} {text}".encode(), "sha256").hex()


def open_cache(directory: Path, warn: Callable[[str], None]) -> Cache:
    """A cache in a directory, under the key of the user who runs this."""
    return Cache(directory, warn, own_key(state_folder(os.environ), warn))


def with_cache(strategy: Strategy, name: str, store: Cache, pins: str | None) -> Strategy:
    """The strategy, asked only for what is not in the cache yet; what a budget cut short is not kept.

    ``pins`` is what the problems' pins say (None: nothing is pinned).
    """
    store.prune()

    def ask(problem: Problem, budget: Budget) -> Solution:
        key = problem_key(problem, name, budget, pins)
        known = store.get(key)
        if known is not None:
            solution = _restore(known, problem, store)
            if solution is not None:
                return solution
        clock = budget.clock()
        try:
            solution = strategy(problem, budget)
        except NoPlanFitsError as error:
            if clock.left_s > 0 and not error.cut:
                limits = {"needed_bytes": error.needed_bytes, "bound_s": error.bound_s}
                store.put(key, {"refused": {**_parts(error), **limits}})
            raise
        if solution.complete:
            store.put(key, {"solution": _write(solution)})
        return solution

    return ask


def problem_key(problem: Problem, strategy: str, budget: Budget, pins: str | None) -> str:
    """A digest of all that a strategy's answer depends on: the problem, the pins, the rules, and this very code."""
    parts = (
        FORMAT,
        [node.name for node in problem.graph.nodes] if pins is not None else [],
        [(entry.name, _field_key(problem, entry.name)) for entry in fields(Problem)],
        pins,
        strategy,
        budget.seed,
        budget.effort,
        code_digest(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _field_key(problem: Problem, name: str) -> object:
    """What a field of the problem says, as text or plain data; of all but these its text says it."""
    match name:
        case "graph":
            return problem.graph.digest
        case "compute":
            return problem.compute.identity
        case "rules":
            return [f"{rule.name}: {rule.equation}" for rule in problem.rules]
        case "products":
            return problem.products and (problem.products.format, sorted(map(str, problem.products.kept)))
        case "fused":
            return problem.fused and problem.fused.identity
        case "pins":  # those that a caller gave have a text of their own
            return problem.pins.gathers is allow_none, problem.pins.name
        case "mesh":
            return str(problem.mesh)
        case "last":
            return None if problem.last is None else problem.graph.nodes.index(problem.last)
    return repr(getattr(problem, name))


@remembered
def code_digest() -> str:
    """Of the source text of everything that a search runs through."""
    root = Path(__file__).parents[2]
    files = sorted(path for package in CODE for path in (root / package).rglob("*") if path.suffix in {".py", ".laws"})
    total = hashlib.sha256()
    for path in files:
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _write(solution: Solution) -> Entry:
    return {
        "algebra": [asdict(step) for step in solution.steps],
        "steps": to_steps(solution),
        "cost_s": solution.cost_s,
        "memory_bytes": solution.memory_bytes,
        "lower_bound_s": solution.lower_bound_s,
        "states": solution.states,
        "variants": solution.variants,
    }


def _restore(entry: Entry, problem: Problem, store: Cache) -> Solution | None:
    """The solution of an entry, replayed.

    Raises:
        NoPlanFitsError: if that is what is known.
    """
    try:
        if "refused" in entry:
            refused = entry["refused"]
            raise NoPlanFitsError(
                refused["what"],
                refused["allowed"],
                refused["mend"],
                needed_bytes=float(refused["needed_bytes"]),
                bound_s=float(refused["bound_s"]),
            )
        known = entry["solution"]
        graph, assignment = replay_steps(problem, known["steps"])
        return Solution(
            problem,
            graph,
            tuple(AlgebraicStep(**step) for step in known["algebra"]),
            assignment,
            known["cost_s"],
            known["memory_bytes"],
            known["lower_bound_s"],
            known["states"],
            known["variants"],
        )
    except NoPlanFitsError:
        raise
    except (LookupError, TypeError, ValueError, PdvError) as error:
        store.warn(f"an entry of the cache {store.directory} does not replay and is ignored: {error!r}")
        return None


def _parts(error: PdvError) -> dict[str, str]:
    return {"what": error.what, "allowed": error.allowed, "mend": error.mend}
