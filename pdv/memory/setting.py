"""What walking a stage needs to know of its workload, found once: shardings, who runs where, who reads what.

Decides which of a chunk's values are kept for backward, before any kernel is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Node, unmoved
from ir.memory.kept import light_values, needed, owner
from ir.memory.local import Local
from ir.sharding import Replicate, Sharding, local_shape
from ir.verify import infer_shardings
from pdv.pcg.units import gathered_once
from pdv.problem.workload import Execution, Workload


@dataclass
class Setting:
    """A workload as the walk reads it; made once, for all of its chunks."""

    workload: Workload
    shapes: dict[Node, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def shardings(self) -> Mapping[Node, Sharding]:
        """Of every value of the PCG."""
        return infer_shardings(self.workload.pcg, self.workload.problem.mesh)

    @property
    def execution(self) -> Execution:
        """How a step runs."""
        return self.workload.execution

    @property
    def train(self) -> bool:
        """True where there is a backward pass."""
        return self.workload.problem.train

    @property
    def eager(self) -> bool:
        """True of the emitted program (``Execution``)."""
        return self.execution.eager

    @cached_property
    def shards_whole(self) -> bool:
        """True of a framework whose weights rest cut as the optimizer's own, and whose gradients backward makes.

        PyTorch's FSDP. A framework that keeps weights or gradients of another type beside them has buffers of these.
        """
        kept = self.execution.precision
        params = [param for param in self.workload.pcg.params if param.attr("regather")]
        own = all(kept.gradient_bytes(param.type.dtype.itemsize) >= kept.master > 0 for param in params)
        return self.train and not self.eager and bool(params) and own

    @property
    def keeps_gathered(self) -> bool:
        """True of stages of one: weights stay gathered all step, and gradients are not summed before its end.

        torchtitan (``reshard_after_forward`` is "default") and torch.distributed.pipelining, which has FSDP sum
        gradients behind the last micro-batch alone.
        """
        return self.shards_whole and self.workload.stages.count > 1

    def gathered_bytes(self, operand: Node) -> float:
        """Of a weight as it is gathered for its use: in a narrow format where it is cast before that."""
        chosen, param = self.execution.resting, chain(operand)[0]
        inside = any(self.layer(reader) is not None for reader in self.workload.pcg.users[operand])
        narrow = chosen is not None and inside and len(param.type.shape) > 1
        share = chosen.bytes / param.type.dtype.itemsize if chosen is not None and narrow else 1.0
        return self.num_bytes(operand) * share

    def gradient_share(self, param: Node) -> float:
        """Bytes of a parameter's accumulated gradient, over those of the parameter in compute."""
        weight = param.type.dtype.itemsize
        return self.execution.precision.gradient_bytes(weight) / weight

    def shape(self, node: Node) -> tuple[int, ...]:
        """Local shape of a value."""
        if node not in self.shapes:
            self.shapes[node] = local_shape(node.type, self.shardings[node], self.workload.problem.mesh)
        return self.shapes[node]

    def num_bytes(self, node: Node) -> float:
        """Of a value's local piece."""
        return float(math.prod(self.shape(node)) * node.type.dtype.itemsize)

    def axis_size(self, node: Node) -> int:
        """Devices along the axis of a parallel operator."""
        return self.size(str(node.attr("axis")))

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return self.workload.problem.mesh.size(axis)

    @cached_property
    def chunks(self) -> tuple[tuple[Node, ...], ...]:
        """By chunk, the nodes that it runs, in order. What no entry of ``chunk_of`` names runs with each reader."""
        pcg, stages = self.workload.pcg, self.workload.stages
        if stages.chunks == 1:
            return (tuple(node for node in pcg.nodes if not node.is_leaf and not of_weights(node)),)
        where: dict[Node, set[int]] = {}
        for node in reversed(pcg.nodes):
            if node in stages.chunk_of:
                where[node] = {stages.chunk_of[node]}
            else:
                where[node] = set().union(*(where[reader] for reader in pcg.users[node])) or {stages.chunks - 1}
        found: list[list[Node]] = [[] for _ in range(stages.chunks)]
        for node in pcg.nodes:
            if not node.is_leaf and not of_weights(node):
                for chunk in where[node]:
                    found[chunk].append(node)
        return tuple(tuple(chunk) for chunk in found)

    def is_differentiated(self, node: Node) -> bool:
        """True if backward runs through a node: what only moves buffers is never asked for a gradient."""
        return node in self._differentiated

    @cached_property
    def _differentiated(self) -> frozenset[Node]:
        if not self.train:
            return frozenset()
        found: set[Node] = set()
        stack = [node for _, node in self.workload.pcg.outputs if node.needs_grad]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [operand for operand in node.operands if operand.needs_grad]
        return frozenset(found)

    def kept_copy(self, node: Node) -> bool:
        """True of a weight that is gathered once a step, for all of its micro-batches."""
        return gathered_once(node, several=self.execution.several and self.train) and self.axis_size(node) > 1

    def layer(self, node: Node) -> int | None:
        """The repeated block that a node belongs to."""
        return self.workload.stages.layer_of.get(node)

    def saved(self, local: Local, declared: Sequence[int | str]) -> list[Node]:
        """The values that autograd keeps of a node: of a product each factor only if another one needs a gradient."""
        node = local.node
        return [node.operands[number] for number in needed(node, declared)] + [node] * ("out" in declared)

    def gathers_again(self, node: Node) -> bool:
        """True of an activation of which a framework keeps this rank's block, and gathers it again in backward.

        Megatron-LM's sequence parallelism (Korthikanti et al., MLSys'23, section 4.2.2).
        """
        move = node.op.transition
        return move.gathers and move.after is Replicate and not self.eager and not of_weights(node)

    @cached_property
    def light(self) -> Mapping[Node, tuple[Node, ...]]:
        """Values that are made again where backward reads them, each with those that it is made of."""
        return light_values(self.workload.pcg) if self.train and self.execution.recompute == "light" else {}

    def again_bytes(self, node: Node) -> float:
        """Of what is made again for a reader's backward, with what that is made of."""
        if self.gathers_again(node):
            return self.num_bytes(node)
        within = owner(node)
        if within not in self.light:
            return 0.0
        return self.num_bytes(within) + sum(map(self.again_bytes, self.light[within]))

    def is_flash(self, node: Node) -> bool:
        """True of attention that never writes its scores."""
        return not node.op.has_scores or self.execution.flash


def of_weights(node: Node) -> bool:
    """True of a parameter and of what moves it: each reader moves it for itself, when it reads it."""
    return unmoved(node).is_param


def gathered_for_use(node: Node) -> bool:
    """True of a weight that is gathered for each use and dropped behind it (ZeRO-3)."""
    steps = chain(node)
    dropped = steps[0].is_param and bool(steps[0].attr("regather"))
    return dropped and any(step.op.transition.gathers for step in steps[1:])


def chain(node: Node) -> list[Node]:
    """The parallel operators between a leaf and ``node``, the leaf's reader first, and the leaf in front."""
    steps = [node]
    while steps[-1].op.kind == "parallel":
        steps.append(steps[-1].operands[0])
    return steps[::-1]
