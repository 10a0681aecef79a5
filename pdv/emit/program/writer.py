"""Expressions of a scope: an operator over names, over what is written inside it, over weights on their way to use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ir.emission.code import Code, call, method
from ir.graph import Node, is_column
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.lower import variable
from pdv.emit.program.expressions import ScopeWriting
from pdv.pcg.over_time import TIME
from pdv.pcg.units import gathered_once, joins_unit

FUNCTIONS: Mapping[type[ast.operator], str] = {
    ast.Add: "torch.add", ast.Sub: "torch.sub", ast.Mult: "torch.mul", ast.Div: "torch.div"
}  # fmt: skip


@dataclass(frozen=True)
class Writer:
    """Writes expressions.

    Attributes:
        attributes: what ``self`` calls parameters, buffers and constants.
        name_of: the variable that holds a value, None where it is written in place.
        biased: sums that are written as the bias of the product below them.
        writing: how the scope says operators that are cut, and sizes that are open.
    """

    reading: Reading
    writing: ScopeWriting
    attributes: Mapping[Node, str]
    name_of: Callable[[Node], str | None]
    biased: Callable[[Node], bool]

    def operand(self, node: Node) -> Code:
        """A value where it is read: its name, its expression if it has none, or a leaf from its storage."""
        node = self.reading.resolve(node)
        name = self.name_of(node)
        if name is not None:
            return Code(name)
        return self.leaf(node) if self.reading.leaf(node) is not None else self.expression(node)

    def kept(self, node: Node) -> Code:
        """The same where backward may read it again: a copy of a buffer that is overwritten by then."""
        node = self.reading.resolve(node)
        code = self.operand(node)
        return method(code, "clone") if self.name_of(node) is None and self.reading.is_overwritten(node) else code

    def expression(self, node: Node) -> Code:
        """What computes a value."""
        if self.reading.leaf(node) is not None:
            code = self.leaf(node, making=True)
            return method(code, "clone") if self.reading.is_overwritten(node) else code
        operands = self.reading.operands(node)
        if self.biased(node):
            product, bias = operands
            with_bias = replace(self.writing, bias=self.leaf(bias, column=False))
            return with_bias.write(product, [self.kept(operand) for operand in self.reading.operands(product)])
        is_view = node.op.strides is not None  # of a buffer, it would show what that is overwritten with
        read = self.kept if node.needs_grad or is_view else self.operand
        if node.op.takes_vectors:
            return self._write(node, [read(operands[0]), *(self.leaf(x, column=False) for x in operands[1:])])
        return self._write(node, [read(x) for x in operands])

    def _write(self, node: Node, operands: Sequence[Code]) -> Code:
        """An operator; a light one so that backward makes its value again."""
        if node not in self.reading.light:
            return self.writing.write(node, operands)
        if node.op.kind == "parallel":
            return replace(self.writing, regather=True).write(node, operands)
        names = [Code(f"given{number}") for number in range(len(operands))]
        return _again(self.writing.write(node, names), names, operands) or self.writing.write(node, operands)

    def leaf(self, node: Node, *, making: bool = False, column: bool = True) -> Code:
        """A parameter on its way from storage, a buffer, or a constant; biases kept as vectors become columns last."""
        leaf = self.reading.leaf(node)
        assert leaf is not None
        name = None if making else self.name_of(node)
        if name is not None:  # of a column, whoever made it
            return Code(name) if column or not is_column(leaf.base) else method(Code(name), "flatten")
        if leaf.base.is_const:
            return Code(f"self.{self.attributes[node]}")
        code = self._chain(node, making=making)
        return method(code, "view", "-1", "1", "1") if column and is_column(leaf.base) else code

    def _chain(self, node: Node, *, making: bool) -> Code:
        """The parallel operators above a parameter; ``local(weight, dp)`` replicates it along ``dp``."""
        name = None if making else self.name_of(node)
        if name is not None:
            return Code(name)
        axes: list[str] = []
        below = node
        while below.op.transition.only_names and (below is node or self.name_of(below) is None):
            if not (self.writing.in_slices and below.attr("axis") == TIME):  # gradients of slices add up
                axes.insert(0, variable(below.attr("axis")))
            below = self.reading.resolve(below.operands[0])
        if below.is_leaf:
            attribute = Code(f"self.{self.attributes[below]}")
            return call("local", attribute, *axes) if below.attr("trainable") else attribute
        inner = self.reading.resolve(node.operands[0])
        if gathered_once(below, several=self.reading.several) and (below is node or self.name_of(below) is None):
            return self._gather(below, axes)
        if joins_unit(node, several=False):
            return self._gather(node)
        leaf = self.reading.leaf(node)
        again = leaf is not None and leaf.regather and node.op.transition.gathers
        return replace(self.writing, regather=again).write(node, [self._chain(inner, making=False)])

    def _gather(self, move: Node, axes: Sequence[str] = ()) -> Code:
        """A parameter gathered with its unit; ``axes``: along which its gradient is summed, too."""
        weight = Code(f"self.{self.attributes[self.reading.resolve(move.operands[0])]}")
        return call("gather", weight, str(move.attr("dim")), variable(move.attr("axis")), *axes)


def _again(made: Code, names: Sequence[Code], operands: Sequence[Code]) -> Code | None:
    """``again(F.gelu, x)``, of what operands make that are called ``names``; None if it reads other variables."""
    known = {name.text: operand for name, operand in zip(names, operands, strict=True)}
    tree = ast.parse(made.text, mode="eval").body
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    plain = [argument for argument in made.arguments if argument.text not in known]
    if made.head and not any(name in code for name in known for code in (made.head, *(one.text for one in plain))):
        return call("again", made.head, *(known.get(argument.text, argument) for argument in made.arguments))
    function = FUNCTIONS.get(type(tree.op)) if isinstance(tree, ast.BinOp) else None
    if isinstance(tree, ast.BinOp) and function and [ast.unparse(x) for x in (tree.left, tree.right)] == list(known):
        return call("again", function, *operands)
    if read <= {*known, "F", "torch"}:
        return call("again", f"lambda {', '.join(known)}: {made.text}", *operands)
    return None
