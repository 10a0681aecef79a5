"""The kernels to time: operators of one layer of each model, whole and as every legal cut of them leaves them.

Shapes are not written but derived: `Operator.splits` names the loops that may be cut, and a cut into 2, 4 or 8 gives
the local operands. Entry point: `cases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ir.builder import Builder
from ir.graph import Node
from ir.operator import Attrs, Work, backward_work, forward_work, local_loops
from ir.types import DType, TensorType

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Language:
    """Sizes of a decoder: one layer, its embedding and its head."""

    name: str
    batch: int
    sequence: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    norm: str
    activation: str


@dataclass(frozen=True, slots=True)
class Convolution:
    """One layer of a convolutional network over [batch, channels, side, side]."""

    channels: int
    filters: int
    kernel: int
    stride: int
    side: int


# GPT-2 124M and Meta-Llama-3-8B (their config.json); what one of several devices holds of a usual batch.
LANGUAGE = (
    Language("gpt2", 8, 1024, 768, 12, 3072, 50257, "layer_norm", "gelu"),
    Language("llama-3-8b", 1, 2048, 4096, 32, 14336, 128256, "rms_norm", "silu"),
)
# ResNet-50 (He et al., CVPR 2016, table 1): the stem, and the middle of its first and last stage.
RESNET_BATCH = 32
RESNET = (
    Convolution(3, 64, 7, 2, 224),
    Convolution(64, 64, 3, 1, 56),
    Convolution(256, 64, 1, 1, 56),
    Convolution(512, 512, 3, 1, 7),
)
SMALL = (Language("small", 2, 32, 64, 4, 256, 128, "layer_norm", "gelu"),)
SMALL_CONVOLUTION = (Convolution(8, 16, 3, 1, 8),)


@dataclass(frozen=True)
class Case:
    """One kernel on one device: ``node`` has local shapes; it is ``degree``-th part of the model's, cut along ``loop``.

    ``wanted`` says for each operand whether backward computes its gradient.
    """

    model: str
    node: Node
    degree: int
    loop: str
    wanted: tuple[bool, ...]

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Types of the operands."""
        return tuple(operand.type for operand in self.node.operands)

    @property
    def dtype(self) -> DType:
        """The type it computes in."""
        return self.node.type.dtype

    @property
    def forward(self) -> Work:
        """What forward does."""
        return forward_work(self.node.op, self.node.loops, self.types, self.node.type)

    @property
    def backward(self) -> Work:
        """What backward does for the gradients that are wanted."""
        return backward_work(self.node.op, self.node.loops, self.types, self.node.type, self.wanted)


def cases(dtypes: Sequence[DType], *, small: bool = False) -> list[Case]:
    """Every kernel to time, each once; whole ones first, so that a budget that runs out costs the smallest pieces."""
    found: dict[tuple[object, ...], Case] = {}
    for dtype in dtypes:
        for model, node in _nodes(dtype, small=small):
            for case in _cut(model, node):
                found.setdefault(_work_of(case), case)
    return sorted(found.values(), key=lambda case: case.degree)


def _work_of(case: Case) -> tuple[object, ...]:
    """Equal for cases that run the same kernel on the same amount: rows cut by batch, or by sequence, say."""
    sizes = tuple(operand.num_elements for operand in case.types)
    return case.node.op.name, tuple(case.node.attrs.items()), case.dtype, case.forward, sizes


def _cut(model: str, node: Node) -> Iterator[Case]:
    wanted = _wanted(node)
    yield Case(model, node, 1, "none", wanted)
    for split in node.op.splits(node.loops):
        # A shard that needs its offset (masks, vocabulary) runs more than the library's kernel.
        if split.loop is None or split.loop == node.op.offset_loop:
            continue
        for degree in DEGREES[1:]:
            if node.loops.extents[split.loop] % degree == 0:
                yield Case(model, _local(node, split.loop, degree), degree, split.loop, wanted)


def _local(node: Node, loop: str, degree: int) -> Node:
    """The same operator over what one of ``degree`` devices holds."""
    loops = local_loops(node.loops, {loop: degree})
    shapes = [loops.shape_of(dims) for dims in loops.operands]
    types = [TensorType(s, operand.type.dtype) for s, operand in zip(shapes, node.operands, strict=True)]
    return _node(Builder(), node.op.name, types, node.attrs)


def _node(k: Builder, op: str, types: Sequence[TensorType], attrs: Attrs) -> Node:
    operands = [k.input(f"x{i}", tensor) for i, tensor in enumerate(types)]
    made: Node = getattr(k, op)(*operands, **attrs)
    return made


def _wanted(node: Node) -> tuple[bool, ...]:
    candidates = range(len(node.operands)) if node.op.differentiable is None else node.op.differentiable
    return tuple(i in candidates and operand.type.dtype.is_floating for i, operand in enumerate(node.operands))


def _nodes(dtype: DType, *, small: bool) -> Iterator[tuple[str, Node]]:
    for sizes in SMALL if small else LANGUAGE:
        for op, shapes, attrs in _layer(sizes):
            types = [TensorType(shape, dtype) for shape in shapes]
            if op == "embedding":
                types[1] = TensorType(shapes[1], DType.I64)
            yield sizes.name, _node(Builder(), op, types, attrs)
    batch = 4 if small else RESNET_BATCH
    for layer in SMALL_CONVOLUTION if small else RESNET:
        image = TensorType((batch, layer.channels, layer.side, layer.side), dtype)
        weight = TensorType((layer.filters, layer.channels, layer.kernel, layer.kernel), dtype)
        pair = {"stride": layer.stride, "padding": layer.kernel // 2, "dilation": 1}
        attrs = {name: (value, value) for name, value in pair.items()} | {"groups": 1}
        yield "resnet50", _node(Builder(), "conv2d", [image, weight], attrs)


def _layer(m: Language) -> Iterator[tuple[str, list[tuple[int, ...]], Attrs]]:
    """Operator, operand shapes and attributes of each kernel of a decoder."""
    b, s, d, h = m.batch, m.sequence, m.width, m.hidden
    rows = (b, s, d)
    head = (b, m.heads, s, d // m.heads)
    scale = (d // m.heads) ** -0.5
    yield "embedding", [(m.vocabulary, d), (b, s)], {}
    yield m.norm, [rows, *[(d,)] * (2 if m.norm == "layer_norm" else 1)], {"eps": 1e-5}
    yield "linear", [rows, (3 * d if m.norm == "layer_norm" else d, d)], {}
    yield "attention", [head, head, head], {"causal": True, "scale": scale}
    yield "matmul", [head, (b, m.heads, d // m.heads, s)], {}
    yield "softmax", [(b, m.heads, s, s)], {"dim": -1}
    yield "add", [rows, rows], {}
    yield "linear", [rows, (h, d)], {}
    yield m.activation, [(b, s, h)], {"approximate": "tanh"} if m.activation == "gelu" else {}
    yield "linear", [(b, s, h), (d, h)], {}
    yield "linear", [rows, (m.vocabulary, d)], {}
