"""Whether the parallel rules that follow from the operators' loops are true: every operator, every split, exactly.

Entry point: ``check_parallel_rules``. A rule takes its degree as a variable: it is proven for several, on one axis and
on two, and applied for any. The examples are small programs of one operator each, whose cut extents are multiples of
twelve, so that all of these degrees divide them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from ir.builder import Builder
from ir.errors import ShapeError, ShardingError, VerificationError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.proof.exact import verify_equal
from ir.sharding import Invariant, Partial, Shard
from ir.types import DType, TensorType
from ir.verify import divides
from pdv.rewrite.parallel_rules import ParallelRule, move_to, parallel_rules

DEGREES = (2, 3, 4)
MESHES = (*(Mesh.of(a=degree) for degree in DEGREES), Mesh.of(a=2, b=2))
TERMS = 12  # of a sum that waits
Report = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Example:
    """Operand shapes and attributes of one application; ``dtypes`` for operands that are no floats.

    ``declared`` is another declaration than the operator's own, to see that a wrong one is refused.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    attrs: Mapping[str, Hashable] = field(default_factory=dict)
    dtypes: Mapping[int, DType] = field(default_factory=dict)
    declared: Operator | None = None

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Of the operands."""
        return tuple(TensorType(shape, self.dtypes.get(at, DType.F32)) for at, shape in enumerate(self.shapes))


# attributes of functions of elements
_GIVEN: Mapping[str, Hashable] = {
    "factor": 0.75, "offset_by": 0.5, "dtype": "f64", "exponent": 3.0, "points": 7, "relation": "<", "number": 0.5,
    "minimum": 0.7, "maximum": math.inf, "p": 0.25, "kind": "normal", "draw": 1,
}  # fmt: skip


def _of_elements(op: Operator, *shapes: tuple[int, ...]) -> Example:
    """A function of elements over floats, or over truth values where it takes no floats."""
    missing = set(op.attrs) - set(op.defaults) - set(_GIVEN)
    assert not missing, f"which {missing} {op.name} takes is not said in _GIVEN"
    attrs = {name: _GIVEN[name] for name in op.attrs if name not in op.defaults}
    try:
        op.dtype_of([DType.F32] * len(shapes), attrs)
    except ShapeError:
        return Example(op.name, shapes, attrs, dict.fromkeys(range(len(shapes)), DType.BOOL))
    return Example(op.name, shapes, attrs)


BINARY = [op for op in OPERATORS.values() if op.loops == "..., ... -> ..."]
_WINDOW = {"kernel": (2, 2), "stride": (1, 2), "padding": (1, 0)}
_CALLED = {"function": "f", "arguments": "{0}, {1}", "gives": "0"}
EXAMPLES = (
    Example("linear", ((12, 1, 12), (12, 12))),
    Example("matmul", ((12, 2, 12), (12, 12, 12))),
    Example("matmul", ((2, 12, 2, 12), (1, 12, 12, 2))),
    Example("attention", ((12, 12, 12, 1), (12, 12, 3, 1), (12, 12, 3, 2)), {"scale": 0.5}),
    Example("attention", ((2, 12, 12, 1), (2, 12, 12, 1), (2, 12, 12, 1)), {"scale": 0.5, "causal": True}),
    Example(
        "attention", ((2, 12, 12, 1), (2, 12, 3, 1), (2, 12, 3, 1), (1, 1, 12, 3)), {"scale": 0.5}, {3: DType.BOOL}
    ),
    *(_of_elements(op, (12, 1, 12), (12,)) for op in BINARY),
    *(_of_elements(op, (12, 1), (12, 12)) for op in BINARY if op.commutative),
    Example("where", ((12, 1), (12, 12), (12,)), {}, {0: DType.BOOL}),
    Example("softmax", ((12, 12, 3),)),
    Example("log_softmax", ((12, 3),)),
    Example("layer_norm", ((12, 12, 3), (3,), (3,)), {"eps": 1e-5}),
    Example("rms_norm", ((12, 12, 3), (3,)), {"eps": 1e-5}),
    Example("group_norm", ((12, 24, 2, 1), (24, 1, 1), (24, 1, 1)), {"groups": 12, "eps": 1e-5}),
    Example("prelu", ((12, 12, 2), (1, 12, 1))),
    Example("channel_mean", ((12, 12, 12, 1),)),
    Example("channel_variance", ((12, 12, 1, 12), (12,))),
    Example("batch_norm", ((12, 12, 1, 12), (12,), (12,), (12,), (12,)), {"eps": 1e-5}),
    Example("reduce_sum", ((12, 12, 12),), {"dims": (1,), "keepdim": False}),
    Example("reduce_mean", ((12, 12, 12),), {"dims": (0, 2), "keepdim": True}),
    Example("reduce_max", ((12, 3, 12),), {"dim": 1, "keepdim": False}),
    Example("cumsum", ((12, 3, 12),), {"dim": 1}),
    Example("reshape", ((12, 24),), {"shape": (12, 12, 2)}),
    Example("reshape", ((12, 12, 2),), {"shape": (12, 24)}),
    Example("permute", ((12, 2, 12),), {"perm": (2, 0, 1)}),
    Example("expand", ((12, 1, 2),), {"shape": (12, 12, 2)}),
    Example("detach", ((12, 1, 12),)),
    Example("row_major", ((12, 1, 12),)),
    Example("chunk", ((12, 36),), {"dim": 1, "parts": 3, "index": 1}),
    Example("slice", ((12, 18),), {"dim": 1, "start": 3, "stop": 10}),
    Example("concat", ((12, 2), (12, 2)), {"dim": 1}),
    Example("concat", ((5, 12), (1, 12), (2, 12)), {"dim": 0}),
    Example("pad", ((12, 5, 12),), {"dim": 1, "after": 3}),
    Example("surrounded", ((12, 5, 12),), {"ends": ((1, 2, 1),), "number": 0.5}),
    Example("embedding", ((12, 12), (12, 2)), {}, {1: DType.I64}),
    Example("padded_embedding", ((12, 12), (12, 2)), {"padding_idx": 5}, {1: DType.I64}),
    Example("index_select", ((12, 2, 12), (24,)), {"dim": 1}, {1: DType.I64}),
    Example("pick", ((12, 2, 12), (12, 2)), {}, {1: DType.I64}),
    Example("gather", ((12, 2, 12), (12, 24, 12)), {"dim": 1}, {1: DType.I64}),
    Example("bag_numbers", ((24,), (12,)), {}, {0: DType.I64, 1: DType.I64}),
    Example("segment_sum", ((8, 12), (8,), (12,)), {}, {1: DType.I64, 2: DType.I64}),
    Example("grouped_linear", ((12, 24), (3, 24, 12), (3,)), {}, {2: DType.I64}),
    Example("routed_linear", ((12, 24), (3, 24, 12), (12,)), {}, {2: DType.I64}),
    Example("top_k", ((12, 12, 3),), {"k": 2}),
    Example("opaque", ((12, 12, 3), (3,)), {**_CALLED, "loops": "... d*, d* -> ... d*", "sizes": (12, 12, 3)}),
    Example("opaque", ((12, 3), (3,)), {**_CALLED, "sizes": (12, 12)}),
    Example("conv2d", ((12, 12, 3, 4), (12, 12, 2, 1)), {"stride": (2, 1), "padding": (1, 0)}),
    Example("conv2d", ((2, 24, 3, 3), (24, 2, 2, 2)), {"groups": 12, "dilation": (2, 1)}),
    Example("max_pool2d", ((12, 12, 3, 4),), _WINDOW),
    Example("avg_pool2d", ((12, 12, 3, 4),), _WINDOW),
)


def examples() -> tuple[Example, ...]:
    """The examples above, and one of each function of elements that operators declare."""
    shown = {OPERATORS[example.op] for example in EXAMPLES}
    maps = [op for op in OPERATORS.values() if op.kind == "map" and op not in shown]
    return EXAMPLES + tuple(_of_elements(op, (12, 1, 12)) for op in maps)


def check_parallel_rules(*, seed: int = 0, report: Report = lambda stage, share: None) -> int:
    """Prove every parallel rule of every example, for every degree that divides, on one axis and on two of two.

    Returns:
        How many different rules there were.

    Raises:
        VerificationError: naming the rule that is false.
    """
    proved: set[tuple[str, str]] = set()
    listed = examples()
    for number, example in enumerate(listed):
        report(f"split-{example.op}", number / len(listed))
        proved |= {(rule.op, rule.name) for rule in proved_rules(example, seed=seed)}
    return len(proved)


def proved_rules(example: Example, *, seed: int) -> tuple[ParallelRule, ...]:
    """The rules of one operator, those that let a pending sum pass among them.

    Raises:
        VerificationError: naming the rule that is false.
    """
    rules = parallel_rules(serial(example).outputs[0][1])
    for rule in rules:
        prove_rule(example, rule, seed=seed)
    return rules


def prove_rule(example: Example, rule: ParallelRule, *, seed: int) -> None:
    """For every degree that divides, on one axis and on two of two.

    Raises:
        VerificationError: naming the rule, if it is false.
    """
    for mesh in MESHES:
        pair = apply_rule(example, rule, mesh)
        if pair is None:
            continue
        try:
            verify_equal(*pair, mesh, scale=False, trials=1, seed=seed)
        except (VerificationError, ShardingError) as error:
            check = error.check if isinstance(error, VerificationError) else "states"
            raise VerificationError(f"{rule.name} is false on {mesh}: {error.what}", check=check) from error


def apply_rule(example: Example, rule: ParallelRule, mesh: Mesh) -> tuple[Graph, Graph] | None:
    """The operator on one device and under the rule on every axis of ``mesh``; None where that does not divide."""
    whole = serial(example, rule)
    node = whole.outputs[0][1]
    if not divides(node.loops, (rule.split,) * len(mesh.axes), mesh):
        return None
    k = Builder()
    operands = _enter(k, example, rule, mesh)
    result = k.copy(node, operands)
    for axis in reversed(mesh.axes):  # entered outer axis first, left inner axis first
        result = rule.leave(k, result, axis.name)
    return whole, k.graph({"y": result})


def _enter(k: Builder, example: Example, rule: ParallelRule, mesh: Mesh) -> tuple[Node, ...]:
    """Operands in the states that the rule needs along every axis."""
    states = rule.split.operands
    found = []
    for at, (tensor, state) in enumerate(zip(example.types, states, strict=True)):
        pending = isinstance(state, Partial)
        operand = _leaf(k, at, _terms(tensor) if pending else tensor)
        for axis in mesh.axes:
            operand = move_to(k, operand, Invariant(), Shard(0) if pending else state, axis.name)
        found.append(k.reduce_sum(operand, dims=(0,), keepdim=False) if pending else operand)
    return tuple(found)


def _terms(tensor: TensorType) -> TensorType:
    """What sums up to ``tensor``: cut along the terms, its sum waits."""
    return TensorType((TERMS, *tensor.shape), tensor.dtype)


def _leaf(k: Builder, at: int, tensor: TensorType) -> Node:
    """A weight if it takes a gradient, else an input."""
    return k.param(f"x{at}", tensor) if tensor.dtype.is_floating else k.input(f"x{at}", tensor)


def serial(example: Example, rule: ParallelRule | None = None) -> Graph:
    """The operator on one device; the operands that ``rule`` takes as pending sums are sums here too."""
    k = Builder()
    operands = []
    for at, tensor in enumerate(example.types):
        if rule is not None and isinstance(rule.split.operands[at], Partial):
            operands.append(k.reduce_sum(_leaf(k, at, _terms(tensor)), dims=(0,), keepdim=False))
        else:
            operands.append(_leaf(k, at, tensor))
    return k.graph({"y": k.apply(example.declared or OPERATORS[example.op], tuple(operands), example.attrs)})
