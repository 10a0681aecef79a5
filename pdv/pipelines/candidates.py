"""The outer choices of a plan: stages, the mesh inside each, micro-batches, recomputation; and what bounds them.

Entry point: ``Space``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ir.cost_model import CostModel
from ir.dims import divisors
from ir.errors import PinsError
from ir.graph import Graph
from ir.mesh import Mesh
from ir.scaling.rows import micro_batch
from pdv.cluster import Cluster, Device
from pdv.cluster.meshes import part_meshes
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.memory.allocator import room_within
from pdv.pcg.fused import fused_of
from pdv.pcg.plan_cost import kept_values, saved_values
from pdv.pins import PinSet
from pdv.pipelines.pinned import FREE, Pinned, rows_of, trained_pieces, why_whole
from pdv.pipelines.sending import least_seconds, sending_seconds
from pdv.prices import slowest_axes, stage_axes
from pdv.problem import Pins, Problem
from pdv.problem.fused import Fused
from pdv.problem.problem import allow_none
from pdv.problem.workload import SEARCHED, STALE, Order, Recompute, are_several
from pdv.schedule.order import why_not
from pdv.schedule.pieces import pieces
from pdv.simulate.lowering.in_step import InStep

MOST_AXES = 2  # of the mesh inside a stage; stages are one more
MESHES = 4  # of a stage that bounds are over
ADDED_PASSES = 3  # over a parameter's bytes: two gradients are read, their sum is written
LONG = 0.05  # of what devices compute, that sends take at least which are worth the memory of what hides them
IDLE = 0.15  # of a stage's time, that filling and draining a pipeline may take in the first guess of micro-batches


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: ``axes`` by stage, the links of the mesh's axes there."""

    stages: int
    mesh: Mesh
    axes: tuple[tuple[AxisLink, ...], ...]
    micro_batches: int

    @property
    def inside(self) -> tuple[AxisLink, ...]:
        """By axis the slowest stage's links, for which the inside of all stages is chosen."""
        return slowest_axes(self.axes)

    @property
    def spread(self) -> float:
        """Times that a micro-batch takes on one stage that a step takes at least, beside one a micro-batch."""
        return self.micro_batches + self.stages - 1

    @property
    def in_order(self) -> int:
        """Micro-batches that a stage of a 1F1B pipeline holds at once at most."""
        return min(self.stages, self.micro_batches)

    def filled(self, virtual: int) -> float:
        """What a step with so many stages on each rank takes of one with a single stage.

        Filling and draining take what they did, divided by the stages of a rank (Narayanan et al., SC'21, 2.2).
        """
        return (self.micro_batches + (self.stages - 1) / virtual) / self.spread

    @property
    def several(self) -> bool:
        """Whether micro-batches are in flight at once."""
        return are_several(self.stages, self.micro_batches)


@dataclass(frozen=True)
class Space:
    """What is chosen among. ``problem`` is that of the whole batch on a mesh of the whole cluster.

    ``pins``: of the inside of each stage, on its mesh.
    """

    problem: Problem
    cluster: Cluster
    pinned: Pinned = FREE
    pins: PinSet | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_graphs", {1: self.problem.graph})

    @cached_property
    def batch(self) -> int:
        """Rows that every input has."""
        return rows_of(self.problem)

    @cached_property
    def open(self) -> bool:
        """Whether there is something to choose: micro-batches, or what the whole batch computes again."""
        if not self.problem.train or all(node.is_leaf for node in self.problem.graph.nodes):
            return False
        return self.apart or self.pinned.recompute not in (None, "none")

    @cached_property
    def apart(self) -> bool:
        """Whether the rows of the batch can be run apart, in micro-batches."""
        return not why_whole(self.problem) and self.batch > 1 and self.graph(self._divisors[1]) is not None

    @cached_property
    def _divisors(self) -> tuple[int, ...]:
        return divisors(self.batch)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches that divide the batch."""
        found = self._divisors if self.apart else (1,)
        return tuple(count for count in found if self.pinned.micro_batches in (None, count))

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """What may run again in backward, or wait in the host's memory for it; on the device and kept comes first."""
        return self.pinned.recomputations(compiled=self.problem.fused is not None)

    @property
    def lean(self) -> bool:
        """Whether light values may be made again in backward."""
        return "light" in self.recomputations

    def orders(self, candidate: Candidate, recompute: Recompute) -> tuple[tuple[Order, int], ...]:
        """Of passes: that which holds least; all forward passes first, where sends may take longer than that hides.

        Eager 1F1B only where they take long: bounds of plans that have it are of less. With fewer micro-batches than
        stages nothing is steady, and torch has no 1F1B of them. Each with the stages on a rank: one, or what is pinned.
        """
        if candidate.stages == 1:
            return ((SEARCHED[-1], 1),)
        if self.pinned.takes_turns:
            return self.in_turns(candidate, recompute)
        if self.pinned.schedule is not None:
            order, count = self.pinned.schedule, candidate.micro_batches
            wrong = why_not(order, candidate.stages, 1, count, recomputes=recompute != "none")
            return () if wrong else ((order, 1),)
        few = candidate.micro_batches < candidate.stages
        found = SEARCHED[:1] if few else SEARCHED[::-1]
        return tuple((order, 1) for order in found if order != "eager-1f1b" or self._sends_take_long(candidate.stages))

    def _sends_take_long(self, stages: int) -> bool:
        if stages not in self._long:
            least = least_seconds(self.problem, self.cluster)
            self._long[stages] = sending_seconds(self.problem.graph, self.cluster, stages) > LONG * least
        return self._long[stages]

    @cached_property
    def _long(self) -> dict[int, bool]:
        return {}

    def in_turns(self, candidate: Candidate, recompute: Recompute) -> tuple[tuple[Order, int], ...]:
        """Orders of passes through several stages on each rank, or in halves of backward, with how many stages.

        The latter only where they are pinned: on no machine were they measured to be faster. Both only so where
        processes share cores: what one leaves idle another computes in, and more passes wait for a core more often.
        GPT-2's demo takes 2.9 s interleaved and 2.3 without, which are predicted within 2 % of each other. And only so
        where ranks follow each other as listed: torch takes their order in a pipeline for that of its process group.
        """
        order, count = self.pinned.schedule or "interleaved", candidate.micro_batches
        if not self.pinned.may_take_turns or candidate.stages == 1:
            return ()
        if self.cluster.places or (not self.pinned.takes_turns and self.cluster.shares_cores):
            return ()
        return tuple(
            (order, each)
            for each in self.pinned.virtual(order, self.layers, candidate.stages)
            if candidate.stages * each <= self._most
            and not why_not(order, candidate.stages, each, count, recomputes=recompute != "none")
        )

    def filled(self, candidate: Candidate) -> float:
        """What a step takes of one with a single stage on each rank, with as many as help most."""
        each = [1] if self.pinned.takes_turns else [each for _, each in self.in_turns(candidate, "none")]
        return candidate.filled(max(each, default=1))

    @cached_property
    def _most(self) -> int:
        """Stages at most, on all ranks: each has something to train."""
        return trained_pieces(self.problem.graph)

    def graph(self, micro_batches: int) -> Graph | None:
        """The program of one micro-batch."""
        known: dict[int, Graph | None] = self.__dict__["_graphs"]
        if micro_batches not in known:
            whole = self.problem.graph
            known[micro_batches] = whole if micro_batches == 1 else micro_batch(whole, micro_batches)
        return known[micro_batches]

    def fused(self, micro_batches: int) -> Fused | None:
        """What operators take of a micro-batch that is compiled, as a replay of its program finds it."""
        if self.problem.fused is None or (graph := self.graph(micro_batches)) is None:
            return None
        if micro_batches not in self._fused:
            self._fused[micro_batches] = fused_of(graph, self.problem.compute)
        return self._fused[micro_batches]

    @cached_property
    def _fused(self) -> dict[int, Fused]:
        return {1: self.problem.fused} if self.problem.fused is not None else {}

    def of_micro_batch(self, graph: Graph, micro_batches: int) -> Problem:
        """The problem of one of so many micro-batches, whose program, or a short one of it, is ``graph``."""
        return replace(self.problem, graph=graph, rows=None, fused=self.fused(micro_batches))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Numbers of stages that divide the devices and are no more than the pieces that have parameters."""
        devices = self.cluster.num_devices
        most = 1 if why_whole(self.problem) else min(devices, self._most)
        allowed = range(1, most + 1) if self.pinned.stages is None else (self.pinned.stages,)
        return tuple(p for p in allowed if devices % p == 0 and self.cluster.keeps_order(p) and self.meshes(p))

    def meshes(self, stages: int) -> tuple[Mesh, ...]:
        """The meshes of a stage that bounds are over."""
        return self.all_meshes(stages)[:MESHES]

    def all_meshes(self, stages: int) -> tuple[Mesh, ...]:
        """Meshes of one stage's devices: the one of a single axis, then those that keep to the cluster's levels."""
        named = self.pins is not None  # what is pinned of one axis is not of the other
        found = part_meshes(self.cluster, self.cluster.num_devices // stages, MOST_AXES, mirrored=named)
        found = self.pinned.meshes(found, self.cluster.num_devices // stages)
        found = tuple(mesh for mesh in found if self.pins is None or self.pins.speaks_of(mesh))
        return tuple(sorted(found, key=self._askew))

    def _askew(self, mesh: Mesh) -> tuple[bool, bool]:
        """Whether there are several axes, and whether the last of them is another than a node's devices."""
        if not mesh.axes:
            return False, False
        return len(mesh.axes) > 1, mesh.axes[-1].size != min(self.node_size, mesh.num_devices)

    def pins_on(self, graph: Graph, mesh: Mesh) -> Pins:
        """What the inside of a stage keeps; bounds are of all plans, whether they do or not.

        Raises:
            PinsError: if a name is none of the program's, or nothing there can follow a technique.
        """
        own = self.problem.pins
        if self.pins is None:
            return own
        found = self.pins.on(graph, mesh)
        return replace(found, gathers=allow_none) if own.gathers is allow_none else found

    def check_pins(self) -> None:
        """Whether pins may be kept by the whole batch on some mesh of a stage.

        Raises:
            PinsError: if they name what there is not, or no mesh lets anything follow them.
        """
        if self.pins is None:
            return
        what = f"no mesh of a stage has the axes {', '.join(self.pins.axes)}"
        refused = PinsError(what, mend="Pin the mesh of a stage, too: mesh: {dp: 2}, or --mesh dp=2")
        for mesh in dict.fromkeys(mesh for stages in self.stages for mesh in self.meshes(stages)):
            try:
                self.pins_on(self.problem.graph, mesh)
            except PinsError as error:
                refused = error
            else:
                return
        raise refused

    def spans_nodes(self, stages: int) -> bool:
        """Whether a stage has more devices than a node."""
        return self.cluster.num_devices // stages > self.node_size

    @property
    def node_size(self) -> int:
        """Devices of a node."""
        return self.cluster.levels[-1].size if self.cluster.levels else 1

    def candidate(self, stages: int, mesh: Mesh, micro_batches: int) -> Candidate:
        """With the links that the mesh's axes have in each stage."""
        return Candidate(stages, mesh, stage_axes(self.problem.compute, self.cluster, mesh, stages), micro_batches)

    def devices_of(self, candidate: Candidate, stage: int) -> tuple[Device, ...]:
        """The kinds of devices that a stage has."""
        cluster, size = self.cluster, candidate.mesh.num_devices
        if len(cluster.classes) == 1:
            return (cluster.classes[0].device,)
        return tuple(dict.fromkeys(cluster.device_of(rank) for rank in range(stage * size, (stage + 1) * size)))

    def compute_of(self, devices: tuple[Device, ...]) -> CostModel:
        """What prices the slowest of some devices."""
        return self.problem.compute.on(devices)

    def in_step(self, device: Device) -> InStep:
        """What prices kernels of a device as they run within a step."""
        return self._in_step.setdefault(device, InStep(self.compute_of((device,)), device))

    @cached_property
    def _in_step(self) -> dict[Device, InStep]:
        return {}

    # ---- What bounds a candidate ----

    @cached_property
    def adding_s(self) -> float:
        """Seconds a byte of a parameter in which its gradient is added to that of earlier micro-batches, at least."""
        devices = [entry.device for entry in self.cluster.classes]
        return min(ADDED_PASSES / one.memory_bandwidth_bytes_per_s / one.pace for one in devices)

    def versions(self, stages: int) -> int:
        """Of parameters, that so many stages keep."""
        return 2 if stages > 1 and self.pinned.schedule in STALE else 1

    def _resting(self, stages: int = 1) -> float:
        versions = self.versions(stages)
        if versions not in self._rests:
            trained = [node.type for node in self.problem.graph.params if node.needs_grad]
            problem = replace(self.problem, versions=versions)
            self._rests[versions] = sum(problem.held_bytes(param, param.num_bytes) for param in trained)
        return self._rests[versions]

    @cached_property
    def _rests(self) -> dict[int, float]:
        """Bytes of trained parameters, by how many versions of each are kept."""
        return {}

    @cached_property
    def _kept(self) -> float:
        return float(sum(node.type.num_bytes for node in saved_values(self.problem.graph)))

    @cached_property
    def _surely_kept(self) -> float:
        return float(sum(value.type.num_bytes for value in kept_values(self.problem.graph.nodes, lean=self.lean)))

    @property
    def is_bounded(self) -> bool:
        """Whether parts of an operator take no less together than the whole: by arithmetic, not as measured."""
        return isinstance(self.problem.compute, ComputeModel)

    @cached_property
    def room(self) -> float:
        """Bytes that tensors may take of a device."""
        limit = self.problem.memory_limit
        return max(room_within(limit, entry.device, eager=True) for entry in self.cluster.classes)

    def least_bytes(self, stages: int, micro_batches: int, recompute: Recompute = "none") -> float:
        """Bytes of a device, were everything cut evenly; of what is run again nothing."""
        devices = self.cluster.num_devices
        kept = self._kept * min(stages, micro_batches) / micro_batches if recompute == "none" else 0.0
        return (self._resting(stages) + kept) / devices

    def held_bytes(self, micro_batches: int, resting: float) -> float:
        """Bytes of a device, were everything cut evenly and one micro-batch held, a share ``resting`` of what rests."""
        return (self._resting() * resting + self._surely_kept / micro_batches) / self.cluster.num_devices

    @cached_property
    def layers(self) -> int:
        """How many pieces repeat, and might run again in backward."""
        return sum(pieces(self.problem.graph).layers)

    @cached_property
    def is_tied(self) -> bool:
        """Whether pieces share a parameter, whose gradients stages sum that have them."""
        graph = self.problem.graph
        of = pieces(graph).of
        trained = (param for param in graph.params if param.needs_grad)
        return any(len({of[reader] for reader in graph.users[param] if reader in of}) > 1 for param in trained)

    def counts_of(self, stages: int) -> tuple[int, ...]:
        """Of so many stages: those that the order of passes asks for, where it is pinned."""
        order = self.pinned.schedule or "interleaved"
        if not self.pinned.takes_turns and order not in STALE:
            return self.counts
        each = self.pinned.virtual(order)[0] if self.pinned.takes_turns else 1
        return tuple(m for m in self.counts if not why_not(order, stages, each, m, recomputes=False)) or self.counts

    def first_counts(self, stages: int, mesh: Mesh) -> list[int]:
        """First guesses: the fewest that keep a pipeline busy, and the fewest whose rows the slow axis can cut, too."""
        first, ways = self.first_count(stages), mesh.axes[0].size if mesh.axes else 1
        cut = [count for count in self.counts_of(stages) if (self.batch // count) % ways == 0]
        dealt = min(cut, key=lambda count: (count < first, abs(count - first)), default=first)
        return list(dict.fromkeys([first, dealt]))

    def fewer_counts(self, stages: int) -> list[int]:
        """Fewer than the first guess where insides are pinned, as rows may be too few for what they are to do."""
        if self.pins is None:
            return []
        return [count for count in reversed(self.counts_of(stages)) if count < self.first_count(stages)]

    def first_count(self, stages: int) -> int:
        """Micro-batches to begin with: the fewest that fit if all is cut evenly and keep a pipeline busy."""
        limit, counts = self.problem.memory_limit, self.counts_of(stages)
        for count in counts:
            if (stages - 1) / count <= IDLE and self.least_bytes(stages, count) <= 0.8 * limit:
                return count
        return counts[-1]
