"""What the page tells beside plan.json: the step that was simulated, the memory that was walked, the parallel graph.

Works none of it out. Entry points: ``page_facts``, and ``saved_page`` of a package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdv.guard import door

if TYPE_CHECKING:
    from pdv.cost.breakdown import PlanCost
    from pdv.memory import StepMemory
    from pdv.problem import Derived
    from pdv.problem.workload import Workload
    from pdv.report.loaded import Loaded
    from pdv.simulate.result import Simulation

Facts = dict[str, Any]  # Any: JSON
ASKED = ("why", "experts", "sensitivity")
"""Facts that take searches; null where nobody asked for them."""


@dataclass(frozen=True)
class Step:
    """A plan's step: what runs, what each node of it costs, and what a simulation and a walk of its memory found."""

    workload: Workload
    derived: Derived
    cost: PlanCost
    simulation: Simulation
    memory: StepMemory


def step_of(plan: Loaded) -> Step:
    """Of a saved plan."""
    from pdv.memory import step_memory
    from pdv.report.loaded import workload_of_plan
    from pdv.simulate.step import simulate

    workload = workload_of_plan(plan)
    return Step(workload, plan.derived, plan.cost, simulate(workload), step_memory(workload))


def page_facts(step: Step, document: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> Facts:
    """All that the page of a plan.json tells beside it; ``asked``: what of ``ASKED`` there is."""
    from pdv.report.axes import axis_uses, run_text
    from pdv.report.html.blocks import graph_facts
    from pdv.report.html.timeline import timeline, traffic
    from pdv.report.simulated import simulated_document
    from pdv.simulate.drawing import draw

    drawing = draw(step.simulation)
    return {
        "simulated": simulated_document(step.workload, step.simulation, step.memory),
        "timeline": timeline(drawing, step.memory),
        "traffic": traffic(drawing),
        "graph": graph_facts(step.workload, step.derived, step.cost),
        "uses": axis_uses(document),
        "runs": run_text(document),
        **{name: (asked or {}).get(name) for name in ASKED},
    }


@door("pdv report")
def saved_page(
    directory: str | os.PathLike[str],
    cost: str | os.PathLike[str] | None = None,
    asked: Mapping[str, Any] | None = None,
) -> str:
    """The page of a package; ``cost`` as `pdv explain` takes it.

    Raises:
        UsageError: if the directory is no package, or the plan was priced by other weights or profiles than there are.
        VerificationError: if plan.json is not as it was written, misses a field, or does not replay.
    """
    from pdv.page import write_page
    from pdv.plan.package import read_document
    from pdv.plan.seal import damage_error
    from pdv.prices import priced_by
    from pdv.report.loaded import load_plan

    document = read_document(directory)
    try:
        step = step_of(load_plan(directory, priced_by(document, cost)))
        return write_page(document, page_facts(step, document, asked))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damage_error(error) from error
