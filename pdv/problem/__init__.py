"""What planning is about, below all who plan, price, simulate and emit: a problem, its answers, a workload."""

from __future__ import annotations

from pdv.problem.precision import Precision
from pdv.problem.problem import Pins, Problem, Storage
from pdv.problem.solution import AlgebraicStep, Assignment, Derived, Realized, Solution
from pdv.problem.workload import Execution, Stages, Workload

__all__ = [
    "AlgebraicStep", "Assignment", "Derived", "Execution", "Pins", "Precision", "Problem", "Realized", "Solution",
    "Stages", "Storage", "Workload",
]  # fmt: skip
