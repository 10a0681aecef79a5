"""The inside of a pipeline's stages: a plan for one micro-batch on the mesh of one stage. Entry point: ``Insides``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ir.errors import NoPlanFitsError, PinsError
from ir.graph import Graph
from pdv.pcg.plan_cost import plan_cost
from pdv.pcg.redistribute import Redistribution
from pdv.pcg.spread import spread_to_pcg
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.lengthen import lengthen
from pdv.pipelines.mixing import Mixture
from pdv.pipelines.pipeline import Mode
from pdv.pipelines.profile import ByStage, piece_of_pcg, profile
from pdv.pipelines.shorten import Short
from pdv.pipelines.timing import Timing, measure
from pdv.problem import Problem, Solution
from pdv.problem.workload import Stages, Workload, emitted
from pdv.schedule.pieces import Pieces, pieces
from pdv.search.best import BestPlan
from pdv.search.meshes import realize_solution
from pdv.search.solver.tables import TooWideError
from pdv.search.strategies.budget import Budget, EarlierSearches, Strategy
from pdv.simulate.calibration import CALIBRATION

FREE = 1e30  # bytes: a limit that every plan keeps


@dataclass(frozen=True)
class Inside:
    """A plan for one micro-batch, its pieces, and by stage what these take there.

    timings: simulated, of each kind of stage that the profiles are of.
    """

    plan: BestPlan
    pieces: Pieces
    profiles: ByStage
    timings: tuple[Timing, ...]

    def held_bytes(self, flight: float, *, lean: bool = False) -> float:
        """Bytes of all stages together, with so many micro-batches' activations, as a search's limit counts them.

        ``lean``: where light values are made again in backward.
        """
        own = self.profiles[0]
        return float(own.resting_bytes.sum() + flight * (own.light_bytes if lean else own.kept_bytes).sum())


class Insides:
    """Insides of candidates, of the programs that ``graph_of`` gives; ``solved`` counts the problems so far.

    ``rules``: whether algebraic rewrites are searched, too; ``middle``: of a short program, the pieces that stand for
    more.
    """

    def __init__(
        self,
        space: Space,
        graph_of: Callable[[int], Graph | None],
        strategy: Strategy,
        budget: Budget,
        *,
        rules: bool,
        middle: range = range(0),
    ) -> None:
        self.space, self.strategy, self.budget, self.middle = space, strategy, budget, middle
        self.graph_of = graph_of
        self.solved = self.states = 0
        self.complete = True  # False once one was cut short: of what it left out nothing is known
        self.rules = space.problem.rules if rules else ()
        self._known: dict[tuple[object, ...], EarlierSearches] = {}
        self._too_small: dict[tuple[object, ...], float] = {}  # the largest limit within which there is none
        self._free: dict[Candidate, Inside | None] = {}
        self.known: dict[Candidate, dict[str, Inside]] = {}  # by their digests
        self._moves: dict[tuple[object, ...], Redistribution] = {}

    def free(self, candidate: Candidate) -> Inside | None:
        """The fastest inside, whatever memory it takes; None if there is none."""
        if candidate not in self._free:
            # counted as limits will have it that are asked for next
            self._free[candidate] = self._solve(candidate, FREE, 1.0 / candidate.in_order, lean=False)
        return self._free[candidate]

    def within(self, candidate: Candidate, limit: float, flight: float, *, lean: bool = False) -> Inside | None:
        """The fastest inside that holds no more than ``limit`` bytes, all stages together.

        ``flight``: how many micro-batches' activations are held at once, as a share of what backward needs of each;
        ``lean``: without what is light, which is made again.
        """
        return self._solve(candidate, limit / flight, 1.0 / flight, lean=lean)

    def _solve(self, candidate: Candidate, limit: float, resting: float, *, lean: bool) -> Inside | None:
        graph = self.graph_of(candidate.micro_batches)
        if graph is None:
            return None
        try:
            pins = self.space.pins_on(graph, candidate.mesh)
        except PinsError:  # rows are too few for a technique; what is named wrongly was said before
            return None
        plain = replace(
            self.space.of_micro_batch(graph, candidate.micro_batches),
            mesh=candidate.mesh,
            axes=candidate.inside,
            rules=self.rules,
            versions=self.space.versions(candidate.stages),
            pins=pins,
        )
        adding_s = self.space.adding_s if candidate.micro_batches > 1 else 0.0
        once, several = 1.0 / candidate.spread, candidate.several
        counted = replace(plain, memory_limit=limit, resting=resting, lean=lean)
        problem = replace(counted, once=once, several=several, adding_s=adding_s)
        key = (candidate.mesh, candidate.inside, candidate.micro_batches, candidate.stages, resting, lean)
        if key not in self._known:
            links = problem.mesh, problem.axes
            moves = self._moves.setdefault(links, Redistribution(*links, problem.bucket_bytes))
            self._known[key] = EarlierSearches(moves)
        if limit <= self._too_small.get(key, 0.0):
            return None
        budget = replace(self.budget, known=self._known[key])
        self.solved += 1
        try:
            solution = self.strategy(problem, budget)
        except TooWideError:
            return None
        except NoPlanFitsError as error:
            self.complete = self.complete and not error.cut
            if not error.cut:
                self._too_small[key] = max(limit, self._too_small.get(key, 0.0))
            return None
        self.states, self.complete = self.states + solution.states, self.complete and solution.complete
        solution = replace(solution, realized=solution.realized or realize_solution(solution))
        assert solution.realized is not None, "made just now"
        known, digest = self.known.setdefault(candidate, {}), solution.realized.derived.pcg.digest
        if digest not in known:
            known[digest] = self.made(candidate, solution)
        return known[digest]

    def made(self, candidate: Candidate, solution: Solution) -> Inside:
        """What a solution is for a candidate."""
        plan = self.make_plan(solution)
        derived, problem = plan.derived, plan.solution.problem
        versions = self.space.versions(candidate.stages)
        rewritten = replace(problem, graph=plan.solution.graph, several=candidate.several, versions=versions)
        found = pieces(solution.graph)
        where = piece_of_pcg(derived, found.of, found.count)
        stages = [self._as_stage(candidate, rewritten, stage) for stage in range(candidate.stages)]
        kinds = dict(stages)
        update_s = CALIBRATION.host_update_s if self.space.cluster.has_gpus else 0.0
        profiles = tuple(profile(one, derived.pcg, where, found.count, update_s=update_s) for one in kinds.values())
        by_stage = ByStage(profiles, tuple(list(kinds).index(key) for key, _ in stages))
        firsts = [by_stage.kind_of.index(kind) for kind in range(len(profiles))]
        timings = tuple(measure(self._alone(candidate, plan, stage), found, self.middle) for stage in firsts)
        return Inside(plan, found, by_stage, timings)

    def _alone(self, candidate: Candidate, plan: BestPlan, stage: int) -> Callable[[Stages], Workload]:
        """A micro-batch of the whole model on the devices of one stage, cut in chunks."""
        cluster, size = self.space.cluster, candidate.mesh.num_devices
        own = range(stage * size, (stage + 1) * size)
        others = [place for place in range(cluster.num_devices) if place not in own]
        led = replace(cluster, places=tuple(map(cluster.number_at, (*own, *others)))) if stage else cluster

        def made(chunks: Stages) -> Workload:
            work = workload(self.space, candidate, plan, chunks, Mode())
            return replace(work, cluster=led, axes=candidate.axes[stage:])

        return made

    def lengthened(self, candidate: Candidate, inside: Inside, short: Short) -> Inside:
        """The inside of a short program, of the whole one."""
        graph = self.space.graph(candidate.micro_batches)
        assert graph is not None, "the short program has so many micro-batches, too"
        solution = lengthen([inside.plan.solution], [], graph, short.middle)
        profiles = inside.profiles.map(lambda own: own.map(short.stretch))
        found = pieces(solution.graph)
        if found.count != profiles[0].count:  # rewritten layers are joined to others: pieces stand for other ones
            return self.made(candidate, solution)
        timings = tuple(timing.map(short.stretch) for timing in inside.timings)
        return Inside(self.make_plan(solution), found, profiles, timings)

    def mixed(self, insides: Sequence[Inside], mixture: Mixture, short: Short) -> Inside:
        """Those of a short program, each for some pieces of the whole one."""
        candidate = mixture.whole.candidate
        graph = self.space.graph(candidate.micro_batches)
        assert graph is not None, "the short program has so many micro-batches, too"
        solutions = [one.plan.solution for one in insides]
        plan = self.make_plan(lengthen(solutions, mixture.inside_of, graph, short.middle))
        return Inside(plan, pieces(plan.solution.graph), mixture.whole.profiles, mixture.whole.timings)

    def make_plan(self, solution: Solution) -> BestPlan:
        """The plan of a solution; its own price is that of one micro-batch by itself."""
        made = solution.realized or realize_solution(solution)
        plain = replace(
            solution.problem,
            once=1.0,
            several=False,
            resting=1.0,
            lean=False,
            versions=1,
            adding_s=0.0,
            memory_limit=self.space.problem.memory_limit,
        )
        cost = plan_cost(replace(plain, graph=solution.graph), made.derived.pcg)
        solution = replace(
            solution, problem=plain, cost_s=cost.seconds, memory_bytes=cost.memory_bytes, lower_bound_s=0.0,
            realized=None,
        )  # fmt: skip
        return BestPlan(solution, made.derived, cost, 0.0, solution.states, complete=solution.complete)

    def _as_stage(self, candidate: Candidate, problem: Problem, stage: int) -> tuple[tuple[object, ...], Problem]:
        """The problem with the links and devices of a stage; stages of an equal key are alike."""
        devices = self.space.devices_of(candidate, stage)
        axes = candidate.axes[stage]
        return (devices, axes), replace(problem, axes=axes, compute=self.space.compute_of(devices))


def workload(space: Space, candidate: Candidate, plan: BestPlan, stages: Stages, mode: Mode) -> Workload:
    """What is simulated; ``stages`` are over operators of the plan's graph."""
    chunks, layers = (spread_to_pcg(plan.derived, of) for of in (stages.chunk_of, stages.layer_of))
    problem = replace(plan.solution.problem, graph=plan.solution.graph)
    return Workload(
        problem,
        plan.pcg,
        space.cluster,
        replace(stages, chunk_of=chunks, layer_of=layers),
        emitted(space.cluster, problem, candidate.micro_batches, mode.recompute, mode.order, candidate.stages),
        candidate.axes,
        lambda device: space.compute_of((device,)),
    )
