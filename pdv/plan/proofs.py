"""A proof, and a run of the text, as plan.json keeps them and as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ir.proof.exact import Proof

if TYPE_CHECKING:
    from pdv.check import Checked
    from pdv.plan.package import Plan


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
