"""The lines of a forward function: statements with names, one local line each, shapes in comments where they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ir.emission.code import Code, call
from ir.graph import Node
from ir.ops.batch_norm import fused_batch_norm
from ir.ops.parts import parts_code
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.outline import BlockRun, own_params
from pdv.emit.analysis.shapes import Shapes
from pdv.emit.analysis.staged import Scaled
from pdv.emit.program.code import statement, with_comment
from pdv.emit.program.expressions import ScopeWriting
from pdv.emit.program.local_names import variable_names
from pdv.emit.program.statements import Arranged, Scope, Statement, arrange
from pdv.emit.program.writer import Writer

INDENT = 8
MOMENTUM, EPS = 0.1, 1e-5  # what torch.nn.functional.batch_norm takes where nothing is said


@dataclass(frozen=True, slots=True)
class Again:
    """How backward has what it needs of a block: run again, and from the host's memory."""

    recompute: bool = False
    hosted: bool = False

    def __bool__(self) -> bool:
        return self.recompute or self.hosted

    def call(self, function: str, module: str, arguments: Sequence[str], *, moves: bool) -> Code:
        """A call that is run so; ``moves``: buffers of the module, or what is drawn next."""
        words = [function, *arguments]
        if self.recompute:
            restored = [f"context_fn=restoring({module})"] if moves else []
            words = ["checkpoint", *words, "use_reentrant=False", *restored]
        return call(*(["on_host", *words] if self.hosted else words))


ONCE = Again()


@dataclass(frozen=True)
class Attributes:
    """What ``self`` holds: parameters, buffers and constants by node, module lists by run."""

    leaves: Mapping[Node, str]
    runs: Mapping[BlockRun, str]
    again: Again = ONCE
    scaled: Scaled | None = None
    stages: tuple[str, ...] = ()
    """The axis of stages, if there are several."""
    in_slices: bool = False
    """Whether an axis of time is that of slices."""


class Body:
    """The forward function of one scope."""

    def __init__(
        self,
        scope: Scope,
        reading: Reading,
        shapes: Shapes,
        attributes: Attributes,
        arguments: Mapping[Node, str],
        reserved: frozenset[str],
    ) -> None:
        self._scope = scope
        self._reading = reading
        self._shapes = shapes
        self._attributes = attributes
        self._arguments = arguments
        stages, in_slices = attributes.stages, attributes.in_slices
        writing = ScopeWriting(shapes, arguments, scaled=attributes.scaled, stages=stages, in_slices=in_slices)
        writer = Writer(reading, writing, attributes.leaves, arguments.get, lambda node: False)
        self._say_sizes(writer)
        self._arranged: Arranged = arrange(scope, reading, writer)
        names = variable_names(scope, self._arranged.statements, reading, arguments, reserved | writing.used)
        self._names = names
        self._writer = replace(writer, name_of=names.get, biased=self._arranged.biased.__contains__)

    def lines(self) -> list[str]:
        """The statements."""
        found: list[str] = []
        shown = ""
        for item in self._arranged.statements:
            if item.kind == "run":
                found += self._loop(item)
                shown = ""
                continue
            lines, shape = self._lines(item)
            found += with_comment(lines, shape if shape != shown else "")
            shown = shape or shown
        return found

    def _lines(self, item: Statement) -> tuple[list[str], str]:
        if item.kind == "return":
            results = [self._writer.operand(node) for node in self._scope.results]
            if len(results) == 1:
                return statement("return ", results[0], INDENT), ""
            return [f"{' ' * INDENT}return {', '.join(result.text for result in results)}"], ""
        assert item.value is not None
        if item.kind == "chunk":
            operand = self._writer.kept(self._reading.operands(item.value)[0])
            targets = ", ".join(self._names[node] for node in item.targets)
            code = parts_code(item.targets, operand)
            return statement(f"{targets} = ", code, INDENT), self._shapes.text(item.value)
        if item.kind == "norm":
            targets = ", ".join(self._names[node] for node in item.targets)
            return statement(f"{targets} = ", self._norm(item, item.value), INDENT), self._shapes.text(item.value)
        if item.kind == "update":
            value = item.value
            code = self._writer.operand(value) if value in self._names else self._writer.expression(value)
            code = call("overwrite", f"self.{self._buffer(item.update)}", code)
            return statement("", code, INDENT), ""
        code = self._writer.expression(item.value)
        return statement(f"{self._names[item.value]} = ", code, INDENT), self._shapes.text(item.value)

    def _norm(self, item: Statement, node: Node) -> Code:
        """A batch norm by the batch's own statistics, which it returns too or moves its buffers by."""
        x, _, _, *affine = self._reading.operands(node)
        weights = [self._writer.operand(leaf) for leaf in affine]
        eps = node.attr("eps")
        if item.tracking is None:
            return call("batch_norm_of_all", self._writer.operand(x), *weights, repr(eps))
        buffers = [self._writer.operand(buffer) for buffer in item.tracking.buffers]
        given = (("momentum", item.tracking.momentum, MOMENTUM), ("eps", eps, EPS))
        options = [f"{name}={value!r}" for name, value, default in given if value != default]
        return call(fused_batch_norm(node), self._writer.operand(x), *buffers, *weights, "training=True", *options)

    def _buffer(self, name: str) -> str:
        return next(attr for node, attr in self._attributes.leaves.items() if node.attrs.get("name") == name)

    def _loop(self, item: Statement) -> list[str]:
        run = item.run
        assert run is not None
        pad = " " * INDENT
        results = [self._names[node] for node in run.outgoing[-1]]
        if len(run.blocks) == 1:  # of a run that stages share
            given = [*run.incoming[0], *run.fixed]
            arguments = [self._writer.kept(node).text for node in given]
            made = self._call_block(run, f"self.{self._attributes.runs[run]}[0]", arguments)
            return statement(f"{', '.join(results)} = ", made, INDENT)
        passed = dict(zip(run.incoming[1], run.incoming[0], strict=True))
        carried = {passed[first]: name for first, name in zip(run.outgoing[0], results, strict=True) if first in passed}
        lines = [f"{pad}{name} = {self._names[node]}" for node, name in carried.items() if name != self._names[node]]
        arguments = [carried[node] for node in run.incoming[0]]
        arguments += [self._writer.kept(node).text for node in run.fixed]
        return [
            *lines,
            f"{pad}for block in self.{self._attributes.runs[run]}:",
            *statement(f"{', '.join(results)} = ", self._call_block(run, "block", arguments), INDENT + 4),
        ]

    def _call_block(self, run: BlockRun, block: str, arguments: Sequence[str]) -> Code:
        held = {param.attr("name") for nodes in run.blocks for param in own_params(self._reading, nodes)}
        draws = any(node.op.draws for nodes in run.blocks for node in nodes)
        moves = draws or not held.isdisjoint(self._reading.overwritten)
        return self._attributes.again.call(block, block, arguments, moves=moves)

    def _say_sizes(self, writer: Writer) -> None:
        """Write each step once over operands without names: then it is known which arguments must keep theirs."""
        for node in self._scope.steps:
            if isinstance(node, Node):
                writer.writing.write(node, [Code("()")] * len(node.operands))
