"""An assignment made into its PCG, and priced."""

from __future__ import annotations

from dataclasses import dataclass

from pdv.pcg.derive import Derived, derive
from pdv.pcg.plan_cost import PlanCost, plan_cost
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Assignment, Problem


@dataclass(frozen=True)
class Realized:
    """The PCG of an assignment, and what it costs."""

    derived: Derived
    cost: PlanCost


def realize(problem: Problem, assignment: Assignment, moves: Redistribution | None = None) -> Realized:
    """Derive and price an assignment of the problem's own graph; ``moves`` where some are known already."""
    derived = derive(problem, assignment, moves or Redistribution(problem.mesh, problem.axes))
    return Realized(derived, plan_cost(problem, derived.pcg))
