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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count

from ir.mesh import Mesh
from pdv.pcg.redistribute import Redistribution
from pdv.pipelines.bounding.cells import Cell, multiples
from pdv.pipelines.bounding.even import EvenPieces, HeldBlocks, even_pieces
from pdv.pipelines.bounding.floors import Floor, Floors, issued_seconds
from pdv.pipelines.bounding.least import LeastInside, reached_links
from pdv.pipelines.bounding.packing import Fitting, Packing, Turns, held, rounds
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimates
from pdv.pipelines.profile import Numbers
from pdv.problem.workload import ONE_EACH, Order
from pdv.schedule.lines import lines
from pdv.schedule.order import Pipeline
from pdv.search.meshes import BestPlan
from pdv.search.solver.configs import KnownConfigs
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.shared import Cores
from pdv.simulate.lowering.price import copying_s
from pdv.simulate.step import factors

DRAWS = 16  # of stragglers, as steps are predicted
# Of memory, in seconds of an inside for all that its stages have; in this order, as long as a cell is bounded lowest.
PRICES = (0.3, 0.7, 0.1, 0.45, 0.2, 1.2)
SOLVED = 128  # insides at most; what is known by then is a bound, too
MOST = 4.0  # times what all stages together take, that is looked for
COMING = 0.75  # of what rests while the only micro-batch runs forward: gradients come as it runs backward


@dataclass(frozen=True)
class _Fit:
    """What pieces take, as of a ``Packing``: runs, backward, and the bytes that stages have."""

    runs: Mapping[float, Numbers]
    backward: Numbers
    rooms: Sequence[float]


@dataclass
class Bounds:
    """Of a space, whose program is as written, or in all blocks as ``rewrites`` of a plan have it.

    ``one_each``: of plans with one stage on each rank; several may fill a pipeline in next to no time. ``own``: stages,
    and the mesh of one, of the plan found.

    ``floors``: of a step, compute alone; ``issued_s``: of one micro-batch, forward and backward, in which hosts of all
    stages together issue its kernels.
    """

    space: Space
    estimates: Estimates
    floors: Floors
    issued_s: tuple[float, float]
    one_each: bool = True
    own: tuple[int, Mesh] | None = None
    enough_s: float = math.inf
    solved: int = 0
    _alike: dict[int, bool] = field(default_factory=dict)
    _insides: dict[tuple[int, int, Mesh], LeastInside | None] = field(default_factory=dict)
    _known: dict[tuple[object, ...], KnownConfigs] = field(default_factory=dict)
    _moves: dict[tuple[object, ...], Redistribution] = field(default_factory=dict)
    _pieces: dict[tuple[tuple[int, ...], int], EvenPieces] = field(default_factory=dict)
    _held: dict[int, HeldBlocks] = field(default_factory=dict)

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
        return cls(space, estimates, floors, issued_s, plan.stages.virtual == 1, own)

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
            if self.solved >= SOLVED and cells[0][2].asks:
                break
            bound_s, _, cell = heapq.heappop(cells)
            inner = list(self._open(cell))
            if not inner:
                return bound_s
            for found_s, one in inner:
                heapq.heappush(cells, (max(bound_s, found_s), next(numbers), one))
        return min([least_s, *(bound_s for bound_s, *_ in cells)])

    def _open(self, cell: Cell) -> Iterator[tuple[float, Cell]]:
        """The cells in a cell, each with its bound; none where nothing more can be said."""
        stages, counts, mesh = cell.stages, cell.counts, cell.mesh
        if cell.prices == len(PRICES) or not self._is_alike(stages):
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
        if not self._is_alike(stages):
            return min(self.floors.least_s(stages, m) for m in counts)
        return min(self._even_of(stages, m, mesh) for m in counts)

    def _even_of(self, stages: int, micro_batches: int, mesh: Mesh | None) -> float:
        floor = self.floors.of(stages, micro_batches, mesh)
        if mesh is None or math.isinf(floor.busy_s):
            may_keep = self._may_host or self._may_keep(stages, micro_batches)
            again_s = 0.0 if may_keep else floor.again_s if self._may_repeat else math.inf
            busy_s = self._spread_s(stages, (micro_batches,), floor.busy_s + again_s)
            return self._step_s(stages, (micro_batches,), busy_s, floor.backward_s)
        candidate = self.space.candidate(stages, mesh, micro_batches)
        kept_s = 0.0 if self._may_keep(stages, micro_batches) else math.inf
        runs = self._evenly(candidate).runs(self._resting(candidate))
        return self._in_order(candidate, floor, floor.busy_s, lambda _: kept_s, runs)

    def _free_s(self, stages: int, mesh: Mesh, counts: Sequence[int], kinds: int | None = None) -> float:
        """The inside of the fewest micro-batches, at any memory; whole, or of so many ``kinds`` of blocks."""
        inside = self._inside(stages, counts[0], mesh)
        if inside is None:
            return math.inf
        taken_s = inside.at(0.0) if kinds is None else inside.roughly(kinds)
        floor = self.floors.of(stages, counts[0], mesh)
        whole_s = max(taken_s * counts[0] / stages, floor.busy_s)
        return self._step_s(stages, counts, self._spread_s(stages, counts, whole_s), floor.backward_s)

    def _has_more(self, cell: Cell, mesh: Mesh) -> bool:
        """Whether there are kinds of blocks behind the next one, with which the inside is not yet whole."""
        inside = self._inside(cell.stages, cell.counts[0], mesh) if cell.by in ("even", "part") else None
        return inside is not None and cell.kinds + 1 < len(inside.kinds)

    def _within_s(self, stages: int, mesh: Mesh, micro_batches: int, prices: int = len(PRICES)) -> float:
        """The same of one number of micro-batches, each stage within its memory, or with layers run again.

        By so many prices of memory, of which each says what no other does.
        """
        inside = self._inside(stages, micro_batches, mesh)
        if inside is None:
            return math.inf
        floor = self.floors.of(stages, micro_batches, mesh)
        whole_s = max(inside.at(0.0) * micro_batches / stages, floor.busy_s)
        candidate = self.space.candidate(stages, mesh, micro_batches)
        asked = self._prices(inside, candidate)[:prices]
        runs = {price: inside.runs(price) for price in (0.0, *asked)}
        return self._in_order(candidate, floor, whole_s, partial(self._kept_s, inside, asked), runs)

    def _in_order(
        self,
        candidate: Candidate,
        floor: Floor,
        whole_s: float,
        kept_of: Callable[[Sequence[float]], float],
        runs: Mapping[float, Numbers],
    ) -> float:
        """Seconds of a step in any order of passes, busy for ``whole_s`` in all; again, or within rooms."""
        stages, count, even = candidate.stages, candidate.micro_batches, self._evenly(candidate)
        found: list[float] = []
        for order, each in self._orders(candidate):
            rooms = self._rooms(candidate, order, each)
            if "none" in self.space.recomputations:
                busy_s = max(whole_s, kept_of(rooms) * count / stages)
                found.append(self._fitted_s(candidate, (order, each), busy_s, _Fit(runs, even.backward, rooms)))
            if self._may_host:
                hosted = _Fit({0.0: runs[0.0]}, even.backward, [math.inf] * stages)
                found.append(self._fitted_s(candidate, (order, each), whole_s, hosted))
            if self._may_repeat:
                again = _Fit({0.0: runs[0.0] + even.again_runs}, even.backward + even.again, [math.inf] * stages)
                found.append(self._fitted_s(candidate, (order, each), whole_s + floor.again_s, again))
        return self._step_s(stages, (count,), min(found, default=math.inf), floor.backward_s)

    def _fitted_s(self, candidate: Candidate, order: tuple[Order, int], whole_s: float, fit: _Fit) -> float:
        """Of a step in an order of passes, of stages busy for ``whole_s`` each that are whole pieces."""
        stages, count = candidate.stages, candidate.micro_batches
        busy_s = whole_s * rounds(Pipeline(stages, order[1], count, order[0])) / count
        fitting = self._fitting(candidate, order[0], fit) if busy_s < self.enough_s else None
        if fitting is None:
            return busy_s
        return fitting.least_s(busy_s, min(max(busy_s, self.enough_s), MOST * busy_s))

    def _kept_s(self, inside: LeastInside, prices: Sequence[float], rooms: Sequence[float]) -> float:
        """Seconds of one micro-batch on one device, all stages together, within the memory of all of them together."""
        return max([inside.at(0.0), *(inside.at(price) - price * sum(rooms) for price in prices)])

    def _prices(self, inside: LeastInside, candidate: Candidate) -> list[float]:
        """Of memory, in seconds a byte."""
        limit = candidate.stages * self.space.room / self._flight(candidate)
        return [share * inside.at(0.0) / limit for share in PRICES] if 0.0 < limit < math.inf else []

    def _rooms(self, candidate: Candidate, order: Order, each: int) -> list[float]:
        """By stage, the bytes that it has at most, counted as an inside counts them."""
        limit, least = self.space.room, self._flight(candidate)
        stages, count = candidate.stages, candidate.micro_batches
        flights = [held(Pipeline(stages, each, count, order), stage) for stage in range(stages)]
        return [limit / max(1.0, min(least, flight)) for flight in flights]

    def _resting(self, candidate: Candidate) -> float:
        """What a byte that rests counts as, where a micro-batch's count as they are."""
        return COMING if candidate.micro_batches == 1 else 1.0 / self._flight(candidate)

    def _flight(self, candidate: Candidate) -> float:
        """Micro-batches in flight that an inside counts what rests as a part of."""
        return float(max(1, min(candidate.stages, candidate.micro_batches - 1)))

    def _evenly(self, candidate: Candidate) -> EvenPieces:
        """Each operator by itself, as fast and as small as can be."""
        key = candidate.mesh.shape, candidate.micro_batches
        if key not in self._pieces:
            count, mesh = candidate.micro_batches, candidate.mesh
            seconds = self.floors.of_blocks(count, mesh)
            loss_s = float(min(self.floors.losses_s(count, mesh)))
            self._pieces[key] = even_pieces(self._blocks(count), seconds, mesh.num_devices, loss_s=loss_s)
        return self._pieces[key]

    def _blocks(self, micro_batches: int) -> HeldBlocks:
        """Of the program of one micro-batch, which there is."""
        if micro_batches not in self._held:
            source = self.estimates.source(micro_batches)
            assert source is not None, "asked of programs that there are"
            self._held[micro_batches] = HeldBlocks.of(source, self.space.problem)
        return self._held[micro_batches]

    def _fitting(self, candidate: Candidate, order: Order, fit: _Fit) -> Fitting | None:
        """Of stages that are whole pieces; None where passes are in halves."""
        stages, count, even = candidate.stages, candidate.micro_batches, self._evenly(candidate)
        if order == "interleaved":
            return Turns(fit.runs, count, fit.rooms)
        if order not in ONE_EACH:
            return None
        ways = [lines(order, stages, count, stage) for stage in range(stages)]
        return Packing(fit.runs, even.forward, fit.backward, list(zip(ways, fit.rooms, strict=True)))

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
        slower = factors(stages, self.space.cluster.num_devices // stages, DRAWS, CALIBRATION.straggler_std, 0)
        slow = max(1.0, float(slower.min(axis=0).mean()))
        return max(busy_s + first * begun_s, issued_s) * slow + (CALIBRATION.host_step_s if on_gpu else 0.0)

    def _spread_s(self, stages: int, counts: Sequence[int], whole_s: float) -> float:
        """Of a step that keeps all stages busy for ``whole_s``, pipelines filled and drained."""
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
        """Whether a piece takes the same on each stage, whatever runs on the others."""
        if stages not in self._alike:
            cluster, meshes = self.space.cluster, self.space.meshes(stages)
            axes = (self.space.candidate(stages, mesh, 1).axes for mesh in meshes)
            one_kind = len(cluster.classes) == 1 and Cores.of(cluster, stages) is None
            self._alike[stages] = stages == 1 or (one_kind and all(len(set(links)) == 1 for links in axes))
        return self._alike[stages]

    @cached_property
    def _may_repeat(self) -> bool:
        return "full" in self.space.recomputations and self.space.has_layers

    @property
    def _may_host(self) -> bool:
        """Whether layers may leave nothing on the device, which takes no time at best."""
        return self.space.pinned.activations is not None and self.space.has_layers

    def _may_keep(self, stages: int, micro_batches: int) -> bool:
        """Whether an even cut of all that is kept would fit."""
        resting = COMING if stages == micro_batches == 1 else 1.0
        return self.space.held_bytes(micro_batches, resting) <= self.space.room

    def _inside(self, stages: int, micro_batches: int, mesh: Mesh) -> LeastInside | None:
        """None if there is no such program."""
        key = stages, micro_batches, mesh
        if key not in self._insides:
            self._insides[key] = self._find(self.space.candidate(stages, mesh, micro_batches))
        return self._insides[key]

    def _find(self, candidate: Candidate) -> LeastInside | None:
        source = self.estimates.source(candidate.micro_batches)
        if source is None:
            return None
        self.solved += 1
        alone = candidate.stages == 1
        adding_s = self.space.adding_s if candidate.micro_batches > 1 else 0.0
        problem = replace(
            self.space.of_micro_batch(source.graph, candidate.micro_batches),
            mesh=candidate.mesh,
            once=1.0 / candidate.micro_batches if alone else 0.0,
            several=candidate.several,
            adding_s=adding_s,
            resting=self._resting(candidate),
        )
        device = self.floors.slowest
        loss_s = float(min(self.floors.losses_s(candidate.micro_batches, candidate.mesh)))
        links = candidate.mesh, reached_links(candidate.inside)
        key = (*links, problem.once, problem.several, problem.adding_s, problem.resting)
        if key not in self._known:
            moves = Redistribution(*links, problem.bucket_bytes, copying_s(device, CALIBRATION))
            self._known[key] = KnownConfigs(self._moves.setdefault(links, moves))
        compute, known = self.space.in_step(device), self._known[key]
        held = self._blocks(candidate.micro_batches)
        forward, backward, _ = self.floors.of_blocks(candidate.micro_batches, candidate.mesh)
        own = (forward + backward)[held.apart :]
        slowed = 1.0 - 1.0 / CALIBRATION.overlap_slowdown if self.space.cluster.has_gpus else 0.0
        rewrites = self.floors.rewrites
        return LeastInside(problem, compute, candidate.inside, loss_s, own, source, held.spans, rewrites, slowed, known)
