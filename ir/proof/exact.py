"""Proof that a parallel program computes what its source does, outputs and gradients, by evaluation over Z_p.

Entry point: ``verify_equal``. Floating-point tolerance plays no part: two programs that differ as expressions agree on
random inputs with a probability that is bounded and stated. What is claimed, and why it holds: docs/proof.md.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.errors import VerificationError
from ir.evaluation.collectives import MOVES, cut
from ir.evaluation.einsum import Data
from ir.evaluation.field import Var
from ir.evaluation.interpret import SINGLE, Evaluation, Gradients, Moves, evaluate
from ir.evaluation.modular import PrimeField
from ir.evaluation.polynomial import ONE, Size
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.proof.depth import Short, cut_apart, shorten
from ir.proof.primes import LEAST, PRIMES, draw_primes
from ir.scaling.scale import Shrinking, Small
from ir.sharding import parse_sharding
from ir.types import DType
from ir.verify import describe
from ir.views import Base, add_up, places, sources_of

MOST_ERROR = 1e-6  # of a proof worth its name; where the bound is larger, more trials make it smaller
MOST_TRIALS = 5
FULL_SIZE = "full size"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked, and how sure it is.

    Attributes:
        error_bound: the probability that programs that differ pass (see ``error_bound``).
        primes: of the fields computed in, one a trial.
        scaled: at which sizes, in words.
        seconds: it took.
    """

    error_bound: float
    primes: tuple[int, ...]
    scaled: str
    seconds: float

    @property
    def trials(self) -> int:
        """Independent evaluations."""
        return len(self.primes)


def verify_equal(
    source: Graph,
    pcg: Graph,
    mesh: Mesh,
    *,
    seed: int = 0,
    trials: int = 3,
    gradients: bool = True,
    scale: bool = True,
    moves: Moves = MOVES,
    field_of: type[PrimeField] = PrimeField,
) -> Proof:
    """Prove ``pcg`` on ``mesh`` equal to ``source``: outputs, buffer updates, and gradients by all stored tensors.

    Args:
        source: the serial program.
        pcg: the parallel program; its parameters may be views of the source's stored tensors.
        mesh: what ``pcg`` is for.
        seed: keys all randomness, together with a hash of both programs.
        trials: primes to compute with; more, where so few leave too large an error.
        gradients: compare these too.
        scale: at two sets of small sizes; at the programs' own if False.
        moves: what the parallel operators do (tests seed mistakes here).
        field_of: what is computed in.

    Raises:
        ShardingError: if ``pcg`` is no legal PCG.
        VerificationError: naming the first output, update or parameter that differs.
    """
    started = time.perf_counter()
    _check_signature(source, pcg)
    _check_indices(source, pcg)
    key = f"{seed}/{source.digest}/{pcg.digest}/{mesh}"
    pair = functools.partial(_Pair, key=key, gradients=gradients, moves=moves, field_of=field_of)
    check = functools.partial(_check, pair=pair, mesh=mesh, trials=trials, scale=scale)
    short = shorten(source, pcg, mesh) if scale else Short(source, pcg)
    found = check(short)
    if found is None:
        found = check(short := Short(source, pcg))
    assert found is not None, "the whole programs have no values between layers to disagree about"
    if found[0] > MOST_ERROR and (apart := cut_apart(short, mesh)) is not None:
        found = check(apart) or found
    bound, primes, notes = found
    if bound > MOST_ERROR:
        raise VerificationError(
            f"the programs agree, but programs that differ would too with probability {bound:.1e}",
            f"At most {MOST_ERROR:.0e}",
            "Report which part of the model makes products of so many factors",
        )
    return Proof(bound, primes, notes, time.perf_counter() - started)


def _check(
    short: Short, pair: Callable[[Short, Small], _Pair], mesh: Mesh, trials: int, *, scale: bool
) -> tuple[float, tuple[int, ...], str] | None:
    """The largest error bound, the primes, and at which sizes; None if values between layers differ."""
    pairs = [pair(short, small) for small in _smalls(short, mesh, scale)]
    found = [entry for one in pairs if (entry := one.check(trials)) is not None]
    if len(found) < len(pairs):
        return None
    notes = [*dict.fromkeys(one.small.note or FULL_SIZE for one in pairs), *([short.note] if short.note else [])]
    return max(bound for bound, _ in found), max((primes for _, primes in found), key=len), ", ".join(notes)


def _smalls(short: Short, mesh: Mesh, scale: bool) -> Iterator[Small]:
    """The programs at the sizes to evaluate them at: two different ones, unless the first are their own."""
    shrinking = Shrinking((short.source, short.pcg), mesh, symbols=scale)
    first = shrinking.at(0) if scale else shrinking.full()
    yield first
    if first.note:
        yield shrinking.at(1)


def error_bound(evaluations: Sequence[Evaluation], compared: Sequence[Size], trials: int) -> float:
    """Probability that programs that differ agree on everything compared.

    Between functions known by name, every value is a polynomial N / D over the integers in the drawn values and the
    functions' values. Suppose that no two different argument tuples of one function collide in all trials. Then the
    functions' values are independent and uniform. Two different polynomials agree in a trial if the prime divides all
    coefficients of their difference, or by Schwartz and Zippel with probability (degree / p) else; both are bounded by
    ``_chance``, independently over trials. Two different arguments collide in all trials with that probability, or,
    being rows, when their 64-bit hashes do; a function asked at n points has at most n² / 2 pairs. The bound is the sum
    of these, over all functions and both programs, with the sizes that the evaluations recorded. Functions are taken to
    be random, and so is the hash that primes and values are drawn from.
    The bound is about the programs evaluated: at small sizes where these were scaled (docs/proof.md).
    """
    bound = _chance(functools.reduce(Size.plus, compared)) ** trials
    names = {name for evaluation in evaluations for name in evaluation.calls}
    for name in sorted(names):
        asked = [evaluation.calls[name] for evaluation in evaluations if name in evaluation.calls]
        points = sum(calls.points for calls in asked)
        worst = _chance(functools.reduce(Size.plus, (calls.size for calls in asked)))
        bound += points**2 / 2 * (worst**trials + asked[0].hashed * 2.0**-64)
    return min(bound, 1.0)


def _chance(size: Size) -> float:
    """Of two different polynomials to agree in one trial, both within ``size``.

    A coefficient of their difference is below 2^height, so that at most height / 30 primes above 2^30 divide it.
    """
    if math.isinf(size.height):
        return 1.0
    return min(size.degree / LEAST + size.height // math.log2(LEAST) / PRIMES, 1.0)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both programs at small sizes, to be evaluated and compared."""

    short: Short
    small: Small
    key: str
    gradients: bool
    moves: Moves
    field_of: type[PrimeField]

    def check(self, trials: int) -> tuple[float, tuple[int, ...]] | None:
        """(error bound, primes) if the programs agree; None if they do not between the layers that were left out.

        More trials than asked for, where these make the error small enough.

        Raises:
            VerificationError: if they do not agree.
        """
        _check_ties(self.small.graphs[1], self.small.mesh, self.small.stored)
        for number in range(trials, MOST_TRIALS + 1):
            primes = draw_primes(self.key, number)
            bound = self._bound(self.field_of(f"{self.key}/{self.small.note}", primes))
            if bound is None or bound <= MOST_ERROR:
                break
        return None if bound is None else (bound, primes)

    def _bound(self, field: PrimeField) -> float | None:
        """The error bound of one evaluation of both; None if they disagree between layers."""
        fresh = self._fresh(field)
        if len(fresh[0]) != len(fresh[1]):  # one value of a program stands for two of the other
            return None
        values = _draw(self.small, field)
        loops, mesh = self.small.loops, self.small.mesh
        serial = evaluate(self.small.graphs[0], values, field=field, fresh=fresh[0], loops=loops)
        parallel = evaluate(
            self.small.graphs[1], values, mesh=mesh, field=field, moves=self.moves, fresh=fresh[1], loops=loops
        )
        for one, other in zip(fresh[0], fresh[1], strict=True):
            if not np.array_equal(serial.whole_arrived(one), parallel.whole_arrived(other)):
                return None
        _compare_outputs(serial, parallel)
        compared = [ONE, *_sizes(serial), *_sizes(parallel)]
        bound = error_bound((serial, parallel), compared, field.trials)
        if not self.gradients or bound > MOST_ERROR:  # gradients only add to it
            return bound
        compared += _compare_gradients(serial, parallel, self.small.stored, field)
        return error_bound((serial, parallel), compared, field.trials)

    def _fresh(self, field: PrimeField) -> tuple[dict[Node, Data], dict[Node, Data]]:
        """What the readers of the values between layers get, in the source and in the PCG: any value, the same."""
        first: dict[Node, Data] = {}
        second: dict[Node, Data] = {}
        for number, pair in enumerate(self.short.pairs):
            one, other = (self.small.nodes[node] for node in pair)
            first[one] = second[other] = field.random(f"boundary {number}", one.type.shape)
        return first, second


def _sizes(evaluation: Evaluation) -> list[Size]:
    """Bounds on what is compared: outputs, updates, and values between layers."""
    values = [evaluation.values[node] for node in evaluation.graph.roots] + list(evaluation.arrived.values())
    return [value.size for value in values if isinstance(value, Var)]


def _check_signature(source: Graph, pcg: Graph) -> None:
    """Both take and give the same, and the PCG trains no tensor that the source does not have."""
    for what, left, right in (
        ("inputs", [(x.attr("name"), x.type) for x in source.inputs], [(x.attr("name"), x.type) for x in pcg.inputs]),
        ("outputs", [(n, x.type) for n, x in source.outputs], [(n, x.type) for n, x in pcg.outputs]),
        ("updates", [(n, x.type) for n, x in source.updates], [(n, x.type) for n, x in pcg.updates]),
    ):
        if left != right:
            raise VerificationError(f"{what} of the plan are {_enumerate(right)}, of the source {_enumerate(left)}")
    unknown = {x for node in pcg.params for x in sources_of(node)} - {
        x for node in source.params for x in sources_of(node)
    }
    if unknown:
        raise VerificationError(f"the plan stores {', '.join(sorted(unknown))}, which the source does not have")


def _check_indices(source: Graph, pcg: Graph) -> None:
    """Constant indices that the source does not have lie in their table: where tables shrink, indices are wrapped."""
    known = {node.digest for node in source.nodes if node.is_const}
    for node in pcg.nodes:
        index = node.operands[1] if node.op.kind == "index" else node
        while index.op.kind == "parallel" or index.op.is_view_of_all:
            index = index.operands[0]
        if node.op.kind != "index" or not index.is_const or index.digest in known:
            continue
        rows, array = node.loops.extents["v"], index.attr("value").array
        if array.size and not 0 <= array.min() <= array.max() < rows:
            what = f"{describe(node)} of the plan reads rows {array.min()} to {array.max()} of {rows}"
            raise VerificationError(what, "Rows that the table has", check="values")


def _enumerate(named: Sequence[tuple[Any, Any]]) -> str:
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
    """Random values of all inputs (constants among them) and stored tensors, [trials, *shape]."""
    values: dict[str, Data] = {}
    for node in dict.fromkeys(node for graph in small.graphs for node in graph.inputs):
        name, shape, dtype = node.attr("name"), node.type.shape, node.type.dtype
        if dtype.is_floating:
            values[name] = field.random(f"input {name}", shape)
        elif dtype is DType.BOOL:
            values[name] = field.integers(f"input {name}", shape, 0, 2).astype(bool)
        else:
            values[name] = field.integers(f"input {name}", shape, *small.ranges.get(name, (0, 1 << 15)))
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


def _compare_gradients(
    serial: Evaluation, parallel: Evaluation, stored: Mapping[str, Base], field: PrimeField
) -> list[Size]:
    """Compare gradients by all stored tensors and by the values between layers; bounds on them."""
    cotangents = {name: field.random(f"cotangent {name}", node.type.shape) for name, node in serial.graph.outputs}
    arriving = [field.random(f"cotangent {number}", node.type.shape) for number, node in enumerate(serial.arrived)]
    found = [
        evaluation.gradients(cotangents, dict(zip(evaluation.arrived, arriving, strict=True)))
        for evaluation in (serial, parallel)
    ]
    totals = [
        _by_stored(evaluation, gradients, stored, field)
        for evaluation, gradients in zip((serial, parallel), found, strict=True)
    ]
    for source, total in totals[0].items():
        if not np.array_equal(total, totals[1].get(source, np.zeros_like(total))):
            raise VerificationError(f"the plan's gradient of {source} is not the source's", check="gradients")
    for one, other in zip(serial.arrived, parallel.arrived, strict=True):
        sides = [
            evaluation.whole_gradient(node, gradients) if node in gradients.fresh else np.zeros(())
            for evaluation, node, gradients in zip((serial, parallel), (one, other), found, strict=True)
        ]
        if not np.array_equal(sides[0], sides[1]):
            what = f"the plan's gradient of {describe(other)} between two layers is not the source's"
            raise VerificationError(what, check="gradients")
    return [size for gradients in found for size in gradients.sizes.values()]


def _by_stored(
    evaluation: Evaluation, gradients: Gradients, stored: Mapping[str, Base], field: PrimeField
) -> dict[str, Data]:
    """Stored tensor -> [trials, elements]: its gradient, over all that read it."""
    by_node = {node: evaluation.whole_gradient(node, gradients) for node in gradients.local}
    return {source: field.reduce(total) for source, total in add_up(by_node, stored).items()}


__all__ = ["SINGLE", "Proof", "error_bound", "verify_equal"]
