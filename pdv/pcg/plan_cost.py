"""Price a finished PCG, node by node: what the search's tables must add up to, and what a report breaks down.

Decides: seconds of compute, communication and optimizer, bytes by lifetime, per device. Nothing overlaps here; the
simulator's job is to say how much does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ir.graph import Graph, Node
from ir.operator import Split, backward_work, forward_work
from ir.sharding import Sharding, local_bytes
from ir.verify import infer_shardings, node_local_loops, node_splits
from pdv.cost.comm import GATHERS, move_seconds
from pdv.cost.compute import ROOFLINE_RELATIVE_STD
from pdv.problem import TRAIN_COPIES, Problem

FIXED_MOST = 128  # operators and leaves of a value that is computed from weights alone


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds of one PCG node, forward and backward."""

    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PlanCost:
    """Per step and device. ``memory`` by lifetime; ``transient`` is the largest node's working set."""

    compute_s: float
    communication_s: float
    optimizer_s: float
    memory: Mapping[str, float]
    nodes: Mapping[Node, NodeCost] = field(repr=False)

    @property
    def seconds(self) -> float:
        """All of it, nothing overlapped."""
        return self.compute_s + self.communication_s + self.optimizer_s

    @property
    def std_s(self) -> float:
        """Deviation of ``seconds``: the roofline's error, taken as shared by all kernels."""
        return ROOFLINE_RELATIVE_STD * self.seconds

    @property
    def memory_bytes(self) -> float:
        """What stays allocated until backward: weights, gradients, optimizer state, activations."""
        return sum(size for name, size in self.memory.items() if name != "transient")

    @property
    def peak_bytes(self) -> float:
        """The above and the largest working set."""
        return sum(self.memory.values())


def plan_cost(problem: Problem, pcg: Graph) -> PlanCost:
    """Price every node of a PCG.

    Raises:
        ShardingError: if the graph is not a PCG of the problem's mesh.
    """
    shardings = infer_shardings(pcg, problem.mesh)
    nodes: dict[Node, NodeCost] = {}
    compute_s = communication_s = 0.0
    for node in pcg.nodes:
        if node.is_leaf:
            continue
        if node.op.kind == "parallel":
            nodes[node] = _parallel(problem, node, shardings)
            communication_s += nodes[node].seconds
        else:
            splits = node_splits(node, [shardings[operand] for operand in node.operands], problem.mesh)
            nodes[node] = local_cost(problem, node, splits)
            compute_s += nodes[node].seconds
    trained = [node for node in pcg.params if node.needs_grad]
    held = [local_bytes(node.type, shardings[node], problem.mesh) for node in trained]
    optimizer_s = sum(problem.compute.optimizer_seconds(size) for size in held) if problem.train else 0.0
    return PlanCost(compute_s, communication_s, optimizer_s, _memory(problem, pcg, shardings), nodes)


def local_cost(problem: Problem, node: Node, splits: Sequence[Split]) -> NodeCost:
    """Seconds of an operator's own work on one device, cut as ``splits`` say; the search prices with the same."""
    if not problem.train and (is_fixed(node) or _is_bias(node)):
        return NodeCost(0.0, 0.0)  # computed once, when the package is written; or within the product below
    loops = node_local_loops(node, splits, problem.mesh)
    types = [operand.type for operand in node.operands]
    forward_s = problem.compute.seconds(forward_work(node.op, loops, types, node.type), node.type.dtype)
    if not (problem.train and node.needs_grad):
        return NodeCost(forward_s, 0.0)
    indices = range(len(types)) if node.op.differentiable is None else node.op.differentiable
    wanted = [i in indices and operand.needs_grad for i, operand in enumerate(node.operands)]
    work = backward_work(node.op, loops, types, node.type, wanted)
    return NodeCost(forward_s, problem.compute.seconds(work, node.type.dtype))


def _is_bias(node: Node) -> bool:
    """linear(x, w) + b and conv2d(x, w) + b, which are one call in the emitted program.

    Wherever the product is moved in between, for the search prices an operator without knowing that.
    """
    if node.op.name != "add":
        return False
    product, bias = _base(node.operands[0]), node.operands[1]
    rank = {"linear": 1, "conv2d": 3}.get(product.op.name)
    return rank is not None and bias.type.shape == (node.type.shape[-rank], *(1,) * (rank - 1)) and is_fixed(bias)


@lru_cache(maxsize=1 << 14)  # asked once per configuration
def is_fixed(node: Node) -> bool:
    """True if a value depends on weights and constants alone (and is found to within a few operators)."""
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        if value.op.name == "input" or len(seen) > FIXED_MOST:
            return False
        stack.extend(operand for operand in value.operands if operand not in seen)
        seen.update(value.operands)
    return True


def _parallel(problem: Problem, node: Node, shardings: Mapping[Node, Sharding]) -> NodeCost:
    operand = node.operands[0]
    base = _base(node)
    if base.is_leaf and not base.needs_grad:
        return NodeCost(0.0, 0.0)  # whole on every device: any slice of it is at hand
    axis = problem.axes[problem.mesh.index(node.attr("axis"))]
    forward_s, backward_s = move_seconds(
        node.op.name, axis, local_bytes(operand.type, shardings[operand], problem.mesh)
    )
    if not (problem.train and node.needs_grad):
        return NodeCost(forward_s, 0.0)
    if base.op.name == "param" and base.attr("regather"):
        backward_s += forward_s
    return NodeCost(forward_s, backward_s)


def _base(node: Node) -> Node:
    """The value at the root of a chain of parallel operators."""
    while node.op.kind == "parallel":
        node = node.operands[0]
    return node


def whole_bytes(graph: Graph) -> float:
    """Bytes that every device holds in any plan: inputs, constants, and buffers, none of which is ever cut."""
    return float(sum(node.type.num_bytes for node in graph.nodes if node.is_leaf and not node.needs_grad))


def _memory(problem: Problem, pcg: Graph, shardings: Mapping[Node, Sharding]) -> dict[str, float]:
    """Bytes by lifetime; a value that several nodes keep for backward counts once."""

    def held(node: Node) -> float:
        return float(local_bytes(node.type, shardings[node], problem.mesh))

    trained = sum(held(node) for node in pcg.params if node.needs_grad)
    saved: dict[Node, None] = {}
    transient = 0.0
    for node in pcg.nodes:
        if node.is_leaf or node.op.kind == "parallel":
            continue
        transient = max(transient, held(node) + sum(held(operand) for operand in node.operands))
        if problem.train and node.needs_grad:
            saved |= dict.fromkeys(copy for value in _kept(node) if _is_activation(copy := _copy(value)))
    memory = {
        "weights": trained + whole_bytes(pcg),
        "activations": sum(held(node) for node in saved),
        "transient": transient,
    }
    if problem.train:
        memory["gradients"] = trained
        memory["optimizer"] = trained * (TRAIN_COPIES - 2)
    return memory


def _kept(node: Node) -> list[Node]:
    """What autograd keeps of a node; it may be declared to keep an operand that this one leaves out."""
    saved = [kept for kept in node.op.saved if isinstance(kept, int) and kept < len(node.operands)]
    return [node.operands[kept] for kept in saved] + [node] * ("out" in node.op.saved)


def _copy(value: Node) -> Node:
    """The value that holds the memory: ``replicate`` only names a state."""
    while value.op.name == "replicate":
        value = value.operands[0]
    return value


def _is_activation(value: Node) -> bool:
    """No leaf, nor a slice of one, nor a gathered parameter that is dropped after forward."""
    base = _base(value)
    if not base.is_leaf:
        return True
    return base.needs_grad and not base.attr("regather") and _gathers(value)


def _gathers(value: Node) -> bool:
    while value.op.kind == "parallel":
        if value.op.name in GATHERS:
            return True
        value = value.operands[0]
    return False
