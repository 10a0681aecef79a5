"""One micro-batch through one chunk, forward and backward, as torch runs it: what lives from when to when.

A value lives until its last reader ran, and if autograd keeps it until the backward of the last node that does; a
gradient from the first term until the backward of what made the value (PyTorch's engine: the nodes in reverse, saved
tensors freed after each). ``pdv.memory.passes`` runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ir.graph import Node
from ir.memory.layout import Layout, fresh
from ir.memory.local import Local
from pdv.memory.log import Heap, Holder, Kind, Storage
from pdv.memory.moves import Backend, backward_move, forward_move, gathered_dim
from pdv.memory.setting import Setting, chain, gathered_for_use, of_weights
from pdv.memory.units import Units
from pdv.pcg.calls import is_within_product
from pdv.pcg.plan_cost import is_residual


@dataclass(frozen=True, slots=True)
class Value:
    """Where a value lies.

    One that a fused chain never writes is made again of its ``sources``, and an activation that a framework gathers is
    gathered again: these are what is kept of it.
    """

    storage: Storage
    layout: Layout
    sources: tuple[Storage, ...] = ()


@dataclass
class Walk:
    """The state while a chunk runs. ``heap.log`` is what comes of it."""

    setting: Setting
    chunk: Sequence[Node]
    heap: Heap
    on_gpu: bool = False
    values: dict[Node, Value] = field(default_factory=dict)
    waiting: Counter[Node] = field(default_factory=Counter)  # forward readers that are still to come
    saved: dict[Node, list[Storage]] = field(default_factory=dict)
    grads: dict[Node, Storage] = field(default_factory=dict)
    accumulated: set[Node] = field(default_factory=set)  # parameters whose gradient is there
    units: Units = field(init=False)
    backwards: bool = False
    """Whether what runs now is part of a backward pass."""

    def __post_init__(self) -> None:
        self.units = Units(self.setting, self.chunk, self.heap, self.on_gpu)

    # ---- forward ----

    def run(self, nodes: Iterable[Node], *, keep: bool, again: bool = False) -> None:
        """Forward of some nodes; ``keep``: what backward needs stays; ``again``: recomputation."""
        self.backwards = again
        for node in nodes:
            self.heap.moment = _moment("recomputation" if again else "forward", node, self.setting)
            self._run(node, keep=keep and self.setting.is_differentiated(node))

    def _run(self, node: Node, *, keep: bool) -> None:
        setting, heap = self.setting, self.heap
        read = [self._read(operand) for operand in node.operands]
        if node.op.kind == "parallel":
            value = self._move(node, read[0])
        else:
            local = Local(
                node, tuple(value.layout for value in read), fresh(setting.shape(node)), _itemsize(node), self.on_gpu
            )
            work = heap.allocate(local.memory.forward(local), self._holder("temporaries", node))
            value = self._compute(local, read)
            scores = self._scores(node, local)
            heap.drop(work)
            if keep:
                self._keep(node, local, value, read, scores)
            for storage in scores:
                heap.drop(storage)
        self.values[node] = value
        for operand, one in zip(node.operands, read, strict=True):
            self._release(operand, one)
        if not self.waiting[node]:
            self.forget(node)

    def _compute(self, local: Local, read: Sequence[Value]) -> Value:
        """The result of local work, allocated, or a view of what is read."""
        node, shape, setting = local.node, local.result.shape, self.setting
        if node.op.strides is not None:
            strides = node.op.strides(node.attrs, read[0].layout, shape)
            if strides is not None:
                return self._share(read[0], Layout(shape, strides))
        if is_within_product(node):
            return self._share(read[0], read[0].layout)
        layout = local.layout
        if self._inner(node):
            sources = dict.fromkeys(s for value in read for s in value.sources or (value.storage,))
            return Value(Storage(0.0, Holder("activations")), layout, tuple(self.heap.keep(s) for s in sources))
        size = float(_size(shape) * _itemsize(node))
        made = self.heap.allocate(size, self._holder("activations", node))
        if node not in setting.light:
            return Value(made, layout)
        sources = dict.fromkeys(s for value in read for s in value.sources or (value.storage,))
        return Value(made, layout, tuple(self.heap.keep(source) for source in sources))

    def _share(self, value: Value, layout: Layout) -> Value:
        """The same memory, read another way."""
        sources = tuple(self.heap.keep(source) for source in value.sources)
        return Value(self.heap.keep(value.storage), layout, sources)

    def _move(self, node: Node, read: Value) -> Value:
        """The result of a parallel operator."""
        setting = self.setting
        if setting.axis_size(node) == 1:
            return self._share(read, read.layout)
        layout = fresh(setting.shape(node))
        if setting.kept_copy(node):
            return Value(Storage(0.0, Holder("weights")), layout)  # which a step holds: ``state``
        if node in self.units.of:
            self.units.reach(self.units.of[node], backward=self.backwards)
            return Value(Storage(0.0, Holder("weights")), layout)
        num_bytes = float(layout.elements * _itemsize(node))
        dim = gathered_dim(node, backward=False)
        move = forward_move(node, read.layout, num_bytes, dim, self._backend)
        if move.alias:
            shared = node.op.transition.only_names or layout.elements == read.layout.elements
            return self._share(read, read.layout if shared else layout)
        for_use = gathered_for_use(node)
        beside = self.heap.allocate(move.beside, self._holder("collectives", node))
        size = num_bytes if setting.eager or not for_use else 0.0  # a framework gathers layers of them: ``state``
        whole = self.heap.allocate(size, self._holder("activations", node))
        self.heap.drop(beside)
        if for_use:
            whole.again = num_bytes, move.beside
        elif setting.gathers_again(node) or node in setting.light:
            return Value(whole, layout, tuple(self.heap.keep(source) for source in read.sources or (read.storage,)))
        return Value(whole, layout)

    def _scores(self, node: Node, local: Local) -> list[Storage]:
        """Attention that writes its scores: softmax, mask and what is left of it (Korthikanti et al., section 4.1)."""
        if self.setting.is_flash(node):
            return []
        q, k = local.operands[0], local.operands[1]
        elements = q.elements // q.shape[-1] * k.shape[-2]
        holder = self._holder("activations", node)
        scores = self.heap.allocate(elements * _itemsize(node), self._holder("temporaries", node))
        made = [self.heap.allocate(elements * _itemsize(node), holder)]
        self.heap.drop(scores)
        if self.setting.execution.dropout:
            made += [self.heap.allocate(elements * size, holder) for size in (_itemsize(node), 1)]
        return made

    def _keep(self, node: Node, local: Local, value: Value, read: Sequence[Value], scores: list[Storage]) -> None:
        """Hold on to what the node's backward needs."""
        setting, heap = self.setting, self.heap
        attention = node.op.has_scores
        selective = attention and setting.execution.recompute == "selective"
        every = selective or (attention and not setting.execution.flash)
        held = [] if selective else [heap.keep(storage) for storage in scores]
        by_node = dict(zip((*node.operands, node), (*read, value), strict=True))
        for kept in setting.saved(local, (0, 1, 2) if every else local.saved):
            if kept in self.units.of:
                self.units.saved.append(self.units.of[kept])
            for storage in by_node[kept].sources or (by_node[kept].storage,):
                own = not kept.is_leaf and storage.holder.kind not in ("weights", "inputs")
                held += [heap.keep(storage)] if own and storage.again is None else []
        statistics = 0.0 if selective else local.memory.keeps(local)
        if statistics:
            held.append(heap.allocate(statistics, self._holder("activations", node)))
        if setting.execution.dropout and is_residual(node):
            held.append(heap.allocate(float(_size(setting.shape(node))), self._holder("activations", node)))
        self.saved[node] = held

    def _inner(self, node: Node) -> bool:
        """True of a value that a fused chain of element-wise operators never writes."""
        if not self.setting.execution.fused or not _is_map(node) or is_within_product(node):
            return False
        readers = self.setting.workload.pcg.users[node]
        return bool(readers) and all(_is_map(reader) for reader in readers)

    def _read(self, node: Node) -> Value:
        """A value; a weight is moved here, for this reader."""
        if node.is_leaf:
            kind: Kind = "weights" if node.is_param else "inputs"
            return Value(Storage(0.0, Holder(kind)), fresh(self.setting.shape(node)))
        if not of_weights(node):
            return self.values[node]
        steps = chain(node)
        value = self._read(steps[0])
        for step in steps[1:]:
            moved = self._move(step, value)
            self.heap.drop(value.storage)
            value = moved
        return value

    def _release(self, operand: Node, value: Value) -> None:
        """An operand was read."""
        if of_weights(operand) or operand.is_leaf:
            self.heap.drop(value.storage)
            return
        self.waiting[operand] -= 1
        if not self.waiting[operand]:
            self.forget(operand)

    def forget(self, node: Node) -> None:
        """A value that nobody reads any more."""
        value = self.values.pop(node)
        for storage in (value.storage, *value.sources):
            self.heap.drop(storage)

    # ---- backward ----

    def run_backward(self, nodes: Sequence[Node]) -> None:
        """Backward of some nodes, the last one first."""
        self.backwards = True
        for node in reversed(nodes):
            if self.setting.is_differentiated(node):
                self.heap.moment = _moment("backward", node, self.setting)
                self._run_backward(node)

    def _run_backward(self, node: Node) -> None:
        saved = self.saved.pop(node, [])
        grad = self.grads.pop(node, None)
        given: list[tuple[Node, Storage]] = []
        if grad is not None:
            if node.op.kind == "parallel":
                given.append((node.operands[0], self._moved_back(node, grad)))
            else:
                given = self._differentiate(node, grad)
            self.heap.drop(grad)
        for storage in saved:
            self.heap.drop(storage)
        for operand, term in reversed(given):  # weights, which are moved last, are moved back first
            self._give(operand, term)

    def _differentiate(self, node: Node, grad: Storage) -> list[tuple[Node, Storage]]:
        """Gradients of the operands that need one."""
        setting, heap = self.setting, self.heap
        layouts = tuple(fresh(setting.shape(operand)) for operand in node.operands)
        local = Local(node, layouts, fresh(setting.shape(node)), _itemsize(node), self.on_gpu)
        memory = local.memory
        if memory.is_within:
            return []
        work = heap.allocate(memory.backward(local) + self._again(local), self._holder("temporaries", node))
        wanted = [n for n, is_wanted in enumerate(node.wanted) if is_wanted]
        given = [(node.operands[n], self._gradient(local, n, grad, handed=memory.handed)) for n in wanted]
        heap.drop(work)
        return given

    def _again(self, local: Local) -> float:
        """Bytes of what a node's backward makes once more: gathered weights, scores of attention."""
        node = local.node
        again = 0.0
        for operand in self.setting.saved(local, local.saved):
            if operand in self.units.of:
                self.units.reach(self.units.of[operand], backward=True)
            elif self._drop(operand):
                again += self.setting.num_bytes(operand)
            else:
                again += self.setting.again_bytes(operand)
        if not self.setting.is_flash(node):
            q, k = (self.setting.shape(operand) for operand in node.operands[:2])
            scores = _size(q) // q[-1] * k[-2] * _itemsize(node)
            again += 2.0 * scores  # the gradients of softmax and of the scores
            if self.setting.execution.recompute == "selective":
                again += scores * (1 + (1 + 1 / _itemsize(node)) * self.setting.execution.dropout)
        return again

    def _drop(self, operand: Node) -> bool:
        """True of a gathered weight that is gathered for each use (of a framework, layers of them are: ``state``)."""
        return self.setting.eager and gathered_for_use(operand)

    def _gradient(self, local: Local, number: int, grad: Storage, *, handed: Sequence[int]) -> Storage:
        """The gradient of one operand: the result's own, if it is handed on, or a new one."""
        node, operand = local.node, local.node.operands[number]
        elements, of_result = local.operands[number].elements, local.result.elements
        through = number in handed and node.op.kind != "map"
        if through or (elements == of_result and (number in handed or not node.op.kernel)):
            return self.heap.keep(grad)
        if elements > of_result and not node.op.kernel and operand in self.grads:
            return self.heap.allocate(0.0, Holder("temporaries"))  # the pieces' gradients are put into one
        if self._inner(operand) and operand.op.kind == "map":
            return self.heap.allocate(0.0, Holder("temporaries"))
        size = float(elements * _itemsize(operand))
        kind: Kind = "gradients" if of_weights(operand) else "activation gradients"
        return self.heap.allocate(size, self._holder(kind, node))

    def _moved_back(self, node: Node, grad: Storage) -> Storage:
        """The dual of a parallel operator, on a gradient."""
        setting = self.setting
        late = node.attr("axis") in setting.execution.data_axes and of_weights(node) and not setting.eager
        if setting.axis_size(node) == 1 or (late and node.op.transition.only_names):
            return self.heap.keep(grad)
        after = setting.num_bytes(node.operands[0])
        dim = gathered_dim(node, backward=True)
        before = setting.num_bytes(node)
        move = backward_move(node, before, after, dim, self._backend)
        if move.alias:
            return self.heap.keep(grad)
        beside = self.heap.allocate(move.beside, self._holder("collectives", node))
        kind: Kind = "gradients" if of_weights(node) else "activation gradients"
        made = self.heap.allocate(after, self._holder(kind, node))
        self.heap.drop(beside)
        return made

    def _give(self, node: Node, term: Storage) -> None:
        """A term of a value's gradient, which owns its storage."""
        if of_weights(node):
            self._give_weight(node, term)
            return
        if not node.needs_grad or node.is_leaf:
            self.heap.drop(term)
            return
        known = self.grads.get(node)
        if known is None:
            self.grads[node] = term
            return
        if known.references > 1:  # others refer to it, so the sum is a tensor of its own
            total = self.heap.allocate(max(known.num_bytes, term.num_bytes), known.holder)
            self.heap.drop(known)
            self.grads[node] = total
        self.heap.drop(term)

    def _give_weight(self, node: Node, term: Storage) -> None:
        """Back through what moved a weight, to its gradient."""
        if node in self.units.of:
            self.units.give(self.units.of[node], term)
            return
        copied = False
        for step in reversed(chain(node)[1:]):
            if copied := self.setting.kept_copy(step):
                break  # all of it is added up, and scattered behind the last micro-batch
            moved = self._moved_back(step, term)
            self.heap.drop(term)
            term = moved
        param = chain(node)[0]
        summed = self.setting.shards_whole and not self.setting.keeps_gathered and bool(param.attr("regather"))
        if not (self.setting.eager or summed) or param in self.accumulated:
            self.heap.drop(term)
            return
        self.accumulated.add(param)
        kept = term.num_bytes * self.setting.gradient_share(param)
        if term.references > 1 or kept != term.num_bytes or copied:
            own = self.heap.allocate(kept, Holder("gradients"))
            self.heap.drop(term)
            term = own
        self.heap.hand_over(term, Holder("gradients"))  # it stays until the optimizer ran

    @property
    def _backend(self) -> Backend:
        return Backend(self.setting.eager, gloo=not self.on_gpu)

    def _holder(self, kind: Kind, node: Node) -> Holder:
        return Holder(kind, node.op.name, self.setting.layer(node))


def _size(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _itemsize(node: Node) -> int:
    return node.type.dtype.itemsize


def _is_map(node: Node) -> bool:
    return node.op.kind == "map" and node.op.kernel


def _moment(what: str, node: Node, setting: Setting) -> str:
    layer = setting.layer(node)
    where = f"layer {layer}, {node.op.name}" if layer is not None else node.name or node.op.name
    return f"{what} of {where}"
