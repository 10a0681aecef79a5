"""Stored tensors known as what was computed of the module's parameters, by the values that these had.

Who gives the weights that the module had when it was exported gives a proof: a function of them that is what the file
has. Which functions are tried is told by the names of torch's operators that the exporter says; values tell the rest:
which rows, which number, which of several parameters. What is not told is left alone. Entry point: ``recover_proved``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir

from ir.dims import Shape
from pdv.frontend.onnx.origins.made import Made, joined, norm_axes, write
from pdv.frontend.onnx.origins.proofs.methods import turned_by_method
from pdv.frontend.onnx.origins.proofs.moves import find_moves
from pdv.frontend.onnx.origins.proofs.products import Told, of_linear, of_rows, of_sum
from pdv.frontend.onnx.origins.readers import Readers, Reading
from pdv.frontend.onnx.origins.signature import Signature, array_of, call_of, is_float, kind_of, origins_of
from pdv.frontend.onnx.origins.undone import CHANCE
from pdv.passes.fold_constants import Array

Stored = Mapping[str, Callable[[], Array]]
"""The module's tensors, by name."""

_ORDER = {"unsqueeze", "squeeze", "clone", "contiguous", "alias", "detach", "expand", "repeat", "_to_copy", "to"}
"""Operators of torch by which elements stay in order, all of them."""
_NUMBERS = ("val_", "scalar_tensor_default")
"""What the names of constants, and of what the exporter puts between operators, begin with."""
_SHAPES = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}
_TURNS = {"permute", "transpose", "t", "numpy_T"}
_LOOKUPS = {"slice", "select", "index", "embedding", "index_select", "narrow", "getitem"}
_SCALES = {"div", "mul", "sqrt", "rsqrt", "pow"}
"""Of which the first two are of what is scaled, all of them of the number."""
_DROPS = {"getitem", "dropout", "native_dropout"}
_NORM = {"linalg_vector_norm", "div", "mul"}
CLOSE = 1e-5  # of what is computed again to what the file has: some steps of float32


def recover_proved(
    graph: onnx_ir.Graph, signature: Signature, stored: Stored
) -> tuple[dict[str, tuple[Made, list[str]]], set[str]]:
    """Stored tensor -> what it was made of, and which of these parameters were not in the file; changes the graph.

    Also parameters of which the part that they have in such a tensor is not told.
    """
    untold = set[str]()
    found: dict[str, tuple[Made, list[str]]] = {}
    placed = {role.node.inputs[role.place] for role in signature.roles(graph) if role.place < len(role.node.inputs)}
    readers = Readers(graph, signature)
    for value in list(graph.initializers.values()):
        origins = sorted((origins_of(value) or set()) & signature.targets)
        computed = value.uses() and origins and value.name not in signature.targets and is_float(value)
        if not computed or value in placed or not set(origins) <= stored.keys():
            continue
        made = [(each, _made_of(graph, value, each, origins, stored)) for each in _readings(readers, value, stored)]
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
        untold |= {*origins}.difference(*(how.parameters for _, how in told)) if len(origins) > 1 else set()
    return found, untold


def lost_equals(graph: onnx_ir.Graph, signature: Signature, stored: Stored, made: Iterable[Made]) -> set[str]:
    """Parameters that nothing reads, equal to one of few values that was had back: nodes of both may be one."""
    there = {name for name, value in graph.initializers.items() if value.uses()}
    left = {name: stored[name]() for name in signature.targets - there if name in stored}
    read = [stored[name]() for name in dict.fromkeys(name for how in made for name in how.parameters) if name in stored]
    few = [each for each in read if len(np.unique(each)) < CHANCE]
    return {name for name, each in left.items() if any(_same(each, other) for other in few)}


def _readings(readers: Readers, value: onnx_ir.Value, stored: Stored) -> Sequence[Reading]:
    """The places that read a tensor, by the parameter that they read; none if that is not told."""
    origins = sorted((origins_of(value) or set()) & {*stored})
    own = [stored[name]() for name in origins]
    like = [other for other in readers.missing - {*origins} if other in stored and _same(own[0], stored[other]())]
    if value.is_graph_output():
        return []
    uses = tuple(value.uses())
    if len(origins) > 1 and any(readers.name_of(use, value) != value.name for use in uses):
        like += [x for x in readers.missing - {*origins} & {*stored} if any(_same(one, stored[x]()) for one in own[1:])]
        return [] if like else [Reading(origins[0], uses, frozenset())]
    if len(origins) > 1 or not like:
        return [Reading(origins[0], uses, frozenset())]
    return readers.readings(value, origins[0], chance=lambda: False) or []


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.array_equal(one, other)


def _made_of(
    graph: onnx_ir.Graph, value: onnx_ir.Value, reading: Reading, origins: Sequence[str], stored: Stored
) -> Made | None:
    """What a tensor was made of; None where several functions fit, or none of those that are tried."""
    array = array_of(value)
    steps = {value.name or "", *(origins_of(value) or ())} - {*origins}
    numbers = {each for each in steps if each.startswith(_NUMBERS) or ".lifted_tensor_" in f".{each}"}
    kinds = Counter(kind_of(each) for each in steps - numbers)
    names = (reading.parameter,) if len(origins) == 1 else tuple(origins)
    parts = {name: stored[name]() for name in names}
    if any(part.dtype != array.dtype for part in parts.values()):
        return None
    if kinds["linear"] == 1 and len(parts) > 1:
        return _multiplied(graph, parts, array, kinds, steps)
    if len(parts) == 2:
        made = _normed(names, [*parts.values()], array) if kinds.keys() == _NORM else None
        if kinds["add"] == 1 and kinds.keys() <= {"add"} | _ORDER | _LOOKUPS:
            return _added(parts, array, sum(kinds[each] for each in _LOOKUPS))
    elif len(parts) > 2:
        return None
    elif kinds == Counter(["add"]) and numbers:
        made = _shifted(names[0], parts[names[0]], array)
    else:
        made = _moved(names[0], parts[names[0]], array, kinds)
        if made is None and kinds["permute"] == 1 and kinds.keys() <= {"permute", *_SHAPES} | _ORDER:
            made = _turned(graph, reading, parts[names[0]], array)
    return made if made is not None and _fits(made, parts, array) else None


def _turned(graph: onnx_ir.Graph, reading: Reading, part: Array, array: Array) -> Made | None:
    """A parameter of one number throughout, turned by a method that the file has elsewhere."""
    name = reading.parameter
    turned = turned_by_method(graph, name.rpartition(".")[2], [use.node for use in reading.uses])
    if turned is None or sorted(turned) != list(range(array.ndim)) or part.size != array.size:
        return None
    between = tuple(array.shape[turned.index(dim)] for dim in range(array.ndim))
    return Made((name,), None, between, array.shape, turned)


def _multiplied(
    graph: onnx_ir.Graph, parts: Mapping[str, Array], array: Array, kinds: Counter[str], steps: set[str]
) -> Made | None:
    """The product of one parameter, or of rows of it, with another, and perhaps the bias of this one's module."""
    if not kinds.keys() <= {"linear"} | _ORDER | _SHAPES | _TURNS | _LOOKUPS | _SCALES or len(parts) > 3:
        return None
    numbers = tuple((kind, x) for kind in ("div", "mul") if kinds[kind] for x in _numbers_of(graph))
    if kinds.keys() & {"div", "mul"} and not numbers:
        return None
    drops = tuple(sorted(each for each in steps if kind_of(each) in _DROPS))
    told = Told(numbers, tuple(sorted(_shares(graph))), drops)
    matrices = [name for name, part in parts.items() if part.ndim == 2]
    biases = [name for name, part in parts.items() if part.ndim == 1]
    if len(matrices) != 2 or len(matrices) + len(biases) < len(parts):
        return None
    orders = [(a, b) for a, b in (matrices, matrices[::-1]) if all(_module_of(b) == _module_of(c) for c in biases)]
    fits = []
    for order in orders:
        names = (*order, *biases)
        made = of_linear(names, [parts[name] for name in names], array, told)
        fits += [] if made is None else [made]
    plain = all(made.dropped is None for made in fits)  # then the product of either with the other is the same
    return fits[0] if fits and (len(fits) == 1 or plain) else None


def _added(parts: Mapping[str, Array], array: Array, lookups: int) -> Made | None:
    """A token and rows of a table; where these are one number throughout, the token and a number.

    lookups: how many operators chose rows; the one that a table needs leaves the token as it is.
    """
    for token, table in (tuple(parts), tuple(parts)[::-1]):
        own, other = parts[token], parts[table]
        whole = lookups == 0 or (lookups == 1 and not _broadcasts(other, array.shape))
        if own.size >= other.size or not (whole or len(np.unique(own)) == own.size):
            continue
        made = of_sum((token, table), [own, other], array)
        if made is not None:
            return made
        number = other.reshape(-1)[0]
        if not (other == number).all() or not _broadcasts(own, array.shape):
            continue
        if np.array_equal(np.broadcast_to(own + number, array.shape), array):
            between = (1,) * (array.ndim - own.ndim) + own.shape
            return Made((token,), None, between, array.shape, steps=(("add", float(number)),) if number else ())
    return None


def _broadcasts(part: Array, shape: Shape) -> bool:
    sizes = (1,) * (len(shape) - part.ndim) + part.shape
    return len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def _numbers_of(graph: onnx_ir.Graph) -> list[float]:
    """Single numbers that the file has, and that no parameter went into."""
    found = {
        float(array_of(value).reshape(-1)[0])
        for value in graph.initializers.values()
        if value.uses() and is_float(value) and array_of(value).size == 1
    }
    return sorted(x for x in found if np.isfinite(x) and x not in (0.0, 1.0))


def _shares(graph: onnx_ir.Graph) -> set[float]:
    """Of dropout, as the file's nodes say them."""
    given = [call_of(node)[1] for node in graph if call_of(node)[0] in ("dropout", "native_dropout")]
    return {share for each in given if len(each) > 1 and 0 < (share := float(each[1])) < 1}


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


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
        return of_rows(name, part, array)
    return Made(
        (name,), moves.rows, moves.between, array.shape, moves.turned, width=moves.width, hidden=moves.hidden
    )  # fmt: skip


def register(graph: onnx_ir.Graph, name: str, array: Array, like: onnx_ir.Value) -> None:
    """A stored tensor under a name, of the type of ``like``; one that has the name goes."""
    tensor, shape = onnx_ir.Tensor(array, name=name), onnx_ir.Shape(array.shape)
    graph.initializers[name] = onnx_ir.Value(name=name, shape=shape, type=like.type, const_value=tensor)
