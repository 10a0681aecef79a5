"""Price a finished PCG, node by node: what the search's tables must add up to, and what a report breaks down.

Decides: seconds of compute, communication and optimizer, bytes by lifetime, per device. Nothing overlaps here; the
simulator's job is to say how much does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache

from ir.cost_model import NOTHING, Estimate, NodeEstimate, Query, together
from ir.dims import Loops
from ir.graph import Graph, Node, unmoved
from ir.memory.kept import declared_kept, is_light, light_values, made_of, needed
from ir.memory.layout import Layout, fresh
from ir.mesh import Mesh
from ir.operator import Split
from ir.ops.parts import table_below
from ir.sharding import Sharding, fits, local_bytes, local_shape
from ir.types import TensorType
from ir.verify import infer_shardings, node_local_loops, node_splits
from pdv.cost.breakdown import NodeCost, PlanCost
from pdv.cost.comm import AxisLink, move_seconds, sum_seconds
from pdv.cost.compute import ROOFLINE_RELATIVE_STD
from pdv.pcg.derive import derive
from pdv.pcg.norms import FIXED_MOST, is_own_statistic, is_taken_by_norm
from pdv.pcg.redistribute import Redistribution
from pdv.pcg.scaled import estimate_nodes, is_narrow
from pdv.pcg.units import gathered_once
from pdv.problem import Assignment, Problem, Realized

SCALE_BYTES = 4  # float32


def realize(problem: Problem, assignment: Assignment, moves: Redistribution | None = None) -> Realized:
    """Derive and price an assignment of the problem's own graph; ``moves`` where some are known already."""
    derived = derive(problem, assignment, moves or Redistribution(problem.mesh, problem.axes))
    return Realized(derived, plan_cost(problem, derived.pcg))


def plan_cost(problem: Problem, pcg: Graph) -> PlanCost:
    """Price every node of a PCG.

    Raises:
        ShardingError: if the graph is not a PCG of the problem's mesh.
    """
    shardings = infer_shardings(pcg, problem.mesh)
    held = {node: local_bytes(node.type, sharding, problem.mesh) for node, sharding in shardings.items()}
    known = _local_costs_of(problem, pcg, shardings)
    nodes: dict[Node, NodeCost] = {}
    compute_s = communication_s = 0.0
    for node in pcg.nodes:
        if node.is_leaf:
            continue
        if node.op.kind == "parallel":
            nodes[node] = _parallel(problem, node, held[node.operands[0]])
            communication_s += nodes[node].seconds
        else:
            nodes[node] = known[node]
            compute_s += nodes[node].seconds
    optimizer: tuple[Estimate, ...] = ()
    outside, trained = NOTHING, 0
    if problem.train:
        whole = {move.operands[0]: held[move] for move in pcg.nodes if gathered_once(move, several=problem.several)}
        trained = sum(whole.get(node, held[node]) for node in pcg.params if node.needs_grad)
        optimizer = tuple(problem.optimizer(node.type, held[node]) for node in pcg.params if node.needs_grad)
        outputs = [node for _, node in pcg.outputs]
        pieces = [TensorType(local_shape(x.type, shardings[x], problem.mesh), x.type.dtype) for x in outputs]
        outside = problem.compute.outside(pieces)
    return PlanCost(
        compute_s,
        communication_s,
        sum(estimate.mean_s * problem.once for estimate in optimizer) + problem.adding_s * trained,
        _memory(problem, pcg, held),
        nodes,
        optimizer,
        outside,
        problem.compute.correlation,
    )


def _local_costs_of(problem: Problem, pcg: Graph, shardings: Mapping[Node, Sharding]) -> dict[Node, NodeCost]:
    """``local_cost`` of all nodes; those of equal layers are the same question."""
    asked: dict[Node, Hashable] = {}
    firsts: dict[Hashable, tuple[Node, tuple[Sharding, ...]]] = {}
    for node in pcg.nodes:
        if not node.is_leaf and node.op.kind != "parallel":
            operands = tuple(shardings[operand] for operand in node.operands)
            asked[node] = node.signature, node.wanted, _is_free(problem, node), operands
            firsts.setdefault(asked[node], (node, operands))
    questions = [(node, node_splits(node, operands, problem.mesh)) for node, operands in firsts.values()]
    costs = dict(zip(firsts, local_costs(problem, questions), strict=True))
    return {node: costs[key] for node, key in asked.items()}


def local_cost(problem: Problem, node: Node, splits: Sequence[Split]) -> NodeCost:
    """Seconds of an operator's own work on one device, cut as ``splits`` say; the search prices with the same."""
    return local_costs(problem, [(node, splits)])[0]


def local_costs(
    problem: Problem,
    asked: Sequence[tuple[Node, Sequence[Split]]],
    in_norm: Callable[[Node, Loops], bool] = is_own_statistic,
) -> list[NodeCost]:
    """``local_cost`` of many, in one question to the cost model; ``in_norm``: what a batch norm's call does, too.

    A search pays for what moves running statistics, which stand by themselves where they are cut; a bound does not.
    """
    in_norm = is_taken_by_norm if problem.hides else in_norm
    nodes = [(node, node_local_loops(node, splits, problem.mesh)) for node, splits in asked]
    free = [_is_free(problem, node) or in_norm(node, loops) for node, loops in nodes]
    paid = (pair for pair, is_free in zip(nodes, free, strict=True) if not is_free)
    queries = [Query.of(node, loops, train=problem.train) for node, loops in paid]
    answers = iter(zip(queries, estimate_nodes(problem.compute, queries, problem.products, problem.fused), strict=True))
    costs = []
    for (node, splits), is_free in zip(asked, free, strict=True):
        if is_free:
            costs.append(NodeCost(0.0, 0.0))  # computed once, as the package is written; or within a product or norm
        else:
            estimate = _with_scales(problem, node, splits, *next(answers))
            costs.append(NodeCost(estimate.forward.mean_s, estimate.backward.mean_s, estimate))
    return costs


def _with_scales(
    problem: Problem, node: Node, splits: Sequence[Split], query: Query, found: NodeEstimate
) -> NodeEstimate:
    """With the sums over ranks by which parts of a product's factors get one scale, where one is of a whole tensor."""
    products = problem.products
    if products is None or products.format.by_rows or not is_narrow(query, products):
        return found
    of_matrix = {loop for dim in node.loops.operands[1] for loop in dim}
    parts = [[found.forward], [found.backward]]
    for axis, split in zip(problem.mesh.axes, splits, strict=True):
        if split.loop in of_matrix:  # of the operand forward, and of matrix and gradient or operand behind
            seconds, _ = move_seconds("reduce", problem.link(axis.name), SCALE_BYTES)
            both = split.loop in node.loops.contracted
            for part, count in zip(parts, (1 + both, 2), strict=True):
                part.append(Estimate(count * seconds, count * seconds * ROOFLINE_RELATIVE_STD))
    return NodeEstimate(*map(together, parts))


def _is_free(problem: Problem, node: Node) -> bool:
    return not problem.train and (is_fixed(node) or is_bias(node))


def is_bias(node: Node) -> bool:
    """linear(x, w) + b and conv2d(x, w) + b, which are one call in the emitted program.

    Wherever the product is moved in between, for the search prices an operator without knowing that.
    """
    if not node.op.adds:
        return False
    product, bias = unmoved(node.operands[0]), node.operands[1]
    rank = product.op.bias_rank
    return rank > 0 and bias.type.shape == (node.type.shape[-rank], *(1,) * (rank - 1)) and is_fixed(bias)


def is_residual(node: Node) -> bool:
    """A sum of two activations of one shape: where transformers drop out what a branch adds (Vaswani et al., 5.4)."""
    alike = [operand for operand in node.operands if operand.type == node.type and not unmoved(operand).is_param]
    return node.op.adds and len(alike) == 2


@lru_cache(maxsize=1 << 14)  # asked once per configuration
def is_fixed(node: Node) -> bool:
    """True if a value depends on weights and constants alone, not on chance (and is found to within a few operators).

    A part of a table that is as long as the inputs are depends on these, and so do copies for each row of these.
    """
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        if value.is_input or value.op.draws or value.op.repeats or len(seen) > FIXED_MOST:
            return False
        if table_below(value) is not None:
            return False
        stack.extend(operand for operand in value.operands if operand not in seen)
        seen.update(value.operands)
    return True


def _parallel(problem: Problem, node: Node, held: int) -> NodeCost:
    """What moving a value costs, of which a device holds so many bytes before."""
    base = unmoved(node)
    if base.is_leaf and not base.needs_grad:
        return NodeCost(0.0, 0.0)  # whole on every device: any slice of it is at hand
    axis = problem.link(node.attr("axis"))
    forward_s, backward_s = move_seconds(node.op.name, axis, held)
    if not (problem.train and node.needs_grad):
        return _move(axis, forward_s, 0.0)
    if gathered_once(node, several=problem.several):
        # A sum may hide behind the last backward pass, which is not known here; a gather is waited for. So it counts as
        # the part of a sum whose place it takes, and once more.
        return _move(axis, forward_s * problem.once, (backward_s + forward_s) * problem.once)
    if base.is_param and node.op.transition.only_names:
        backward_s = problem.once * sum_seconds(node.op.name, axis, held, problem.bucket_bytes)
    if base.is_param and base.attr("regather"):
        backward_s += forward_s
    return _move(axis, forward_s, backward_s)


def _move(axis: AxisLink, forward_s: float, backward_s: float) -> NodeCost:
    seconds, curves = forward_s + backward_s, axis.curves
    if curves is None:
        return NodeCost(forward_s, backward_s, (Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds),))
    return NodeCost(forward_s, backward_s, (Estimate(seconds, curves.relative_std * seconds, curves.source),))


def whole_bytes(graph: Graph) -> float:
    """Bytes that every device holds in any plan: inputs, constants, and buffers, none of which is ever cut."""
    return float(sum(node.type.num_bytes for node in graph.nodes if node.is_leaf and not node.needs_grad))


def _memory(problem: Problem, pcg: Graph, held: Mapping[Node, int]) -> dict[str, float]:
    """Bytes by lifetime; a value that several nodes keep for backward counts once. ``held``: bytes on one device."""
    trained = sum(float(held[node]) for node in pcg.params if node.needs_grad)
    transient = 0.0
    for node in pcg.nodes:
        if node.is_leaf or node.op.kind == "parallel":
            continue
        transient = max(transient, float(held[node] + sum(held[operand] for operand in node.operands)))
    saved = saved_values(pcg, several=problem.several) if problem.train else []
    saved = made_of(saved, light_values(pcg, depth=len(pcg.nodes))) if problem.lean else saved
    memory = {
        "weights": (trained + whole_bytes(pcg)) * problem.resting,
        "activations": sum(float(held[node]) for node in saved),
        "transient": transient,
    }
    if problem.train:
        params = [node for node in pcg.params if node.needs_grad]
        sizes = [(held[node] // node.type.dtype.itemsize, node.type.dtype.itemsize) for node in params]
        precision = problem.precision
        memory["gradients"] = sum(float(n * precision.gradient_bytes(size)) for n, size in sizes) * problem.resting
        memory["optimizer"] = sum(float(n * precision.optimizer_bytes(size)) for n, size in sizes) * problem.resting
        copies = [move for move in pcg.nodes if gathered_once(move, several=problem.several)]
        copied = [copied_bytes(problem, move.type, held[move], held[move.operands[0]]) for move in copies]
        memory["weights"] += sum(one[0] for one in copied) * problem.resting
        memory["gradients"] += sum(one[1] for one in copied) * problem.resting
    return memory


def copied_bytes(problem: Problem, param: TensorType, whole: float, rests: float) -> tuple[float, float]:
    """What a parameter takes beyond what rests, gathered once a step: its copy, and the gradient of all of that.

    The part of the gradient that rests with the parameter is there once the other is not, and where the optimizer has
    a copy of its own nothing but that rests. ``whole``, ``rests``: bytes.
    """
    weight, precision = param.dtype.itemsize, problem.precision
    copied = whole - rests if precision.masters_here else whole
    return copied, (whole - rests) * precision.gradient_bytes(weight) / weight


def saved_values(pcg: Graph, *, several: bool = False) -> list[Node]:
    """What a micro-batch keeps of a PCG for backward, each value once; ``several``: in flight share copies."""
    return kept_of(pcg.nodes, several=several)


def kept_of(nodes: Iterable[Node], *, several: bool = False) -> list[Node]:
    """The same of some nodes."""
    found: dict[Node, None] = {}
    for node in nodes:
        if not node.is_leaf and node.op.kind != "parallel" and node.needs_grad:
            copies = [copy for value in _keep(node) if _is_activation(copy := _copy(value))]
            found |= dict.fromkeys(copy for copy in copies if not gathered_once(copy, several=several))
    return list(found)


@lru_cache(maxsize=1 << 14)  # asked once per configuration
def surely_kept(node: Node) -> frozenset[int | str]:
    """Operand numbers and/or "out" that a differentiated node's backward keeps, whatever lies how in memory.

    Of a product each factor only if another one needs a gradient; nothing that may be a view of what is kept anyway
    (of views see ``written_share``), nor of a node that may keep something else.
    """
    declared = declared_kept(node)
    if declared is None:
        return frozenset()
    return frozenset(needed(node, declared)) | ({"out"} if "out" in declared and node.op.kernel else set())


def kept_values(nodes: Iterable[Node], *, lean: bool = False) -> set[Node]:
    """What some nodes keep for backward for sure, in memory of its own however it is cut; parameters aside.

    ``lean``: where what may be made again is not kept.
    """
    found: set[Node] = set()
    for node in nodes:
        if node.needs_grad and node.op.kind != "parallel" and not node.is_leaf:
            kept = [node if number == "out" else node.operands[int(number)] for number in surely_kept(node)]
            found.update(value for value in kept if value.op.kernel and not value.is_leaf)
    return {value for value in found if not is_light(value)} if lean else found


def written_share(node: Node, sharding: Sharding, mesh: Mesh) -> float:
    """1 of a value that lies in memory of its own for sure, else 0: of a view if it reads what is spread over a dim."""
    if node.op.strides is None:
        return 1.0
    layout = _view(node, sharding, mesh)
    return 0.0 if layout is None or layout.strides else 1.0


@lru_cache(maxsize=1 << 14)  # views of views: of a chain, every part is asked for
def _view(node: Node, sharding: Sharding, mesh: Mesh) -> Layout | None:
    """How a value lies on a device, if that can be said; without strides where it reads spread values, and copies."""
    shape = local_shape(node.type, sharding, mesh)
    if node.op.strides is None or node.operands[0].is_leaf:
        return fresh(shape)
    ways = node.op.splits(node.loops)
    splits = [next((one for one in ways if one.result == state), None) for state in sharding]
    before = [split.operands[0] for split in splits if split is not None]
    read = node.operands[0]
    if len(before) < len(splits) or not fits(read.type, tuple(before), mesh):
        return None
    layout = _view(read, tuple(before), mesh)
    if layout is None or not layout.strides:
        return None
    strides = node.op.strides(node.attrs, layout, shape)
    if strides is not None:
        return Layout(shape, strides)
    spread = any(size > 1 and not stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    return Layout(shape, ()) if spread else None


def _keep(node: Node) -> list[Node]:
    """What autograd keeps of a node; it may be declared to keep an operand that this one leaves out."""
    saved = [kept for kept in node.op.saved if isinstance(kept, int) and kept < len(node.operands)]
    return [node.operands[kept] for kept in saved] + [node] * ("out" in node.op.saved)


def _copy(value: Node) -> Node:
    """The value that holds the memory: ``replicate`` only names a state."""
    while value.op.transition.only_names:
        value = value.operands[0]
    return value


def _is_activation(value: Node) -> bool:
    """No leaf, nor a slice of one, nor a gathered parameter that is dropped after forward."""
    base = unmoved(value)
    if not base.is_leaf:
        return True
    return base.needs_grad and not base.attr("regather") and _gathers(value)


def _gathers(value: Node) -> bool:
    while value.op.kind == "parallel":
        if value.op.transition.fetches:
            return True
        value = value.operands[0]
    return False
