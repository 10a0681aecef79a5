"""What the operators of a step take at least, each for itself, on devices that are busy all the time.

By arithmetic the parts of an operator take no less than the whole, spread evenly. Learned and measured prices promise
nothing of the kind: half of a product may take more than half of its time, or less. So every shape that an operator may
have on a device is asked for, for so many micro-batches on a stage's mesh, and the cheapest counts: what a stage
computes is a sum of such prices, whatever the plan. Entry point: ``Floors``.

Of several classes of devices, c of count_c, a plan chooses what runs where. Whatever weights w_c are given to them, a
step of S seconds has S x sum(count_c w_c) >= sum of what the operators take, each weighed by its device's class, and
that is no less than the least over classes. Weights are one over what a class takes for the whole program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ir.cost_model import Query, backward_work
from ir.graph import Graph, Node
from ir.mesh import Mesh
from pdv.cluster import Device
from pdv.pcg.calls import issued, parameters_read
from pdv.pcg.norms import is_taken_by_norm, is_within_norm
from pdv.pcg.scaled import estimate_nodes
from pdv.pipelines.candidates import Space
from pdv.pipelines.profile import Numbers
from pdv.problem.fused import Fused
from pdv.problem.workload import Execution
from pdv.schedule.pieces import pieces
from pdv.search.blocks import Block
from pdv.search.variants.variants import SourceBlocks
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.shared import Cores
from pdv.simulate.engine.task import PICO
from pdv.simulate.lowering.entries import Entries
from pdv.simulate.lowering.price import DevicePrices

Sizes = tuple[int, ...]
"""Of a mesh's axes."""

Shape = tuple[int, ...]
"""Extents of loops."""

Rewrites = Mapping[int, tuple[str, ...]]
"""By block, the rules that a plan applies to it, in order."""

LEAST_S = 1e-12  # that a class of devices takes for a program


@dataclass(frozen=True)
class Floor:
    """Seconds of a step at least, were all devices busy all the time.

    ``busy_s``: of all that is computed, the loss too; ``backward_s``: of backward, the loss aside; ``again_s``: of the
    layers' forward once more.
    """

    busy_s: float
    backward_s: float
    again_s: float


@dataclass
class Floors:
    """Of a space's plans, each block as written, or as ``rewrites`` has it.

    ``source_of``: the program's blocks, by how many micro-batches there are. ``own``: the sizes of a plan's mesh, where
    they are none of those that bounds are over.
    """

    space: Space
    source_of: Callable[[int], SourceBlocks | None]
    rewrites: Rewrites = field(default_factory=dict)
    own: tuple[Sizes, ...] = ()
    _prices: dict[Hashable, dict[Shape, Numbers]] = field(default_factory=dict)  # [class; forward, backward], unweighed
    _blocks: dict[int, dict[Sizes, Numbers]] = field(default_factory=dict)
    _floors: dict[tuple[Sizes, int], Floor] = field(default_factory=dict)

    def of_plan(self, rewrites: Rewrites, mesh: Mesh) -> Floors:
        """The same of a plan's rewrites and mesh, too."""
        own = () if mesh.shape in self._sizes else (mesh.shape,)
        return Floors(self.space, self.source_of, rewrites, own, self._prices) if rewrites or own else self

    def of(self, stages: int, micro_batches: int, mesh: Mesh | None = None) -> Floor:
        """Of so many stages and micro-batches, on one mesh or on any; infinite where there is no such program."""
        if self.space.is_bounded:
            return self._spread
        meshes = self.space.meshes(stages) if mesh is None else (mesh,)
        found = [self._floor(one, micro_batches) for one in meshes]
        return Floor(*(min(getattr(one, name) for one in found) for name in ("busy_s", "backward_s", "again_s")))

    def least_s(self, stages: int, micro_batches: int, mesh: Mesh | None = None, *, again: bool = False) -> float:
        """Seconds of a step that no plan is faster than: all devices at work but for filling and draining.

        again: with the layers' forward twice.
        """
        floor = self.of(stages, micro_batches, mesh)
        busy_s = floor.busy_s + (floor.again_s if again else 0.0)
        if self.space.pinned.takes_turns:
            return busy_s
        cores = Cores.of(self.space.cluster, stages)
        if cores is not None:  # who waits leaves its core to others; a micro-batch is on one core a device at a time
            return busy_s * max(1.0, sum(cores.shares) / micro_batches)
        return busy_s / self._share(stages, micro_batches)

    def _share(self, stages: int, micro_batches: int) -> float:
        """Of what all devices might do in a step, what they do at most, as pipelines are filled and drained.

        Before its own passes a stage waits for those of the stages before it, once each. Of the time that a stage
        leaves to those behind it a device may use an m-th part, or leave all of it.
        """
        size = self.space.cluster.num_devices // stages
        weights = [sum(self._weight_of_ranks[at * size : (at + 1) * size]) for at in range(stages)]
        most = 0.0
        for weight in reversed(weights):
            most = max(most, weight / micro_batches + most * (1.0 - 1.0 / micro_batches))
        return micro_batches * most / sum(weights)

    @cached_property
    def _weight_of_ranks(self) -> list[float]:
        cluster = self.space.cluster
        if len(self.devices) == 1:
            return [1.0] * cluster.num_devices
        return [self._weight_of[cluster.device_of(rank)] for rank in range(cluster.num_devices)]

    @cached_property
    def _spread(self) -> Floor:
        """Of arithmetic: all that one device would do, spread evenly."""
        return self._floor(Mesh(()), 1)

    def _floor(self, mesh: Mesh, micro_batches: int) -> Floor:
        """All stages' devices at work alike."""
        key = mesh.shape, micro_batches
        if key not in self._floors:
            self._floors[key] = self._find(mesh, micro_batches)
        return self._floors[key]

    def _find(self, mesh: Mesh, micro_batches: int) -> Floor:
        known = self._by_blocks(micro_batches)
        if not known:
            return Floor(math.inf, math.inf, math.inf)
        both, backward, _, forward = known[mesh.shape].sum(axis=0)
        times = micro_batches * mesh.num_devices / float(self._counts @ self._weights)
        loss = min(self._weights * self.losses_s(micro_batches, mesh))
        return Floor(float(both + loss) * times, float(backward) * times, float(forward) * times)

    def _by_blocks(self, micro_batches: int) -> dict[Sizes, Numbers]:
        if micro_batches not in self._blocks:
            source = self.source_of(micro_batches)
            fused = self.space.fused(micro_batches)
            self._blocks[micro_batches] = {} if source is None else self._of_blocks(source, fused)
        return self._blocks[micro_batches]

    def of_blocks(self, micro_batches: int, mesh: Mesh, device: Device) -> tuple[Numbers, Numbers, Numbers]:
        """By block of the program, seconds of one micro-batch on one device of a stage, of this class.

        Forward, backward, and forward of blocks that are in layers.
        """
        of = (1, Mesh(())) if self.space.is_bounded else (micro_batches, mesh)
        spread = micro_batches * mesh.num_devices if self.space.is_bounded else 1
        # no class takes less than the least over all
        found = self._by_blocks(of[0])[of[1].shape] / self._weight_of[device] / spread
        return found[:, 2], found[:, 1], found[:, 3]

    # ---- Classes of devices ----

    @cached_property
    def devices(self) -> list[Device]:
        """By class."""
        return [entry.device for entry in self.space.cluster.classes]

    def slowest_of(self, devices: Sequence[Device]) -> Device:
        """Of some classes, the one that takes longest for the whole program."""
        return min(devices, key=self._weight_of.__getitem__)

    @cached_property
    def _weight_of(self) -> dict[Device, float]:
        return dict(zip(self.devices, self._weights.tolist(), strict=True))

    @property
    def _counts(self) -> Numbers:
        return np.array([float(entry.count) for entry in self.space.cluster.classes])

    @cached_property
    def _weights(self) -> Numbers:
        """By class, one over what one device takes for the whole program; equal where that cannot be said."""
        source = self.source_of(1)
        if len(self.devices) == 1 or source is None:
            return np.ones(len(self.devices))
        nodes = [node for block in source.blocks for node in block.nodes if node.op.kernel]
        whole = {node: (tuple(node.loops.extents.values()),) for node in nodes}
        fused = self.space.fused(1)
        self._ask(whole, fused)
        taken_by = {node: self._prices[_kind(node, fused)][shape].sum(axis=1) for node, (shape,) in whole.items()}
        taken = sum(taken_by[node] for node in nodes)  # blocks that are there again have the same nodes
        return np.asarray(1.0 / np.maximum(taken, LEAST_S))

    def loss_s(self, micro_batches: int, mesh: Mesh, device: Device) -> float:
        """Of one class."""
        return float(self.losses_s(micro_batches, mesh)[self.devices.index(device)])

    def losses_s(self, micro_batches: int, mesh: Mesh) -> Numbers:
        """By class, seconds of one micro-batch's loss on one device of a mesh, as outputs may leave."""
        source = self.source_of(micro_batches)
        assert source is not None, "asked of programs that there are"
        problem = replace(self.space.problem, graph=source.graph, mesh=mesh, axes=())
        entries, outputs = Entries(problem, Execution()), [node.type for _, node in source.graph.outputs]
        found = []
        for device in self.devices:
            compute = self.space.compute_of((device,))
            prices = DevicePrices.of(entries, Execution(), device, compute, CALIBRATION)
            each = [prices.loss([(output, way) for output in outputs]) for way in problem.exits]
            found.append(min(loss.forward + loss.backward for loss in each) / PICO)
        return np.array(found)

    # ---- Sums over operators ----

    @cached_property
    def _sizes(self) -> list[Sizes]:
        """Of the meshes that are asked about."""
        if self.space.is_bounded:
            return [()]
        near = (mesh.shape for p in self.space.stages for mesh in self.space.meshes(p))
        return list(dict.fromkeys((*near, *self.own)))

    def _of_blocks(self, source: SourceBlocks, fused: Fused | None) -> dict[Sizes, Numbers]:
        """By sizes [block; forward and backward, backward, forward, forward of the layers], weighed."""
        found = pieces(source.graph)
        layers = {node for node, piece in found.of.items() if found.layers[piece]}
        ways: dict[Block, list[Block]] = {}
        for number, block in enumerate(source.blocks):  # of those that are there again each may do otherwise
            ways.setdefault(block, []).extend(variants_of(source, number, self.rewrites))
        nodes = dict.fromkeys(node for each in ways.values() for one in each for node in one.nodes if node.op.kernel)
        least, nothing = self._least(list(nodes), fused), np.zeros((len(self._sizes), 3))
        sums: dict[Block, Numbers] = {}
        for block, each in ways.items():
            of = np.min([sum((least[node] for node in one.nodes if node in least), nothing) for one in each], axis=0)
            sums[block] = np.column_stack([of, of[:, 2] * layers.issuperset(block.nodes)])
        return dict(zip(self._sizes, np.stack([sums[block] for block in source.blocks], axis=1), strict=True))

    def _least(self, nodes: Sequence[Node], fused: Fused | None) -> dict[Node, Numbers]:
        """By node [sizes; forward and backward, backward, forward], weighed: the least of all shapes and classes."""
        kinds: dict[Node, tuple[Hashable, Hashable]] = {
            node: (_kind(node, fused), tuple(node.loops.extents.items())) for node in nodes
        }
        firsts: dict[tuple[Hashable, Hashable], Node] = {}
        for node, kind in kinds.items():
            firsts.setdefault(kind, node)
        shapes = {kind: [_shapes(node, sizes) for sizes in self._sizes] for kind, node in firsts.items()}
        self._ask({firsts[kind]: [one for each in of for one in each] for kind, of in shapes.items()}, fused)
        found = {}
        for kind, of in shapes.items():
            least, known = [], self._prices[kind[0]]
            for each in of:
                prices = np.array([known[one] for one in each]) * self._weights[:, None]
                least.append([prices.sum(axis=2).min(), prices[:, :, 1].min(), prices[:, :, 0].min()])
            found[kind] = np.array(least)
        return {node: found[kind] for node, kind in kinds.items()}

    def _ask(self, asked: Mapping[Node, Sequence[Shape]], fused: Fused | None) -> None:
        """Know the prices of nodes whose loops have such extents on a device."""
        new: list[tuple[dict[Shape, Numbers], Shape]] = []
        queries = []
        for node, shapes in asked.items():
            known = self._prices.setdefault(_kind(node, fused), {})
            for shape in shapes:
                if shape not in known:
                    loops = replace(node.loops, extents=dict(zip(node.loops.extents, shape, strict=True)))
                    known[shape] = np.zeros((len(self.devices), 2))
                    if not is_taken_by_norm(node, loops):
                        new.append((known, shape))
                        queries.append(Query.of(node, loops, train=True))
        products = self.space.problem.products
        prices = [estimate_nodes(self.space.in_step(device), queries, products, fused) for device in self.devices]
        for (known, shape), *each in zip(new, *prices, strict=True):
            known[shape] = np.array([(one.forward.mean_s, one.backward.mean_s) for one in each])


def variants_of(source: SourceBlocks, number: int, rewrites: Rewrites) -> list[Block]:
    """A block as written, and as a plan rewrites it."""
    names = rewrites.get(number, ())
    return [source.blocks[number], *([source.variant(number, names).block] if names else [])]


def _kind(node: Node, fused: Fused | None) -> Hashable:
    """Equal where prices of equal shapes are."""
    types = tuple(operand.type.dtype for operand in node.operands)
    matrix = node.operands[1].type if node.op.weight_waits else None  # by which a product's format is known
    how = node.loops.operands, node.loops.result, node.wanted if node.needs_grad else None
    whole = tuple(operand.type for operand in node.operands)
    share = 1.0 if fused is None else fused.share(node.op, whole, node.type, node.attrs)
    return node.op.name, tuple(node.attrs.items()), types, matrix, node.type.dtype, how, share, is_within_norm(node)


def _shapes(node: Node, sizes: Sizes) -> list[Shape]:
    """Extents of a node's loops on a device, in all ways to cut them along axes of some sizes."""
    extents = node.loops.extents
    names = dict.fromkeys(split.loop for split in node.op.splits(node.loops))
    found: dict[Shape, None] = {}
    for chosen in itertools.product(names, repeat=len(sizes)):
        left = dict(extents)
        for name, size in zip(chosen, sizes, strict=True):
            if name is not None and left[name] % size:
                break
            if name is not None:
                left[name] //= size
        else:
            found[tuple(left.values())] = None
    return list(found)


def issued_seconds(space: Space, graph: Graph) -> tuple[float, float]:
    """Seconds in which a host issues the kernels of a program, forward and backward; a CPU issues to itself."""
    if not space.cluster.has_gpus:
        return 0.0, 0.0
    forward = backward = read = 0
    for node in graph.nodes:
        if not node.is_leaf and node.op.kind != "parallel":
            types, behind = [operand.type for operand in node.operands], 0
            if space.problem.train and node.needs_grad:
                behind = backward_work(node.op, node.loops, types, node.type, node.wanted).kernels
            kernels = issued(node, node.loops, behind)
            forward, backward = forward + kernels[0], backward + kernels[1]
            read += parameters_read(node)
    forward_s, backward_s = forward * CALIBRATION.host_forward_s, backward * CALIBRATION.host_backward_s
    return forward_s + read * CALIBRATION.host_read_s, backward_s + read * CALIBRATION.host_gradient_s
