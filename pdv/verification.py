"""Whether a package is what its plan says, and its plan computes what its source does."""

from __future__ import annotations

import os
from typing import Any

from ir.errors import VerificationError
from ir.exact import verify_equal
from pdv.derivation import replay
from pdv.document import read_problem
from pdv.proofs import proof_document
from pdv.report.loaded import read_planned


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Replay the plan of a package and prove again that it equals its source.

    Raises:
        UsageError: if the directory is no package.
        VerificationError: if the plan does not replay, or does not compute what its source computes.
    """
    document, source = read_planned(directory)
    problem = read_problem(document, source)
    pcg = replay(problem, document.get("derivation", []))
    if pcg.digest != document.get("pcg_hash"):
        raise VerificationError("the derivation replays to another graph than plan.json says", "", "Plan again")
    return proof_document(verify_equal(source, pcg, problem.mesh, gradients=problem.train))
