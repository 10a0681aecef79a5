"""What refuses a wrong graph, each layer of defence alone; and brute force at full size over what none refuses."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.mutation.edit import Edit, edited
from benchmarks.mutation.plans import Right
from ir.errors import PdvError, ShapeError, ShardingError, VerificationError
from ir.evaluation.collectives import MOVES
from ir.evaluation.interpret import SINGLE, Evaluation, evaluate
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof import exact
from ir.proof.exact import verify_equal
from ir.verify import check_outputs, infer_shardings
from ir.views import apply_view, read_stored
from pdv.check import check_text
from pdv.emit.emission import Emission
from pdv.frontend.program import Weights

LAYERS = ("validator", "signature", "values", "gradients", "text")
TOLERANCE = 1e-9
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        refused: the layers that refuse it alone, of ``LAYERS``.
        first: what refuses it as users meet it: a layer, or "nothing".
        equal: by brute force at full size; None where it was refused.
        note: what was said.
    """

    refused: frozenset[str]
    first: str
    equal: bool | None
    note: str
    seconds: float

    @property
    def survives(self) -> bool:
        """Nothing refused it, and it is wrong."""
        return self.equal is False


def judged(right: Right, edit: Edit, *, text: bool) -> Verdict | None:
    """The verdict of one mutant; None if there is no such program, or it is the right one."""
    started = time.process_time()
    try:
        mutant = edited(right.pcg, edit)
    except (ShapeError, AssertionError, KeyError, IndexError, ValueError):
        return None
    if mutant.digest == right.pcg.digest and not edit.moves and not _redeclared(right.pcg, mutant):
        return None
    first, note = _proof(right, mutant, edit)
    refused = {first} - {"nothing"}
    if first in ("validator", "signature"):
        refused |= _legal_alone(right, mutant)
    if first == "values" and _alone(right, mutant, edit, "_compare_outputs") == "gradients":
        refused.add("gradients")
    if first == "signature":
        refused |= {_alone(right, mutant, edit, "_check_signature", "_check_ties")} & set(LAYERS)
    if text and not edit.moves and "validator" not in refused and _text(right, mutant):
        refused.add("text")
    equal = None if first != "nothing" else brute_force(right.source, mutant, right.mesh, edit.all_moves)
    return Verdict(frozenset(refused), first, equal, note, time.process_time() - started)


def _redeclared(one: Graph, other: Graph) -> bool:
    return any(a.op != b.op for a, b in zip(one.nodes, other.nodes, strict=True))


def _proof(right: Right, mutant: Graph, edit: Edit, **given: bool) -> tuple[str, str]:
    """(the layer that refuses, what it says)."""
    try:
        verify_equal(right.source, mutant, right.mesh, moves=edit.all_moves, **given)
    except ShardingError as error:
        return "validator", str(error.what)
    except VerificationError as error:
        return (error.check if error.check in LAYERS else "signature"), str(error.what)
    except PdvError as error:
        return "validator", str(error)
    return "nothing", ""


def _legal_alone(right: Right, mutant: Graph) -> set[str]:
    try:
        check_outputs(mutant, infer_shardings(mutant, right.mesh))
    except (ShardingError, ShapeError):
        return {"validator"}
    return set()


def _alone(right: Right, mutant: Graph, edit: Edit, *off: str) -> str:
    """What refuses it once these checks are off."""
    with _without(*off):
        try:
            return _proof(right, mutant, edit)[0]
        except (AssertionError, ValueError, KeyError, IndexError):  # what these checks keep away
            return "crash"


@contextmanager
def _without(*checks: str) -> Iterator[None]:
    patches = [patch.object(exact, name, lambda *args, **kwargs: None) for name in checks]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _text(right: Right, mutant: Graph) -> bool:
    """Whether a run of its text refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_text(right.source, Emission.of(mutant, right.mesh, train=True), Weights({}))
    except Exception:  # noqa: BLE001  # whatever the emitter or the run raise
        return True
    return False


# ---- Brute force ----


def brute_force(source: Graph, mutant: Graph, mesh: Mesh, moves: Mapping[str, Any] = MOVES, seeds: int = 2) -> bool:
    """Whether a program gives what its source gives, outputs and gradients, in float64 at its own sizes."""
    return all(_agree(source, mutant, mesh, moves, np.random.default_rng((seed, 77))) for seed in range(seeds))


def _agree(source: Graph, mutant: Graph, mesh: Mesh, moves: Mapping[str, Any], rng: np.random.Generator) -> bool:
    given = drawn(source, rng)
    cotangents = {name: rng.normal(size=node.type.shape) for name, node in source.outputs}
    found = []
    for graph, on, its in ((source, SINGLE, MOVES), (mutant, mesh, moves)):
        try:
            with np.errstate(all="ignore"):
                run = evaluate(graph, given, mesh=on, moves=its)
                found.append({**run.gather(), **_gradients(run, cotangents, given)})
        except (PdvError, AssertionError, KeyError, ValueError, IndexError):
            assert graph is not source, "the source itself does not run"
            return False
    zero = np.zeros(())
    return all(
        np.allclose(found[0].get(name, zero), found[1].get(name, zero), rtol=TOLERANCE, atol=TOLERANCE * _most(found))
        for name in found[0].keys() | found[1].keys()
    )


def _most(found: list[dict[str, Array]]) -> float:
    """No more than one."""
    return min(1.0, max((float(np.abs(value).max()) for value in found[0].values() if value.size), default=1.0))


def drawn(source: Graph, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs and stored tensors; indices are of rows that their table has."""
    given: dict[str, Array] = {}
    for node in source.inputs:
        if node.type.dtype.is_floating:
            given[node.attr("name")] = rng.normal(size=node.type.shape)
        else:
            tables = [x.operands[0].type.shape[0] for x in source.nodes if x.op.kind == "index" and node in x.operands]
            given[node.attr("name")] = rng.integers(0, min(tables, default=2), node.type.shape)
    for node in source.params:  # read whole
        shape = node.type.shape
        given[node.attr("source")] = rng.uniform(0.5, 1.5, shape) * rng.choice(
            [-1, 1] if len(shape) > 1 else [1], shape
        )
    return given


def _gradients(run: Evaluation, cotangents: Mapping[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
    """Stored tensor -> the gradient of all that read it."""
    local = run.gradients(cotangents)
    totals: dict[str, Array] = {}
    places = {name: np.arange(value.size).reshape(value.shape) for name, value in given.items()}
    start = dict(zip(places, np.cumsum([0, *(value.size for value in places.values())]), strict=False))
    flat = np.zeros(sum(value.size for value in places.values()))

    def where(source: str, view: Any) -> Array:
        return apply_view(places[source] + start[source], view)

    for node in local.local:
        if node.is_param:
            np.add.at(flat, read_stored(node, where), run.whole_gradient(node, local)[0])
    for name, value in places.items():
        totals[f"gradient of {name}"] = flat[start[name] : start[name] + value.size]
    return totals
