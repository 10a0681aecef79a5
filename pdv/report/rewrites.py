"""What each algebraic rewrite of a plan brought: the best plan without it, and what it costs on one device alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.pcg.plan_cost import plan_cost
from pdv.plan.derivation import replay_steps
from pdv.problem import Problem
from pdv.report.loaded import Loaded
from pdv.search.meshes import search_mesh


@dataclass(frozen=True, slots=True)
class Brought:
    """One rule of a derivation.

    Attributes:
        rule, equation: as in plan.json; ``sites``: places where it was applied.
        alone_s: what its steps add to the time of the whole model on one device; below zero they save it there too.
        without_s: seconds a step of the best plan on this mesh by the other rules taken; None if none fits.
        with_s: of this plan, priced alike.
    """

    rule: str
    equation: str
    sites: int
    alone_s: float
    without_s: float | None
    with_s: float


def brought(plan: Loaded) -> list[Brought]:
    """Every rule taken, in the order of the derivation."""
    steps = [step for step in plan.document["derivation"] if step["kind"] == "algebraic"]
    alone: dict[str, float] = {}
    sites: dict[str, int] = {}
    equations: dict[str, str] = {}
    before = one_device_s(plan.source, plan.source.graph)
    for number, step in enumerate(steps, start=1):
        after = one_device_s(plan.source, replay_steps(plan.source, steps[:number])[0])
        alone[step["rule"]] = alone.get(step["rule"], 0.0) + after - before
        sites[step["rule"]] = sites.get(step["rule"], 0) + len(step["sites"])
        equations[step["rule"]] = step["law"]
        before = after
    return [
        Brought(rule, equations[rule], sites[rule], alone[rule], _without(plan, rule, set(alone)), plan.cost.seconds)
        for rule in alone
    ]


def _without(plan: Loaded, rule: str, taken: set[str]) -> float | None:
    """Seconds of the best plan by the other rules taken."""
    rules = tuple(other for other in plan.source.rules if other.name in taken and other.name != rule)
    try:
        return search_mesh(replace(plan.source, rules=rules)).cost.seconds
    except NoPlanFitsError:
        return None


def one_device_s(problem: Problem, graph: Graph) -> float:
    """Seconds of a step of a whole serial graph on one device."""
    return plan_cost(replace(problem, graph=graph, mesh=Mesh(()), axes=()), graph).seconds
