"""Pins on tensors: the state of a parameter at rest, or of a value between its operator and its readers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ir.errors import PinsError
from ir.graph import Node, View, param_view
from ir.operator import Split
from ir.sharding import Invariant, Partial, Replicate, Shard, State
from ir.views import readings, sources_of
from pdv.pins.constraint import Constraint
from pdv.pins.names import Names, key_of, match_some, matching, source_of


def tensor_constraints(where: str, pattern: str, states: Mapping[str, str], names: Names) -> list[Constraint]:
    """One constraint for each axis on which the tensors of a pattern are pinned.

    Raises:
        PinsError: if nothing is called so, or a dim does not exist.
    """
    sources, values = _tensors(where, pattern, names)
    found = []
    for axis, text in states.items():
        _check_dims(where, text, [*(p for s in sources for p in names.params[s]), *values.values()])
        label = f"{where} ({axis}: {text})"
        found.append(_constraint(label, axis, text, frozenset(sources), values, forbidden=False))
    return found


def forbidden_state(where: str, pattern: str, text: str, axis: str | None, names: Names) -> Constraint:
    """Tensors that must not be in a state, along one axis or any.

    Raises:
        PinsError: as ``tensor_constraints``.
    """
    sources, values = _tensors(where, pattern, names)
    _check_dims(where, text, [*(p for s in sources for p in names.params[s]), *values.values()])
    return _constraint(where, axis, text, frozenset(sources), values, forbidden=True)


def _tensors(where: str, pattern: str, names: Names) -> tuple[list[str], dict[str, Node]]:
    """Parameters and values of a pattern, at least one of either."""
    everything = {**dict.fromkeys(names.params), **dict.fromkeys(names.values)}
    match_some(where, "parameter or value", pattern, everything)
    values = {name: names.values[name] for name in matching(pattern, names.values)}
    return matching(pattern, names.params), values


def _check_dims(where: str, text: str, tensors: list[Node]) -> None:
    if not text.startswith("shard"):
        return
    dim = int(text.split()[1])
    for tensor in tensors:
        if not -tensor.type.rank <= dim < tensor.type.rank:
            raise PinsError(
                f"{where}: {tensor.name or source_of(tensor)} {tensor.type} has no dim {dim}",
                f"Allowed: 0 to {tensor.type.rank - 1}" if tensor.type.rank else "",
            )


def _constraint(
    label: str, axis: str | None, text: str, sources: frozenset[str], values: Mapping[str, Node], *, forbidden: bool
) -> Constraint:
    keys = frozenset(key_of(node) for node in values.values())

    def storage(param: Node, on: str, state: State) -> bool:
        if (axis is not None and on != axis) or sources.isdisjoint(sources_of(param)):
            return True
        return all(rests != forbidden for rests in _at_rest(param, text, state, sources))

    def split(node: Node, on: str, option: Split) -> bool:
        if axis is not None and on != axis:
            return True
        if key_of(node) in keys and not _make(node, text, option.result, forbidden=forbidden):
            return False
        return all(
            _read(operand, text, state) != forbidden
            for operand, state in zip(node.operands, option.operands, strict=True)
            if not operand.is_param and key_of(operand) in keys
        )

    def traces(node: Node) -> frozenset[Hashable]:
        return keys & {key_of(node)}

    return Constraint(label, split=split, storage=storage, keys=keys, sources=sources, traces=traces)


def _make(node: Node, text: str, state: State, *, forbidden: bool) -> bool:
    """What an operator may give: the state itself, or a pending sum, which is reduced straight into it."""
    if forbidden:
        return not _is(text, node.type.rank, state)
    return isinstance(state, Partial) or _is(text, node.type.rank, state)


def _read(value: Node, text: str, state: State) -> bool:
    """What a reader may want: the state itself; a whole value may be used as copies."""
    return _is(text, value.type.rank, state) or (text == "whole" and isinstance(state, Replicate))


def _is(text: str, rank: int, state: State) -> bool:
    match text:
        case "whole":
            return isinstance(state, Invariant)
        case "cut":
            return isinstance(state, Shard)
    return state == Shard(int(text.split()[1]) % rank)


def _at_rest(param: Node, text: str, state: State, sources: frozenset[str]) -> list[bool]:
    """Whether each of these stored tensors that a parameter reads is so.

    Dims are the stored tensor's; what is read through a view is cut where the view took them. A device has a part of
    each of several that are joined only where they are cut along another dim than the one that joins them.
    """
    if text == "whole":
        return [isinstance(state, Invariant)]
    view = param_view(param)
    joins = bool(view) and view[0][0] == "concat"
    behind = view[1:] if joins else ()
    apart = None if not joins else _dim_after(view[0][1], behind)
    if not isinstance(state, Shard) or state.dim == apart:
        return [False]
    if text == "cut":
        return [True]
    number = int(text.split()[1])
    read = [one for one in readings(param) if one.source in sources]
    return [state.dim == _dim_after(number % len(one.shape), (*one.view, *behind)) for one in read]


def _dim_after(dim: int | None, view: View) -> int | None:
    """Where a view takes a dim; None where a cut may not be one of it any more."""
    for step in view:
        if step[0] == "permute":
            dim = step[1].index(dim) if dim is not None else None
        elif step[0] == "reshape":
            dim = None
    return dim
