"""How a forward function says an operator that is cut, and open sizes: ``ids.size(0)``, or of the tensor at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ir.emission.code import ATOM, PRODUCT, Code, binary, call, tuple_of
from ir.emission.writing import Writing
from ir.graph import Node, unmoved
from ir.sharding import Invariant
from ir.transition import Transition
from ir.verify import node_splits
from pdv.emit.analysis.lower import variable
from pdv.emit.analysis.reserved import FLOAT8
from pdv.emit.analysis.shapes import Dim, Factor, Shapes
from pdv.emit.analysis.staged import Scaled
from pdv.pcg.over_time import TIME
from pdv.problem.formats import EMITTED_FORMATS


class UnsayableError(Exception):
    """An open size that no argument of a function tells."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A dim of an argument."""

    name: str
    dim: int
    factors: Dim
    cuts: tuple[str, ...]


@dataclass(frozen=True)
class ScopeWriting(Writing):
    """Writes operators of one scope.

    Attributes:
        arguments: names of what the scope is given.
        used: collects those whose sizes are read: their names must stay.
        scaled: products that are written in a narrow format.
        regather: True for a gather whose result must not outlive its use.
        in_slices: whether an axis of time is that of slices.
    """

    shapes: Shapes
    arguments: Mapping[Node, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    regather: bool = False
    scaled: Scaled | None = None
    in_slices: bool = False

    def write(self, node: Node, operands: Sequence[Code]) -> Code:
        """The expression of a node; of a parallel operator by its name: ``combine(x, 1, tp)``."""
        scaled = self.scaled if node.op.weight_waits else None
        if scaled is not None and unmoved(node.operands[1]).attrs.get("name") in scaled.weights:
            return self._write_scaled(node, operands, scaled.format)
        if node.op.kind != "parallel":
            return super().write(node, operands)
        dims = [str(node.attr(name)) for name in node.op.transition.dims]
        if self.in_slices and node.attr("axis") == TIME:
            if node.op.transition.only_names:  # gradients of slices add up
                return operands[0]
            return call(moves_in_time(node.op.transition), operands[0], *dims, TIME)
        options = ["regather=True"] if self.regather else []
        return call(node.op.name, operands[0], *dims, variable(node.attr("axis")), *options)

    def _write_scaled(self, node: Node, operands: Sequence[Code], name: str) -> Code:
        """A product in a narrow format; where a scale is of a whole tensor, with the axes that cut it."""
        given = [*operands, *([self.bias] if self.bias else [])]
        by_tensor, by_rows = FLOAT8
        if EMITTED_FORMATS[name].by_rows:
            return call(by_rows, *given)
        inner = node.loops.contracted
        outer = [loop for dim in node.loops.operands[1] for loop in dim if loop not in inner]
        axes = {"inner": self.cutting(node, *inner), "outer": self.cutting(node, *outer)}
        return call(by_tensor, *given, *(f"{name}={tuple_of(found)}" for name, found in axes.items() if found))

    def cutting(self, node: Node, *loops: str) -> tuple[str, ...]:
        """The axes that cut one of a node's loops, outer first."""
        splits = node_splits(node, [self.shapes.shardings[x] for x in node.operands], self.shapes.mesh)
        pairs = zip(self.shapes.mesh.axes, splits, strict=True)
        return tuple(axis.name for axis, split in pairs if split.loop in loops)

    def is_open(self, node: Node, dim: int) -> bool:
        """True if the size of a dim is not the same in every run."""
        return self.shapes.is_open(node, dim)

    def left_open(self, node: Node, dims: Sequence[int]) -> int | None:
        """The dim whose size is best left to torch, one of all: an open one before any cut one."""
        shapes = self.shapes
        found = [dim for dim in dims if shapes.is_open(node, dim)] or [dim for dim in dims if shapes.cuts(node, dim)]
        return next(iter(found), None)

    def count(self, node: Node, dims: Sequence[int]) -> Code:
        """The elements along some dims, over all ranks."""
        factors = tuple(factor for dim in dims for factor in self.shapes.dims[node][dim])
        return self.whole(factors) if any(factor.symbol for factor in factors) else super().count(node, dims)

    def size(self, node: Node, dim: int, near: Sequence[tuple[Node, Code]] = ()) -> Code:
        """The size of a dim of ``node`` on one rank; ``near``: operands at hand, which tell it if they have a name.

        Raises:
            UnsayableError: if no argument tells it.
        """
        factors, cuts = self.shapes.dims[node][dim], self.shapes.cuts(node, dim)
        if not any(factor.symbol for factor in factors):
            return Code(f"{_number(factors)}{_over(cuts)}", PRODUCT if cuts else ATOM)
        for operand, code in near:
            for place, same in enumerate(self.shapes.dims[operand]):
                if same == factors and self.shapes.cuts(operand, place) == cuts and code.text.isidentifier():
                    return Code(f"{code.text}.size({place})")
        for source in self._sources():
            if source.factors == factors and source.cuts == cuts:
                return self._read(source)
        code = self.whole(factors)
        for axis in cuts:
            code = binary(code, "//", Code(f"{axis}.size"))
        return code

    def whole(self, factors: Dim) -> Code:
        """The size of a dim over all ranks.

        Raises:
            UnsayableError: if no argument tells it.
        """
        code: Code | None = None
        for factor in sorted(factors, key=lambda factor: not factor.symbol):
            next_code = self._factor(factor) if factor.symbol else Code(str(factor.extent))
            code = next_code if code is None else binary(code, "*", next_code)
        assert code is not None, "a dim of size one is not open"
        return code

    def _factor(self, factor: Factor) -> Code:
        """slope * symbol + offset"""
        code = self._symbol(factor.symbol)
        code = _times(code, factor.slope)
        return _plus(code, factor.offset)

    def _symbol(self, symbol: str) -> Code:
        """The open size itself, from the first argument that tells it most simply."""
        found: list[tuple[int, int, _Source, Factor]] = []
        for number, source in enumerate(self._sources()):
            opened = [factor for factor in source.factors if factor.symbol]
            if len(opened) == 1 and opened[0].symbol == symbol and opened[0].slope:
                effort = len(source.cuts) + 4 * (len(source.factors) > 1) + 4 * (not opened[0].is_plain)
                found.append((effort, number, source, opened[0]))
        if not found:
            raise UnsayableError(symbol)
        _, _, source, factor = min(found, key=lambda entry: entry[:2])
        code = self._read(source)
        for axis in source.cuts:
            code = binary(code, "*", Code(f"{axis}.size"))
        numbers = _number(tuple(f for f in source.factors if not f.symbol))
        if numbers != 1:
            code = binary(code, "//", Code(str(numbers)))
        return _times(_plus(code, -factor.offset), 1 / factor.slope)

    def _sources(self) -> Iterator[_Source]:
        for node, name in self.arguments.items():
            for dim, factors in enumerate(self.shapes.dims[node]):
                yield _Source(name, dim, factors, self.shapes.cuts(node, dim))

    def _read(self, source: _Source) -> Code:
        self.used.add(source.name)
        return Code(f"{source.name}.size({source.dim})")


def moves_in_time(transition: Transition) -> str:
    """The function of ``slices.py`` that moves a value so: what is cut, read by later slices, or put together."""
    if not transition.gathers:
        return "now"
    return "at_end" if transition.after is Invariant else "earlier"


def _number(factors: Sequence[Factor]) -> int:
    product = 1
    for factor in factors:
        product *= factor.extent
    return product


def _over(cuts: Sequence[str]) -> str:
    return "".join(f" // {axis}.size" for axis in cuts)


def _times(code: Code, factor: Fraction) -> Code:
    if factor.numerator != 1:
        code = binary(code, "*", Code(str(factor.numerator)))
    return code if factor.denominator == 1 else binary(code, "//", Code(str(factor.denominator)))


def _plus(code: Code, number: int) -> Code:
    return binary(code, "-" if number < 0 else "+", Code(str(abs(number)))) if number else code
