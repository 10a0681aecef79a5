"""An assignment made into its PCG, and priced."""

from __future__ import annotations

from pdv.pcg.derive import derive
from pdv.pcg.plan_cost import plan_cost
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Assignment, Problem, Realized


def realize(problem: Problem, assignment: Assignment, moves: Redistribution | None = None) -> Realized:
    """Derive and price an assignment of the problem's own graph; ``moves`` where some are known already."""
    derived = derive(problem, assignment, moves or Redistribution(problem.mesh, problem.axes))
    return Realized(derived, plan_cost(problem, derived.pcg))
