"""Parameters had back from stored tensors that torch's exporter made of them beforehand.

Its optimizer computes what depends on small parameters alone: rows of a table at known places, a token for each row of
the batch, weights of recurrent layers by gates as ONNX orders them. It writes down from which parameters
(``signature.origins_of``). What was only moved is moved in the graph again; what was calculated with is not touched,
and named as lost (``signature.absent``). Entry points: ``recover``,
``rows_of_table``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx_ir

from pdv.frontend.onnx.origins.made import Made, write
from pdv.frontend.onnx.origins.readers import Readers, Reading
from pdv.frontend.onnx.origins.signature import Signature, array_of, is_float, kind_of, origins_of
from pdv.frontend.onnx.origins.undone import CHANCE, DISTINCT, is_chance, undo, without_repeats
from pdv.passes.fold_constants import Array

_GATES: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""Of torch's gates, in ONNX's order: input, forget, cell, output become i, o, f, c; reset, update, new: z, r, h."""
_BIASES = 3  # the operand of a recurrent layer that has those of input and state, one after the other
_MOVES = {
    "alias", "arange", "clone", "contiguous", "cumsum", "detach", "embedding", "expand", "full", "full_like", "ones",
    "ones_like", "new_ones", "new_zeros", "permute", "reshape", "select", "slice", "squeeze", "sub", "add", "to",
    "_to_copy", "transpose", "unsqueeze", "view", "zeros", "zeros_like", "index", "repeat",
}  # fmt: skip
"""Operators of torch by which positions are made and a table is looked up: none of them scales what it is given."""
_TURNS = {"permute", "transpose", "t", "numpy_t", "numpy_T"}
_LOOKUPS = {"embedding", "index"}
_ONES = {"unsqueeze", "squeeze", "clone", "alias", "contiguous"}  # what leaves rows as they are


def recover(graph: onnx_ir.Graph, signature: Signature) -> dict[str, tuple[Made, list[str]]]:
    """Stored tensor -> what it was made of, and which of these parameters were not in the file; changes the graph."""
    found = _recover_by_roles(graph, signature)
    readers = Readers(graph, signature)
    for value in list(graph.initializers.values()):
        origins = (origins_of(value) or set()) & signature.targets
        if not value.uses() or not origins or value.name in signature.targets or not is_float(value):
            continue
        readings = readers.readings(value, *origins, chance=partial(_is_alone, value)) if len(origins) == 1 else []
        if readings is None:
            continue  # whose parameters it has is not told
        if any({each.parameter} != origins for each in readings):
            _undo_each(graph, signature, value, readings, found)
            continue
        made = _of_recurrent(value, signature, origins) or _of_known(graph, value, origins) or _of_lost(value, origins)
        made = None if made is None else _without_known(graph, made)
        if made is None:
            _undo_each(graph, signature, value, readings, found)
            continue
        if any(made[1][name].dtype != array_of(value).dtype for name in made[1]):
            continue
        how, own = made
        for name, array in own.items():
            register(graph, name, array, value)
        onnx_ir.convenience.replace_all_uses_with(value, write(graph, value.name or "", how))
        found[value.name or ""] = how, sorted(own)
    drop_unread(graph, found)
    return found


def drop_unread(graph: onnx_ir.Graph, names: Iterable[str]) -> None:
    """Those of stored tensors that nobody reads any more: each would be a copy of what it is made of."""
    for name in names:
        if not graph.initializers[name].uses():
            del graph.initializers[name]


def _undo_each(
    graph: onnx_ir.Graph,
    signature: Signature,
    value: onnx_ir.Value,
    readings: Sequence[Reading],
    found: dict[str, tuple[Made, list[str]]],
) -> None:
    """Read a stored tensor as what is computed of a parameter at each place, if that is told for all of them."""
    name, array = value.name or "", array_of(value)
    steps = {each for each in origins_of(value) or () if not each.startswith("val_")} - signature.targets
    if not readings or name.startswith("val_") or any("." in each for each in steps):
        return
    owners = {each.parameter for each in readings}
    shared = sum(bool(owners & (origins_of(other) or set())) for other in graph.initializers.values() if other.uses())
    made: list[tuple[Made, Array]] = []
    for each in readings:
        undone = undo(each.parameter, array, {name, *steps}, each.lines if shared == 1 else ())
        own = graph.initializers.get(each.parameter)
        if undone is None or (own is not None and not _is_alike(array_of(own), undone[1])):
            return
        made.append(undone)
    new = [each.parameter for each in readings if each.parameter not in graph.initializers]
    for each, (how, before) in zip(readings, made, strict=True):
        if each.parameter not in graph.initializers:
            register(graph, each.parameter, before, value)
        read = write(graph, f"{name} of {each.parameter}", how)
        for use in each.uses:
            use.node.replace_input_with(use.idx, read)
    found[name] = made[0][0], new


def _is_alike(one: Array, other: Array) -> bool:
    return one.size == other.size and np.allclose(one.reshape(-1), other.reshape(-1), rtol=1e-5, atol=1e-7)


def _recover_by_roles(graph: onnx_ir.Graph, signature: Signature) -> dict[str, tuple[Made, list[str]]]:
    """Scales and shifts of norms over groups, written with dims of size one behind them, of which equal ones became
    one; and tables of which rows are chosen by ids, as they are.
    """
    found: dict[str, tuple[Made, list[str]]] = {}
    for role in list(signature.roles(graph)):
        value = role.node.inputs[role.place] if role.place < len(role.node.inputs) else None
        origins = (origins_of(value) or set()) & signature.targets if value is not None else set()
        if value is None or value.const_value is None:
            continue  # computed by a node, if a constant
        if not origins or value.name in signature.targets or role.parameter in graph.initializers:
            continue
        array = array_of(value)
        alike = bool((array == array.reshape(-1)[0]).all())
        column = array.shape == (array.shape[0], *(1,) * (array.ndim - 1))
        table = role.node.op_type == "GatherND"
        if not (column or table) or not (alike or origins == {role.parameter}):
            continue
        name = value.name or ""
        register(graph, role.parameter, array if table else array.reshape(-1), value)
        how = Made((role.parameter,), None, array.shape, array.shape)
        role.node.replace_input_with(role.place, write(graph, f"{role.parameter} as {name}", how))
        made, own = found.get(name, (how, []))
        found[name] = made, [*own, role.parameter]
    return found


def register(graph: onnx_ir.Graph, name: str, array: Array, like: onnx_ir.Value) -> None:
    """Store a tensor beside another of its type."""
    tensor, shape = onnx_ir.Tensor(array, name=name), onnx_ir.Shape(array.shape)
    graph.register_initializer(onnx_ir.Value(name=name, shape=shape, type=like.type, const_value=tensor))


Found = tuple[Made, dict[str, Array]]
"""What a tensor is made of, and the values of those of them that the file has not."""


def _without_known(graph: onnx_ir.Graph, found: Found) -> Found | None:
    """Less those parameters that the file has itself; None where it has them with other values."""
    how, own = found
    stored = {name: array_of(graph.initializers[name]) for name in own if name in graph.initializers}
    if not all(np.array_equal(own[name], array) for name, array in stored.items()):
        return None
    return how, {name: array for name, array in own.items() if name not in stored}


def _of_recurrent(value: onnx_ir.Value, signature: Signature, origins: set[str]) -> Found | None:
    """The weights or biases of a recurrent layer, [directions, gates * hidden, ...], of those of torch's."""
    uses = list(value.uses())
    node, place = uses[0].node, uses[0].idx
    if len(uses) != 1 or node.op_type not in _GATES or place not in (1, 2, _BIASES):
        return None
    names = [name for name in signature.weights_of(node) if name in origins]
    array, gates = array_of(value), _GATES[node.op_type]
    parts = array.shape[0] * (2 if place == _BIASES else 1)
    if set(names) != origins or len(names) != parts or array.size % (parts * len(gates)):
        return None
    each = array.reshape(parts, len(gates), -1, *array.shape[2:])  # [part, gate, hidden, ...]
    hidden = each.shape[2]
    back = np.argsort(gates)
    own = {name: each[i][back].reshape(-1, *array.shape[2:]) for i, name in enumerate(names)}
    numbers = np.arange(parts * len(gates) * hidden).reshape(parts, len(gates), hidden)[:, list(gates)]
    return Made(tuple(names), tuple(map(int, numbers.reshape(-1))), array.shape, array.shape), own


def _of_known(graph: onnx_ir.Graph, value: onnx_ir.Value, origins: set[str]) -> Found | None:
    """A parameter that the file has, repeated, or rows of it.

    What else went into it had no part: no zeros are among the other parameters by which it could have been hidden.
    """
    array, stored = array_of(value), {name: graph.initializers.get(name) for name in sorted(origins)}
    if any(each is None or each.const_value is None or not is_chance(array_of(each)) for each in stored.values()):
        return None
    for name, each in stored.items():
        assert each is not None, name
        parameter = array_of(each)
        fits = all(a in (1, b) for a, b in zip(parameter.shape[::-1], array.shape[::-1], strict=False))
        if fits and parameter.ndim <= array.ndim and np.array_equal(np.broadcast_to(parameter, array.shape), array):
            return Made((name,), None, parameter.shape, array.shape), {}
    return None


def _of_lost(value: onnx_ir.Value, origins: set[str]) -> Found | None:
    """Rows of a table, a turned weight, or one tensor repeated, that the file has in no other form."""
    array, kind = array_of(value), kind_of(value.name or "")
    (*_, name), others = origins, (origins_of(value) or set()) - origins
    moved = all(kind_of(each) in _MOVES or each.startswith("val_") or "." in each for each in others)
    if len(origins) != 1 or array.ndim < 2 or not moved:
        return None
    shifted = {"add", "sub"} & set(map(kind_of, others))  # of positions, before a lookup; else of the values themselves
    looked = [each for each in (value.name or "", *others) if kind_of(each) in _LOOKUPS]
    if len(looked) == 1 and (kind in _LOOKUPS or (kind in _ONES and not shifted)):
        return rows_of_table(name, array, whole=kind == "embedding")
    if kind in _TURNS and array.ndim == 2 and not others:
        turned = np.ascontiguousarray(array.T)
        return Made((name,), None, turned.shape, array.shape, (1, 0)), {name: turned}
    if (
        kind in ("expand", "repeat")
        and is_chance(array)
        and not shifted
        and (once := without_repeats(array)) is not None
    ):
        return Made((name,), None, once.shape, array.shape), {name: np.ascontiguousarray(once)}
    return None


def rows_of_table(name: str, array: Array, *, whole: bool) -> Found | None:
    """A table of the distinct rows, as they come; None where equal rows need not be one.

    whole: whether they are known to be rows of a table; else no element may be there twice.
    """
    flat = array.reshape(-1, array.shape[-1])
    rows, places, counts = np.unique(flat, axis=0, return_inverse=True, return_counts=True)
    if any(len(np.unique(row)) < min(CHANCE, row.size) for row in rows[counts > 1]):
        return None
    if not whole and len(np.unique(rows)) < DISTINCT * rows.size:
        return None
    order = np.argsort([int(np.argmax(places == i)) for i in range(len(rows))])
    numbers = np.argsort(order)[places.reshape(-1)]
    return Made((name,), tuple(map(int, numbers)), array.shape, array.shape), {name: rows[order]}


def _is_alone(value: onnx_ir.Value) -> bool:
    """Whether no other tensor has the same values, and may have become one with it."""
    array = array_of(value)
    return is_chance(array) or (len(value.uses()) == 1 and len(np.unique(array)) >= CHANCE)
