"""Picoseconds of each entry on the device classes and links of a stage.

Decides: what of an estimate is the device's time (the host's is simulated on a GPU), attention without FlashAttention,
the loss, the optimizer. Entry point: ``DevicePrices``; collectives are in ``links``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ir.cost_model import NOTHING, CostModel, Estimate, NodeEstimate, Query
from ir.operator import Work
from ir.ops import OPERATORS
from ir.sharding import local_shape
from ir.types import DType, TensorType
from ir.verify import node_local_loops
from pdv.cluster import Device
from pdv.cost.compute import ADAMW_PASSES, ROOFLINE_RELATIVE_STD, ComputeModel
from pdv.pcg.plan_cost import local_costs
from pdv.problem import Problem
from pdv.simulate.nodes import Entry, Nodes
from pdv.simulate.setup import Execution, Precision
from pdv.simulate.task import picoseconds

# Cross-entropy in float32 over logits: the copy in float32, the row's maximum and sum, the result; backward reads and
# writes (as the reference implementation in torch.nn.functional does it).
LOSS_PASSES = (3, 2)


class Price(NamedTuple):
    """Of an entry on one device class. Moves cost the same on all.

    Attributes:
        forward, backward: picoseconds of the device.
        kernels: launches forward and backward.
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
    entries: Mapping[int, Price]
    loss: Price
    compute: CostModel

    @classmethod
    def of(cls, nodes: Nodes, execution: Execution, device: Device, compute: CostModel) -> DevicePrices:
        """Ask the device's cost model once for everything."""
        problem = replace(nodes.problem, compute=compute)
        local = [entry for entry in nodes.entries if entry.role == "local"]
        costs = local_costs(problem, [(entry.node, entry.splits) for entry in local])
        entries = {}
        for entry, cost in zip(local, costs, strict=True):
            if entry.name == "attention" and not execution.flash:
                entries[entry.number] = _written_scores(entry, problem, device, execution)
            else:
                forward, backward = cost.estimates or (NOTHING, NOTHING)
                kernels = entry.kernels if cost.estimates else (0, 0)
                entries[entry.number] = _price(device, NodeEstimate(forward, backward), kernels)
        return cls(device, entries, _loss(nodes, problem, device), compute)

    def traffic(self, num_bytes: float) -> Estimate:
        """Plain reading and writing."""
        estimate = ComputeModel((self.device,)).estimate(Work(0.0, num_bytes, 1), DType.F32)
        seconds = _own_s(self.device, estimate, 1)
        return Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds)

    def optimizer(self, entry: Entry, precision: Precision, parts: float) -> Estimate:
        """AdamW for a parameter whose optimizer state is cut ``parts`` ways."""
        weight = entry.node.type.dtype.itemsize
        known = self.compute.optimizer(entry.bytes / parts)
        factor = optimizer_bytes(precision, weight) / (ADAMW_PASSES * weight)
        return Estimate(known.mean_s * factor, known.std_s * factor, known.source, known.why)


def optimizer_bytes(precision: Precision, weight: int) -> float:
    """Read and written for each element: gradient; the optimizer's weight and two moments, both ways; the weight."""
    gradient = weight if precision.gradient is None else precision.gradient
    moment = weight if precision.moment is None else precision.moment
    own = 2 * precision.master + weight if precision.master else 2 * weight
    return float(gradient + own + 4 * moment)


def _price(device: Device, estimate: NodeEstimate, kernels: tuple[int, int]) -> Price:
    forward, backward = estimate
    return Price(
        picoseconds(_own_s(device, forward, kernels[0])), picoseconds(_own_s(device, backward, kernels[1])),
        kernels, (forward, backward),
    )  # fmt: skip


def _own_s(device: Device, estimate: Estimate, kernels: int) -> float:
    """Without launches where a host issues them ahead: measured and predicted kernels were timed one behind another."""
    if device.kind == "cpu" or estimate.source != "analytic":
        return estimate.mean_s
    return max(0.0, estimate.mean_s - kernels * device.launch_latency_s / device.share)


def _written_scores(entry: Entry, problem: Problem, device: Device, execution: Execution) -> Price:
    """Attention as q kᵀ, scale, mask, softmax, dropout and a product with v, each written to memory."""
    loops = node_local_loops(entry.node, entry.splits, problem.mesh)
    dtype = entry.node.type.dtype
    q, k, v = (TensorType(loops.shape_of(loops.operands[i]), dtype) for i in range(3))
    swapped = TensorType((*k.shape[:-2], k.shape[-1], k.shape[-2]), dtype)
    scores = TensorType((*q.shape[:-1], k.shape[-2]), dtype)
    masked = bool(entry.node.attr("causal")) or len(entry.node.operands) > 3
    passes = 0 if execution.fused else 1 + int(masked)
    queries = [
        _query("matmul", (q, swapped), entry.backward),
        _query("matmul", (scores, v), entry.backward),
        _query("softmax", (scores,), entry.backward),
    ]
    queries += [_query("scale", (scores,), entry.backward)] * (passes + int(execution.dropout))
    found = problem.compute.nodes(queries)
    forward, backward = _together([e.forward for e in found]), _together([e.backward for e in found])
    kernels = (len(queries), len(queries) + 2 if entry.backward else 0)
    return _price(device, NodeEstimate(forward, backward), kernels)


def _query(name: str, operands: tuple[TensorType, ...], backward: bool) -> Query:
    op = OPERATORS[name]
    attrs = op.check_attrs({"factor": 1.0} if name == "scale" else {})
    loops = op.solve(name, operands, attrs)
    result = op.result_type(loops, operands, attrs)
    return Query(op, loops, operands, result, attrs, (True,) * len(operands) if backward else None)


def _together(parts: Sequence[Estimate]) -> Estimate:
    """One after the other, errors of one sign."""
    source = next((p.source for p in parts if p.source == "analytic"), parts[0].source)
    return Estimate(sum(p.mean_s for p in parts), sum(p.std_s for p in parts), source)


def _loss(nodes: Nodes, problem: Problem, device: Device) -> Price:
    """Cross-entropy over the outputs: as the cost model has it, else by its passes over float32."""
    if not problem.train:
        return Price(0, 0)
    outputs = [node for _, node in nodes.pcg.outputs]
    pieces = [TensorType(local_shape(x.type, nodes.of[x].sharding, problem.mesh), x.type.dtype) for x in outputs]
    known = problem.compute.outside(pieces)
    ahead, behind = LOSS_PASSES
    if known.mean_s > 0.0:
        shares = [passes / (ahead + behind) for passes in LOSS_PASSES]
        parts = [Estimate(known.mean_s * s, known.std_s * s, known.source, known.why) for s in shares]
        return _price(device, NodeEstimate(*parts), (len(pieces), len(pieces)))
    model = ComputeModel((device,))
    size = sum(4.0 * piece.num_elements for piece in pieces if piece.rank)
    parts = [model.estimate(Work(0.0, passes * size, passes), DType.F32) for passes in LOSS_PASSES]
    return _price(device, NodeEstimate(*parts), LOSS_PASSES)
