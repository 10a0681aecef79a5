"""Random numbers of a file, and the masks that exporters make of them: dropout and dropped paths, taken apart.

torch writes ``floor(keep + rand)`` and ``rand < keep`` where a module draws by itself. Of numbers between two ends only
that is read: each element of the mask is one by chance, as it is behind dropout. Entry points: `READERS`, `of_drawn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from ir.graph import Node
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Chance, Handler, Uniform, Value
from pdv.frontend.onnx.schema import dtype_of

_DIGITS = 7  # of a share that a file says in float32
_BELOW = {"Less": True, "LessOrEqual": True, "Greater": False, "GreaterOrEqual": False}


def uniform(c: Call) -> Uniform:
    """Between two ends, of the shape of operand 0 or of an attribute; seeds are the program's own."""
    c.attrs.get("seed")
    like = c[0].type if len(c.inputs) else None
    shape = like.shape if like is not None else tuple(c.attrs["shape"])
    dtype = dtype_of(c.attrs["dtype"]) if c.attrs.get("dtype") or like is None else like.dtype
    low, high = float(c.attrs["low"]), float(c.attrs["high"])
    if not (isfinite(low) and isfinite(high) and low < high):
        raise ValueError(f"random numbers from {low} to {high}")
    return _read_once(c, Uniform(shape, dtype, low, high))


def bernoulli(c: Call) -> Node:
    """One by a chance that is the same for all elements, and known."""
    c.attrs.get("seed")
    dtype = dtype_of(c.attrs["dtype"]) if c.attrs.get("dtype") else c[0].type.dtype
    if not dtype.is_floating:
        raise Unsupported(f"drawn as {dtype.value}")
    share = _number(c.k, c[0])
    if share is None or not 0 <= share <= 1:
        raise Unsupported("by chances that are not known, or differ between elements")
    return _ones(c.k, _chance(c.k, Uniform(c[0].type.shape, dtype, 0.0, 1.0), share))


def of_drawn(c: Call, op: str) -> Node | Uniform | Chance | None:
    """What an operator makes of random numbers or of a mask; None where it is nothing of its own.

    Raises:
        Unsupported: if random numbers become anything but a mask.
    """
    values = [c.inputs[i] for i in range(len(c.inputs))]
    (at, drawn), *others = [(i, x) for i, x in enumerate(values) if isinstance(x, Uniform | Chance)]
    if isinstance(drawn, Chance):
        is_cast = op == "Cast" and dtype_of(c.attrs["to"]) is drawn.of.type.dtype
        return _ones(c.k, drawn) if is_cast else None
    if others:
        raise Unsupported("of several random numbers")
    if op == "Floor":
        return _floor(c.k, drawn)
    number = _number(c.k, values[1 - at]) if len(values) == 2 else None
    if number is not None and op in _BELOW:
        below = _BELOW[op] is (at == 0)
        share = (number - drawn.low) / (drawn.high - drawn.low)
        return _chance(c.k, drawn, share if below else 1 - share)
    if number is not None and (op == "Add" or (op == "Sub" and at == 0)):
        by = number if op == "Add" else -number
        return _read_once(c, Uniform(drawn.shape, drawn.dtype, drawn.low + by, drawn.high + by))
    raise Unsupported("of random numbers, of which only masks are read")


def _read_once(c: Call, drawn: Uniform) -> Uniform:
    """Numbers of which there is one mask: two masks of the same numbers depend on each other.

    Raises:
        Unsupported: if there may be more.
    """
    output = c.node.outputs[0]
    if len(output.uses()) > 1 or output.is_graph_output():
        raise Unsupported("random numbers that are read twice, or returned")
    return drawn


def _floor(k: Lowering, drawn: Uniform) -> Node:
    """Zeros and ones."""
    if not 0 <= drawn.low < 1 < drawn.high <= 2:
        raise Unsupported(f"of random numbers from {drawn.low} to {drawn.high}, which is no mask")
    return _ones(k, _chance(k, drawn, (drawn.high - 1) / (drawn.high - drawn.low)))


def _chance(k: Lowering, drawn: Uniform, share: float) -> Chance:
    share = round(share, _DIGITS)
    if not 0 < share < 1 or not drawn.dtype.is_floating:
        raise Unsupported(f"a mask that is one by the chance {share}")
    ones = masks.fill(k, 1, drawn.shape, drawn.dtype)
    k.drawn[k.name] = True
    return Chance(masks.dropout(k, ones, round(1 - share, _DIGITS)), share)


def _ones(k: Lowering, chance: Chance) -> Node:
    """As numbers: without dropout the share, by which whatever is masked is divided."""
    k.drawn[k.name] = chance.share
    return k.scale(chance.of, chance.share)


def _number(k: Lowering, value: Value | None) -> float | None:
    """The one number that a known tensor has throughout."""
    array = k.value(value) if isinstance(value, Node) else None
    if array is None or not array.size or not (array == array.reshape(-1)[0]).all():
        return None
    return round(float(array.reshape(-1)[0]), _DIGITS)


READERS: Mapping[str, Handler] = {"RandomUniformLike": uniform, "RandomUniform": uniform, "Bernoulli": bernoulli}
