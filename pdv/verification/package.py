"""A package held against its plan: the plan proved again, its fields worked out again, its files written again.

Nothing of the package is run or imported, unless that is asked for (``run``, ``allow_edits``): then its text is, on
simulated ranks (``pdv.check``). What is believed is named: ``CLAIMS``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ir.cost_model import CostModel
from ir.errors import DataError, UsageError, VerificationError, WeightsError
from ir.graph import Graph
from ir.verify import check_outputs
from pdv.emit.emission import Emission
from pdv.emit.package import WEIGHTS, emission_of
from pdv.emit.weights import Stored
from pdv.frontend.program import Weights
from pdv.guard import door
from pdv.plan.package import read_document
from pdv.plan.proofs import checked_document, prove, proved_sizes
from pdv.plan.running import running_of
from pdv.plan.seal import check_minor, damage_error, refusing
from pdv.prices import priced_by
from pdv.report.loaded import Document, Loaded, load_document, read_planned
from pdv.verification.fields import CLAIMED, RUN, check_fields, difference
from pdv.verification.files import check_no_program, check_program, edited_program
from pdv.verification.weights import check_weights, read_stored

if TYPE_CHECKING:
    from pdv.check import Checked

CLAIMS = (
    "that source.graph is the model that was meant",
    "that weights.safetensors has the model's values, beyond its digests",
    "the page report.html (pdv report draws it again)",
    *dict.fromkeys(sentence for sentence in CLAIMED.values() if sentence != RUN),
)
PRICES = "the prices: the weights or profiles that they are from are not here"


@door("pdv.verify")
def verify(
    directory: str | os.PathLike[str],
    cost: str | os.PathLike[str] | None = None,
    *,
    run: bool = False,
    allow_edits: bool = False,
) -> dict[str, Any]:
    """Prove the plan of a package again, and hold every file and field of the package to what follows from it.

    Args:
        directory: a package, or a plan without a program.
        cost: the weight file or profile folder that priced the plan, where that was none of the shipped ones.
        run: run the program's text, too, on simulated ranks in this process, and compare it with the source.
        allow_edits: Python files may be edited or added, and are run; weights may have other values.

    Returns:
        ``proof`` as plan.json has it, ``files`` that were compared, ``edited`` those that differ, ``run`` what the run
        showed (None: there was none), and ``claims``, what was not checked.

    Raises:
        UsageError: if the directory is no package, or the plan was priced by others than ``cost``.
        VerificationError: naming the file, and in plan.json the field, that is not as it should be.
    """
    folder = Path(directory)
    check_minor(read_document(folder))
    with refusing():
        document, source = read_planned(folder)
        compute = _compute(document, cost)
        plan = load_document(document, source, compute)
        check_fields(plan, priced=compute is not None)
        proof = _proof(plan, source)
        files = _check_files(folder, plan, run=run, allow_edits=allow_edits)
    claims = [*CLAIMS, *([PRICES] if compute is None else []), *([] if files["run"] else [RUN])]
    return {"proof": proof, **files, "claims": claims}


def _compute(document: Document, cost: str | os.PathLike[str] | None) -> CostModel | None:
    """What priced the plan, if it is here."""
    try:
        return priced_by(document, cost)
    except (UsageError, WeightsError, DataError):
        said = document["cost_model"]
        if cost is not None:
            raise
        if not (said.get("weights") or said.get("profiles")):
            raise damage_error(f"no cost model is called {said['name']!r}, and it names no files") from None
        return None


def _proof(plan: Loaded, source: Graph) -> dict[str, Any]:
    """The proof, made again; plan.json says the same."""
    problem, pcg = plan.problem, plan.derived.pcg
    check_outputs(pcg, plan.shardings)
    proof = prove(source, pcg, problem, plan.execution.moments)
    _same(proof, plan.document.get("proof"), "proof")
    _same(proved_sizes(plan.document["sizes"], proof), plan.document["sizes"], "sizes")
    return proof


def _check_files(folder: Path, plan: Loaded, *, run: bool, allow_edits: bool) -> dict[str, Any]:
    """The files beside plan.json, compared; a plan without weights has no program."""
    sources = list(plan.document["files"])
    if "weights" not in plan.document:
        check_no_program(folder)
        return {"files": sources, "edited": [], "run": None}
    stored = read_stored(plan.document["weights"])
    running = running_of(plan.problem, plan.derived, plan.stages, plan.execution)
    program = emission_of(plan.derived.pcg, plan.problem.mesh, plan.document, running)
    state = plan.document.get("state") or {}
    check_weights(folder, program, stored, state, edited=allow_edits)
    texts = program.files(plan.document, lambda name: stored[name].shape)
    found, edited = dict(texts), list[str]()
    if allow_edits:
        found, edited = edited_program(folder, texts)
    else:
        check_program(folder, texts)
    shown = _run(folder, plan, program, stored, found, edited) if run or edited else None
    if shown is not None and not edited:
        _same(checked_document(shown), plan.document.get("run"), "run")
    return {"files": [*sources, *texts, WEIGHTS], "edited": edited, "run": shown and shown.statement}


def _run(
    folder: Path,
    plan: Loaded,
    program: Emission,
    stored: Mapping[str, Stored],
    files: Mapping[str, str],
    edited: list[str],
) -> Checked:
    """What running the text showed.

    Raises:
        VerificationError: if it gives something else than the source, or was edited and cannot be run.
    """
    from pdv.check import check_text

    shapes = {name: entry.shape for name, entry in stored.items()}
    weights = Weights({name: partial(np.broadcast_to, np.zeros(()), shape) for name, shape in shapes.items()})
    checked = check_text(plan.source.graph, program, weights, files=files if edited else None, directory=folder)
    if edited and not checked.ran:
        what = f"{', '.join(str(folder / name) for name in edited)} was edited, and {checked.statement}"
        raise VerificationError(what, "Edits of programs that can be run", "Run it against the source model yourself")
    return checked


def _same(expected: dict[str, Any], found: object, name: str) -> None:
    """Whether a field of plan.json says what was found again.

    Raises:
        VerificationError: naming where it does not.
    """
    wrong = difference(expected, found, name)
    if wrong:
        raise VerificationError(f"plan.json: {wrong}", "What follows from the plan", "Plan again")
