"""From the steps of a scope to its statements: which values get a line and a name, which are written in place.

A value is written where it is read if it is read once, and the line stays readable: at most one heavy operator (a
contraction, a normalisation, a gather) and some hundred columns. Weights are always written where they are read, so
that no variable keeps a gathered one alive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ir.graph import Node, is_column
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.norms import Tracking, tracking
from pdv.emit.analysis.outline import BlockRun, Item
from pdv.emit.program.code import WIDTH
from pdv.emit.program.writer import Writer

HEAVY_KINDS = ("contraction", "stencil", "index")
_SIZE = re.compile(r"(?<![\w.])\d+(?![\w.])")
MAX_COLUMNS = 88  # leaves room for indentation, a name and a comment
MAX_INLINED = 6  # operators in a line, parallel ones and weights apart


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a forward pass.

    ``value`` is the node whose expression it holds: assigned to ``targets`` (all parts of a chunk, a normed batch with
    its mean and variance, else one), written into a buffer (``update`` names it), or returned. A ``run`` is the loop
    over equal blocks. A normed batch alone moves its running statistics too, as ``tracking`` says.
    """

    kind: Literal["assign", "chunk", "norm", "update", "run", "return"]
    targets: tuple[Node, ...]
    reads: tuple[Node, ...]
    value: Node | None = None
    run: BlockRun | None = None
    update: str = ""
    tracking: Tracking | None = None


@dataclass(frozen=True)
class Scope:
    """What one forward function computes.

    Attributes:
        steps: its steps and runs, in order.
        arguments: values and leaves that it is given.
        results: values that it returns.
        updates: new value -> buffer that it overwrites.
    """

    steps: tuple[Item, ...]
    arguments: tuple[Node, ...]
    results: tuple[Node, ...]
    updates: Mapping[Node, str]


@dataclass(frozen=True)
class Arranged:
    """The statements of a scope, and which nodes are written with a fused bias."""

    statements: tuple[Statement, ...]
    biased: frozenset[Node]


def is_heavy(node: Node) -> bool:
    """True for operators of which one is enough in a line."""
    return node.op.kind in HEAVY_KINDS or node.op.is_heavy


def arrange(scope: Scope, reading: Reading, writer: Writer) -> Arranged:
    """The statements of a scope, in an order that can run; ``writer`` tells how long an expression would be."""
    return _Arranging(scope, reading, writer).run()


class _Arranging:
    def __init__(self, scope: Scope, reading: Reading, writer: Writer) -> None:
        self._scope = scope
        self._reading = reading
        self._writer = replace(writer, name_of=self._any_name, biased=self._is_biased)
        self._steps = set(scope.steps)
        self._reads = self._count_reads()
        self._given = set(scope.arguments)
        self._old = [x for x in dict.fromkeys(scope.results) if reading.is_overwritten(x) and x not in self._given]
        self._pending: dict[Node, tuple[int, int]] = {}  # node -> heavy operators and operators in its expression
        self._inlined: set[Node] = set()
        self._biased: set[Node] = set()
        self._statements: list[Statement] = []
        self._done: set[Node] = set()
        self._reached: set[Node] = set()
        self._deferred: list[Statement] = []  # new values of buffers whose old ones are read further on

    def run(self) -> Arranged:
        for node in self._old:
            self._leaf_reads(node)
        for item in self._scope.steps:
            if isinstance(item, BlockRun):
                self._run(item)
            elif item not in self._done:
                self._step(item)
        results = self._scope.results
        if self._deferred:
            for node in results:
                self._flush(node)
            self._statements += self._deferred
        if len(results) == 1 and results[0] in self._pending:
            self._inline(results[0])
            self._emit("return", (), results[0])
        else:
            for node in results:
                self._flush(node)
            self._statements.append(Statement("return", (), results))
        assert not self._pending, f"never read: {list(self._pending)}"
        return Arranged(tuple(self._statements), frozenset(self._biased))

    def _count_reads(self) -> dict[Node, int]:
        reads: dict[Node, int] = {}
        for item in self._scope.steps:
            if isinstance(item, BlockRun):
                operands: Sequence[Node] = (*item.incoming[0], *item.fixed)
            else:
                operands = self._reading.operands(item)
            for operand in operands:
                reads[operand] = reads.get(operand, 0) + 1
        for node in self._scope.results:
            reads[node] = reads.get(node, 0) + 1
        return reads

    def _any_name(self, node: Node) -> str | None:
        """A stand-in for the name of a value that has a line of its own."""
        is_value = self._reading.leaf(node) is None or node in self._given or self._is_shared_leaf(node)
        return None if node in self._inlined or not is_value else "name"

    def _is_biased(self, node: Node) -> bool:
        return node in self._biased

    # ---- Leaves that are worth a variable: read twice on their way from storage ----

    def _is_shared_leaf(self, node: Node) -> bool:
        leaf = self._reading.leaf(node)
        if node in self._old:  # is returned once its buffer is overwritten
            return True
        if leaf is None or node in self._given or not leaf.chain or leaf.regather or not leaf.base.is_param:
            return False
        return len(self._reading.users[node]) > 1

    def _leaf_reads(self, node: Node) -> tuple[Node, ...]:
        """Variables that a leaf's expression reads, made first if need be."""
        if node in self._given:
            return (node,)
        if self._is_shared_leaf(node):
            if node not in self._done:
                self._done.add(node)
                below = self._leaf_reads(node.operands[0]) if not node.is_leaf else ()
                self._statements.append(Statement("assign", (node,), below, node))
            return (node,)
        return () if node.is_leaf else self._leaf_reads(self._reading.resolve(node.operands[0]))

    # ---- Steps ----

    def _step(self, node: Node) -> None:
        self._reached.add(node)
        normed = self._fuse_norm(node)
        if normed is not None:
            self._norm(normed)
            return
        own = [x for x in self._reading.operands(node) if x in self._pending]
        heavy, size = int(is_heavy(node)), int(node.op.kind != "parallel")
        if self._takes_bias(node):
            self._biased.add(node)
            heavy, size = heavy + 1, size + 1
            self._pending.pop(node.operands[0])
            self._inlined.add(node.operands[0])
            own = []
        for operand in own:
            more_heavy, more_size = self._pending[operand]
            readable = heavy + more_heavy <= 1 and size + more_size <= MAX_INLINED and not self._wants_names(node)
            if readable and not (is_heavy(node) and self._holds(operand)) and self._fits(node, operand):
                self._inline(operand)
                heavy, size = heavy + more_heavy, size + more_size
            else:
                self._flush(operand)
        siblings = self._siblings(node)
        if siblings:
            self._done.update(siblings)
            self._emit("chunk", siblings, node)
        elif node in self._scope.updates:
            if self._is_read_on(self._scope.updates[node]):
                self._emit("assign", (node,), node)
                self._deferred.append(Statement("update", (), (node,), node, update=self._scope.updates[node]))
            elif self._reads.get(node, 0):
                self._emit("assign", (node,), node)
                self._statements.append(Statement("update", (), (node,), node, update=self._scope.updates[node]))
            else:
                self._emit("update", (), node, self._scope.updates[node])
        else:
            self._pending[node] = heavy, size
            if self._reads.get(node, 0) != 1:
                self._flush(node)

    def _is_read_on(self, buffer: str) -> bool:
        """True if a step to come, or an expression that is still to be written, reads the old value of a buffer."""
        readers = {
            node
            for param in self._reading.graph.params
            if param.attr("name") == buffer
            for node in self._reading.readers(param)
        }
        waiting = {node for pending in self._pending for node in self._within(pending)}
        return not readers <= self._reached or not readers.isdisjoint(waiting)

    def _within(self, node: Node) -> list[Node]:
        """The steps that an expression holds."""
        inner = (x for x in self._reading.operands(node) if x in self._inlined)
        return [node, *(below for x in inner for below in self._within(x))]

    def _holds(self, operand: Node) -> bool:
        """True if a variable that only ``operand`` still needs would be kept in memory while its reader runs.

        ``F.conv2d(F.relu(h), w)`` holds h all along; with a line for ``h = F.relu(h)`` its memory is free for others.
        """
        makes, reads = self._parts(operand)
        return makes and any(node not in self._given and self._reads.get(node) == 1 for node in reads)

    def _parts(self, node: Node) -> tuple[bool, list[Node]]:
        """Whether the expression of a node makes a new tensor, and the computed values that it reads by name."""
        makes, reads = node.op.kernel and node.op.kind != "parallel", list[Node]()
        for operand in self._reading.operands(node):
            if operand in self._inlined:
                more, below = self._parts(operand)
                makes, reads = makes or more, [*reads, *below]
            elif self._reading.leaf(operand) is None:
                reads.append(operand)
        return makes, reads

    def _fits(self, node: Node, operand: Node) -> bool:
        """True if ``node`` with ``operand`` written in it is still a short line, or no longer for it."""
        alone = _columns(self._writer.expression(node).text)
        self._inlined.add(operand)
        together = _columns(self._writer.expression(node).text)
        self._inlined.discard(operand)
        return together <= MAX_COLUMNS or (together <= WIDTH - 20 and together - alone < 12)

    def _takes_bias(self, node: Node) -> bool:
        """linear(x, w) + b and conv2d(x, w) + b, in one call."""
        if not node.op.adds:
            return False
        product, bias = self._reading.operands(node)
        leaf = self._reading.leaf(bias)
        rank = product.op.bias_rank
        if not rank or product not in self._pending or leaf is None:
            return False
        if not leaf.base.is_param or product.type != node.type:
            return False
        return bias.type.shape == (node.type.shape[-rank], *(1,) * (rank - 1)) and is_vector(leaf.base)

    def _wants_names(self, node: Node) -> bool:
        """Queries, keys and values read best by name."""
        return node.op.has_scores

    def _siblings(self, node: Node) -> tuple[Node, ...]:
        """All parts of a value, in order, if the scope reads every one of them: chunks, or slices that cover it.

        Backward puts gradients of such parts together in one go; slices taken one by one are filled up and added.
        """
        if not (node.op.takes_part or node.op.takes_range):
            return ()
        (whole,), dim = node.operands, node.attr("dim")
        users = (user for user in self._reading.users[self._reading.operands(node)[0]] if user.op is node.op)
        alike = [user for user in users if user.attr("dim") == dim and self._reads.get(user) and user in self._steps]
        if node.op.takes_part:
            parts = {user.attr("index"): user for user in alike if user.attr("parts") == node.attr("parts")}
            found = tuple(parts[index] for index in sorted(parts))
            return found if len(found) == node.attr("parts") else ()
        found = tuple(sorted(alike, key=lambda user: int(user.attr("start"))))
        ends = [0, *(user.attr("stop") for user in found)]
        covered = [user.attr("start") for user in found] == ends[:-1] and ends[-1] == whole.type.shape[dim]
        return found if covered and len(found) > 1 and not self._writer.writing.is_open(whole, dim) else ()

    def _fuse_norm(self, mean: Node) -> Node | None:
        """The batch norm by this mean, if all points of a channel are on one device: a call of torch's gives both."""
        for node in self._reading.users[mean]:
            if node.op.statistics[:1] == (mean.op,) and node in self._steps:
                x, first, variance, *affine = self._reading.operands(node)
                same = self._reading.operands(mean) == (x,) and self._reading.operands(variance) == (x, mean)
                stored = all(self._reading.leaf(vector) is not None for vector in affine)
                is_cut = self._writer.writing.cutting(mean, *mean.loops.contracted)
                if same and stored and first is mean and variance in self._steps and not is_cut:
                    return node
        return None

    def _norm(self, node: Node) -> None:
        """A batch norm with the statistics that it takes; what reads these (buffers) follows."""
        x, mean, variance, *affine = self._reading.operands(node)
        self._flush(x)
        reads = [x, *(variable for leaf in affine for variable in self._leaf_reads(leaf))]
        self._done.update((node, variance))
        tracked = tracking(node, self._reading, self._scope.updates)
        targets = (node, mean, variance) if tracked is None else (node,)
        self._done.update(tracked.steps if tracked else ())
        self._statements.append(Statement("norm", targets, tuple(dict.fromkeys(reads)), node, tracking=tracked))

    def _run(self, run: BlockRun) -> None:
        for node in (*run.incoming[0], *run.fixed):
            self._flush(node)
        reads = [*run.incoming[0]]
        for node in run.fixed:
            reads += [node] if self._reading.leaf(node) is None else self._leaf_reads(node)
        self._statements.append(Statement("run", run.outgoing[-1], tuple(dict.fromkeys(reads)), run=run))

    def _inline(self, node: Node) -> None:
        self._pending.pop(node, None)
        self._inlined.add(node)

    def _flush(self, node: Node) -> None:
        """Give a pending value its line."""
        if node in self._pending:
            self._pending.pop(node)
            self._emit("assign", (node,), node)

    def _emit(
        self,
        kind: Literal["assign", "chunk", "update", "return"],
        targets: tuple[Node, ...],
        value: Node,
        update: str = "",
    ) -> None:
        reads = tuple(dict.fromkeys(self._reads_of(value)))
        self._statements.append(Statement(kind, targets, reads, value, update=update))

    def _reads_of(self, value: Node) -> list[Node]:
        """Variables that the expression of a node reads."""
        found: list[Node] = []
        for operand in self._reading.operands(value):
            if operand in self._inlined:
                found += self._reads_of(operand)
            elif self._reading.leaf(operand) is not None:
                found += self._leaf_reads(operand)
            else:
                found.append(operand)
        return found


def is_vector(param: Node) -> bool:
    """True for a parameter of rank one, or stored as one and read as [c, 1, 1]."""
    return param.type.rank == 1 or is_column(param)


def _columns(text: str) -> int:
    """How wide a text is with sizes of three digits: a program has the same lines at all sizes."""
    return len(_SIZE.sub("123", text))
