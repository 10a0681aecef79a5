"""One way to say in the IR what models say: the operations that frontends lower to.

Frontends differ in names and argument order; what an operation *becomes* is decided once, here. Anything over known
values is computed on the spot, since shapes, masks and position tables arrive as little programs. Entry point:
`Lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ir.builder import Builder
from ir.evaluation.rational import short_float
from ir.graph import Node
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.types import DType
from pdv.passes.fold_constants import Array, fold

Pair = tuple[int, int]
Number = int | float | bool


_JUMPS = ("floor", "ceil", "round", "to_integer", "fmod", "remainder", "compare", "compare_number")


class Unsupported(Exception):
    """A form of an operator that the IR cannot say; the message says which."""


@dataclass(frozen=True, slots=True)
class Empty:
    """A tensor without elements, of which the IR has none."""


@dataclass(frozen=True, slots=True)
class TopK:
    """What a search for each row's k largest elements gives: the elements or where they are, of the node ``of``.

    Only putting the elements back where they were is a function of the IR (`top_k`); apart they are known by this.
    """

    of: Node
    k: int
    part: Literal["values", "places"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Noise that a source draws: numbers of a kind, times ``scale`` and moved by ``offset``.

    Of the kind ``bernoulli``: one by the chance that the source says of each element.
    """

    kind: Literal["uniform", "normal", "bernoulli"]
    rank: int
    scale: float = 1.0
    offset: float = 0.0


class Lowering:
    """A builder that folds constants and speaks the frontends' language.

    Attributes:
        builder: the graph so far.
        updates: buffer name -> its new value, as batch normalisation in training leaves it.
        buffers: such a value, or one that another has replaced -> the buffer's name.
        dropped: what is dropped out.
        divided: products with the inverse of a number -> what is divided there, and by what.
        drawn: values of the source that are drawn at random -> what they are without: true, a number throughout, or
            noise.
        noises: how many draws of random numbers there are.
        trains: whether these are drawn in training alone, or might be.
        drops_as_noise: whether dropout is among these, which is of training alone otherwise.
        foreign: functions of other libraries that are run as they are.
        stored: how the values of stored tensors are read, where an operand must be known; by name.
        name: hint for the nodes made next, usually the source's own name for the value.
    """

    def __init__(self) -> None:
        self.builder = Builder()
        self.updates: dict[str, Node] = {}
        self.buffers: dict[Node, str] = {}
        self.dropped: set[Node] = set()
        self.divided: dict[Node, tuple[Node, float]] = {}
        self.drawn: dict[str, float | bool | Drawn] = {}
        self.noises = 0
        self.trains = False
        self.drops_as_noise = False
        self.foreign: dict[str, None] = {}
        self.stored: Mapping[str, Callable[[], Array]] = {}
        self.name = ""

    def apply(self, op: str, *operands: Node, **attrs: Hashable) -> Node:
        """One operator, or its value where all operands are constants, or it has no elements."""
        declared = OPERATORS[op]
        if op in _JUMPS:
            operands = tuple(map(self.exactly, operands))
        if not all(x.type.num_elements for x in operands):
            return self._of_nothing(declared, operands, attrs)
        if any(x.type.dtype.is_stored for x in operands) and declared.kind != "move" and not declared.names_dtype:
            return self._of_stored(op, operands, attrs)
        value = fold(declared, operands, attrs)
        if value is None:
            return self.builder.apply(declared, operands, attrs, self.name)
        return self.const(value, declared.dtype_of([operand.type.dtype for operand in operands], attrs))

    def _of_stored(self, op: str, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Node:
        """An operator over a type in which torch does not compute: integers are wide ones on the way.

        Raises:
            Unsupported: of floats of eight bits.
        """
        own = next(x.type.dtype for x in operands if x.type.dtype.is_stored)
        if own.is_floating:
            raise Unsupported(f"arithmetic in {own.torch_name}")
        wide = [self.cast(x, DType.I64) if x.type.dtype is own else x for x in operands]
        found = self.apply(op, *wide, **attrs)
        return self.cast(found, own) if found.type.dtype is DType.I64 else found

    def _of_nothing(self, declared: Operator, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Node:
        """An operator where an operand has no elements: known, if its result has none, or all that it reads is known.

        Raises:
            Unsupported: if neither is so.
        """
        known = all(x.is_const for x in operands)
        if declared.fold is None or not (known or declared.kind in ("map", "move")):
            raise Unsupported("of a tensor without elements")
        arrays = [np.zeros(x.type.shape) if (value := self.value(x)) is None else value for x in operands]
        found = np.asarray(declared.fold(*arrays, **attrs))
        if found.size and not known:
            raise Unsupported("of a tensor without elements")
        return self.const(found, declared.dtype_of([operand.type.dtype for operand in operands], attrs))

    def const(self, array: Any, dtype: DType | None = None) -> Node:  # Any: whatever NumPy can make an array of
        """A known array; values of types that NumPy alone does not know are kept as float32.

        Numbers for a type come in float64, and are rounded here: to no less than the type has.
        """
        array = np.asarray(array)
        if dtype is None:
            try:
                dtype = DType.from_name(array.dtype.name)
            except KeyError:
                raise Unsupported(f"element type {array.dtype.name}") from None
        unknown = dtype is DType.BF16 or (dtype.is_floating and dtype.itemsize == 1)  # to NumPy alone
        rounded = array.dtype == np.float64 and dtype.is_floating and dtype is not DType.F64
        return self.builder.const(array.astype(np.float32) if unknown or rounded else array, self.name, dtype)

    @staticmethod
    def value(node: Node) -> Array | None:
        """The array of a constant node."""
        return node.attr("value").array if node.is_const else None

    def scalar(self, node: Node, like: Node) -> Number | None:
        """The one element of a constant that does not widen `like` when broadcast against it."""
        array = self.value(node)
        if array is None or array.size != 1 or array.ndim > like.type.rank:
            return None
        element: Number = array.reshape(()).item()
        if not isinstance(element, float) or not math.isfinite(element):
            return element
        return short_float(element, like.type.dtype)

    # Element-wise

    def add(self, x: Node, y: Node) -> Node:
        """x + y."""
        if (c := self.scalar(y, x)) is not None:
            return self.shift(x, c)
        if (c := self.scalar(x, y)) is not None:
            return self.shift(y, c)
        return self.apply("add", x, y)

    def sub(self, x: Node, y: Node) -> Node:
        """x - y."""
        if (c := self.scalar(y, x)) is not None:
            return self.shift(x, -c)
        if (c := self.scalar(x, y)) is not None:
            return self.shift(self.apply("neg", y), c)
        return self.apply("sub", x, y)

    def mul(self, x: Node, y: Node) -> Node:
        """x * y."""
        if (c := self.scalar(y, x)) is not None:
            return self.scale(x, c)
        if (c := self.scalar(x, y)) is not None:
            return self.scale(y, c)
        return self.apply("mul", x, y)

    def div(self, x: Node, y: Node) -> Node:
        """x / y; of integers towards zero."""
        c = self.scalar(y, x)
        if c == 1:
            return x
        if not x.type.dtype.is_floating:
            return self.apply("quotient", x, y)
        if c is not None and c != 0 and math.isfinite(c):
            if x.is_const:
                return self.apply("div", x, y)
            found = self.scale(x, 1 / c)
            if abs(math.frexp(c)[0]) != 0.5:  # by a power of two it is the same
                self.divided[found] = x, float(c)
            return found
        if (c := self.scalar(x, y)) is not None:
            return self.scale(self.apply("reciprocal", y), c)
        return self.apply("div", x, y)

    def exactly(self, x: Node, depth: int = 8) -> Node:
        """x, divided where the source divides: the product with an inverse is off by a step, where its reader jumps."""
        if x in self.divided:
            of, number = self.divided[x]
            return self.apply("divide_by", self.exactly(of, depth), number=number)
        if not depth or x.op.kind not in ("map", "move") or x.op.is_foreign:
            return x
        operands = tuple(self.exactly(each, depth - 1) for each in x.operands)
        return x if operands == x.operands else self.apply(x.op.name, *operands, **x.attrs)

    def scale(self, x: Node, factor: Number) -> Node:
        """x * factor."""
        if not math.isfinite(factor):
            return self.apply("mul", x, self._infinite(x, factor))
        return x if factor == 1 else self.apply("scale", x, factor=self._literal(x, factor))

    def shift(self, x: Node, offset: Number) -> Node:
        """x + offset."""
        if not math.isfinite(offset):
            return self.apply("add", x, self._infinite(x, offset))
        return x if offset == 0 else self.apply("shift", x, offset_by=self._literal(x, offset))

    def pow(self, x: Node, y: Node) -> Node:
        """x ** y."""
        exponent = self.scalar(y, x)
        if exponent is None:
            return self.apply("power", x, y)
        named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
        if exponent == 1:
            return x
        return self.apply(named[exponent], x) if exponent in named else self.apply("pow", x, exponent=float(exponent))

    def _infinite(self, x: Node, number: Number) -> Node:
        """A constant of the type of x: plans, which are JSON, say no such number as an attribute."""
        if not x.type.dtype.is_floating:
            raise Unsupported(f"{x.type.dtype.value} with {number}")
        return self.const(np.asarray(number, np.float32).astype(x.type.dtype.torch_name), x.type.dtype)

    @staticmethod
    def _literal(x: Node, number: Number) -> Number:
        if x.type.dtype.is_floating:
            return short_float(float(number), x.type.dtype)
        if number != int(number):
            raise Unsupported(f"{x.type.dtype.value} with the fraction {number}")
        return int(number) % 256 if x.type.dtype is DType.U8 else int(number)

    def cast(self, x: Node, dtype: DType) -> Node:
        """x converted to an element type: floats to integers towards zero, and to truth values where they are not."""
        if x.type.dtype is dtype:
            return x
        if dtype is DType.BOOL:
            zero = 0.0 if x.type.dtype.is_floating else 0
            return self.apply("compare_number", x, relation="!=", number=zero)
        to_integer = x.type.dtype.is_floating and not dtype.is_floating
        return self.apply("to_integer" if to_integer else "cast", x, dtype=dtype.value)

    @staticmethod
    def promote(*values: Node) -> DType:
        """The type in which torch computes with tensors of several: the widest of the highest kind.

        Tensors without dims decide only where no other is of that kind.
        """
        most = max(_kind(value.type.dtype) for value in values)
        pool = [value for value in values if _kind(value.type.dtype) == most]
        found = {value.type.dtype for value in [value for value in pool if value.type.rank] or pool}
        if found == {DType.F16, DType.BF16}:
            return DType.F32
        return max(found, key=lambda dtype: (dtype.itemsize, dtype.value))

    def alike(self, *values: Node) -> tuple[Node, ...]:
        """The values, converted to the type in which torch computes with them together."""
        dtype = self.promote(*values)
        return tuple(self.cast(value, dtype) for value in values)

    # Movement

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        """Row-major reshape; one -1 takes what is left."""
        sizes = [int(size) for size in shape]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes and known > 0:
            sizes[sizes.index(-1)] = x.type.num_elements // known
        if math.prod(sizes) != x.type.num_elements or min(sizes, default=1) < 0:
            raise ValueError(f"reshape of {list(x.type.shape)} to {list(shape)}")
        return x if tuple(sizes) == x.type.shape else self.apply("reshape", x, shape=tuple(sizes))

    def permute(self, x: Node, perm: Sequence[int]) -> Node:
        """The dims in another order."""
        order = tuple(int(dim) % x.type.rank for dim in perm)
        if sorted(order) != list(range(x.type.rank)):
            raise ValueError(f"permute of rank {x.type.rank} by {list(perm)}")
        return x if order == tuple(range(x.type.rank)) else self.apply("permute", x, perm=order)

    def transpose(self, x: Node, dim: int, other: int) -> Node:
        """Two dims swapped."""
        perm = list(range(x.type.rank))
        perm[dim], perm[other] = perm[other], perm[dim]
        return self.permute(x, perm)

    def expand(self, x: Node, shape: Sequence[int]) -> Node:
        """Broadcast to a shape; -1 keeps a dim, new dims lead."""
        lead = len(shape) - x.type.rank
        if lead < 0:
            raise ValueError(f"expand of {list(x.type.shape)} to {list(shape)}")
        x = self.reshape(x, (1,) * lead + x.type.shape)
        sizes = tuple(have if want == -1 else int(want) for want, have in zip(shape, x.type.shape, strict=True))
        return x if sizes == x.type.shape else self.apply("expand", x, shape=sizes)

    def broadcast(self, x: Node, shape: Sequence[int]) -> Node:
        """Broadcast both ways, as ONNX Expand does: dims of size one in `shape` keep x's."""
        return self.expand(x, np.broadcast_shapes(x.type.shape, tuple(int(size) for size in shape)))

    def slice(self, x: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
        """Elements start to stop of a dim, clamped as Python does; every ``step``-th is a selection by number."""
        dim = _dim(x, dim)
        chosen = range(x.type.shape[dim])[slice(start, stop, step)]
        if not chosen:
            shape = (*x.type.shape[:dim], 0, *x.type.shape[dim + 1 :])
            return self.const(np.zeros(shape, np.float32).astype(x.type.dtype.torch_name), x.type.dtype)
        if step != 1:
            return self.apply("index_select", x, self.const(np.array(chosen, np.int64)), dim=dim)
        start, stop = chosen.start, chosen.stop
        whole = (start, stop) == (0, x.type.shape[dim])
        return x if whole else self.apply("slice", x, dim=dim, start=start, stop=stop)

    def select(self, x: Node, dim: int, index: int) -> Node:
        """One element of a dim; the dim goes."""
        dim = _dim(x, dim)
        size = x.type.shape[dim]
        if not -size <= index < size:
            raise ValueError(f"index {index} of a dim of size {size}")
        index %= size
        return self.reshape(self.slice(x, dim, index, index + 1), x.type.shape[:dim] + x.type.shape[dim + 1 :])

    def split(self, x: Node, dim: int, sizes: Sequence[int]) -> tuple[Node, ...]:
        """Pieces of a dim; equal ones are chunks, which can be cut beside the dim."""
        dim = _dim(x, dim)
        if sum(sizes) != x.type.shape[dim]:
            raise ValueError(f"split of {x.type.shape[dim]} into {list(sizes)}")
        if len(sizes) == 1:
            return (x,)
        if len(set(sizes)) == 1:
            return tuple(self.apply("chunk", x, dim=dim, parts=len(sizes), index=i) for i in range(len(sizes)))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.slice(x, dim, a, a + n) for a, n in zip(starts, sizes, strict=True))

    def concat(self, xs: Sequence[Node], dim: int) -> Node:
        """The operands joined along a dim; those without elements add none."""
        full = [x for x in xs if x.type.num_elements]
        if full and all(x.type.rank == full[0].type.rank for x in xs):
            xs = full
        return xs[0] if len(xs) == 1 else self.apply("concat", *xs, dim=_dim(xs[0], dim))

    # Reductions

    def reduce(self, op: str, x: Node, dims: Sequence[int], keepdim: bool) -> Node:
        """`reduce_mean` or `reduce_sum` over dims; no dims means all."""
        over = tuple(sorted(_dim(x, dim) for dim in dims)) or tuple(range(x.type.rank))
        if not x.type.dtype.is_floating and op == "reduce_mean":
            raise Unsupported(f"mean of {x.type.dtype.value}")
        return self.apply(op, x, dims=over, keepdim=bool(keepdim))


def _kind(dtype: DType) -> int:
    """Truth values, integers, fractions."""
    return 2 if dtype.is_floating else int(dtype is not DType.BOOL)


def _dim(x: Node, dim: int) -> int:
    """A dim counted from the front.

    Raises:
        ValueError: if there is no such dim.
    """
    if not -x.type.rank <= dim < x.type.rank:
        raise ValueError(f"dim {dim} of a tensor of rank {x.type.rank}")
    return int(dim) % x.type.rank
