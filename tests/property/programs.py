"""Small programs for property tests: examples of every operator, and the PCG that a split of one asks for.

Every cut extent is a multiple of 6, so that axes of 2 and 3 divide it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Operator, Split
from ir.ops import OPERATORS
from ir.ops.parallel import move
from ir.sharding import Invariant, Partial, Shard, State
from ir.types import DType, TensorType

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


@dataclass(frozen=True)
class Example:
    """Operand shapes and attributes of one application; ``dtypes`` for operands that are no floats."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    attrs: Mapping[str, Hashable] = field(default_factory=dict)
    dtypes: Mapping[int, DType] = field(default_factory=dict)
    operator: Operator | None = None  # a changed declaration

    def __str__(self) -> str:
        attrs = "".join(f" {key}={value}" for key, value in self.attrs.items())
        return f"{self.op} {' '.join('x'.join(map(str, shape)) for shape in self.shapes)}{attrs}"

    @property
    def declared(self) -> Operator:
        return self.operator or OPERATORS[self.op]

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, self.dtypes.get(i, F32)) for i, shape in enumerate(self.shapes))


_UNARY = (
    "relu",
    "silu",
    "tanh",
    "sigmoid",
    "exp",
    "log",
    "erf",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "abs",
    "log1p",
    "expm1",
    "tan",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "floor",
    "ceil",
    "round",
    "sign",
)

EXAMPLES: tuple[Example, ...] = (
    Example("linear", ((6, 2, 6), (12, 6))),
    Example("linear", ((6, 12), (6, 12))),
    Example("matmul", ((6, 2, 6), (6, 6, 12))),
    Example("matmul", ((6, 6, 2, 6), (1, 6, 6, 6))),
    Example("matmul", ((6, 6), (6, 6))),
    Example("attention", ((6, 6, 6, 2), (6, 6, 3, 2), (6, 6, 3, 4)), {"scale": 0.5}),
    Example("attention", ((6, 6, 6, 2), (6, 6, 6, 2), (6, 6, 6, 2)), {"scale": 0.3, "causal": True}),
    Example("attention", ((6, 6, 6, 2), (6, 6, 3, 2), (6, 6, 3, 2), (1, 1, 6, 3)), {"scale": 0.5}, {3: BOOL}),
    Example("attention", ((6, 6, 6, 2), (6, 6, 3, 2), (6, 6, 3, 2), (6, 1, 1, 3)), {"scale": 0.5}),
    *(Example(name, ((6, 1, 12),)) for name in _UNARY),
    Example(
        "opaque",
        ((6, 2, 6), (6,)),
        {
            "function": "torch.ops.aten.layer_norm.default",
            "arguments": "{0}, [6], {1}",
            "loops": "... d*, d* -> ... d*",
            "sizes": (6, 2, 6),
            "gives": "0",
        },
    ),
    Example(
        "opaque",
        ((6, 6),),
        {
            "function": "torch.ops.aten.cummax.default",
            "arguments": "{0}, 1",
            "output": 0,
            "sizes": (6, 6),
            "gives": "0",
        },
    ),
    Example("gelu", ((6, 6),), {"approximate": "none"}),
    Example("gelu", ((6, 6),), {"approximate": "tanh"}),
    Example("pow", ((6, 6),), {"exponent": 3.0}),
    *(Example(name, ((6, 2, 6), (6,))) for name in ("add", "sub", "mul", "div")),
    *(Example(name, ((6, 1), (6, 6))) for name in ("add", "mul")),
    Example("neg", ((6,),)),
    Example("scale", ((6, 6),), {"factor": 0.7}),
    Example("shift", ((6, 6),), {"offset_by": 0.7}),
    Example("unbiased", ((6, 6),), {"points": 7}),
    Example("cast", ((6, 6),), {"dtype": "f64"}),
    Example("where", ((6, 1), (6, 6), (6,)), {}, {0: BOOL}),
    *(Example("compare", ((6, 2, 6), (6,)), {"relation": r}, {0: I64, 1: I64}) for r in ("==", "<")),
    Example("compare", ((6, 6), (6, 1)), {"relation": ">="}),
    Example("compare_number", ((6, 6),), {"relation": "!=", "number": 1}, {0: I64}),
    *(Example(name, ((6, 2, 6), (6,))) for name in ("power", "fmod")),
    Example("divide_by", ((6, 6),), {"number": 41.0}),
    *(Example(name, ((6, 6), (6, 1)), {}, {0: I64, 1: I64}) for name in ("power", "quotient", "remainder", "fmod")),
    Example("to_integer", ((6, 6),), {"dtype": "i64"}),
    Example("compare_number", ((6, 6),), {"relation": "<", "number": 0.5}),
    *(Example(name, ((6, 2, 6), (6,)), {}, {0: BOOL, 1: BOOL}) for name in ("logical_and", "logical_or")),
    Example("logical_not", ((6, 6),), {}, {0: BOOL}),
    Example("clamp", ((6, 6),), {"minimum": 0.7, "maximum": float("inf")}),
    Example("hardtanh", ((6, 6),), {"minimum": -0.5, "maximum": 0.7}),
    Example("dropout", ((6, 1, 12),), {"p": 0.25}),
    *(Example("noise", ((6, 1, 12),), {"kind": kind, "draw": 1}) for kind in ("uniform", "normal")),
    Example("noise", ((6, 1, 12),), {"kind": "integers", "draw": 2, "low": 0, "high": 5}, {0: I64}),
    Example("softplus", ((6, 6),)),
    Example("softmax", ((6, 6, 4),)),
    Example("log_softmax", ((6, 4),)),
    Example("top_k", ((6, 6, 4),), {"k": 2}),
    Example("layer_norm", ((6, 6, 4), (4,), (4,)), {"eps": 1e-5}),
    Example("layer_norm", ((6, 4), (4,)), {"eps": 1e-5}),
    Example("rms_norm", ((6, 6, 4), (4,)), {"eps": 1e-5}),
    Example("channel_mean", ((6, 6, 6, 2),)),
    Example("channel_variance", ((6, 6, 2, 6), (6,))),
    Example("batch_norm", ((6, 6, 2, 6), (6,), (6,), (6,), (6,)), {"eps": 1e-5}),
    Example("batch_norm", ((6, 6, 6), (6,), (6,), (6,), (6,)), {"eps": 1e-5}),
    *(
        Example(name, ((6, 6, 6),), {"dims": dims, "keepdim": keep})
        for name in ("reduce_sum", "reduce_mean")
        for dims, keep in (((1,), False), ((0, 2), True))
    ),
    *(Example("cumsum", ((6, 4, 6),), {"dim": dim}) for dim in (1, 2)),
    *(Example("reduce_max", ((6, 4, 6),), {"dim": 1, "keepdim": keep}) for keep in (False, True)),
    Example("reshape", ((6, 12),), {"shape": (6, 6, 2)}),
    Example("reshape", ((6, 6, 2),), {"shape": (6, 12)}),
    Example("reshape", ((6, 6),), {"shape": (36,)}),
    Example("reshape", ((6, 6, 4),), {"shape": (6, 8, 3)}),
    Example("reshape", ((6, 1, 12),), {"shape": (1, 6, 2, 6)}),
    Example("permute", ((6, 2, 12),), {"perm": (2, 0, 1)}),
    Example("detach", ((6, 2, 12),)),
    Example("row_major", ((6, 2, 12),)),
    Example("prelu", ((6, 12, 2, 6), (1, 12, 1, 1))),
    Example("prelu", ((6, 12), (1, 1))),
    Example("surrounded", ((6, 5, 4),), {"ends": ((1, 2, 1), (2, 0, 3)), "number": -1.5}),
    Example("group_norm", ((6, 12, 2, 6), (12, 1, 1), (12, 1, 1)), {"groups": 6, "eps": 1e-5}),
    *(Example(name, ((6, 2, 12),), {"factor": 0.3}) for name in ("leaky_relu", "elu", "celu")),
    Example("expand", ((6, 1, 2),), {"shape": (6, 6, 2)}),
    Example("chunk", ((6, 18),), {"dim": 1, "parts": 3, "index": 1}),
    Example("pad", ((6, 5, 4),), {"dim": 1, "after": 3}),
    Example("slice", ((6, 18),), {"dim": 1, "start": 3, "stop": 10}),
    Example("concat", ((6, 2), (6, 2)), {"dim": 1}),
    Example("concat", ((6, 6), (1, 6), (2, 6)), {"dim": 0}),
    Example("embedding", ((6, 6), (6, 2)), {}, {1: I64}),
    Example("padded_embedding", ((6, 6), (6, 2)), {"padding_idx": 3}, {1: I64}),
    Example("index_select", ((6, 2, 6), (12,)), {"dim": 1}, {1: I64}),
    Example("index_select", ((2, 6), (6,)), {"dim": 0}, {1: I64}),
    Example("pick", ((6, 2, 6), (6, 2)), {}, {1: I64}),
    Example("gather", ((6, 4, 6), (6, 12, 6)), {"dim": 1}, {1: I64}),
    Example("bag_numbers", ((12,), (6,)), {}, {0: I64, 1: I64}),
    Example("segment_sum", ((4, 6), (4,), (6,)), {}, {1: I64, 2: I64}),
    Example("grouped_linear", ((12, 6), (3, 6, 4), (3,)), {}, {2: I64}),
    Example("routed_linear", ((12, 6), (3, 6, 4), (12,)), {}, {2: I64}),
    Example("conv2d", ((6, 6, 4, 5), (6, 6, 3, 2)), {"stride": (2, 1), "padding": (1, 0)}),
    Example("conv2d", ((2, 12, 3, 3), (12, 2, 2, 2)), {"groups": 6, "dilation": (2, 1)}),
    Example("max_pool2d", ((6, 6, 5, 4),), {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 0)}),
    Example("avg_pool2d", ((6, 6, 5, 4),), {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 0)}),
)


def leaf(k: Builder, name: str, tensor: TensorType) -> Node:
    """A weight if it takes a gradient, else an input."""
    return k.param(name, tensor) if tensor.dtype.is_floating else k.input(name, tensor)


def pending(k: Builder, name: str, tensor: TensorType, terms: int) -> Node:
    """A sum of ``terms`` tensors, before it is taken."""
    return leaf(k, f"{name}.terms", TensorType((terms, *tensor.shape), tensor.dtype))


def enter(k: Builder, name: str, tensor: TensorType, states: Sequence[State], mesh: Mesh) -> Node:
    """A leaf of Invariant brought into the given state on every axis."""
    terms = 1
    for state, axis in zip(states, mesh.axes, strict=True):
        terms *= axis.size if isinstance(state, Partial) else 1
    if terms == 1:
        x = leaf(k, name, tensor)
        return follow(k, x, [Invariant()] * len(states), states, mesh)
    x = pending(k, name, tensor, terms)
    for state, axis in zip(states, mesh.axes, strict=True):  # cut the terms, so that their sum is left Partial
        if isinstance(state, Partial):
            x = k.partition(x, dim=0, axis=axis.name)
    x = k.reduce_sum(x, dims=(0,), keepdim=False)
    before = [state if isinstance(state, Partial) else Invariant() for state in states]
    return follow(k, x, before, states, mesh)


def follow(k: Builder, x: Node, before: Sequence[State], after: Sequence[State], mesh: Mesh) -> Node:
    """Axis by axis from one state to another: what is left outer axis last, what is entered outer axis first."""
    steps = list(zip(before, after, mesh.axes, strict=True))
    leaving = any(isinstance(state, Shard) for state in before)
    for old, new, axis in reversed(steps) if leaving else steps:
        found = move(old, new)
        if found is not None:
            name, dims = found
            x = k.apply(OPERATORS[name], (x,), {**dims, "axis": axis.name})
        else:
            assert old == new, (old, new)
    return x


def serial(example: Example, partial: Mapping[int, int] | None = None) -> Graph:
    """The operator on one device; operand ``i`` is a sum of ``partial[i]`` terms."""
    k = Builder()
    operands = []
    for i, tensor in enumerate(example.types):
        if partial and i in partial:
            operands.append(k.reduce_sum(pending(k, f"x{i}", tensor, partial[i]), dims=(0,), keepdim=False))
        else:
            operands.append(leaf(k, f"x{i}", tensor))
    return k.graph({"y": k.apply(example.declared, tuple(operands), example.attrs)})


def parallel(example: Example, splits: Sequence[Split], mesh: Mesh) -> tuple[Graph, Graph]:
    """(serial graph, PCG): the operator split along every axis, between Invariant leaves and an Invariant result."""
    terms: dict[int, int] = {}
    for split, axis in zip(splits, mesh.axes, strict=True):
        for i, state in enumerate(split.operands):
            if isinstance(state, Partial):
                terms[i] = terms.get(i, 1) * axis.size
    k = Builder()
    operands = tuple(
        enter(k, f"x{i}", tensor, [split.operands[i] for split in splits], mesh)
        for i, tensor in enumerate(example.types)
    )
    y = k.apply(example.declared, operands, example.attrs)
    y = follow(k, y, [split.result for split in splits], [Invariant()] * len(splits), mesh)
    return serial(example, terms), k.graph({"y": y})
