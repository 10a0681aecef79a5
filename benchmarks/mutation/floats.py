"""Whether two programs agree in float64, with the real functions: another way than the proof's to see that they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.errors import ShardingError, VerificationError
from ir.evaluation.interpret import SINGLE, evaluate
from ir.graph import Graph
from ir.mesh import Mesh

Arrays = dict[str, Any]  # Any: float64 arrays of any shape


def agree(one: Graph, other: Graph, seed: int, *, mesh: Mesh = SINGLE) -> bool:
    """Outputs and gradients of ``one`` on one device, and of ``other`` on ``mesh``, on the same random numbers.

    Numbers of either sign, where both programs are finite there; and numbers around one, where roots are too.
    """
    compared = 0
    for signed in (True, False):
        given = _drawn((one, other), np.random.default_rng((seed, signed)), signed=signed)
        rng = np.random.default_rng((seed, 2))
        cotangents = {name: rng.normal(size=node.type.shape) for name, node in one.outputs}
        try:
            left, right = _run(one, given, cotangents, SINGLE), _run(other, given, cotangents, mesh)
        except (VerificationError, ShardingError, ValueError, AssertionError):  # ranks disagree, or shapes do
            return False
        if signed and not all(np.isfinite(value).all() for found in (left, right) for value in found.values()):
            continue
        if not _close(left, right):
            return False
        compared += 1
    return compared > 0


def _drawn(graphs: tuple[Graph, Graph], rng: np.random.Generator, *, signed: bool) -> Arrays:
    """Leaves by name; indices are such that every table has the row."""
    leaves = {node.name: node for graph in graphs for node in graph.nodes if node.is_leaf}
    rows = [node.type.shape[0] for node in leaves.values() if node.type.dtype.is_floating and node.type.rank]
    given: Arrays = {}
    for name, node in sorted(leaves.items()):
        shape = node.type.shape
        if not node.type.dtype.is_floating:
            given[name] = rng.integers(0, min([2, *rows]), shape)
        else:
            given[name] = rng.normal(size=shape) if signed else rng.uniform(0.5, 1.5, shape)
    return given


def _run(graph: Graph, given: Mapping[str, Any], cotangents: Mapping[str, Any], mesh: Mesh) -> Arrays:
    with np.errstate(all="ignore"):
        found = evaluate(graph, given, mesh=mesh)
        gradients = {f"gradient {name}": value for name, value in found.gather_gradients(cotangents).items()}
        return {**found.gather(), **gradients}


def _close(left: Arrays, right: Arrays) -> bool:
    """A gradient that one side does not have is zero."""
    zero = np.zeros(())
    return all(
        np.allclose(left.get(name, zero), right.get(name, zero), rtol=1e-9, atol=1e-9)
        for name in left.keys() | right.keys()
    )
