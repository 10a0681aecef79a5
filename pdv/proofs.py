"""A proof as plan.json keeps it and as people read it."""

from __future__ import annotations

from typing import Any

from ir.exact import Proof


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
