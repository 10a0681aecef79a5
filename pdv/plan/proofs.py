"""A proof, and a run of the text, as plan.json keeps them and as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ir.graph import Graph
from ir.proof.exact import Proof, verify_equal
from ir.proof.in_time import is_of_any_mask, verify_in_time
from pdv.pcg.in_slices import in_slices
from pdv.pcg.over_time import TIME
from pdv.problem import Problem

if TYPE_CHECKING:
    from pdv.check import Checked
    from pdv.plan.package import Plan

AT_THIS_LENGTH = "slices in time are proved of a mask of this length"


def run_document(plan: Plan) -> dict[str, Any]:
    """What a run of the emitted text on simulated ranks showed, as JSON (docs/plan-format.md).

    Raises:
        VerificationError: if it does not compute what the source does.
    """
    if not plan.weights.names and plan.source.params:
        return {"statement": "there are no weights, and so no text that could be run", "ranks": 0}
    from pdv.check import check_text

    return checked_document(check_text(plan.source, plan.emission, plan.weights))


def checked_document(checked: Checked) -> dict[str, Any]:
    """The same of a run."""
    return {"statement": checked.statement, "ranks": checked.ranks}


def prove(source: Graph, pcg: Graph, problem: Problem, moments: int) -> dict[str, Any]:
    """The proof that a PCG is equal to its source, as JSON; where micro-batches pass in slices, so are these.

    Raises:
        VerificationError: if it is not.
    """
    proof = proof_document(verify_equal(source, pcg, problem.mesh, gradients=problem.train))
    if moments == 1:
        return proof
    sliced = in_slices(pcg, problem.mesh, moments)
    found = verify_in_time(source, sliced.graph, sliced.mesh, TIME, gradients=problem.train)
    said = f"in {moments} slices in time, each of which gets nothing of later ones, {proof_statement(found)}"
    lengths = "any" if is_of_any_mask(found, source, sliced.graph) else "planned"
    return {**proof, "slices": {**proof_document(found), "statement": said, "lengths": lengths}}


def proved_sizes(sizes: Mapping[str, Mapping[str, Any]], proof: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same, all but rows fixed where masks at one length show that slices in time get nothing of later ones."""

    def fixed(one: Mapping[str, Any]) -> str:
        return str(one["fixed_by"]) or (AT_THIS_LENGTH if any(dim for _, dim in one["inputs"]) else "")

    alone = proof.get("slices", {}).get("lengths") == "planned"
    return {name: {**one, "fixed_by": fixed(one)} if alone else dict(one) for name, one in sizes.items()}


def proof_document(proof: Proof) -> dict[str, Any]:
    """A proof as JSON, with the sentence that people read."""
    return {
        "statement": proof_statement(proof),
        "primes": list(proof.primes),
        "trials": proof.trials,
        "error_bound": proof.error_bound,
        "scaled": proof.scaled,
    }


def proof_statement(proof: Proof) -> str:
    """A proof as a sentence; how long it took is left out, so that equal plans read the same."""
    return (
        f"equal to its source over the integers mod {' and '.join(map(str, proof.primes))}, {proof.scaled}; "
        f"programs that differ would pass with probability at most {proof.error_bound:.1e}"
    )
