"""What no plan's simulated step takes less than, whatever its stages, mesh and micro-batches. Entry point: ``Bounds``.

Branch and bound over *cells*: some numbers of micro-batches of some stages, on any mesh or on one. A cell's first bound
is compute alone (``floors``); the next one the search of a stage's inside (``least``); the last one that search with
a price of memory, which stages share. The cell that is bounded lowest is looked at more closely, as long as that helps.

If a micro-batch takes L at least, over all stages, then p stages take so many times L / p for m of them, however L is
cut among stages (``packing.rounds``); and no stage may take, or hold, too much (``packing.Packing``). By arithmetic a
micro-batch of fewer rows takes no less a row, so the inside of m micro-batches bounds that of multiples of m; by other
prices each number is a cell of its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count

from ir.graph import Graph
from ir.mesh import Mesh
from pdv.pipelines.bounding.cells import Cell, multiples
from pdv.pipelines.bounding.floors import Floor, Floors, issued_seconds
from pdv.pipelines.bounding.insides import COMING, LeastInsides, flight, resting
from pdv.pipelines.bounding.least import LeastInside
from pdv.pipelines.bounding.packing import Packing, Pieces, Turns, heights, held, rounds, slowest_s
from pdv.pipelines.bounding.sends import LeastSends
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimates
from pdv.problem.workload import ONE_EACH, STALE, Order
from pdv.schedule.lines import lines
from pdv.schedule.order import Pipeline
from pdv.search.best import BestPlan
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.shared import Cores
from pdv.simulate.step import factors

DRAWS = 16  # of stragglers, as steps are predicted
# Of memory, in seconds of an inside for all that its stages have; in this order, as long as a cell is bounded lowest.
PRICES = (0.3, 0.7, 0.1, 0.45, 0.2, 1.2)
SOLVED = 128  # insides at most; what is known by then is a bound, too
MOST = 4.0  # times what all stages together take, that is looked for
KINDS = 4  # of stages at most, of which insides are solved


@dataclass
class Bounds:
    """Of a space, whose program is as written, or in all blocks as ``rewrites`` of a plan have it.

    ``one_each``: of plans with one stage on each rank; several may fill a pipeline in next to no time. ``own``: stages,
    and the mesh of one, of the plan found; ``rewritten``: its program of one micro-batch, and how many there are.

    ``floors``: of a step, compute alone; ``issued_s``: of one micro-batch, forward and backward, in which hosts of all
    stages together issue its kernels.
    """

    space: Space
    estimates: Estimates
    floors: Floors
    issued_s: tuple[float, float]
    one_each: bool = True
    own: tuple[int, Mesh] | None = None
    rewritten: tuple[Graph, int] | None = None
    enough_s: float = math.inf
    _counted: dict[int, int] = field(default_factory=dict)
    _sent: dict[tuple[int, Mesh, int], LeastSends] = field(default_factory=dict)

    @classmethod
    def of(cls, estimates: Estimates, plan: BestPlan | None = None) -> Bounds:
        """Among all of a space, and what a plan makes of its program."""
        space = estimates.space
        issued_s = issued_seconds(space, space.problem.graph)
        rewrites: dict[int, tuple[str, ...]] = {}
        for step in plan.solution.steps if plan is not None else ():
            rewrites[step.block] = (*rewrites.get(step.block, ()), step.rule)
        if plan is not None and rewrites:
            other_s = issued_seconds(space, plan.solution.graph)
            issued_s = min(issued_s[0], other_s[0]), min(issued_s[1], other_s[1])
        if plan is None:
            return cls(space, estimates, estimates.floors, issued_s)
        mesh = plan.solution.problem.mesh
        floors, own = estimates.floors.of_plan(rewrites, mesh), (plan.stages.count, mesh)
        rewritten = plan.solution.graph, plan.execution.micro_batches
        return cls(space, estimates, floors, issued_s, plan.stages.virtual == 1, own, rewritten)

    def least_s(self, enough_s: float, stopped: Callable[[], bool] = lambda: False) -> float:
        """Seconds of a step that no plan is faster than; what takes ``enough_s`` is not looked at more closely.

        Once ``stopped``, nothing is: what is known by then is a bound, too.
        """
        self.enough_s = enough_s
        numbers, least_s = count(), math.inf
        cells: list[tuple[float, int, Cell]] = []
        for stages in self.space.stages:
            alone_s = {m: self._even_s(stages, (m,)) for m in self.space.counts}
            near = tuple(m for m, seconds in alone_s.items() if seconds < enough_s)
            least_s = min([least_s, *(alone_s[m] for m in self.space.counts if m not in near)])
            if near:
                cells.append((min(alone_s[m] for m in near), next(numbers), Cell(stages, near)))
        heapq.heapify(cells)
        while cells and cells[0][0] < min(enough_s, least_s) and not stopped():
            if self._insides.solved >= SOLVED and cells[0][2].asks:
                break
            bound_s, _, cell = heapq.heappop(cells)
            inner = list(self._open(cell))
            if not inner:
                return bound_s
            for found_s, one in inner:
                heapq.heappush(cells, (max(bound_s, found_s), next(numbers), one))
        return min([least_s, *(bound_s for bound_s, *_ in cells)])

    @cached_property
    def _insides(self) -> LeastInsides:
        return LeastInsides(self.space, self.estimates, self.floors)

    def _open(self, cell: Cell) -> Iterator[tuple[float, Cell]]:
        """The cells in a cell, each with its bound; none where nothing more can be said."""
        stages, counts, mesh = cell.stages, cell.counts, cell.mesh
        if cell.prices == len(PRICES) or not self._is_known(stages):
            return
        if mesh is None:
            groups = list(multiples(counts) if self.space.is_bounded else ((m,) for m in counts))
            for mesh in self._meshes(stages):
                yield from ((self._even_s(stages, group, mesh), Cell(stages, group, mesh)) for group in groups)
        elif cell.by == "even" and len(counts) > 1:
            yield self._free_s(stages, mesh, counts), replace(cell, by="free")
        elif len(counts) == 1 and self._has_more(cell, mesh):
            more = cell.kinds + 1
            yield self._free_s(stages, mesh, counts, more), replace(cell, by="part", kinds=more)
        elif len(counts) == 1:
            prices = cell.prices + (cell.by == "within") if math.isfinite(self.space.room) else len(PRICES)
            yield self._within_s(stages, mesh, counts[0], prices), replace(cell, by="within", prices=prices)
        else:
            half = len(counts) // 2
            for group in (counts[:half], *multiples(counts[half:])):
                yield self._free_s(stages, mesh, group), replace(cell, counts=group)

    def _meshes(self, stages: int) -> tuple[Mesh, ...]:
        """Those near the cluster's levels, and that of the plan found."""
        own = (self.own[1],) if self.own is not None and self.own[0] == stages else ()
        return tuple(dict.fromkeys((*self.space.meshes(stages), *own)))

    # ---- Bounds of cells ----

    def _even_s(self, stages: int, counts: Sequence[int], mesh: Mesh | None = None) -> float:
        """Compute alone, again where memory asks for that: the least of some numbers of micro-batches."""
        if not self._is_known(stages):
            floors = self.floors
            return min(floors.least_s(stages, m) if self.one_each else floors.of(stages, m).busy_s for m in counts)
        return min(self._even_of(stages, m, mesh) for m in counts)

    def _even_of(self, stages: int, micro_batches: int, mesh: Mesh | None) -> float:
        floor = self.floors.of(stages, micro_batches, mesh)
        if mesh is None or math.isinf(floor.busy_s):
            may_keep = self._may_host or self._may_keep(stages, micro_batches)
            again_s = 0.0 if may_keep else floor.again_s if self._may_repeat else math.inf
            busy_s = self._spread_s(stages, (micro_batches,), floor.busy_s + again_s)
            if self.one_each and not self._is_alike(stages):
                busy_s = max(busy_s, self.floors.least_s(stages, micro_batches, mesh, again=again_s > 0.0))
            return self._step_s(stages, (micro_batches,), busy_s, floor.backward_s)
        candidate = self.space.candidate(stages, mesh, micro_batches)
        kept_s = 0.0 if self._may_keep(stages, micro_batches) else math.inf
        evenly = self._insides.evenly(candidate)
        fits = {even: Pieces(even.runs(resting(candidate)), even.forward, even.backward) for even in evenly}
        return self._in_order(candidate, floor, floor.busy_s, lambda _: kept_s, [fits[even] for even in evenly])

    def _free_s(self, stages: int, mesh: Mesh, counts: Sequence[int], kinds: int | None = None) -> float:
        """The inside of the fewest micro-batches, at any memory; whole, or of so many ``kinds`` of blocks."""
        insides = self._insides.of(self.space.candidate(stages, mesh, counts[0]))
        if insides is None:
            return math.inf
        floor = self.floors.of(stages, counts[0], mesh)
        if self._is_alike(stages):
            taken_s = (insides[0].at(0.0) if kinds is None else insides[0].roughly(kinds)) / stages
        else:
            taken_s = slowest_s([inside.runs(0.0) for inside in insides])
        busy_s = self._spread_s(stages, counts, max(taken_s * counts[0], floor.busy_s))
        return self._step_s(stages, counts, busy_s, floor.backward_s)

    def _has_more(self, cell: Cell, mesh: Mesh) -> bool:
        """Whether there are kinds of blocks behind the next one, with which the inside is not yet whole."""
        if cell.by not in ("even", "part") or not self._is_alike(cell.stages):
            return False
        insides = self._insides.of(self.space.candidate(cell.stages, mesh, cell.counts[0]))
        return insides is not None and cell.kinds + 1 < len(insides[0].kinds)

    def _within_s(self, stages: int, mesh: Mesh, micro_batches: int, prices: int = len(PRICES)) -> float:
        """The same of one number of micro-batches, each stage within its memory, or with layers run again.

        By so many prices of memory, of which each says what no other does.
        """
        candidate = self.space.candidate(stages, mesh, micro_batches)
        insides = self._insides.of(candidate)
        if insides is None:
            return math.inf
        floor, alike = self.floors.of(stages, micro_batches, mesh), self._is_alike(stages)
        whole_s = max(insides[0].at(0.0) * micro_batches / stages, floor.busy_s) if alike else floor.busy_s
        asked = self._prices(insides[0], candidate)[:prices]
        fits: dict[LeastInside, Pieces] = {}
        for inside, even in zip(insides, self._insides.evenly(candidate), strict=True):
            if inside not in fits:
                runs = {price: inside.runs(price) for price in (0.0, *asked)}
                fits[inside] = Pieces(runs, even.forward, even.backward)
        kept_of = partial(self._kept_s, insides[0], asked) if alike else lambda _: 0.0
        return self._in_order(candidate, floor, whole_s, kept_of, [fits[inside] for inside in insides])

    def _in_order(
        self,
        candidate: Candidate,
        floor: Floor,
        whole_s: float,
        kept_of: Callable[[Sequence[float]], float],
        fits: Sequence[Pieces],
    ) -> float:
        """Seconds of a step in any order of passes, busy for ``whole_s`` in all; again, or within rooms.

        ``fits``: by stage, what pieces take.
        """
        stages, count = candidate.stages, candidate.micro_batches
        anyhow = [math.inf] * stages
        free = {one: replace(one, runs={0.0: one.runs[0.0]}) for one in fits}
        evenly = self._insides.evenly(candidate)
        again = {one: free[one].again(even.again) for one, even in zip(fits, evenly, strict=True)}
        hosted, twice = [free[one] for one in fits], [again[one] for one in fits]
        found: list[float] = []
        for order, each in self._orders(candidate):
            rooms = self._rooms(candidate, order, each)
            if not {"none", "light"}.isdisjoint(self.space.recomputations):
                busy_s = max(whole_s, kept_of(rooms) * count / stages)
                found.append(self._fitted_s(candidate, (order, each), busy_s, fits, rooms))
            if self._may_host:
                found.append(self._fitted_s(candidate, (order, each), whole_s, hosted, anyhow))
            if self._may_repeat:
                found.append(self._fitted_s(candidate, (order, each), whole_s + floor.again_s, twice, anyhow))
        return self._step_s(stages, (count,), min(found, default=math.inf), floor.backward_s)

    def _fitted_s(
        self,
        candidate: Candidate,
        order: tuple[Order, int],
        whole_s: float,
        fits: Sequence[Pieces],
        rooms: Sequence[float],
    ) -> float:
        """Of a step in an order of passes, of stages busy for ``whole_s`` each that are whole pieces."""
        stages, count = candidate.stages, candidate.micro_batches
        if self._is_alike(stages):
            busy_s = whole_s * rounds(Pipeline(stages, order[1], count, order[0])) / count
        else:
            busy_s = max(whole_s, count * slowest_s([one.runs[0.0] for one in fits]) if order[1] == 1 else 0.0)
        if busy_s >= self.enough_s or not (order[0] == "interleaved" or order[0] in ONE_EACH):
            return busy_s
        if order[0] == "interleaved":
            most_s = min(max(busy_s, self.enough_s), MOST * busy_s)
            flown, pipeline = flight(candidate), Pipeline(stages, order[1], count, order[0])
            held_by = [() if math.isinf(rooms[rank]) else heights(pipeline, rank, flown) for rank in range(stages)]
            return Turns(list(zip(fits, held_by, strict=True)), self.space.room / flown, count).least_s(busy_s, most_s)
        ways, sends = [lines(order[0], stages, count, stage) for stage in range(stages)], self._sends(candidate)
        packing = Packing(list(zip(fits, ways, rooms, strict=True)), sends.all_s)
        if order[0] not in STALE:  # over each border in turns, the last to go on to the end
            busy_s = max(busy_s, packing.whole_s + (count - 1) * sends.most_s)
        return max(busy_s, packing.least_s)

    def _sends(self, candidate: Candidate) -> LeastSends:
        """Of a candidate, as much less as devices are slower."""
        key = candidate.stages, candidate.mesh, candidate.micro_batches
        if key not in self._sent:
            found, slower = LeastSends.of(self.space, candidate, self.rewritten), self._slower(candidate.stages)
            self._sent[key] = LeastSends(found.all_s / slower, found.most_s / slower)
        return self._sent[key]

    def _kept_s(self, inside: LeastInside, prices: Sequence[float], rooms: Sequence[float]) -> float:
        """Seconds of one micro-batch on one device, all stages together, within the memory of all of them together."""
        return max([inside.at(0.0), *(inside.at(price) - price * sum(rooms) for price in prices)])

    def _prices(self, inside: LeastInside, candidate: Candidate) -> list[float]:
        """Of memory, in seconds a byte."""
        limit = candidate.stages * self.space.room / flight(candidate)
        return [share * inside.at(0.0) / limit for share in PRICES] if 0.0 < limit < math.inf else []

    def _rooms(self, candidate: Candidate, order: Order, each: int) -> list[float]:
        """By stage, the bytes that it has at most, counted as an inside counts them."""
        limit, least = self.space.room, flight(candidate)
        stages, count = candidate.stages, candidate.micro_batches
        numbers = [held(Pipeline(stages, each, count, order), stage) for stage in range(stages)]
        return [limit / max(1.0, min(least, number)) for number in numbers]

    def _step_s(self, stages: int, counts: Sequence[int], busy_s: float, backward_s: float) -> float:
        """Of a step in which stages are busy, and wait for one another, for ``busy_s``, with stragglers and hosts.

        ``backward_s``: what backward takes of each stage at least.
        """
        rounds = [self._rounds(stages, m) for m in counts]
        first, more = min(rounds), min(of / m for of, m in zip(rounds, counts, strict=True))
        on_gpu = self.space.cluster.has_gpus
        begun_s = CALIBRATION.host_pass_s * (1 + self.space.problem.train) if on_gpu and stages > 1 else 0.0
        issued_s = first * (sum(self.issued_s) / stages + begun_s)
        if stages > 1:  # else a host issues the next pass ahead
            issued_s = max(issued_s, first * (self.issued_s[0] / stages + begun_s) + backward_s * more)
        seconds = max(busy_s + first * begun_s, issued_s) * self._slower(stages)
        devices = (entry.device for entry in self.space.cluster.classes)
        return seconds + CALIBRATION.outside_s(devices, train=self.space.problem.train)

    def _slower(self, stages: int) -> float:
        """Times what devices take that a step's stragglers make of it."""
        slower = factors(stages, self.space.cluster.num_devices // stages, DRAWS, CALIBRATION.straggler_std, 0)
        return max(1.0, float(slower.min(axis=0).mean()))

    def _spread_s(self, stages: int, counts: Sequence[int], whole_s: float) -> float:
        """Of a step that keeps all stages busy for ``whole_s``, pipelines filled and drained.

        Where stages differ, the slowest of them.
        """
        if not self._is_alike(stages):
            return whole_s
        return min(whole_s * self._rounds(stages, m) / m for m in counts)

    def _rounds(self, stages: int, micro_batches: int) -> float:
        candidate = self.space.candidate(stages, self.space.meshes(stages)[0], micro_batches)
        orders = self._orders(candidate)
        return min((rounds(Pipeline(stages, each, micro_batches, order)) for order, each in orders), default=math.inf)

    def _orders(self, candidate: Candidate) -> Sequence[tuple[Order, int]]:
        """Of passes, with the stages on a rank, that plans may have."""
        found = self.space.orders(candidate, "none")
        return found if self.one_each else tuple(dict.fromkeys((*found, *self.space.in_turns(candidate, "none"))))

    # ---- What a cell is ----

    def _is_alike(self, stages: int) -> bool:
        """Whether a piece takes the same on each stage."""
        return stages == 1 or self._kinds(stages) == 1

    def _is_known(self, stages: int) -> bool:
        """Whether a piece takes what its stage says, whatever runs on others, and stages are of few kinds."""
        return stages == 1 or (Cores.of(self.space.cluster, stages) is None and self._kinds(stages) <= KINDS)

    def _kinds(self, stages: int) -> int:
        """How many kinds of stages there are, on whichever mesh has most."""
        if stages not in self._counted:
            candidates = (self.space.candidate(stages, mesh, 1) for mesh in self._meshes(stages))
            self._counted[stages] = max(len(set(self._insides.kinds(one))) for one in candidates)
        return self._counted[stages]

    @cached_property
    def _may_repeat(self) -> bool:
        return "full" in self.space.recomputations and self.space.layers > 0

    @property
    def _may_host(self) -> bool:
        """Whether layers may leave nothing on the device, which takes no time at best."""
        return self.space.pinned.activations is not None and self.space.layers > 0

    def _may_keep(self, stages: int, micro_batches: int) -> bool:
        """Whether an even cut of all that is kept would fit."""
        share = COMING if stages == micro_batches == 1 else 1.0
        return self.space.held_bytes(micro_batches, share) <= self.space.room
