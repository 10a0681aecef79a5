"""Loops over experts alone that some row chose. Entry point: ``hits``.

``for i in (mask.sum(dim=(-1, -2)) > 0).nonzero()``, as transformers has it, goes over as many as values say. With any
other it does nothing, if all that it leaves behind is put where the mask holds: programs go over all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import partial

from pdv.frontend.torch.tracing.skips import PLACES, SAME, TRUTHS, Part, is_truth, names_of, written_in

_NUMBERS = frozenset("item squeeze flatten view reshape".split())  # noqa: SIM905
"""Methods that give a tensor of one number in another form."""


def hits(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Of loops over the numbers of those rows of a mask in which it holds anywhere, what they go over.

    Such a loop may as well go over the numbers of all rows: with the others it does nothing, if the mask is of zeros
    and ones. Where the text does not say that, with the mask's name.
    """
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for loop in [node for node in ast.walk(function) if isinstance(node, ast.For)]:
            if loop.orelse or not isinstance(loop.target, ast.Name):
                continue
            value = loop.iter
            if isinstance(value, ast.Name):
                (value,) = given if len(given := _values_of(function, value.id)) == 1 else (loop.iter,)
            mask, dims = _hit(value)
            given = _values_of(function, mask)
            if given and all(x.lineno < value.lineno for x in given):
                is_said = all(_is_hot(x, mask) for x in given) and _is_hot(given[0], "")
                first = partial(_chosen_by_number, loop=loop, mask=mask, dims=dims)
                if Part(function, loop, loop.body, first).does_nothing(of_loop=True):
                    yield loop.iter, "" if is_said else mask


def _values_of(function: ast.FunctionDef, name: str) -> list[ast.expr]:
    """What a name is given, in their order; none if it is given values by other means, or is written into."""
    stores = [
        x for x in ast.walk(function) if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Store)
    ]
    assigned = [pair for one in ast.walk(function) if isinstance(one, ast.Assign) for pair in _pairs(one)]
    values = [value for target, value in assigned if isinstance(target, ast.Name) and target.id == name]
    plain = len(stores) == len(values) and name not in written_in(function)
    return sorted(values, key=lambda value: value.lineno) if plain else []


def _pairs(one: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is given a value, and which: each of several."""
    for target in one.targets:
        if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
            yield from zip(target.elts, one.value.elts, strict=False)
        else:
            yield target, one.value


def _hit(value: ast.expr) -> tuple[str, int]:
    """The mask of whose rows it has the numbers, and how many dims these have; an empty name if it is none such."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[inner]) if attr in PLACES:
            return _held(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=[]) if attr in PLACES:
            return _held(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in SAME:
            return _hit(inner)
    return "", 0


def _held(value: ast.expr) -> tuple[str, int]:
    """The same of where a sum over all dims but the first is not zero."""
    match value:
        case ast.Compare(left=inner, ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0)]):
            return _held(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch")), args=[inner, ast.Constant(value=0)]) if (
            isinstance(value.func, ast.Attribute) and value.func.attr in ("greater", "gt")
        ):
            return _held(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=mask), attr=attr), args=args, keywords=keywords):
            given = [*args, *(x.value for x in keywords if x.arg == "dim")]
            dims = [ast.unparse(x) for x in given[0].elts] if given and isinstance(given[0], ast.Tuple) else []
            behind = [{str(sign * (dim + 1)) for dim in range(len(dims))} for sign in (1, -1)]
            if attr in TRUTHS and len(given) == 1 == len(args) + len(keywords) and dims and set(dims) in behind:
                return mask, len(dims)
    return "", 0


def _chosen_by_number(assigned: Sequence[ast.Assign], _: set[str], loop: ast.For, mask: str, dims: int) -> set[str]:
    """Names of the places where a row of the mask holds: that of the loop's number."""
    numbers = {loop.target.id} if isinstance(loop.target, ast.Name) else set[str]()
    found = set[str]()
    for one in sorted(assigned, key=lambda one: one.lineno):
        names = names_of(one.targets) or set()
        if _number_of(one.value) in numbers and one in loop.body:
            numbers |= names
            continue
        match one.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="where"), args=[inner]):
                if _row_of(inner, mask) in numbers and len(names) == dims:
                    found |= names
        numbers -= names
    return found


def _is_hot(value: ast.expr, name: str) -> bool:
    """Whether its text says that a mask is of zeros and ones, as that of ``name`` is: of no others sums are zero."""
    match value:
        case ast.Name(id=own) if own == name:
            return True
        case ast.Call(func=ast.Attribute(attr="one_hot") | ast.Name(id="one_hot")):
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in SAME | {"permute", "transpose", "long"}:
            return _is_hot(inner, name)
    return is_truth(value, {})


def _number_of(value: ast.expr) -> str:
    """The name of the number that it is, in whatever form."""
    match value:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=inner, slice=ast.Constant(value=0)):
            return _number_of(inner)
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _number_of(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _NUMBERS:
            return _number_of(inner)
    return ""


def _row_of(value: ast.expr, mask: str) -> str:
    """The name of the number of the row of the mask that it is."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in SAME:
            return _row_of(inner, mask)
        case ast.Subscript(value=ast.Name(id=name), slice=number) if name == mask:
            return _number_of(number)
    return ""
