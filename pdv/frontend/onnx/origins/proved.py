"""Stored tensors known as what was computed of the module's parameters, by the values that these had.

Who gives the weights that the module had when it was exported gives a proof: a function of them that is what the file
has. Which functions are tried is told by the names of torch's operators that the exporter says; values tell the rest:
which rows, which number, which of several parameters. What is not told is left alone. Entry point: ``recover_proved``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.made import Made, joined, norm_axes, write
from pdv.frontend.onnx.origins.moves import find_moves
from pdv.frontend.onnx.origins.readers import Readers, Reading, kind_of
from pdv.frontend.onnx.origins.signature import Signature, is_float, origins_of
from pdv.passes.fold_constants import Array

Stored = Mapping[str, Callable[[], Array]]
"""The module's tensors, by name."""

_ORDER = {"unsqueeze", "squeeze", "clone", "contiguous", "alias", "detach", "expand", "repeat", "_to_copy", "to"}
"""Operators of torch by which elements stay in order, all of them."""
_NUMBERS = ("val_", "scalar_tensor_default")
"""What the names of constants, and of what the exporter puts between operators, begin with."""
_NORM = {"linalg_vector_norm", "div", "mul"}
CLOSE = 1e-5  # of what is computed again to what the file has: some steps of float32


def recover_proved(graph: onnx_ir.Graph, signature: Signature, stored: Stored) -> dict[str, tuple[Made, list[str]]]:
    """Stored tensor -> what it was made of, and which of these parameters were not in the file; changes the graph."""
    found: dict[str, tuple[Made, list[str]]] = {}
    placed = {role.node.inputs[role.place] for role in signature.roles(graph) if role.place < len(role.node.inputs)}
    readers = Readers(graph, signature)
    for value in list(graph.initializers.values()):
        origins = sorted((origins_of(value) or set()) & signature.targets)
        computed = value.uses() and origins and value.name not in signature.targets and is_float(value)
        if not computed or value in placed or not set(origins) <= stored.keys():
            continue
        made = [(reading, _made_of(value, reading, origins, stored)) for reading in _readings(readers, value, stored)]
        told = [(reading, how) for reading, how in made if how is not None]
        if not told or len(told) < len(made):
            continue
        new: list[str] = []
        for reading, how in told:
            for name in how.parameters:
                if name not in graph.initializers:
                    new.append(name)
                    register(graph, name, stored[name](), value)
            read = write(graph, f"{value.name} of {reading.parameter}", how)
            read.shape, read.type = value.shape, value.type
            for use in reading.uses:
                use.node.replace_input_with(use.idx, read)
        found[value.name or ""] = told[0][1], new
    return found


def _readings(readers: Readers, value: onnx_ir.Value, stored: Stored) -> Sequence[Reading]:
    """The places that read a tensor, by the parameter that they read; none if that is not told."""
    origins = sorted((origins_of(value) or set()) & {*stored})
    own = [stored[name]() for name in origins]
    like = [other for other in readers.missing - {*origins} if other in stored and _same(own[0], stored[other]())]
    if value.is_graph_output():
        return []
    if len(origins) > 1 or not like:
        return [Reading(origins[0], tuple(value.uses()), frozenset())]
    return readers.readings(value, origins[0], chance=lambda: False) or []


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.array_equal(one, other)


def _made_of(value: onnx_ir.Value, reading: Reading, origins: Sequence[str], stored: Stored) -> Made | None:
    """What a tensor was made of; None where several functions fit, or none of those that are tried."""
    array = array_of(value)
    steps = {value.name or "", *(origins_of(value) or ())} - {*origins}
    numbers = {each for each in steps if each.startswith(_NUMBERS)}
    kinds = Counter(kind_of(each) for each in steps - numbers)
    names = (reading.parameter,) if len(origins) == 1 else tuple(origins)
    parts = [stored[name]() for name in names]
    if any(part.dtype != array.dtype for part in parts):
        return None
    if len(parts) == 2:
        made = _normed(names, parts, array) if kinds.keys() == _NORM else None
    elif kinds == Counter(["add"]) and numbers:
        made = _shifted(names[0], parts[0], array)
    else:
        made = _moved(names[0], parts[0], array, kinds)
    return made if made is not None and _fits(made, dict(zip(names, parts, strict=True)), array) else None


def _fits(made: Made, values: Mapping[str, Array], array: Array) -> bool:
    found = made.of(values)
    return found.shape == array.shape and np.allclose(found, array, rtol=CLOSE, atol=0)


def _normed(names: Sequence[str], parts: Sequence[Array], array: Array) -> Made | None:
    """A weight over its norm, times a scale for each of these: v * (g / |v|)."""
    for order in ((0, 1), (1, 0)):
        scale, weight = (parts[i] for i in order)
        axes = norm_axes(scale.shape)
        apart = scale.shape == tuple(1 if dim in axes else size for dim, size in enumerate(weight.shape))
        if apart and scale.size < weight.size and np.allclose(joined((scale, weight), "weight norm"), array, CLOSE, 0):
            return Made(tuple(names[i] for i in order), None, array.shape, array.shape, head="weight norm")
    return None


def _shifted(name: str, part: Array, array: Array) -> Made | None:
    """A parameter and a number that is added to each element."""
    if part.shape != array.shape:
        return None
    number = float(np.median(array.astype(np.float64) - part))
    rounded = round(number, 5)
    fits = rounded and np.array_equal(part + part.dtype.type(rounded), array)
    return Made((name,), None, array.shape, array.shape, steps=(("add", rounded),)) if fits else None


def _moved(name: str, part: Array, array: Array, kinds: Counter[str]) -> Made | None:
    """Elements of a parameter, each where its value says; of one number throughout, where nothing moved them."""
    if kinds.keys() <= _ORDER and 0 < part.ndim <= array.ndim and part.size:
        between = (1,) * (array.ndim - part.ndim) + part.shape
        fits = all(a in (1, b) for a, b in zip(between, array.shape, strict=True))
        if fits and np.array_equal(np.broadcast_to(part.reshape(between), array.shape), array):
            return Made((name,), None, between, array.shape)
    moves = find_moves(part, array)
    if moves is None:
        return None
    return Made(
        (name,), moves.rows, moves.between, array.shape, moves.turned, width=moves.width, hidden=moves.hidden
    )  # fmt: skip


def register(graph: onnx_ir.Graph, name: str, array: Array, like: onnx_ir.Value) -> None:
    """A stored tensor under a name, of the type of ``like``; one that has the name goes."""
    tensor, shape = onnx_ir.Tensor(array, name=name), onnx_ir.Shape(array.shape)
    graph.initializers[name] = onnx_ir.Value(name=name, shape=shape, type=like.type, const_value=tensor)


def array_of(value: onnx_ir.Value) -> Array:
    """A stored tensor's values."""
    assert value.const_value is not None, value
    array: Array = value.const_value.numpy()
    return array
