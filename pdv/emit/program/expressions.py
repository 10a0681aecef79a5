"""One expression per operator: how an expert would write it in PyTorch, the same on a shard as on the whole.

Most operators are their declared template (``Operator.emit``). Those whose text depends on sizes, cuts or defaults
declare none, and have a function in ``WRITERS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ir.graph import Node
from ir.operator import Split
from ir.ops.normalization import counts_variance, variance_below
from ir.types import DType
from ir.verify import node_splits
from pdv.emit.analysis.shapes import Shapes
from pdv.emit.program import view_code
from pdv.emit.program.code import Code, binary, call, keyword_argument, method, negative, tuple_of
from pdv.emit.program.size_code import SizeCode


@dataclass(frozen=True)
class Context:
    """What the text of an operator may depend on besides its operands.

    Attributes:
        sizes: how the program says sizes that are cut or open.
        bias: a bias to add in the same call, if the node takes one.
        regather: True for a gather whose result must not outlive its use.
    """

    sizes: SizeCode
    bias: Code | None = None
    regather: bool = False

    @property
    def shapes(self) -> Shapes:
        """Symbolic shapes of the program."""
        return self.sizes.shapes

    def splits(self, node: Node) -> tuple[Split, ...]:
        """The split that each axis takes at a node."""
        return node_splits(node, [self.shapes.shardings[x] for x in node.operands], self.shapes.mesh)

    def cutting(self, node: Node, *loops: str) -> tuple[str, ...]:
        """The axes that cut one of ``loops``, outer first."""
        pairs = zip(self.shapes.mesh.axes, self.splits(node), strict=True)
        return tuple(axis.name for axis, split in pairs if split.loop in loops)


Writer = Callable[[Node, Sequence[Code], Context], Code]


def write(node: Node, operands: Sequence[Code], context: Context) -> Code:
    """The expression of a node over its operands' expressions."""
    if node.op.kind == "parallel":
        return _parallel(node, operands[0], context)
    writer = _template if node.op.emit else WRITERS[node.op.name]
    return writer(node, operands, context)


def _template(node: Node, x: Sequence[Code], context: Context) -> Code:
    """The declared template: ``F.relu({0})`` or another call, ``{0}.pow({exponent})``, ``{0} + {1}`` or ``-{0}``."""
    template = node.op.emit
    named = {name: repr(value) for name, value in node.attrs.items()}
    if found := re.fullmatch(r"([\w.]+)\((.*)\)", template):
        arguments = [_argument(text, x, named) for text in found[2].split(", ")]
        return call(found[1], *arguments, *([context.bias] if context.bias else []))
    if found := re.fullmatch(r"\{0\}\.(\w+)\((.*)\)", template):
        return method(x[0], found[1], found[2].format(**named))
    if found := re.fullmatch(r"\{0\} (\S) \{1\}", template):
        return binary(x[0], found[1], x[1])
    assert template == "-{0}", f"{node.op.name} has no writer, and its template is no expression: {template!r}"
    return negative(x[0])


def _argument(text: str, x: Sequence[Code], named: Mapping[str, str]) -> Code | str:
    place = re.fullmatch(r"\{(\d)\}", text)
    return x[int(place[1])] if place else text.format(**named)


def _gelu(node: Node, x: Sequence[Code], context: Context) -> Code:
    approximate = node.attr("approximate")
    return call("F.gelu", x[0], *([] if approximate == "none" else [f'approximate="{approximate}"']))


def _shift(node: Node, x: Sequence[Code], context: Context) -> Code:
    by = _number(node, "offset_by")
    return binary(x[0], "-" if by < 0 else "+", Code(repr(abs(by))))


def _scale(node: Node, x: Sequence[Code], context: Context) -> Code:
    return binary(x[0], "*", Code(repr(_number(node, "factor"))))


def _number(node: Node, attr: str) -> float | int:
    """A literal of the kind of the node's elements: an integer times 2.0 is none in torch."""
    return float(node.attr(attr)) if node.type.dtype.is_floating else int(node.attr(attr))


def _unbiased(node: Node, x: Sequence[Code], context: Context) -> Code:
    n = Code(str(node.attr("points")))
    if counts_variance(node):
        image = variance_below(node.operands[0]).operands[0]
        factors = tuple(f for dim in (0, *range(2, image.type.rank)) for f in context.shapes.dims[image][dim])
        n = context.sizes.whole(factors) if any(factor.symbol for factor in factors) else n
    return binary(x[0], "*", binary(n, "/", binary(n, "-", Code("1"))))


def _cast(node: Node, x: Sequence[Code], context: Context) -> Code:
    return method(x[0], "to", f"torch.{DType(node.attr('dtype')).torch_name}")


def _conv2d(node: Node, x: Sequence[Code], context: Context) -> Code:
    options = _windows(node, ("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))
    groups = node.attr("groups")
    if groups != 1:
        options.append("groups=" + _divided(groups, context.cutting(node, "g")))
    return call("F.conv2d", *x, *([context.bias] if context.bias else []), *options)


def _pool(head: str) -> Writer:
    def pool(node: Node, x: Sequence[Code], context: Context) -> Code:
        options = _windows(node, ("padding", (0, 0)), ("dilation", (1, 1)))
        return call(head, x[0], _pair(node.attr("kernel")), f"stride={_pair(node.attr('stride'))}", *options)

    return pool


def _windows(node: Node, *defaults: tuple[str, tuple[int, int]]) -> list[str]:
    return [f"{name}={_pair(node.attr(name))}" for name, default in defaults if node.attr(name) != default]


def _pair(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else str(tuple(value))


def _divided(size: int, axes: Sequence[str]) -> str:
    return str(size) + "".join(f" // {axis}.size" for axis in axes)


def _attention(node: Node, x: Sequence[Code], context: Context) -> Code:
    """PyTorch's fused attention; with a cut causal mask, the helper that shifts it."""
    width = node.operands[0].type.shape[-1]
    scale = float(node.attr("scale"))
    default = math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-12)  # the text is held to the graph, in float64
    options = [] if default else [f"scale={scale!r}"]
    causal, mask = node.attr("causal"), x[3] if len(x) == 4 else None
    axes = context.cutting(node, "s")
    if causal and (axes or mask is not None):
        given = [keyword_argument("mask", mask)] if mask is not None else []
        return call("causal_attention", *x[:3], block_index(context, axes), *given, *options)
    given = [keyword_argument("attn_mask", mask)] if mask is not None else []
    flags = ["is_causal=True"] if causal else []
    return call("F.scaled_dot_product_attention", *x[:3], *given, *flags, *options)


def _embedding(node: Node, x: Sequence[Code], context: Context) -> Code:
    axes = context.cutting(node, "v")
    table, ids = x
    if axes:
        return call("embedding_block", ids, table, block_index(context, axes))
    return call("F.embedding", ids, table)


def block_index(context: Context, axes: Sequence[str]) -> str:
    """Which block of a dim cut by ``axes`` (outer first) this rank holds: ``dp.rank * tp.size + tp.rank``."""
    if not axes:
        return "0"
    text = f"{axes[0]}.rank"
    for axis in axes[1:]:
        text = f"{f'({text})' if '+' in text else text} * {axis}.size + {axis}.rank"
    return text


def _layer_norm(node: Node, x: Sequence[Code], context: Context) -> Code:
    width = tuple_of((str(node.type.shape[-1]),))
    affine = [*x[1:], *["None"] * (3 - len(x))] if len(x) < 3 else x[1:]
    return call("F.layer_norm", x[0], width, *affine, repr(node.attr("eps")))


def _batch_norm(node: Node, x: Sequence[Code], context: Context) -> Code:
    """One call of torch's; by statistics that gradients flow through, the helper that spells it out."""
    if any(statistic.needs_grad for statistic in node.operands[1:3]):
        return call("batch_norm", *x, repr(node.attr("eps")))
    return call(fused_batch_norm(node), *x, f"eps={node.attr('eps')!r}")


def fused_batch_norm(node: Node) -> str:
    """The call that norms [n, c, ...] in one kernel, forward and backward."""
    return "fused_batch_norm" if node.type.rank > 3 and node.needs_grad else "F.batch_norm"


def _rms_norm(node: Node, x: Sequence[Code], context: Context) -> Code:
    width = tuple_of((str(node.type.shape[-1]),))
    return call("F.rms_norm", x[0], width, x[1], repr(node.attr("eps")))


def _reduce(name: str) -> Writer:
    def reduce(node: Node, x: Sequence[Code], context: Context) -> Code:
        dims = node.attr("dims")
        where = str(dims[0]) if len(dims) == 1 else str(tuple(dims))
        return method(x[0], name, where, *(["keepdim=True"] if node.attr("keepdim") else []))

    return reduce


def _mean(node: Node, x: Sequence[Code], context: Context) -> Code:
    """A cut mean is a term of the whole one: the mean of this share over the number of shares."""
    code = _reduce("mean")(node, x, context)
    for axis in context.cutting(node, *node.loops.contracted):
        code = binary(code, "/", Code(f"{axis}.size"))
    return code


def _shares(node: Node, context: Context) -> str:
    axes = context.cutting(node, *node.loops.contracted)
    return " * ".join(f"{axis}.size" for axis in axes) or "1"


def _channel_mean(node: Node, x: Sequence[Code], context: Context) -> Code:
    return call("channel_mean", x[0], _shares(node, context))


def _channel_variance(node: Node, x: Sequence[Code], context: Context) -> Code:
    return call("channel_variance", *x, _shares(node, context))


def _concat(node: Node, x: Sequence[Code], context: Context) -> Code:
    return call("torch.cat", tuple_of(tuple(code.text for code in x)), f"dim={node.attr('dim')}")


def _chunk(node: Node, x: Sequence[Code], context: Context) -> Code:
    return Code(f"{view_code.chunks_code(node, x[0]).text}[{node.attr('index')}]")


def _parallel(node: Node, x: Code, context: Context) -> Code:
    """partition, combine, … by their declared names: ``combine(x, 1, tp)``."""
    dims = [str(node.attr(name)) for name in node.op.transition.dims]
    options = ["regather=True"] if context.regather else []
    return call(node.op.emit, x, *dims, node.attr("axis"), *options)


WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        "conv2d": _conv2d,
        "attention": _attention,
        "embedding": _embedding,
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "batch_norm": _batch_norm,
        "channel_mean": _channel_mean,
        "channel_variance": _channel_variance,
        "reduce_mean": _mean,
        "reduce_sum": _reduce("sum"),
        "max_pool2d": _pool("F.max_pool2d"),
        "avg_pool2d": _pool("F.avg_pool2d"),
        "scale": _scale,
        "unbiased": _unbiased,
        "shift": _shift,
        "gelu": _gelu,
        "cast": _cast,
        "reshape": lambda node, x, context: view_code.reshape_code(node, x[0], context.sizes),
        "permute": lambda node, x, context: view_code.permute_code(node, x[0]),
        "expand": lambda node, x, context: view_code.expand_code(node, x[0], context.sizes),
        "slice": lambda node, x, context: view_code.slice_code(node, x[0], context.sizes),
        "chunk": _chunk,
        "concat": _concat,
    }
)
