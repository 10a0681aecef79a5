"""Every parallel substitution of an operator, generated from its loops: one rule per legal split, for any degree.

``split-<op>-<loop>`` surrounds the operator with the parallel operators that take Invariant operands to the states
the split needs, and its result back to Invariant. What stands between two operators so treated cancels and fuses
(``redistribute``). ``move-reduce-past-<op>`` lets a pending sum pass through. Nothing here names an operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.builder import Builder
from ir.graph import Node
from ir.operator import Split
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, State


@dataclass(frozen=True)
class ParallelRule:
    """One split of one operator as a substitution; the axis is a variable."""

    op: str
    split: Split

    @property
    def name(self) -> str:
        """``split-linear-n``, ``move-reduce-past-add``, or ``repeat-linear`` for the same work on every device."""
        if self.split.loop is not None:
            return f"split-{self.op}-{self.split.loop}"
        return f"move-reduce-past-{self.op}" if self.passes_sum else f"repeat-{self.op}"

    @property
    def passes_sum(self) -> bool:
        """True if it takes Partial operands to a Partial result."""
        return any(isinstance(state, Partial) for state in self.split.operands)

    @property
    def law(self) -> str:
        """The equation, for people: x0, x1, … are whole; a is the axis."""
        operands = [f"x{i}" for i in range(len(self.split.operands))]
        if self.passes_sum:
            inside = [
                f"reduce({x}, a)" if isinstance(s, Partial) else x
                for x, s in zip(operands, self.split.operands, strict=True)
            ]
            return f"{self.op}({', '.join(inside)}) == reduce({self.op}({', '.join(operands)}), a)"
        inside = [_write(x, Invariant(), state) for x, state in zip(operands, self.split.operands, strict=True)]
        right = _write(f"{self.op}({', '.join(inside)})", self.split.result, Invariant())
        return f"{self.op}({', '.join(operands)}) == {right}"

    def apply(self, k: Builder, node: Node, operands: tuple[Node, ...], axis: str) -> Node:
        """The right-hand side over Invariant operands."""
        inner = k.copy(node, self.enter(k, operands, axis))
        return self.leave(k, inner, axis)

    def enter(self, k: Builder, operands: tuple[Node, ...], axis: str) -> tuple[Node, ...]:
        """Operands, Invariant along ``axis``, in the states that the split needs."""
        assert not self.passes_sum, "a pending sum needs a Partial operand, which no Invariant one becomes"
        states = zip(operands, self.split.operands, strict=True)
        return tuple(move_to(k, operand, Invariant(), state, axis) for operand, state in states)

    def leave(self, k: Builder, result: Node, axis: str) -> Node:
        """The split's result made Invariant along ``axis``."""
        return move_to(k, result, self.split.result, Invariant(), axis)


def parallel_rules(node: Node) -> tuple[ParallelRule, ...]:
    """All rules for a node's operator at its shapes; which of them divide evenly depends on the axis."""
    return tuple(ParallelRule(node.op.name, split) for split in node.op.splits(node.loops))


def move_to(k: Builder, node: Node, before: State, after: State, axis: str) -> Node:
    """``node``, in state ``before`` along ``axis``, taken to ``after`` by the one operator that does."""
    if before == after:
        return node
    found = move(before, after)
    assert found is not None, f"no parallel operator takes {before} to {after}"
    name, dims = found
    result: Node = getattr(k, name)(node, axis=axis, **dims)
    return result


def _write(text: str, before: State, after: State) -> str:
    if before == after:
        return text
    found = move(before, after)
    assert found is not None, f"no parallel operator takes {before} to {after}"
    name, dims = found
    return f"{name}({', '.join([text, *map(str, dims.values()), 'a'])})"
