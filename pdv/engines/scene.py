"""What configurations are priced on: a model, a cluster, what prices kernels, and how a step runs beside them.

Of a saved plan all of it is the plan's own, so that a difference in price is one of the configuration and nothing else.
Entry points: ``Scene.of_plan``, ``Scene.price``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ir.cost_model import CostModel
from ir.errors import UsageError
from ir.graph import Graph
from ir.scaling.rows import fewer_rows, more_rows
from ir.types import DType
from pdv.cluster import Cluster, Device
from pdv.manual.configuration import Configuration, workload
from pdv.memory import StepMemory, step_memory
from pdv.passes.precision import with_dtype
from pdv.prices import stage_axes
from pdv.problem.precision import PRECISIONS
from pdv.problem.workload import ONE_STAGE, Workload, emitted
from pdv.report.loaded import Loaded, check_size, workload_of_plan
from pdv.simulate.result import Simulation
from pdv.simulate.step import simulate


@dataclass(frozen=True)
class Priced:
    """A configuration's step."""

    given: Configuration
    work: Workload
    simulation: Simulation
    memory: StepMemory


@dataclass(frozen=True)
class Scene:
    """Where a saved plan runs; ``own`` is its own step, of no configuration."""

    plan: Loaded
    own: Priced

    @classmethod
    def of_plan(cls, plan: Loaded, cluster: Cluster | None = None) -> Scene:
        """Of a plan, on its own cluster or on another one of as many devices.

        Raises:
            UsageError: if the other one has more or fewer.
        """
        check_size(plan, cluster)
        work = workload_of_plan(plan, cluster)
        return cls(plan, Priced(Configuration(), work, simulate(work), step_memory(work)))

    @property
    def work(self) -> Workload:
        """What the plan runs."""
        return self.own.work

    @property
    def in_one_piece(self) -> Priced:
        """Its step with micro-batches that pass as a whole, on the axes that the plan names."""
        plan = replace(self.plan, execution=replace(self.plan.execution, moments=1))
        return self.own if self.plan.execution.moments == 1 else Scene.of_plan(plan, self.work.cluster).own

    @property
    def rows(self) -> int:
        """Of one micro-batch, over all devices of a stage."""
        inputs = [node.type.shape for node in self.plan.source.graph.inputs if node.type.rank]
        return int(inputs[0][0]) if inputs else 1

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.rows * self.plan.execution.micro_batches

    @property
    def dtype(self) -> str:
        """Of the parameters as compute reads them."""
        found = (node.type.dtype.torch_name for node in self.plan.source.graph.params if node.type.dtype.is_floating)
        return next(found, "float32")

    def graph(self, samples: int, dtype: str) -> Graph:
        """The source program over so many rows.

        Raises:
            UsageError: if its rows cannot be told from other sizes.
        """
        source, common = self.plan.source.graph, math.gcd(self.rows, samples)
        fewer = source if common == self.rows else fewer_rows(source, self.rows // common)
        if fewer is None:
            raise UsageError(f"{source.name} has {self.rows} rows, which cannot be told from its other sizes")
        found = more_rows(fewer, samples // common)
        return found if dtype == self.dtype else with_dtype(found, DType.from_name(dtype))

    def price(self, given: Configuration, dtype: str | None = None) -> Priced:
        """A step of this model under a configuration, run as the plan's program runs.

        Raises:
            UsageError: if it is none for this model and cluster.
        """
        axes_of = partial(stage_axes, self.work.problem.compute)
        compute_of: Callable[[Device], CostModel] = self.work.compute_of
        graph_of = partial(self.graph, dtype=dtype or self.dtype)
        made = workload(graph_of, given, self.work.cluster, compute_of, axes_of)
        own = made.execution
        runs = emitted(made.cluster, made.problem, own.micro_batches, own.recompute, own.order, made.stages.count)
        axes = own.data_axes if own.zero else runs.data_axes
        runs = replace(runs, zero=own.zero, data_axes=axes, precision=PRECISIONS[given.precision])
        runs = replace(runs, products=own.products, cast_weights=own.cast_weights)
        made = replace(made, execution=runs)
        if made.stages.chunks == 1 and own.recompute == "none" and not self.work.stages.layer_of:
            made = replace(made, stages=ONE_STAGE)  # gradients are due where the plan's are, not by layer
        return Priced(given, made, simulate(made), step_memory(made))
