"""An operator is its loop nest; this file derives from it what everything else needs.

Decides: result type, legal cuts (one loop along one axis).
Does not decide: which cut to take (search), what it costs (cost model).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ir.dims import Dims, Loops, Shape, parse, solve
from ir.emission.code import Code
from ir.errors import ShapeError
from ir.memory.layout import HANDED_ON, NOTHING, Memory, Sizes
from ir.sharding import Invariant, Partial, Replicate, Shard, State
from ir.transition import STAYS, Transition
from ir.types import DType, TensorType

if TYPE_CHECKING:
    from ir.tape import Call, Tape

Attrs = Mapping[str, Hashable]
LoopRule = Callable[[Sequence[Shape], Attrs], tuple[str, dict[str, int]]]
"""Loop notation that depends on operand shapes and attributes, with the extents that only attributes give."""

Kind = Literal["contraction", "map", "row", "move", "index", "stencil", "leaf", "parallel"]

NO_SIZES = frozenset({
    "approximate", "axis", "causal", "dim", "dims", "dtype", "eps", "exponent", "factor", "k", "keepdim", "maximum",
    "minimum", "number", "offset_by", "p", "padding_idx", "perm", "points", "relation", "scale", "shape", "to_dim",
    "draw", "high", "kind", "low", "trains",
})  # fmt: skip
"""Attributes that name no size but the result's: places of dims, axes, numbers whose value is the same at all sizes."""


class Leaf(Enum):
    """Where a value comes from that nothing computes."""

    INPUT = "the caller"
    PARAM = "the weights"
    CONST = "the program"


@dataclass(frozen=True, slots=True)
class Split:
    """One legal way to run an operator along one axis: the states it needs and the state it gives.

    ``loop`` is the loop that is cut; ``None`` with Partial operands means a pending sum passes through, ``None``
    without them means every device does the same work.
    """

    loop: str | None
    operands: tuple[State, ...]
    result: State

    @property
    def label(self) -> str:
        """Short name used in rules, plans and traces."""
        if self.loop is not None:
            return self.loop
        partial = [str(i) for i, state in enumerate(self.operands) if isinstance(state, Partial)]
        return "sum" + "+".join(partial) if partial else "none"


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """The one declaration of an operator (docs/architecture.md).

    Args:
        name: what printed graphs, rules and plans call it.
        loops: loop notation, or a rule that writes it from shapes and attributes.
        kind: how it computes; ``contraction`` is a sum of products and needs no ``evaluate``.
        attrs: the attribute names it takes.
        defaults: of those that may be left out.
        evaluate: the reference semantics on a ``Tape`` (float or exact), for kinds that are not derived.
        fold: its result over arrays, given its attributes by name, in NumPy and in their element type; None where it is
            left in a program though all it reads is known.
        result_dtype: the result's type from operand types and attributes; default: the first operand's.
        differentiable: operand numbers that receive a gradient (``None``: all floating ones).
        commutative: True if its two operands may change places.
        leaf: of a leaf, where its value comes from.
        linear: sets of operands that may be Partial together.
        offset_loop: the loop whose shard needs to know where it starts (masks, vocabulary slices).
        transition: of a parallel operator, the states before and after along its axis.
        dims_attr: the attribute that names dims of the first operand.
        joins: True if its result is its operands, one behind the other along their ``dim``, each of a size of its own.
        draws: True if it draws at random: each of it, and each time it runs, something else.
        repeats: True if it writes an element to several places.
        ties: what its attributes ask of sizes, told to an ``ir.scaling.ties.Ties``: (node, atoms of its loops, ties).
        attrs_at: the attributes that change with sizes: (node, operands of other sizes, shape of the result there,
            whether sizes are open) -> their values there.
        flops_per_point: floating-point operations per point of the loop nest.
        flops: the count where it is not a multiple of the points.
        backward_factor: backward flops over forward flops, where it is not derived (``None``: derived).
        saved: what autograd keeps for backward: operand numbers and/or ``"out"``.
        memory: what its kernel holds beside operands and result, or a function of a ``Local`` that says so.
        strides: of a view, which launches nothing and moves nothing: the strides of its result, from attributes, the
            operand's layout and the result's shape; None from it where this operand has to be copied.
        has_scores: True if it compares all pairs of rows (attention), in scores that a fused kernel never writes.
        between: between which numbers its elements lie, from the node and what gives that of an operand
            (``ir.evaluation.bounds``); None where nothing is known, and for what moves elements.
        takes_positive: True if it is defined, or steady, for positive operands alone.
        is_foreign: True if another library's function says what it computes, and nothing else does.
        measured_as: what profiles of kernels call it, where not by its own name.
        eager: the torch expression that profiles measure, where it is not what one device runs in a program.
        emit: the torch expression: a template with ``{0}`` … operands and ``{attr}`` attributes, or a function of
            (node, its operands' expressions, an ``ir.emission.writing.Writing``) where it depends on more than that.
        says: of a function that frontends make of others, as search knows these: a node that has its value, and a
            gradient as it has, too -> the operands and attributes of that; None of other nodes.
        is_heavy: True if one of it is enough in a line of a program, though it is no product, window or lookup.
        is_row_norm: True if it scales rows to a unit size; torch's function is told the size of the rows.
        is_activation: True of a function of elements that models put behind products.
        bias_rank: of a product to which torch's function adds a bias, the dims of a bias that is added by itself:
            1 for [n], 3 for [c, 1, 1]; else 0.
        takes_vectors: True if torch's function takes the vectors of channels as such that it reads as [c, 1, 1].
        lays_out: True of what has its operand lie in rows, and changes nothing else.
        statistics: of a norm whose first operand is normed by the others: the operators whose results these are where
            torch's function takes them too.
        result_name: what programs call its result where nothing else names it.
        constant_name: what they call a constant that it reads; ``{0}`` is the module of its first operand.
    """

    # what it computes
    name: str
    loops: str | LoopRule
    kind: Kind
    attrs: tuple[str, ...] = ()
    defaults: Mapping[str, Hashable] = field(default_factory=dict)
    evaluate: Callable[[Tape, Sequence[Any], Call], Any] | None = None  # Any: arrays of the tape's field
    fold: Callable[..., Any] | None = None  # Any: arrays of any element type
    result_dtype: Callable[[Sequence[DType], Attrs], DType] | None = None
    differentiable: tuple[int, ...] | None = None
    commutative: bool = False
    leaf: Leaf | None = None

    # how it is sharded
    linear: tuple[frozenset[int], ...] = ()
    offset_loop: str | None = None
    transition: Transition = STAYS

    # what its attributes mean for sizes
    dims_attr: str = ""
    joins: bool = False
    draws: bool = False
    repeats: bool = False
    ties: Callable[..., None] | None = None
    attrs_at: Callable[..., dict[str, Hashable]] | None = None

    # what it costs, and holds in memory
    flops_per_point: float = 1.0
    flops: Callable[[Loops], float] | None = None
    backward_factor: float | None = None
    saved: tuple[int | str, ...] = ()
    memory: Memory | Callable[..., Memory] = NOTHING
    strides: Callable[..., Sizes | None] | None = None
    has_scores: bool = False
    between: Callable[..., tuple[float, float]] | None = None
    takes_positive: bool = False
    is_foreign: bool = False
    measured_as: str = ""
    eager: str = ""

    # how it is written
    emit: str | Callable[..., Code] = ""
    says: Callable[..., tuple[tuple[Any, ...], Attrs] | None] | None = None  # Any: nodes
    is_heavy: bool = False
    is_row_norm: bool = False
    is_activation: bool = False
    bias_rank: int = 0
    takes_vectors: bool = False
    lays_out: bool = False
    statistics: tuple[Operator, ...] = ()
    result_name: str = ""
    constant_name: str = ""

    def __post_init__(self) -> None:
        unsaid = set(self.attrs) - NO_SIZES
        assert self.kind == "leaf" or self.ties or not unsaid, f"whether {unsaid} of {self.name} name sizes is not said"

    def differentiates(self, place: int) -> bool:
        """Whether an operand (by number) receives a gradient, if it is of a floating type."""
        return self.differentiable is None or place in self.differentiable

    @property
    def only_written(self) -> bool:
        """True of one that programs have as they are written, and nothing else: no price of it is asked."""
        return self.lays_out or self.says is not None

    @property
    def is_dense(self) -> bool:
        """True of a product with a matrix of weights, to which torch's function adds a bias."""
        return self.kind == "contraction" and self.bias_rank > 0

    @property
    def weight_waits(self) -> bool:
        """True of such a product by rows, of whose backward a pipeline may leave the weight's half for later."""
        return self.kind == "contraction" and self.bias_rank == 1

    @property
    def adds(self) -> bool:
        """True of the sum of two values."""
        return self.commutative and self.linear == (frozenset({0, 1}),)

    @property
    def looks_up_rows(self) -> bool:
        """True of a lookup in a table that may be cut by rows: a shard answers zero for those that it lacks."""
        begins = (
            isinstance(self.loops, str) and self.offset_loop is not None and self.loops.startswith(self.offset_loop)
        )
        return begins and self.kind == "index"

    @property
    def takes_part(self) -> bool:
        """True if its result is one of equal parts of a dim."""
        return "parts" in self.attrs

    @property
    def takes_range(self) -> bool:
        """True if its result is what lies from one place of a dim to another."""
        return "start" in self.attrs

    @property
    def cuts(self) -> bool:
        """True if its result is a piece of a dim."""
        return self.takes_part or self.takes_range

    @property
    def reorders_dims(self) -> bool:
        """True if its result has the dims of its operand in another order."""
        return "perm" in self.attrs

    @property
    def kernel(self) -> bool:
        """False for views."""
        return self.strides is None

    @property
    def is_view_of_all(self) -> bool:
        """True of a view that leaves no element out."""
        return self.strides is not None and "dim" not in self.attrs

    @property
    def hands_on_gradient(self) -> bool:
        """True if the gradients of its operands are that of the result, or views of it."""
        return self.memory == HANDED_ON

    @property
    def maps_rows(self) -> bool:
        """True for a product whose leading dims are those of its first operand alone."""
        return self.kind == "contraction" and isinstance(self.loops, str) and self.loops.count("...") == 2

    @property
    def broadcasts(self) -> bool:
        """True for functions of each element of several operands, which are spread to a common shape."""
        return isinstance(self.loops, str) and "," in self.loops and set(self.loops) <= set("., ->")

    @property
    def names_shape(self) -> bool:
        """True if an attribute is the shape of the result."""
        return "shape" in self.attrs

    @property
    def names_dtype(self) -> bool:
        """True if an attribute is the element type of the result."""
        return "dtype" in self.attrs

    def solve(self, where: str, operands: Sequence[TensorType], attrs: Attrs) -> Loops:
        """The loop nest over these operands, extents global.

        Raises:
            ShapeError: if the operands do not fit the declaration.
        """
        shapes = [operand.shape for operand in operands]
        if callable(self.loops):
            text, given = self.loops(shapes, attrs)
        else:
            text, given = self.loops, {}
        return solve(where, parse(text), shapes, given)

    def result_type(self, loops: Loops, operands: Sequence[TensorType], attrs: Attrs) -> TensorType:
        """Type of the result: the loops give its shape.

        Raises:
            ShapeError: if the operands are of types that the operator does not take together.
        """
        return TensorType(loops.result_shape, self.dtype_of([operand.dtype for operand in operands], attrs))

    def dtype_of(self, operands: Sequence[DType], attrs: Attrs) -> DType:
        """Element type of the result; nothing is converted silently, so operands are of one type unless declared.

        Raises:
            ShapeError: if the operands are of types that the operator does not take together.
        """
        if self.result_dtype is not None:
            return self.result_dtype(operands, attrs)
        one_type(self.name, operands)
        return operands[0]

    def check_attrs(self, attrs: Attrs) -> dict[str, Hashable]:
        """``attrs`` with defaults filled in, in declared order; unknown or missing ones are our mistake."""
        unknown = set(attrs) - set(self.attrs)
        assert not unknown, f"{self.name} takes {self.attrs}, not {sorted(unknown)}"
        merged = {**self.defaults, **attrs}
        missing = [name for name in self.attrs if name not in merged]
        assert not missing, f"{self.name} needs {missing}"
        return {name: merged[name] for name in self.attrs}

    def splits(self, loops: Loops) -> tuple[Split, ...]:
        """Every legal split along one axis, whatever its size: "none" first, then loops, then pending sums."""
        ones = frozenset(name for name, extent in loops.extents.items() if extent == 1)
        return _splits(self, loops.operands, loops.result, loops.whole, ones)


def one_type(name: str, operands: Sequence[DType]) -> None:
    """Operands that are computed with together.

    Raises:
        ShapeError: if they are of several types.
    """
    if len(set(operands)) > 1:
        found = ", ".join(operand.value for operand in operands)
        raise ShapeError(f"{name} of operands of types {found}", "One type", "Cast the others")


@lru_cache(maxsize=1 << 14)
def _splits(
    op: Operator, operands: tuple[Dims, ...], result: Dims, whole: frozenset[str], ones: frozenset[str]
) -> tuple[Split, ...]:
    """The splits of a nest, of whose extents only those of one (``ones``) matter."""
    arity = len(operands)
    names = {name for dims in (result, *operands) for group in dims for name in group}
    loops = Loops(operands, result, {name: 1 if name in ones else 2 for name in names}, whole)
    invariant: tuple[State, ...] = (Invariant(),) * arity
    found = [Split(None, invariant, Invariant())]
    if op.kind not in ("leaf", "parallel"):
        cut = (_split_of_loop(loops, loop) for loop in loops.names if loop not in whole and loop not in ones)
        found += [split for split in cut if split is not None]
    for group in op.linear:
        states: tuple[State, ...] = tuple(Partial() if i in group else Replicate() for i in range(arity))
        found.append(Split(None, states, Partial()))
    return tuple(found)


def _split_of_loop(loops: Loops, loop: str) -> Split | None:
    """The split that cuts ``loop``, or None where it may not be cut: where it is not the outermost of its dim.

    Blocks would interleave there.
    """
    states: list[State] = []
    for dims in (*loops.operands, loops.result):
        position = loops.position(dims, loop)
        if position is None and loops.holds(dims, loop):
            return None
        states.append(Replicate() if position is None else Shard(position))
    result: State = states.pop()
    if all(isinstance(state, Replicate) for state in states):
        return None  # a loop that no operand has (expand): partition the result instead
    return Split(loop, tuple(states), Partial() if isinstance(result, Replicate) else result)


def local_loops(loops: Loops, degrees: Mapping[str, int]) -> Loops:
    """The loop nest of one device when loop ``l`` is cut ``degrees[l]`` ways."""
    extents = {name: extent // degrees.get(name, 1) for name, extent in loops.extents.items()}
    return Loops(loops.operands, loops.result, extents, loops.whole)
