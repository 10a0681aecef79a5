"""The best plan over all meshes of a cluster, as searches find it. Entry point: ``BestPlan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ir.graph import Graph
from pdv.cluster import Cluster
from pdv.cluster.routing.arrangements import arranged
from pdv.cost.breakdown import PlanCost
from pdv.problem import Derived, Solution
from pdv.problem.workload import EMITTED, ONE_STAGE, Execution, Stages, runs_whole


@dataclass(frozen=True)
class BestPlan:
    """The best solution over all meshes tried, its derived graph and price, and the least of their lower bounds.

    It is not ``complete`` if a mesh was left out, or the search on one cut short. ``stages`` speaks of operators of the
    solution's graph, which is that of one micro-batch where ``execution`` says that there are several. ``step_s``:
    seconds of a simulated step, where plans were compared by these; the bound is then of them. ``places``: which device
    stands at each place of the mesh (``Cluster.places``).
    """

    solution: Solution
    derived: Derived
    cost: PlanCost
    lower_bound_s: float
    states: int
    meshes: int = 1
    complete: bool = True
    stages: Stages = ONE_STAGE
    execution: Execution = EMITTED
    step_s: float | None = None
    places: tuple[int, ...] = ()

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with its devices where the plan has them."""
        return arranged(cluster, self.places)

    @property
    def is_whole(self) -> bool:
        """Whether a step takes the batch and the model as a whole, once forward and once backward."""
        return runs_whole(self.stages, self.execution)

    @property
    def seconds(self) -> float:
        """What the bound is of."""
        return self.cost.seconds if self.step_s is None else self.step_s

    @property
    def pcg(self) -> Graph:
        """The parallel computation graph found."""
        return self.derived.pcg

    @property
    def gap(self) -> float:
        """Relative distance that optimality may still be away, over all meshes tried."""
        seconds = self.seconds
        return max(0.0, (seconds - self.lower_bound_s) / seconds) if seconds > 0 else 0.0


Needs = Callable[[BestPlan], float]
"""A number of a plan: bytes of a device that it needs, or seconds of its step."""
