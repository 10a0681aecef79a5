"""Picoseconds of each entry on the device classes and links of a stage.

Decides: what of an estimate is the device's time (the host's is simulated on a GPU), attention without FlashAttention,
the loss, the optimizer. Entry point: ``DevicePrices``; collectives are in ``links``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ir.cost_model import (
    NOTHING,
    CostModel,
    Estimate,
    NodeEstimate,
    Query,
    Work,
    misaligned,
    slower_by_rows,
    together,
)
from ir.dims import Loops
from ir.graph import Node, unmoved
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.sharding import Sharding, local_shape
from ir.types import DType, TensorType
from ir.verify import node_local_loops
from pdv.cluster import Device
from pdv.cluster.host import host_of
from pdv.cost.compute import ROOFLINE_RELATIVE_STD, ComputeModel
from pdv.pcg.norms import is_taken_by_norm
from pdv.pcg.plan_cost import is_residual, local_costs
from pdv.pcg.scaled import query_of
from pdv.problem import Problem
from pdv.problem.formats import Format
from pdv.problem.precision import Precision, step_estimate
from pdv.problem.workload import Execution
from pdv.simulate.calibration import Calibration
from pdv.simulate.engine.task import picoseconds
from pdv.simulate.lowering.copies import READ_AND_WRITTEN, copied_by_unit, copied_bytes
from pdv.simulate.lowering.entries import Entries, Entry
from pdv.simulate.lowering.scaled import cast_bytes, is_scaled, scaled_products

# Cross-entropy in float32 over logits: the copy in float32, the row's maximum and sum, the result; backward reads and
# writes (as the reference implementation in torch.nn.functional does it).
LOSS_PASSES = (3, 2)
FUSED_LOSS_PASSES = (1, 2)
# Matrices of scores that a block of the fused softmax takes, where rows are longer than 128; of others it is composed
# (Megatron-LM, fused_kernels/scaled_upper_triang_masked_softmax.h and fused_softmax.py).
FUSED_SCORES = 4


class Price(NamedTuple):
    """Of an entry on one device class. Moves cost the same on all.

    Attributes:
        forward, backward: picoseconds of the device.
        kernels: that the host issues, forward and backward.
        estimates: where both come from.
    """

    forward: int
    backward: int
    kernels: tuple[int, int] = (0, 0)
    estimates: tuple[Estimate, Estimate] = (NOTHING, NOTHING)


@dataclass(frozen=True)
class DevicePrices:
    """Local work on one kind of device."""

    device: Device
    problem: Problem
    execution: Execution
    inside: InStepDevice
    compute: CostModel
    layers: Collection[Node] = ()
    cast_types: set[TensorType] = field(default_factory=set)
    entries: dict[int, Price] = field(default_factory=dict)
    losses: dict[tuple[tuple[TensorType, Sharding], ...], Price] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entries: Entries,
        execution: Execution,
        device: Device,
        compute: CostModel,
        calibration: Calibration,
        layers: Collection[Node] = (),
    ) -> DevicePrices:
        """Ask the device's cost model once for everything; ``layers``: nodes that stand in one."""
        problem = replace(entries.problem, compute=compute)
        found = cls(device, problem, execution, InStepDevice(device, calibration), compute, layers)
        found.learn(entries.all)
        return found

    def learn(self, entries: Sequence[Entry]) -> None:
        """Price those of local work that are not known."""
        local = [entry for entry in entries if entry.role == "local" and entry.number not in self.entries]
        asked = [(entry.node, entry.splits) for entry in local]
        costs = local_costs(self.problem, asked, in_norm=is_taken_by_norm)
        for entry, cost in zip(local, costs, strict=True):
            if self.execution.products is not None and is_scaled(entry, self.layers):
                self.entries[entry.number] = self._scaled(entry, self.execution.products)
                self.cast_types.update(unmoved(operand).type for operand in entry.node.operands)
            elif OPERATORS[entry.name].has_scores and not self.execution.flash:
                self.entries[entry.number] = _written_scores(entry, self.problem, self.inside, self.execution)
            else:
                forward, backward = cost.estimates or (NOTHING, NOTHING)
                kernels = entry.kernels if cost.estimates else (0, 0)
                loops = node_local_loops(entry.node, entry.splits, self.problem.mesh)
                rows = self.inside.of_rows(entry.node.op, loops, entry.node.type.dtype)
                slowdown = self.inside.slowdown(entry.node.op)
                price = self.inside.price(NodeEstimate(forward, backward), kernels, slowdown, rows)
                self.entries[entry.number] = price._replace(kernels=entry.issued if cost.estimates else (0, 0))
            if self.execution.dropout and is_residual(entry.node):
                self.entries[entry.number] = _sum(self.entries[entry.number], self._dropout(entry))
        if self.execution.eager:
            moves = [entry for entry in entries if entry.role in {"move", "parameter", "sum"}]
            self.entries.update((entry.number, self._copies(entry)) for entry in moves)

    def _scaled(self, entry: Entry, chosen: Format) -> Price:
        """A product in a narrow format, and its casts; weights that are gathered in it were cast before that."""
        found = scaled_products(entry, chosen, self.problem)
        casts = cast_bytes(entry, chosen, self.problem, weights=self.execution.resting is None)
        inside = self.inside
        passes = [self.traffic(size * inside.slowdown(None)) if size else NOTHING for size in casts]
        factor = inside.slowdown(entry.node.op) * inside.calibration.scaled_products
        parts = [together([one.times(factor), cast]) for one, cast in zip(found, passes, strict=True)]
        return inside.price(NodeEstimate(*parts), (2 * entry.kernels[0], 2 * entry.kernels[1]), 1.0)

    def cast_share(self, param: Node) -> float:
        """The part of a weight's bytes that is sent where it is cast before it is gathered."""
        chosen = self.execution.resting
        type_ = unmoved(param).type
        return 1.0 if chosen is None or type_ not in self.cast_types else chosen.bytes / type_.dtype.itemsize

    def _dropout(self, entry: Entry) -> Price:
        """Of what a branch adds: a kernel of its own, or fused with the sum, which then writes and reads a mask."""
        piece = local_shape(entry.node.type, entry.sharding, self.problem.mesh)
        tensor = TensorType(piece, entry.node.type.dtype)
        if self.execution.fused:
            mask = self.traffic(float(tensor.num_elements))
            return self.inside.price(NodeEstimate(mask, mask), (0, 0), self.inside.slowdown(None))
        (found,) = self.problem.compute.nodes([query_of("scale", (tensor,), entry.backward, factor=1.0)])
        return self.inside.price(found, (1, int(entry.backward)), self.inside.slowdown(None))

    def _copies(self, entry: Entry) -> Price:
        """Beside a move's collectives, forward and backward."""
        found = [copied_bytes(entry, way) for way in (0, 1)]
        ahead, behind = (self.traffic(size) if size else NOTHING for size, _ in found)
        factor = self.inside.calibration.copies_cpu if self.device.kind == "cpu" else self.inside.slowdown(None)
        return self.inside.price(NodeEstimate(ahead, behind), (found[0][1], found[1][1]), factor)

    def copies_of_units(self, moves: Sequence[Entry]) -> int:
        """Picoseconds in a step of what is copied of weights that are gathered once: on a CPU, to new memory."""
        if self.device.kind == "cpu":
            copied_s = self.traffic(sum(map(copied_by_unit, moves))).mean_s
            return picoseconds(self.inside.calibration.copies_cpu * copied_s)
        joined = sum(copied_bytes(move, 0)[0] for move in moves)
        return picoseconds(self.traffic(joined).mean_s) if joined else 0

    def loss(self, outputs: Sequence[tuple[TensorType, Sharding]]) -> Price:
        """Cross-entropy over the outputs: as the cost model has it, else by its passes over float32."""
        key = tuple(outputs)
        if key not in self.losses:
            self.losses[key] = self._loss(key)
        return self.losses[key]

    def _loss(self, outputs: Sequence[tuple[TensorType, Sharding]]) -> Price:
        problem, inside = self.problem, self.inside
        if not problem.train:
            return Price(0, 0)
        pieces = [TensorType(local_shape(full, cut, problem.mesh), full.dtype) for full, cut in outputs]
        if self.execution.loss == "fused":  # logits are read forward; read again, and their gradient written over them
            sizes = [float(sum(piece.num_bytes for piece in pieces)) * passes for passes in FUSED_LOSS_PASSES]
            return inside.price(NodeEstimate(*map(self.traffic, sizes)), (1, 1), inside.slowdown(None))
        # frameworks cast logits to float32; torch's own loss, in emitted programs, reads and writes them as they are
        taken = pieces if self.execution.eager else [replace(piece, dtype=DType.F32) for piece in pieces]
        known = problem.compute.outside(taken)
        ahead, behind = LOSS_PASSES
        if known.mean_s > 0.0:
            parts = [known.times(passes / (ahead + behind)) for passes in LOSS_PASSES]
            return inside.price(NodeEstimate(*parts), (len(pieces), len(pieces)), inside.slowdown(None))
        model = ComputeModel((inside.device,))
        size = sum(4.0 * piece.num_elements for piece in pieces if piece.rank)
        parts = [model.estimate(Work(0.0, passes * size, passes), DType.F32) for passes in LOSS_PASSES]
        return inside.price(NodeEstimate(*parts), LOSS_PASSES, inside.slowdown(None))

    def traffic(self, num_bytes: float) -> Estimate:
        """Plain reading and writing."""
        estimate = ComputeModel((self.device,)).estimate(Work(0.0, num_bytes, 1), DType.F32)
        seconds = _own_s(self.device, estimate, 1)  # not slower within a step: it runs once, beside nothing
        return Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds)

    def optimizer(self, entry: Entry, precision: Precision, parts: float) -> Estimate:
        """AdamW for a parameter whose optimizer state is cut ``parts`` ways."""
        host = host_of(self.device) if precision.on_host else None
        return step_estimate(precision, self.compute, host, entry.bytes / parts, entry.node.type.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class InStepDevice:
    """How kernels of a device run within a step, rather than alone in a loop of their own."""

    device: Device
    calibration: Calibration

    def slowdown(self, op: Operator | None) -> float:
        """Of kernels of an operator; None: of such as only move memory."""
        if self.device.kind == "cpu":
            return self.calibration.kernels_cpu
        if op is not None and op.has_scores:
            return self.calibration.attention_gpu
        products = op is not None and op.kind == "contraction"
        return self.calibration.products_gpu if products else self.calibration.traffic_gpu

    def of_rows(self, op: Operator, loops: Loops, dtype: DType) -> float:
        """How much slower than the cost model says kernels are for lengths of rows, where none was measured."""
        if self.device.kind == "cpu":
            return 1.0
        return slower_by_rows(op, loops, dtype, self.calibration.unaligned, self.calibration.half_aligned)

    def misaligned(self, row: int) -> float:
        """The same of a product in a two-byte type, for rows of so many elements."""
        return misaligned(row, self.calibration.unaligned, self.calibration.half_aligned)

    def of_query(self, query: Query, found: NodeEstimate, kernels: tuple[int, int]) -> Price:
        """Of an operator asked about by itself."""
        rows = self.of_rows(query.op, query.loops, query.result.dtype)
        return self.price(found, kernels, self.slowdown(query.op), rows)

    def price(self, estimate: NodeEstimate, kernels: tuple[int, int], factor: float, rows: float = 1.0) -> Price:
        """Of kernels that take ``factor`` times their estimate, and ``rows`` times that where none was measured."""
        factors = [factor if found.source == "measured" else factor * rows for found in estimate]
        forward, backward = (found.times(times) for found, times in zip(estimate, factors, strict=True))
        return Price(
            picoseconds(_own_s(self.device, estimate.forward, kernels[0]) * factors[0]),
            picoseconds(_own_s(self.device, estimate.backward, kernels[1]) * factors[1]),
            kernels,
            (forward, backward),
        )


def copying_s(device: Device, calibration: Calibration) -> tuple[float, float]:
    """Seconds a byte that is copied within a step, and by how many a copy takes less: launches are issued ahead."""
    inside = InStepDevice(device, calibration)
    factor = calibration.copies_cpu if device.kind == "cpu" else inside.slowdown(None)
    launched_s = 0.0 if device.kind == "cpu" else device.launch_latency_s / device.pace
    return factor * READ_AND_WRITTEN / device.memory_bandwidth_bytes_per_s / device.pace, factor * launched_s


def _sum(one: Price, other: Price) -> Price:
    """One behind the other."""
    return Price(
        one.forward + other.forward,
        one.backward + other.backward,
        (one.kernels[0] + other.kernels[0], one.kernels[1] + other.kernels[1]),
        (together(one.estimates[:1] + other.estimates[:1]), together(one.estimates[1:] + other.estimates[1:])),
    )


def _own_s(device: Device, estimate: Estimate, kernels: int) -> float:
    """Without launches where a host issues them ahead: measured and predicted kernels were timed one behind another."""
    if device.kind == "cpu" or estimate.source != "analytic":
        return estimate.mean_s
    return max(0.0, estimate.mean_s - kernels * device.launch_latency_s / device.pace)


def _written_scores(entry: Entry, problem: Problem, inside: InStepDevice, execution: Execution) -> Price:
    """Attention as q kᵀ, scale, mask, softmax, dropout and a product with v, each written to memory."""
    loops = node_local_loops(entry.node, entry.splits, problem.mesh)
    dtype = entry.node.type.dtype
    q, k, v = (TensorType(loops.shape_of(loops.operands[i]), dtype) for i in range(3))
    swapped = TensorType((*k.shape[:-2], k.shape[-1], k.shape[-2]), dtype)
    scores = TensorType((*q.shape[:-1], k.shape[-2]), dtype)
    masked = bool(entry.node.attr("causal")) or len(entry.node.operands) > 3
    fused = execution.fused and math.prod(scores.shape[:-2]) % FUSED_SCORES == 0
    wide = not fused and dtype.itemsize < DType.F32.itemsize  # autocast takes softmax in float32
    rows = replace(scores, dtype=DType.F32) if wide else scores
    queries = [
        query_of("matmul", (q, swapped), entry.backward),
        query_of("matmul", (scores, v), entry.backward),
        query_of("softmax", (rows,), entry.backward),
    ]
    passes = 0 if fused else 1 + int(masked)
    queries += [query_of("scale", (scores,), entry.backward, factor=1.0)] * (passes + int(execution.dropout))
    queries += [query_of("scale", (rows,), entry.backward, factor=1.0)] * (2 * int(wide))  # there and back
    found = problem.compute.nodes(queries)
    narrow = inside.device.kind != "cpu" and dtype.itemsize == 2
    factors = [
        inside.slowdown(query.op)
        * (inside.misaligned(q.shape[-1]) if narrow and query.op.kind == "contraction" else 1.0)
        for query in queries
    ]
    forward = together([e.forward.times(factor) for e, factor in zip(found, factors, strict=True)])
    backward = together([e.backward.times(factor) for e, factor in zip(found, factors, strict=True)])
    kernels = (len(queries), len(queries) + 2 if entry.backward else 0)
    return inside.price(NodeEstimate(forward, backward), kernels, 1.0)
