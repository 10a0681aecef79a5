"""Whether ids that a Gather takes may be negative: ONNX counts those from the end, and a table's lookup knows none.

Entry points: ``are_from_front``, ``counted_from_the_end``.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import pairwise

import onnx_ir

from ir.graph import Graph, Node
from ir.types import DType
from pdv.frontend.lowering import Lowering
from pdv.frontend.onnx.origins.signature import call_of

_REFUSED = ("embedding", "index_select")  # of torch, which fails at negative ids
_SCOPED = re.compile(r"/(.+)/Gather(_\d+)?")  # a node's name by torch's older exporter: the modules that it is of
_PLACES = {  # functions of torch -> the result that is places
    "torch.ops.aten.argmax.default": -1, "torch.ops.aten.argmin.default": -1,
    "torch.ops.aten.sort.stable": 1, "torch.ops.aten.topk.default": 1,
}  # fmt: skip
_ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "scale": operator.mul, "shift": operator.add,
}  # fmt: skip

Ends = tuple[float, float]
"""The least and the most that elements can be."""


def are_from_front(k: Lowering, node: onnx_ir.Node, ids: Node) -> bool:
    """Whether the ids of a Gather from a table are known not to be negative.

    Either by what they are made of, or because torch wrote the node for an operator of its own that refuses them.
    """
    if call_of(node)[0] in _REFUSED or _is_of_module(node):
        return True
    return _least_and_most(k, ids, {})[0] >= 0


def _is_of_module(node: onnx_ir.Node) -> bool:
    """Whether torch's older exporter wrote a node for an ``nn.Embedding``: ``/a/emb/Gather`` reads ``a.emb.weight``.

    A tied table may be called by the name that it has in the other module.
    """
    scope, table = _SCOPED.fullmatch(node.name or ""), node.inputs[0]
    if scope is None or table is None or not table.is_initializer() or not (table.name or "").endswith(".weight"):
        return False
    modules = scope[1].split("/")  # of ``inner/inner.0`` the first is named in the second again
    path = [one for one, after in pairwise([*modules, ""]) if not after.startswith(f"{one}.")]
    return table.name == f"{'.'.join(path)}.weight" or len(table.uses()) > 1


def _is_wrapped(node: Node) -> bool:
    """Whether a node is ``where(x < 0, x + n, x)``, as ``masks.from_front`` writes it."""
    if node.op.name != "where":
        return False
    is_less, moved, x = node.operands
    if is_less.op.name != "compare_number" or (is_less.attr("relation"), is_less.attr("number")) != ("<", 0):
        return False
    return moved.op.name == "shift" and moved.operands == is_less.operands == (x,)


def _least_and_most(k: Lowering, node: Node, known: dict[Node, Ends]) -> Ends:
    """Between which ends the elements of a node are, as far as that is told by what they are made of."""
    if node not in known:
        array = k.value(node)
        if node.type.dtype is DType.BOOL:
            known[node] = 0.0, 1.0
        elif node.type.dtype.is_floating or _is_places(node):  # not what they are made of: that may be all there is
            known[node] = (-math.inf if node.type.dtype.is_floating else 0.0), math.inf
        elif array is not None and array.size:
            known[node] = float(array.min()), float(array.max())
        else:
            least, most = _made(node, [_least_and_most(k, x, known) for x in node.operands])
            has_sign = not node.type.dtype.value.startswith("u")
            known[node] = (least if has_sign else max(least, 0.0)), most
    return known[node]


def _made(node: Node, given: Sequence[Ends]) -> Ends:
    """The same, of what an operator makes of elements between these ends."""
    name = node.op.name
    if _is_wrapped(node) or name == "abs":
        return 0.0, math.inf
    if name == "where":
        choices = enumerate(zip(node.operands[1:], given[1:], strict=True))
        return _around([_where(node.operands[0], x, at, ends) for at, (x, ends) in choices])
    if node.op.kind == "move" or name in ("cast", "reduce_max"):
        return _around(given)
    if name in ("cumsum", "reduce_sum"):
        return (0.0 if given[0][0] >= 0 else -math.inf), math.inf
    if name == "remainder":  # of the divisor's sign
        return (0.0 if given[1][0] >= 0 else -math.inf), math.inf
    if name in _ARITHMETIC:
        numbers = [(float(node.attr(each)),) * 2 for each in ("factor", "offset_by") if each in node.attrs]
        ends = [_ARITHMETIC[name](*each) for each in itertools.product(*given, *numbers)]
        return _around([(0.0 if math.isnan(x) else x,) * 2 for x in ends])  # 0 * inf
    return -math.inf, math.inf


def _is_places(node: Node) -> bool:
    return node.op.name == "opaque" and _PLACES.get(node.attr("function")) == node.attr("output")


def _around(given: Sequence[Ends]) -> Ends:
    return min(least for least, _ in given), max(most for _, most in given)


def _where(is_chosen: Node, x: Node, at: int, ends: Ends) -> Ends:
    """Of the elements of x that a comparison with a number chooses, as a clamp of integers does; ``at``: or others."""
    if is_chosen.op.name != "compare_number" or is_chosen.operands != (x,):
        return ends
    is_more = is_chosen.attr("relation") in ((">", ">=") if at == 0 else ("<", "<="))
    return (max(ends[0], float(is_chosen.attr("number"))) if is_more else ends[0]), ends[1]


def counted_from_the_end(graph: Graph) -> set[str]:
    """The inputs of ids that a program reads in no other way than with negative ones counted from the end."""
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for x in node.operands:
            readers.setdefault(x, []).append(node)
    returned = {node for _, node in graph.outputs}
    return {x.attr("name") for x in graph.inputs if _is_only_wrapped(x, readers, returned)}


def _is_only_wrapped(x: Node, readers: Mapping[Node, list[Node]], returned: Set[Node]) -> bool:
    """Whether all that reads x is of lookups that wrap it, besides what moves it for these."""
    own = readers.get(x, [])
    wraps = {node for one in own for node in (one, *readers.get(one, [])) if _is_wrapped(node) and x in node.operands}
    parts = {part for wrap in wraps for part in (wrap, *wrap.operands[:2])}
    moves = [node for node in own if node not in parts]
    moved = all(node.op.kind == "move" and _is_only_wrapped(node, readers, returned) for node in moves)
    return bool(own) and x not in returned and moved
