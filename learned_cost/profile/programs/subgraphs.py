"""Small graphs of operators as compilers fuse them: of real models, and random ones of the same families.

Each is an ir graph, so that what a plan contains and what is measured are described alike. Entry points: ``patterns``
and ``random_pattern`` build graphs; ``describe_graph`` says what one is to a cost model; ``compile_graph``
and ``eager`` run one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.describe import forward_kernels
from learned_cost.profile.programs.library import call_of, without_gradient
from learned_cost.profile.programs.pieces import noise

Map = Callable[[Builder, Node], Node]
ACTIVATIONS: tuple[Map, ...] = (
    lambda k, x: k.gelu(x, approximate="tanh"),
    lambda k, x: k.relu(x),
    lambda k, x: k.silu(x),
    lambda k, x: k.tanh(x),
)
MAPS: tuple[Map, ...] = (
    *ACTIVATIONS,
    lambda k, x: k.sigmoid(x),
    lambda k, x: k.exp(x),
    lambda k, x: k.neg(x),
    lambda k, x: k.abs(x),
    lambda k, x: k.scale(x, factor=0.125),
    lambda k, x: k.shift(x, offset_by=0.5),
    lambda k, x: k.sin(x),
    lambda k, x: k.cos(x),
    lambda k, x: k.erf(x),
)
Family = Callable[[Builder, random.Random, TensorType], Node]


def _chain(k: Builder, rng: random.Random, x: Node, length: int) -> Node:
    """Element-wise operators; two-operand ones take an earlier value, a new tensor or a vector."""
    earlier = [x]
    for i in range(length):
        if rng.random() < 0.55:
            x = rng.choice(MAPS)(k, x)
        else:
            shape = x.type.shape if rng.random() < 0.6 else x.type.shape[-1:]
            fresh = k.input(f"y{i}", TensorType(shape, x.type.dtype))
            other = rng.choice(earlier) if rng.random() < 0.4 else fresh
            x = rng.choice((k.add, k.sub, k.mul))(x, other)
        earlier.append(x)
    return x


def vector(k: Builder, x: Node, name: str) -> Node:
    """A parameter as long as the last dim of ``x``."""
    return k.param(name, TensorType(x.type.shape[-1:], x.type.dtype))


def _norm(k: Builder, rng: random.Random, x: Node) -> Node:
    if rng.random() < 0.5:
        return k.layer_norm(x, vector(k, x, "w"), vector(k, x, "b"), eps=1e-5)
    return k.rms_norm(x, vector(k, x, "w"), eps=1e-5)


def elementwise(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """A chain of maps."""
    return _chain(k, rng, k.input("x", t), rng.randint(2, 8))


def norm_chain(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """Maps, a norm, maps."""
    x = _chain(k, rng, k.input("x", t), rng.randint(0, 2))
    return _chain(k, rng, _norm(k, rng, x), rng.randint(1, 3))


def residual_norm(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """norm(x + f): what stands between the parts of every transformer."""
    x, f = k.input("x", t), k.input("f", t)
    if rng.random() < 0.5:
        f = k.add(f, vector(k, f, "bias"))
    return _norm(k, rng, k.add(x, f))


def softmax_chain(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """Scores scaled, masked and taken through a softmax."""
    x = k.scale(k.input("x", t), factor=0.125)
    if rng.random() < 0.5:
        x = k.add(x, k.input("mask", t if rng.random() < 0.5 else TensorType(t.shape[-1:], t.dtype)))
    return _chain(k, rng, k.softmax(x, dim=-1), rng.randint(0, 2))


def reduction(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """Maps, then a sum or mean over a dim."""
    x = _chain(k, rng, k.input("x", t), rng.randint(1, 4))
    reduce = rng.choice((k.reduce_sum, k.reduce_mean))
    made = reduce(x, dims=(rng.choice((0, len(t.shape) - 1)),), keepdim=rng.random() < 0.5)
    return rng.choice(MAPS)(k, made) if rng.random() < 0.4 else made


def linear_activation(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """A product, its bias and activation, perhaps a residual."""
    x = k.input("x", t)
    width = rng.choice((64, 128, 256, 384, 512, 768, 1024))
    y = k.linear(x, k.param("w", TensorType((width, t.shape[-1]), t.dtype)))
    y = k.add(y, vector(k, y, "bias")) if rng.random() < 0.7 else y
    y = rng.choice(ACTIVATIONS)(k, y)
    return k.add(y, k.input("r", y.type)) if rng.random() < 0.4 else y


def gated_graph(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """silu(x u) * (x v), as Llama's feed-forward layer, or on values that are there."""
    if rng.random() < 0.5:
        return k.mul(k.silu(k.input("u", t)), k.input("v", t))
    x = k.input("x", t)
    width = rng.choice((128, 256, 512, 1024))
    u, v = (k.linear(x, k.param(name, TensorType((width, t.shape[-1]), t.dtype))) for name in ("wu", "wv"))
    return k.mul(k.silu(u), v)


def rotary(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """x cos + rotate(x) sin over [rows, heads, e]."""
    rows, e = t.shape[0], max(2, t.shape[-1] // 8 // 2 * 2)
    shape = (rows, 8, e)
    x, turned = k.input("x", TensorType(shape, t.dtype)), k.input("r", TensorType(shape, t.dtype))
    angles = TensorType((rows, 1, e), t.dtype)
    return k.add(k.mul(x, k.input("cos", angles)), k.mul(turned, k.input("sin", angles)))


def mlp(k: Builder, rng: random.Random, t: TensorType) -> Node:
    """A norm, then a product with bias and gelu: the first half of a feed-forward layer."""
    x = _norm(k, rng, k.input("x", t))
    width = rng.choice((1, 2, 4)) * t.shape[-1]
    y = k.linear(x, k.param("up", TensorType((width, t.shape[-1]), t.dtype)))
    return k.gelu(k.add(y, vector(k, y, "bias")), approximate="tanh")


FAMILIES: tuple[Family, ...] = (
    elementwise,
    norm_chain,
    residual_norm,
    softmax_chain,
    reduction,
    linear_activation,
    gated_graph,
    rotary,
    mlp,
    elementwise,
)
PRODUCTS: frozenset[Family] = frozenset(
    {linear_activation, gated_graph, mlp}
)  # smaller ones, or they take seconds on a CPU


def random_pattern(seed: int, dtype: DType = DType.F32, *, most: int = 1 << 22) -> tuple[str, Graph]:
    """The graph of a seed, with its family's name: rows and width log-uniform, at most ``most`` elements."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    width = rng.choice((32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096))
    if family in PRODUCTS:
        width, most = min(width, 768), min(most, 1 << 19)
    rows = max(1, min(most // width, round(2 ** rng.uniform(0, 13))))
    rows = rows if rng.random() < 0.3 else max(1, 1 << (rows.bit_length() - 1))
    k = Builder()
    result = family(k, rng, TensorType((rows, width), dtype))
    return family.__name__, k.graph({"out": result})


def describe_graph(graph: Graph, *, fused: bool, stack: str) -> Subgraph:
    """The graph as kernels and edges; ``bytes`` counts what enters and leaves. Views hand edges on."""
    kernels: list[Kernel] = []
    place: dict[Node, int | None] = {}  # node -> its kernel, through views; None: it enters
    edges: list[tuple[int, int]] = []
    for node in graph.nodes:
        if node.is_leaf:
            place[node] = None
            continue
        found = forward_kernels(node.op, node.loops, [o.type for o in node.operands], node.type, node.attrs)
        if not found:
            place[node] = place[node.operands[0]]
            continue
        place[node] = len(kernels)
        producers = dict.fromkeys(place[operand] for operand in node.operands)
        edges += [(producer, len(kernels)) for producer in producers if producer is not None]
        kernel = found[0].as_dict() | {"stack": stack}
        kernels.append(Kernel.from_dict(kernel))
    entering = sum(node.type.num_bytes for node in graph.nodes if node.is_leaf)
    leaving = sum(node.type.num_bytes for _, node in graph.outputs)
    return Subgraph(tuple(kernels), tuple(edges), fused, float(entering + leaving) if fused else None)


def inputs_of(graph: Graph, device: torch.device) -> list[Tensor]:
    """Random values for the leaves, in the order of the call."""
    return [
        noise(node.type.shape, getattr(torch, node.type.dtype.torch_name), device)
        for node in graph.nodes
        if node.is_leaf
    ]


def compile_graph(graph: Graph, device: torch.device) -> Callable[[], Any]:  # Any: results are dropped
    """The graph fused by inductor, run on operands of its own.

    The compiler is called on the graph itself: a training step passes the guards of ``torch.compile`` once, not per
    subgraph. Its cache keeps what was compiled (TORCHINDUCTOR_CACHE_DIR), for a run that is resumed.
    """
    from torch._inductor.compile_fx import compile_fx

    operands = inputs_of(graph, device)
    with torch.no_grad():
        traced = make_fx(callable_of(graph))(*operands)
        run: Any = compile_fx(traced, operands)  # Any: typed as more than a callable
    return without_gradient(run, operands)


def eager(graph: Graph, device: torch.device) -> Callable[[], Any]:
    """The graph operator by operator, on operands of its own."""
    return without_gradient(callable_of(graph), inputs_of(graph, device))


def callable_of(graph: Graph) -> Callable[..., tuple[Tensor, ...]]:
    """The graph as torch calls, leaves as arguments."""
    leaves = [node for node in graph.nodes if node.is_leaf]
    calls = [(node, call_of(node)) for node in graph.nodes if not node.is_leaf]

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(leaves, operands, strict=True))
        for node, call in calls:
            values[node] = call(*(values[operand] for operand in node.operands))
        return tuple(values[node] for _, node in graph.outputs)

    return run
