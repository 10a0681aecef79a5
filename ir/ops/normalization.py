"""Functions of whole rows: softmax, layer norm and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ir.dims import Shape
from ir.emission.code import Code, call, tuple_of
from ir.emission.writing import Writing
from ir.evaluation.einsum import Data
from ir.graph import Node, is_column, unmoved
from ir.memory.layout import Memory
from ir.memory.local import INDEX_BYTES, Local
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties, where
from ir.tape import Call, Known, Tape

_TIE = 1e-9  # of a row's largest element: what differs by less is equal but for rounding


def _softmax_loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    assert attrs["dim"] == -1, "frontends move the softmax dim to the end"
    return "... d* -> ... d*", {}


def _softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return y, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True))


SOFTMAX = Known("softmax", _softmax, vanishes=True)

softmax = Operator(
    "softmax",
    _softmax_loops,
    "row",
    emit="F.softmax({0}, dim={dim})",
    between=lambda *_: (0, 1),
    attrs=("dim",),
    defaults={"dim": -1},
    flops_per_point=5,
    saved=("out",),
    evaluate=lambda t, x, c: t.row(SOFTMAX, x[0]),
    is_heavy=True,
    result_name="probabilities",
)


def _log_softmax(x: Data) -> tuple[Data, Callable[[Data], Data]]:
    z = x - x.max(axis=-1, keepdims=True)
    y = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return y, lambda g: g - np.exp(y) * g.sum(axis=-1, keepdims=True)


log_softmax = Operator(
    "log_softmax",
    _softmax_loops,
    "row",
    emit="F.log_softmax({0}, dim={dim})",
    attrs=("dim",),
    defaults={"dim": -1},
    flops_per_point=5,
    saved=("out",),
    evaluate=lambda t, x, c: t.row(Known("log_softmax", _log_softmax), x[0]),
    is_heavy=True,
    measured_as="softmax",
)


def _more_than_chosen(node: Node, loops: Loops, ties: Ties) -> None:
    """What the k largest are chosen from has more than k elements, if it has."""
    ties.atoms.at_least(loops["d"], min(node.attr("k") + 1, node.loops.extents["d"]))


def _top_k(k: int, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    """Not a number in rows whose choice rounding decides."""
    ordered = -np.sort(-x, axis=-1)
    least, next_ = ordered[..., k - 1, None], ordered[..., k : k + 1]
    kept = (x >= least).astype(x.dtype)
    tied = (least - next_ <= _TIE * np.abs(ordered).max(axis=-1, keepdims=True)).any(axis=-1, keepdims=True)
    kept[np.broadcast_to(tied, kept.shape)] = np.nan
    return x * kept, lambda g: g * kept


def _choose(local: Local) -> float:
    """Indices: [rows, k], once of topk and once more of scatter, in the same memory."""
    return float(local.rows * int(local.node.attr("k")) * INDEX_BYTES)


top_k = Operator(  # the row with all but its k largest elements set to zero
    "top_k",
    "... d* -> ... d*",
    "row",
    emit="top_k({0}, {k})",
    attrs=("k",),
    flops_per_point=5,
    saved=("out",),
    memory=Memory(keeps=_choose, forward=lambda local: local.result_bytes, saved=()),
    ties=_more_than_chosen,
    evaluate=lambda t, x, c: t.row(Known(f"top_k:{c.attrs['k']}", partial(_top_k, c.attrs["k"])), x[0]),
)


def _keep_rows(node: Node, loops: Loops, ties: Ties) -> None:
    """torch's function is told the size of the rows."""
    if ties.are_open:
        ties.keep(loops["d"], f"{where(node)} norms rows of this size")


def _standardize(eps: float, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    y = centred * inverse

    def pullback(g: Data) -> Data:
        along = y * (g * y).mean(axis=-1, keepdims=True)
        return np.asarray(inverse * (g - g.mean(axis=-1, keepdims=True) - along))

    return y, pullback


def _layer_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:  # Any: arrays of the tape's field
    x, *affine = operands
    return _affine(t, _normed(t, x, call), affine, len(call.loops.operands[0]))


def _normed(t: Tape, rows: Any, call: Call) -> Any:  # Any: arrays of the tape's field
    return t.row(Known(f"layer_norm:{call.attrs['eps']}", partial(_standardize, call.attrs["eps"])), rows)


def _unit_rms(eps: float, x: Data) -> tuple[Data, Callable[[Data], Data]]:
    inverse = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    y = x * inverse
    return y, lambda g: inverse * (g - y * (g * y).mean(axis=-1, keepdims=True))


def _rms_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, *affine = operands
    y = t.row(Known(f"rms_norm:{call.attrs['eps']}", partial(_unit_rms, call.attrs["eps"])), x)
    return _affine(t, y, affine, len(call.loops.operands[0]))


def _affine(t: Tape, y: Any, affine: Sequence[Any], rank: int) -> Any:
    """y * weight + bias, the vectors along the last of ``rank`` dims."""
    for apply, vector in zip((t.mul, t.add), affine, strict=False):
        y = apply(y, t.reshape(vector, (1,) * (rank - 1) + (vector.shape[-1],)))
    return y


def _write_layer_norm(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    width = tuple_of((str(node.type.shape[-1]),))
    affine = [*x[1:], *["None"] * (3 - len(x))] if len(x) < 3 else x[1:]
    return call("F.layer_norm", x[0], width, *affine, repr(node.attr("eps")))


def _write_rms_norm(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    width = tuple_of((str(node.type.shape[-1]),))
    return call("F.rms_norm", x[0], width, x[1], repr(node.attr("eps")))


layer_norm = Operator(
    "layer_norm",
    lambda shapes, attrs: (", ".join(["... d*", "d*", "d*"][: len(shapes)]) + " -> ... d*", {}),
    "row",
    attrs=("eps",),
    flops_per_point=8,
    saved=(0,),
    memory=Memory(keeps=lambda local: 2 * local.row_bytes),
    evaluate=_layer_norm,
    ties=_keep_rows,
    is_row_norm=True,
    is_heavy=True,
    emit=_write_layer_norm,
    measured_as="layernorm",
)
rms_norm = Operator(
    "rms_norm",
    "... d*, d* -> ... d*",
    "row",
    attrs=("eps",),
    flops_per_point=5,
    saved=(0,),
    memory=Memory(  # one number a row; on a CPU the rows before they meet the weight too
        keeps=lambda local: local.row_bytes + local.composed_bytes,
        forward=lambda local: local.composed_bytes,
        backward=lambda local: 2 * local.composed_bytes,
    ),
    evaluate=_rms_norm,
    ties=_keep_rows,
    is_row_norm=True,
    is_heavy=True,
    emit=_write_rms_norm,
    measured_as="rmsnorm",
)


def _group_norm(t: Tape, operands: Sequence[Any], call: Call) -> Any:
    x, *affine = operands
    rows = t.reshape(x, (x.shape[1], call.loops.extents["g"], -1))
    y = t.reshape(_normed(t, rows, call), x.shape[1:])
    for apply, vector in zip((t.mul, t.add), affine, strict=True):
        y = apply(y, t.reshape(vector, (1, *vector.shape[1:])))
    return y


def _write_group_norm(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    groups = "".join([str(node.attr("groups")), *(f" // {axis}.size" for axis in writing.cutting(node, "g"))])
    return call("F.group_norm", x[0], groups, *x[1:], repr(node.attr("eps")))


def _says_group_norm(node: Node) -> tuple[tuple[Node, ...], Attrs] | None:
    """Rows of groups, normed, times a vector of channels and one more added."""
    if not node.op.adds or node.type.rank != 4 or node.operands[0].op.name != "mul":
        return None
    times, bias = node.operands
    normed, weight = times.operands
    rows = normed.operands[0] if normed.op.name == "reshape" else normed
    if rows.op is not layer_norm or len(rows.operands) > 1 or rows.operands[0].op.name != "reshape":
        return None
    (grouped,) = rows.operands
    (x,) = grouped.operands
    batch, channels, *_ = x.type.shape
    fits = x.type == normed.type == node.type and grouped.type.rank == 3 and grouped.type.shape[0] == batch
    are_vectors = all(one.is_param and is_column(one) for one in map(unmoved, (weight, bias)))
    if not (fits and are_vectors and channels % grouped.type.shape[1] == 0):
        return None
    return (x, weight, bias), {"groups": grouped.type.shape[1], "eps": rows.attr("eps")}


def _keep_groups(node: Node, loops: Loops, ties: Ties) -> None:
    for loop in ("g", "c", "h", "w"):
        ties.keep(loops[loop], f"{where(node)} norms groups of this size")


group_norm = Operator(  # as programs are written; elsewhere it is its rows' norm
    "group_norm",
    lambda shapes, attrs: ("n (g c) h* w*, (g c) 1 1, (g c) 1 1 -> n (g c) h* w*", {"g": int(str(attrs["groups"]))}),
    "row",
    attrs=("groups", "eps"),
    linear=(frozenset({1, 2}),),
    evaluate=_group_norm,
    ties=_keep_groups,
    is_heavy=True,
    takes_vectors=True,
    says=_says_group_norm,
    emit=_write_group_norm,
    measured_as="layernorm",
)

OPS = (softmax, log_softmax, top_k, layer_norm, rms_norm, group_norm)
