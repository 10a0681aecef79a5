"""Whether a law is true: both sides evaluated exactly, outputs and gradients, at many sizes and attribute values.

Entry point: ``check_law``. What a law is, ``law`` says; at which sizes it is tried, ``sample``. Functions of elements
and rows are uninterpreted (``ir.evaluation.modular``), so a law that holds here holds for every choice of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from ir.errors import ShapeError, VerificationError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Law, apply, parse_law
from pdv.rewrite.sample import samples

ALONE = Mesh(())
INSTANCES = 12  # at which a law must hold: four runs of leading dims, equal and different extents
FEWEST = 4  # laws of fixed sizes have few
ATTEMPTS = 1000  # drawn to find them: not every draw type-checks
HOPELESS = 48  # draws, none of which did, after which the generator tries another form
TRIALS = 3


@dataclass(frozen=True, slots=True)
class LawProof:
    """What was checked: different instances, trials of each, and the probability that a false law passed one."""

    instances: int
    trials: int
    error_bound: float

    def __str__(self) -> str:
        return f"proven at {self.instances} sizes, gradients too; {self.trials} primes, error < {self.error_bound:.0e}"


def check_law(law: Law, *, seed: int = 0, instances: int = INSTANCES, hopeless: int = ATTEMPTS) -> LawProof:
    """Prove a law at ``instances`` different instances, or some more until all extents were different somewhere.

    After ``hopeless`` draws none of which type-checks it gives up. Instances at which a side does not are passed over:
    a law is about those where both do.

    Raises:
        VerificationError: if it is false at one of them, or type-checks at fewer than ``fewest``.
    """
    for term in {term for side in (*law.left, *law.right) for term in apply(side) if term.repeated}:
        (attr, _), *_ = term.attrs
        one, two = f"{term.op}({term.op}(x, {attr}=c), {attr}=d)", f"{term.op}(x, {attr}=c * d)"
        check_law(parse_law(f"repeated-{term.op}: {one} == {two} for x[*s]"), seed=seed)
        check_law(parse_law(f"no-{term.op}: {term.op}(x, {attr}=1.0) == x for x[*s]"), seed=seed)
    seen: set[tuple[str, str]] = set()
    bound = 0.0
    runs: set[int] = set()
    together = set(combinations(law.extents, 2))  # extents of two names that were never different, ones apart
    for attempt, values in zip(range(ATTEMPTS), samples(law, seed), strict=False):
        if attempt == hopeless and not seen:
            break
        try:
            left, right = instantiate(law, values)
        except ShapeError:
            continue
        parted = {(one, other) for one, other in together if 1 != values[one] != values[other] != 1}
        if (left.digest, right.digest) in seen or (len(seen) >= instances and not parted):
            continue
        seen.add((left.digest, right.digest))
        together -= parted
        runs |= {len(value) for name, value in values.items() if name in law.stars and isinstance(value, tuple)}
        bound = max(bound, _prove(law, left, right, values, seed))
        if len(seen) >= instances and not together:
            break
    few_runs = len(runs) < 2 and law.stars and "perm" not in law.attr_uses.values()
    if len(seen) < FEWEST or together or few_runs:
        told = f"law {law.name} type-checks at {len(seen)} of the sizes and attributes tried"
        told += f", with {len(runs)} runs of leading dims" if few_runs else ""
        told += "".join(f", {one} and {other} always alike" for one, other in sorted(together)[:1])
        allowed = f"At least {FEWEST}, two runs of leading dims where there are any, all extents different somewhere"
        raise VerificationError(told, allowed)
    return LawProof(len(seen), TRIALS, bound)


def proven(law: Law, *, seed: int = 0) -> Law:
    """The law with the record of its proof.

    Raises:
        VerificationError: if it is false.
    """
    return replace(law, proof=str(check_law(law, seed=seed)))


def holds(law: Law, *, seed: int = 0) -> bool:
    """Whether ``check_law`` proves it, without much patience: the generator tries many forms of a law."""
    try:
        check_law(law, seed=seed, hopeless=HOPELESS)
    except VerificationError:
        return False
    return True


def _prove(law: Law, left: Graph, right: Graph, values: Mapping[str, object], seed: int) -> float:
    """The error bound at one instance; the side that has all variables is the source."""
    names = [
        {node.attr("name") for node in graph.nodes if node.is_leaf and not node.is_const} for graph in (left, right)
    ]
    source, other = (right, left) if names[0] < names[1] else (left, right)
    try:
        return verify_equal(source, other, ALONE, seed=seed, trials=TRIALS, scale=False).error_bound
    except VerificationError as error:
        at = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise VerificationError(f"law {law.name} is false at {at}: {error.what}", check=error.check) from error
