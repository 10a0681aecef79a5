"""Proof that a parallel program computes what its source does, outputs and gradients, by evaluation over Z_p.

Entry point: ``verify_equal``. Floating-point tolerance plays no part: two programs that differ as expressions agree on
random inputs with a probability that is bounded and stated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.collectives import MOVES, cut
from ir.depth import Short, shorten
from ir.einsum import Data
from ir.errors import VerificationError
from ir.graph import Graph, Node
from ir.interpret import SINGLE, Evaluation, Moves, evaluate
from ir.mesh import Mesh
from ir.modular import PRIME, PrimeField
from ir.recording import Var
from ir.scale import Small, shrink
from ir.sharding import parse_sharding
from ir.verify import describe
from ir.views import Base, add_up, places, sources_of


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked, and how sure it is.

    Attributes:
        error_bound: the probability that programs that differ pass (see ``error_bound``).
        trials: independent evaluations.
        prime: the field's size.
        scaled: at which sizes, in words.
        seconds: it took.
    """

    error_bound: float
    trials: int
    prime: int
    scaled: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"equal to the source over Z_p (p = {self.prime}, {self.trials} trials, {self.scaled}); "
            f"probability of error below {self.error_bound:.1e}"
        )


def verify_equal(
    source: Graph,
    pcg: Graph,
    mesh: Mesh,
    *,
    seed: int = 0,
    trials: int = 2,
    gradients: bool = True,
    scale: bool = True,
    moves: Moves = MOVES,
) -> Proof:
    """Prove ``pcg`` on ``mesh`` equal to ``source``: outputs, buffer updates, and gradients by all stored tensors.

    Args:
        source: the serial program.
        pcg: the parallel program; its parameters may be views of the source's stored tensors.
        mesh: what ``pcg`` is for.
        seed: keys all randomness.
        trials: the error bound falls as a power of them.
        gradients: compare these too.
        scale: at small sizes; at the programs' own if False.
        moves: what the parallel operators do (tests seed mistakes here).

    Raises:
        ShardingError: if ``pcg`` is no legal PCG.
        VerificationError: naming the first output, update or parameter that differs.
    """
    started = time.perf_counter()
    _check_signature(source, pcg)
    whole = Short(source, pcg)
    for short in (shorten(source, pcg, mesh), whole) if scale else (whole,):
        small = shrink((short.source, short.pcg), mesh, scale=scale)
        _check_ties(small.graphs[1], small.mesh, small.stored)
        field = PrimeField(seed, trials)
        values = _draw(small, field)
        serial = evaluate(small.graphs[0], values, field=field)
        parallel = evaluate(small.graphs[1], values, mesh=small.mesh, field=field, moves=moves)
        _compare_outputs(serial, parallel)
        if _meet(short, small, serial, parallel):
            break
    degree = max(_degree(serial), _degree(parallel))
    if gradients:
        degree = max(degree, _compare_gradients(serial, parallel, small.stored, field))
    bound = error_bound((serial, parallel), degree, trials)
    note = f"{small.note}, {short.note}" if short.note else small.note
    return Proof(bound, trials, PRIME, note, time.perf_counter() - started)


def _meet(short: Short, small: Small, serial: Evaluation, parallel: Evaluation) -> bool:
    """Whether the programs have the same values where ``short`` stands for more layers only if they do."""
    pairs = ((serial.whole(small.nodes[a]), parallel.whole(small.nodes[b])) for a, b in short.pairs)
    return all(np.array_equal(a, b) for a, b in pairs)


def error_bound(evaluations: Sequence[Evaluation], degree: int, trials: int) -> float:
    """Probability that programs that differ agree on everything compared.

    Between functions known by name, every value is a polynomial over Z_p in the drawn values and the functions'
    values. Suppose that no two different argument tuples of one function collide in all trials. Then the functions'
    values are independent and uniform, and by Schwartz and Zippel two different polynomials of at most degree D agree
    in all trials with probability (D / p)^trials, independently over trials. Two different arguments of degree d
    collide in all trials with probability (d / p)^trials, or when their 64-bit hashes do; a function asked at n
    points has at most n² / 2 pairs. The bound is the sum of these, over all functions and both programs. D and d are
    those that the evaluations recorded. Functions are taken to be random; constants that are no small fractions too.
    The bound is about the programs evaluated: at small sizes where these were scaled (see ``ir.scale``).
    """
    bound = (degree / PRIME) ** trials
    names = {name for evaluation in evaluations for name in evaluation.calls}
    for name in sorted(names):
        asked = [evaluation.calls[name] for evaluation in evaluations if name in evaluation.calls]
        points = sum(calls.points for calls in asked)
        worst = max(calls.degree for calls in asked)
        bound += points**2 / 2 * ((worst / PRIME) ** trials + 2.0**-64)
    return min(bound, 1.0)


def _degree(evaluation: Evaluation) -> int:
    values = [evaluation.values[node] for node in evaluation.graph.roots]
    return max((value.degree for value in values if isinstance(value, Var)), default=1)


def _check_signature(source: Graph, pcg: Graph) -> None:
    """Both take and give the same, and the PCG trains no tensor that the source does not have."""
    for what, left, right in (
        ("inputs", [(x.attr("name"), x.type) for x in source.inputs], [(x.attr("name"), x.type) for x in pcg.inputs]),
        ("outputs", [(n, x.type) for n, x in source.outputs], [(n, x.type) for n, x in pcg.outputs]),
        ("updates", [(n, x.type) for n, x in source.updates], [(n, x.type) for n, x in pcg.updates]),
    ):
        if dict(left) != dict(right):
            raise VerificationError(f"{what} of the plan are {_listed(right)}, of the source {_listed(left)}")
    unknown = {x for node in pcg.params for x in sources_of(node)} - {
        x for node in source.params for x in sources_of(node)
    }
    if unknown:
        raise VerificationError(f"the plan stores {', '.join(sorted(unknown))}, which the source does not have")


def _listed(named: Sequence[tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}: {tensor}" for name, tensor in named) or "none"


def _check_ties(pcg: Graph, mesh: Mesh, found: Mapping[str, Base]) -> None:
    """Readers that share elements of a stored tensor must find them on the same ranks: a tie has one home."""
    readers: dict[str, list[Node]] = {}
    for node in pcg.params:
        for source in dict.fromkeys(sources_of(node)):
            readers.setdefault(source, []).append(node)
    for source, nodes in readers.items():
        for other in nodes[1:]:
            _check_tie(source, nodes[0], other, found, mesh)


def _check_tie(source: str, one: Node, other: Node, found: Mapping[str, Base], mesh: Mesh) -> None:
    held = []
    for node in (one, other):
        sharding = parse_sharding(node.attr("stored")) or ()
        held.append(cut(places(node, found)[None], sharding, mesh).reshape(mesh.num_devices, -1))
    shared = np.intersect1d(places(one, found), places(other, found))
    for rank in range(mesh.num_devices) if shared.size else ():
        first, second = (np.intersect1d(pieces[rank], shared) for pieces in held)
        if not np.array_equal(first, second):
            raise VerificationError(
                f"{one.name} and {other.name} read the same elements of {source}, but store them differently: "
                f"{one.attr('stored') or 'whole'} and {other.attr('stored') or 'whole'}",
                "A tied weight is stored once",
            )


def _draw(small: Small, field: PrimeField) -> dict[str, Data]:
    """Random values of all inputs and stored tensors, [trials, *shape]."""
    values: dict[str, Data] = {}
    for node in small.graphs[0].inputs:
        name = node.attr("name")
        drawn = field.random(f"input {name}", node.type.shape)
        if not node.type.dtype.is_floating:  # one draw for all trials: integers steer, and are not of the field
            most = 2 if node.type.dtype.value == "bool" else small.limits.get(name, 1 << 15)
            drawn = np.broadcast_to(drawn[:1] % most, drawn.shape)
            drawn = drawn.astype(bool) if node.type.dtype.value == "bool" else drawn
        values[name] = drawn
    for source, base in small.stored.items():
        values[source] = field.random(f"stored {source}", base.shape)
    return values


def _compare_outputs(serial: Evaluation, parallel: Evaluation) -> None:
    expected, found = serial.gather(), parallel.gather()
    for name, value in expected.items():
        if not np.array_equal(value, found[name]):
            raise VerificationError(
                f"{name} of the plan is not what the source computes",
                first_difference(serial, parallel),
                check="values",
            )


def first_difference(serial: Evaluation, parallel: Evaluation) -> str:
    """In words, the first node of the PCG whose value the source has nowhere; a hint, for rewrites make new values."""
    known = {serial.whole(node).tobytes() for node in serial.graph.nodes}
    for node in parallel.graph.nodes:
        try:
            same = parallel.whole(node).tobytes() in known
        except VerificationError as disagreement:
            return str(disagreement.what)
        if not same and not node.is_leaf:
            return f"The first value that the source does not have is {describe(node)} of {list(node.operands)}"
    return ""


def _compare_gradients(serial: Evaluation, parallel: Evaluation, stored: Mapping[str, Base], field: PrimeField) -> int:
    """Compare gradients of all stored tensors; the highest degree among them."""
    cotangents = {name: field.random(f"cotangent {name}", node.type.shape) for name, node in serial.graph.outputs}
    totals = []
    degree = 1
    for evaluation in (serial, parallel):
        gradients = evaluation.gradients(cotangents)
        degree = max(degree, *gradients.degrees.values(), 1)
        by_node = {node: evaluation.whole_gradient(node, gradients) for node in gradients.local}
        totals.append({source: total % PRIME for source, total in add_up(by_node, stored).items()})
    expected, found = totals
    for source, total in expected.items():
        if not np.array_equal(total, found.get(source, np.zeros_like(total))):
            raise VerificationError(f"the plan's gradient of {source} is not the source's", check="gradients")
    return degree


__all__ = ["SINGLE", "Proof", "error_bound", "verify_equal"]
