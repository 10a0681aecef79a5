"""Random numbers of a file, and the masks that exporters make of them: dropout and dropped paths, taken apart.

torch writes ``floor(keep + rand)`` and ``rand < keep`` where a module draws by itself: each element of the mask is one
by chance, as it is behind dropout. All other random numbers are noise. Entry points: `READERS`, `of_drawn`, `of_noise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from ir.dims import Shape
from ir.graph import Node
from ir.types import DType
from pdv.frontend import masks
from pdv.frontend.lowering import Drawn, Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Chance, Handler, Operands, Uniform, Value, as_tensor
from pdv.frontend.onnx.schema import dtype_of

_DIGITS = 7  # of a share that a file says in float32
_BELOW = {"Less": True, "LessOrEqual": True, "Greater": False, "GreaterOrEqual": False}


def uniform(c: Call) -> Value:
    """Between two ends, of the shape of operand 0 or of an attribute; seeds are the program's own."""
    shape, dtype = _form(c)
    low, high = float(c.attrs["low"]), float(c.attrs["high"])
    if not (isfinite(low) and isfinite(high) and low < high):
        raise ValueError(f"random numbers from {low} to {high}")
    return _read_once(c, Uniform(shape, dtype, low, high, (c.k.name, low, high)))


def normal(c: Call) -> Node:
    """Around a mean, of the shape of operand 0 or of an attribute."""
    shape, dtype = _form(c)
    mean, scale = float(c.attrs["mean"]), float(c.attrs["scale"])
    if not (isfinite(mean) and isfinite(scale)):
        raise ValueError(f"random numbers around {mean}, {scale} wide")
    c.k.drawn[c.k.name] = Drawn("normal", len(shape), scale, mean)
    return c.k.shift(c.k.scale(masks.noise(c.k, "normal", shape, dtype), scale), mean)


def _form(c: Call) -> tuple[Shape, DType]:
    c.attrs.get("seed")
    like = c[0].type if len(c.inputs) else None
    shape = like.shape if like is not None else tuple(c.attrs["shape"])
    return shape, dtype_of(c.attrs["dtype"]) if c.attrs.get("dtype") or like is None else like.dtype


def bernoulli(c: Call) -> Node:
    """One by a chance: a mask, where that is the same for all elements, and known."""
    c.attrs.get("seed")
    dtype = dtype_of(c.attrs["dtype"]) if c.attrs.get("dtype") else c[0].type.dtype
    if not dtype.is_floating:
        raise Unsupported(f"drawn as {dtype.value}")
    share = _number(c.k, c[0])
    k, shape = c.k, c[0].type.shape
    if share is not None and 0 < share < 1:
        return _ones(k, _chance(k, Uniform(shape, dtype, 0.0, 1.0, (k.name, 0.0, 1.0)), share))
    k.drawn[k.name] = Drawn("bernoulli", len(shape))
    return k.cast(masks.compare(k, "<", masks.noise(k, "uniform", shape, c[0].type.dtype), c[0]), dtype)


def of_drawn(c: Call, op: str) -> Value | None:
    """What an operator makes of random numbers or of a mask; None where it is nothing of its own."""
    values = [c.inputs[i] for i in range(len(c.inputs))]
    (at, drawn), *others = [(i, x) for i, x in enumerate(values) if isinstance(x, Uniform | Chance)]
    if isinstance(drawn, Chance):
        is_cast = op == "Cast" and dtype_of(c.attrs["to"]) is drawn.of.type.dtype
        return _ones(c.k, drawn) if is_cast else None
    if others:
        return None
    if op == "Floor" and 0 <= drawn.low < 1 < drawn.high <= 2:
        share = (drawn.high - 1) / (drawn.high - drawn.low)
        return _ones(c.k, _chance(c.k, drawn, share)) if _is_share(share) else None
    number = _number(c.k, values[1 - at]) if len(values) == 2 else None
    if number is not None and op in _BELOW:
        share = (number - drawn.low) / (drawn.high - drawn.low)
        share = share if _BELOW[op] is (at == 0) else 1 - share
        return _chance(c.k, drawn, share) if _is_share(share) else None
    if number is not None and (op == "Add" or (op == "Sub" and at == 0)):
        by = number if op == "Add" else -number
        return _read_once(c, replace(drawn, low=drawn.low + by, high=drawn.high + by))
    return None


def of_noise(c: Call) -> Call:
    """The call with noise in place of random numbers, of which it makes no mask."""
    values = (c.inputs[i] for i in range(len(c.inputs)))
    return replace(c, inputs=Operands([as_tensor(c.k, x) if isinstance(x, Uniform) else x for x in values]))


def _read_once(c: Call, drawn: Uniform) -> Value:
    """Numbers of which there may be a mask; noise where they are read again, as two masks depend on each other then."""
    output = c.node.outputs[0]
    is_inside = any(use.node.graph is not c.node.graph for use in output.uses())  # of a loop, each time
    if len(output.uses()) > 1 or output.is_graph_output() or is_inside:
        found = as_tensor(c.k, drawn)
        assert isinstance(found, Node), drawn
        return found
    return drawn


def _is_share(share: float) -> bool:
    return 0 < round(share, _DIGITS) < 1


def _chance(k: Lowering, drawn: Uniform, share: float) -> Chance:
    share = round(share, _DIGITS)
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


READERS: Mapping[str, Handler] = {
    "RandomUniformLike": uniform,
    "RandomUniform": uniform,
    "RandomNormalLike": normal,
    "RandomNormal": normal,
    "Bernoulli": bernoulli,
}
