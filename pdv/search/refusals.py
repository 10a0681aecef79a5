"""Why there is no plan, in the same words whichever search says so."""

from __future__ import annotations

import math

from ir.errors import NoPlanFitsError
from pdv.cluster.units import MEMORY
from pdv.problem import Problem

LESS_EACH = "Use more devices, or a smaller batch"  # what lets each device have less


def no_legal_plan(problem: Problem, *, cut: bool = False) -> NoPlanFitsError:
    """The error of pins that contradict each other; ``cut``: as far as a search came that was stopped."""
    return NoPlanFitsError(
        f"no legal plan of {problem.graph.name} on {problem.mesh} keeps the pins ({problem.pins.name})",
        mend="Loosen a pin, or change the mesh so that sizes divide",
        bound_s=0.0 if cut else math.inf,
        cut=cut,
    )


def too_large(needed: float, limit: float) -> str:
    """What the smallest plan needs, what it may, and the difference, all in bytes per device."""
    return (
        f"needs {MEMORY.format(needed)} per device, the limit is {MEMORY.format(limit)} "
        f"({MEMORY.format(needed - limit)} too much)"
    )
