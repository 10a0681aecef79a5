"""The inside of a pipeline's stages: a plan for one micro-batch on the mesh of one stage. Entry point: ``Insides``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ir.errors import NoPlanFitsError
from ir.graph import Graph
from pdv.cluster import Device
from pdv.pcg.plan_cost import plan_cost
from pdv.pcg.spread import spread_to_pcg
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.pipeline import Mode
from pdv.pipelines.profile import ByStage, Numbers, piece_of_pcg, profile
from pdv.problem import Problem, Solution
from pdv.problem.workload import Stages, Workload, emitted
from pdv.schedule.pieces import Pieces, pieces
from pdv.search.meshes import BestPlan, realize_solution
from pdv.search.solver.tables import TooWideError
from pdv.search.strategies.budget import Budget, EarlierSearches, Strategy
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import PICO
from pdv.simulate.stage import Lowered
from pdv.simulate.step import chunk_durations

FREE = 1e30  # bytes: a limit that every plan keeps


@dataclass(frozen=True)
class Inside:
    """A plan for one micro-batch, its pieces, and by stage what these take there."""

    plan: BestPlan
    pieces: Pieces
    profiles: ByStage


class Insides:
    """Insides of candidates, of the programs that ``graph_of`` gives; ``solved`` counts the problems so far.

    ``rules``: whether algebraic rewrites are searched, too.
    """

    def __init__(
        self, space: Space, graph_of: Callable[[int], Graph | None], strategy: Strategy, budget: Budget, *, rules: bool
    ) -> None:
        self.space, self.strategy, self.budget = space, strategy, budget
        self.graph_of = graph_of
        self.solved = self.states = 0
        self._rules = space.problem.rules if rules else ()
        self._known: dict[tuple[object, ...], EarlierSearches] = {}
        self._free: dict[Candidate, Inside | None] = {}

    def free(self, candidate: Candidate) -> Inside | None:
        """The fastest inside, whatever memory it takes; None if there is none."""
        if candidate not in self._free:
            self._free[candidate] = self._solve(candidate, FREE, 1.0)
        return self._free[candidate]

    def within(self, candidate: Candidate, limit: float, flight: float) -> Inside | None:
        """The fastest inside that holds no more than ``limit`` bytes, all stages together.

        ``flight``: how many micro-batches' activations are held at once, as a share of what backward needs of each.
        """
        return self._solve(candidate, limit / flight, 1.0 / flight)

    def _solve(self, candidate: Candidate, limit: float, resting: float) -> Inside | None:
        graph = self.graph_of(candidate.micro_batches)
        if graph is None:
            return None
        plain = replace(
            self.space.problem, graph=graph, mesh=candidate.mesh, axes=candidate.inside, rules=self._rules, rows=None
        )
        problem = replace(plain, memory_limit=limit, resting=resting, once=1.0 / candidate.spread)
        key = (candidate.mesh, candidate.inside, candidate.micro_batches, candidate.stages, resting)
        budget = replace(self.budget, known=self._known.setdefault(key, EarlierSearches()))
        self.solved += 1
        try:
            solution = self.strategy(problem, budget)
        except (NoPlanFitsError, TooWideError):
            return None
        self.states += solution.states
        return self.made(candidate, solution)

    def made(self, candidate: Candidate, solution: Solution) -> Inside:
        """What a solution is for a candidate; its own price is that of one micro-batch by itself."""
        made = solution.realized or realize_solution(solution)
        plain = replace(solution.problem, once=1.0, resting=1.0, memory_limit=self.space.problem.memory_limit)
        derived, rewritten = made.derived, replace(plain, graph=solution.graph)
        cost = plan_cost(rewritten, derived.pcg)
        solution = replace(
            solution, problem=plain, cost_s=cost.seconds, memory_bytes=cost.memory_bytes, lower_bound_s=0.0,
            realized=None,
        )  # fmt: skip
        plan = BestPlan(solution, derived, cost, 0.0, solution.states, complete=solution.complete)
        found = pieces(solution.graph)
        where = piece_of_pcg(derived, found.of, found.count)
        stages = [self._as_stage(candidate, rewritten, stage) for stage in range(candidate.stages)]
        kinds = dict(stages)
        profiles = tuple(profile(one, derived.pcg, where, found.count) for one in kinds.values())
        return Inside(plan, found, ByStage(profiles, tuple(list(kinds).index(key) for key, _ in stages)))

    def _as_stage(self, candidate: Candidate, problem: Problem, stage: int) -> tuple[tuple[object, ...], Problem]:
        """The problem with the links and devices of a stage; stages of an equal key are alike."""
        devices = self._devices(candidate, stage)
        axes = candidate.axes[stage]
        return (devices, axes), replace(problem, axes=axes, compute=self.space.compute_of(devices))

    def _devices(self, candidate: Candidate, stage: int) -> tuple[Device, ...]:
        cluster, size = self.space.cluster, candidate.mesh.num_devices
        if len(cluster.classes) == 1:
            return (cluster.classes[0].device,)
        return tuple(dict.fromkeys(cluster.device_of(rank) for rank in range(stage * size, (stage + 1) * size)))


def workload(space: Space, candidate: Candidate, inside: Inside, stages: Stages, mode: Mode) -> Workload:
    """What is simulated; ``stages`` are over operators of the inside's graph."""
    plan = inside.plan
    chunks, layers = (spread_to_pcg(plan.derived, of) for of in (stages.chunk_of, stages.layer_of))
    return Workload(
        replace(plan.solution.problem, graph=plan.solution.graph),
        plan.pcg,
        space.cluster,
        replace(stages, chunk_of=chunks, layer_of=layers),
        emitted(space.cluster, candidate.mesh, candidate.micro_batches, mode.recompute, mode.order),
        candidate.axes,
        lambda device: space.compute_of((device,)),
    )


def piece_seconds(space: Space, candidate: Candidate, inside: Inside) -> tuple[Numbers, Numbers]:
    """[pieces] simulated seconds of a micro-batch forward and backward, each piece a chunk of one stage."""
    count = inside.pieces.count
    work = workload(space, candidate, inside, Stages(1, count, inside.pieces.of), Mode())
    durations = chunk_durations(Lowered(work, CALIBRATION))
    on_gpu = any(entry.device.kind == "gpu" for entry in space.cluster.classes)
    begun = np.where(np.arange(count) == 0, 0.0, CALIBRATION.host_pass_s) if on_gpu else 0.0
    found = ([getattr(one, name) for one in durations] for name in ("forward", "backward"))
    forward, backward = (np.maximum(np.array(one) / PICO - begun, 0.0) for one in found)
    return forward, backward
