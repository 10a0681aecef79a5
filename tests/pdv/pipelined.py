"""Plans with stages, micro-batches and a mesh inside as a test wants them, in place of what a search would choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import pdv
from ir.mesh import Axis, Mesh
from ir.scaling.rows import fewer_rows
from pdv.emit.analysis.open_sizes import Opened
from pdv.frontend.program import Program
from pdv.pipelines.lengthen import lengthen
from pdv.pipelines.pipeline import stages_of
from pdv.plan.package import Plan
from pdv.planning.search import SearchResult
from pdv.planning.sizes import _why_fixed as why_fixed
from pdv.prices import slowest_axes, stage_axes
from pdv.problem import Pins, Problem
from pdv.problem.problem import ungathered
from pdv.problem.workload import EMITTED, FOLDED, ONE_STAGE, STALE, Order, Recompute, Stages, are_several
from pdv.schedule.pieces import pieces
from pdv.schedule.stages import cut
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh


class Blocks(nn.Module):
    """Four equal ones, residual."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def plan_pipeline(
    model: Any,  # Any: as pdv.optimize takes it
    inputs: Any,
    cluster: Mapping[str, Any],
    *,
    stages: int,
    micro_batches: int,
    mesh: Mapping[str, int],
    order: Order = "1f1b",
    recompute: Recompute = "none",
    sizes: Sequence[int] | None = None,
    virtual: int = 1,
    places: tuple[int, ...] = (),
    last: Pins | None = None,
    moments: int = 1,
    **options: Any,
) -> Plan:
    """The best plan of so many stages, each on ``mesh``: of equal numbers of layers, or ``sizes`` pieces.

    virtual: stages on each rank of the pipeline, ``stages`` times ``virtual`` in all; places: which device stands
    where (``Cluster.places``); last: of the inside of the last stage, where it is not that of those before; moments:
    slices of micro-batches in time.
    """
    inside = Mesh(tuple(Axis(name, size) for name, size in mesh.items()))

    def search(problems: Sequence[Problem], devices: Any, *_: Any, **__: Any) -> SearchResult:
        whole = problems[0]
        graph = fewer_rows(whole.graph, micro_batches) if micro_batches > 1 else whole.graph
        assert graph is not None
        links = slowest_axes(stage_axes(whole.compute, devices, inside, stages))
        problem = Problem(
            graph, inside, links, whole.compute, whole.mode, pins=whole.pins, precision=whole.precision,
            products=whole.products, host=whole.host,
        )  # fmt: skip
        found = search_mesh(ungathered(problem) if order in STALE else problem)
        if last is not None:
            assert sizes is not None, "pieces are told"
            other, inside_of = search_mesh(replace(problem, pins=last)), [0] * sum(sizes[:-1]) + [1] * sizes[-1]
            solution = lengthen([found.solution, other.solution], inside_of, graph, (0, len(inside_of), 1))
            assert solution.realized is not None
            found = replace(found, solution=solution, derived=solution.realized.derived, cost=solution.realized.cost)
        several = are_several(stages, micro_batches * moments)
        execution = replace(
            EMITTED, micro_batches=micro_batches, order=order, recompute=recompute, several=several, moments=moments
        )
        cut_there = _cut(found, stages, virtual, sizes, folded=order in FOLDED)
        return SearchResult(replace(found, stages=cut_there, execution=execution, places=places), 0.0)

    with patch("pdv.compile.search_problems", search), patch("pdv.planning.sizes._why_fixed", _why_fixed_here):
        return pdv.optimize(model, inputs, cluster=cluster, rules="none", **options)


def _why_fixed_here(program: Program, opened: Opened, names: set[str]) -> str:
    """As of a program that cannot be read again: to export it at another size takes a third of these tests' time."""
    return why_fixed(replace(program, again=None), opened, names)


def _cut(found: BestPlan, stages: int, virtual: int, sizes: Sequence[int] | None, *, folded: bool) -> Stages:
    if stages == 1:
        return ONE_STAGE
    if sizes is not None:
        cut_there = stages_of(pieces(found.solution.graph), stages * virtual, sizes, layered=False)
        return replace(cut_there, count=stages, virtual=virtual, folded=folded)
    chunk_of, sizes, _ = cut(found.solution.graph, stages * virtual)
    own = {node: chunk for node, chunk in chunk_of.items() if node.needs_grad}
    return Stages(stages, virtual, chunk_of=own, layers=sizes, folded=folded)
