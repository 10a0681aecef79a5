"""How far from the best a plan can still be, and among which plans: the bound, the gap, and the space they speak of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pdv.cluster.units import MEMORY
from pdv.plan.seal import finite
from pdv.problem import Problem
from pdv.search.best import BestPlan
from pdv.watch import time_text

Document = dict[str, Any]  # Any: JSON


def certificate_document(
    found: BestPlan, problems: Sequence[Problem], pins: str | None = None, running: Mapping[str, Any] | None = None
) -> Document:
    """The certificate as JSON.

    problems: all that were to be searched, in order. pins: what they pin; running: what is pinned of how steps run.
    """
    problem = found.solution.problem
    bound = min(found.lower_bound_s, found.seconds)
    known = bound > 0.0 or found.seconds == 0.0  # a bound of zero says nothing of what costs something
    document = {
        "lower_bound": bound if known else None,
        "gap": found.gap if known else None,
        "of": "price" if found.step_s is None else "step",
        "complete": found.complete,
        "space": {
            "meshes": [str(entry.mesh) for entry in problems[: found.meshes]],
            "meshes_left_out": [str(entry.mesh) for entry in problems[found.meshes :]],
            "rules": {"count": len(problem.rules), "digest": rules_digest(problem)},
            "variants": found.solution.variants,
            "mode": problem.mode,
            "memory_limit_bytes": finite(problems[0].memory_limit if problems else problem.memory_limit),
            "pins": pins,
            **({"running": dict(running)} if running else {}),
            **({"virtual_stages": 1} if found.step_s is not None and found.stages.virtual == 1 else {}),
        },
    }
    return {"statement": statement(document), **document}


def statement(document: Mapping[str, Any]) -> str:
    """A certificate as a sentence."""
    space = document["space"]
    among = _among_pipelines(space) if document["of"] == "step" else _among_meshes(space)
    limit = space["memory_limit_bytes"]
    kept = "" if limit is None else f", that fit in {MEMORY.format(limit)}"
    kept += (" and keep the pins" if kept else ", that keep the pins") if space["pins"] or space.get("running") else ""
    stopped = "" if document["complete"] else "; the search was stopped before its end"
    if document["lower_bound"] is None:
        return f"no bound is known: plans {among}{kept} may cost less{stopped}"
    least = time_text(document["lower_bound"])
    said = f"no plan costs less than {least} a step, kernels, collectives and optimizer added up, hosts left out"
    if document["of"] == "step":
        said = f"no plan's step is simulated in less than {least}"
    return f"gap {document['gap']:.2%}: {said}, {among}{kept}{stopped}"


def _among_pipelines(space: Mapping[str, Any]) -> str:
    """Which plans the bound of a simulated step is of (``pdv.pipelines.bounding.bounds``)."""
    among = (
        "over numbers of stages and micro-batches, for each number of stages the few meshes of a stage that are nearest"
        " to the cluster's levels, with any cut of any operator and parameter of the graph as it was written or as this"
        " plan rewrites it, recomputed or not"
    )
    one_each = space.get("virtual_stages") == 1
    if "schedule" not in space.get("running", {}):
        turns = "" if one_each else " or interleaved"
        among += f", passes in GPipe's or 1F1B's order (eager where sends take long){turns}"
    return among + (", with one stage on each rank of a pipeline" if one_each else "")


def _among_meshes(space: Mapping[str, Any]) -> str:
    meshes, left_out = len(space["meshes"]), len(space["meshes_left_out"])
    over = f"{meshes} mesh{'es' if meshes > 1 else ''}" + (f" (of {meshes + left_out})" if left_out else "")
    rewrites = "of the graph as it was written"
    if space["variants"] > 1 and space["rules"]["count"]:
        rewrites = f"of {space['variants']} variants of its blocks by {space['rules']['count']} algebraic rules"
    return f"over {over}, with any cut of any operator and parameter {rewrites}"


def rules_digest(problem: Problem) -> str:
    """Of the algebraic rules allowed, by name and law, in order."""
    lines = "\n".join(f"{rule.name}: {rule.equation}" for rule in problem.rules)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
