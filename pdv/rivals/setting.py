"""A saved plan's model and cluster as others may plan them, and how any plan is priced: by a simulated step.

Entry points: ``Setting.of``, ``row``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ir.cost_model import CostModel
from ir.errors import PdvError
from ir.graph import Graph
from ir.scaling.rows import more_rows
from pdv.cluster import Cluster
from pdv.config import Mode
from pdv.memory import step_memory
from pdv.plan.running import as_run
from pdv.report.loaded import Loaded, workload_of_found
from pdv.search.best import BestPlan
from pdv.simulate.step import simulate

Row = dict[str, Any]  # Any: JSON; name, detail, step_s (null: there is none), fits, why
LEFT_OUT = "left out: the time was over (--budget)"
WITHIN_S = 10.0  # each search


@dataclass(frozen=True)
class Setting:
    """What is planned: the graph of the whole batch, for a cluster whose kernels ``compute`` prices.

    ``stages`` is how many the saved plan has; ``deadline`` a time of this thread.
    """

    graph: Graph
    cluster: Cluster
    mode: Mode
    compute: CostModel
    memory_limit: float
    stages: int
    deadline: float

    @classmethod
    def of(cls, plan: Loaded, budget_s: float) -> Setting:
        """Of a saved plan; searches begin within ``budget_s`` seconds."""
        cluster = Cluster.from_dict(plan.document["cluster"])
        graph = more_rows(plan.source.graph, plan.execution.micro_batches)
        limit = min(plan.source.memory_limit, float(cluster.memory_bytes))
        mode, compute = plan.problem.mode, plan.problem.compute
        return cls(graph, cluster, mode, compute, limit, plan.stages.count, time.thread_time() + budget_s)

    @property
    def is_over(self) -> bool:
        """Whether no further search is to begin."""
        return time.thread_time() > self.deadline


def row(name: str, search: Callable[[], BestPlan | None], cluster: Cluster, setting: Setting) -> Row:
    """What a search finds, simulated; or why there is nothing."""
    if setting.is_over:
        return {"name": name, "step_s": None, "why": LEFT_OUT}
    try:
        found = search()
    except PdvError as error:
        return {"name": name, "step_s": None, "why": error.what}
    if found is None:
        return {"name": name, "step_s": None, "why": "nothing that is cut so"}
    work = workload_of_found(as_run(found, cluster), cluster)
    return {
        "name": name,
        "detail": _shape(found),
        "step_s": simulate(work).step_s,
        "fits": step_memory(work).fits,
        "why": None,
    }


def _shape(found: BestPlan) -> str:
    """Its mesh, stages and micro-batches in words."""
    mesh = str(found.solution.problem.mesh) or "one device"
    stages = f"{found.stages.count} stages of {mesh}" if found.stages.count > 1 else mesh
    several = found.execution.micro_batches > 1
    return f"{stages}, {found.execution.micro_batches} micro-batches" if several else stages
