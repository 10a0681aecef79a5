"""Arguments of calls from Python, held to what a function's annotations say. Entry point: ``check_arguments``.

Of annotations of plain things: numbers, texts, choices (``Literal``), places, classes, sequences and mappings of them.
What is annotated otherwise, such as functions, is not looked at here.
"""

from __future__ import annotations

import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt

from ir.errors import UsageError, did_you_mean

_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # Any: a type; what an argument is
    int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("True or False", lambda value: isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")),
    type(None): ("None", lambda value: value is None),
    os.PathLike: ("a path", lambda value: isinstance(value, os.PathLike)),
}
_LONGEST = 60  # of a value in a message


def check_arguments(call: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:  # Any: whatever users pass
    """Whether arguments are of the kinds that ``call``, which users know by ``name``, is annotated with.

    Raises:
        UsageError: of the first that is not.
    """
    hints = _hints(call)
    for argument, value in given.items():
        hint = hints.get(argument)
        if hint is None or _fits(value, hint):
            continue
        text = repr(value)
        shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
        mend = did_you_mean(value, _choices(hint)) if isinstance(value, str) else ""
        raise UsageError(f"{name}: {argument}={shown}", f"Allowed: {_words(hint)}", mend)


@cache
def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    """By argument, annotations of plain things."""
    found: dict[str, Any] = {}
    for name, written in call.__annotations__.items():
        one = types.SimpleNamespace(__annotations__={name: written})
        try:
            hint = typing.get_type_hints(one, call.__globals__, include_extras=True)[name]
        except NameError:  # of what is imported where types are checked, and not where they run
            continue
        if name != "return" and hint is not Any and _is_plain(hint):
            found[name] = hint
    return found


def _parts(hint: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Sequence, Mapping):
        return all(map(_is_plain, get_args(hint)))
    if origin is Annotated:
        return _is_plain(get_args(hint)[0])
    is_class = isinstance(hint, type) and not getattr(hint, "_is_protocol", False)
    return hint is Any or origin in (Literal, os.PathLike) or is_class


def _fits(value: Any, hint: Any) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is Annotated:
        return _fits(value, inside[0]) and all(_is_within(value, limit) for limit in inside[1:])
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inside)
    if origin is Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_fits(each, inside[0]) for each in value)
    if origin is Mapping:
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        return isinstance(value, Mapping) and all(_fits(key, inside[0]) and _fits(of, inside[1]) for key, of in pairs)
    plain = _PLAIN.get(origin or hint)
    return hint is Any or (isinstance(value, hint) if plain is None else plain[1](value))


def _is_within(value: Any, limit: object) -> bool:
    if isinstance(limit, Ge):
        return bool(value >= limit.ge)
    return bool(value > limit.gt) if isinstance(limit, Gt) else True


def _words(hint: Any) -> str:
    """What may be passed, in words."""
    return ", or ".join(_word(each) for each in _parts(hint))


def _word(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(repr, inside))
    if origin is Annotated:
        limits = [f"{limit.ge} or more" for limit in inside[1:] if isinstance(limit, Ge)]
        limits += [f"more than {limit.gt}" for limit in inside[1:] if isinstance(limit, Gt)]
        return " of ".join([_word(inside[0]), *limits])
    if origin is Sequence:
        return f"a list, of each: {_words(inside[0])}"
    if origin is Mapping:
        return f"a dict, from {_words(inside[0])} to {_words(inside[1])}"
    plain = _PLAIN.get(origin or hint)
    return ("anything" if hint is Any else f"a {hint.__name__}") if plain is None else plain[0]


def _choices(hint: Any) -> list[str]:
    return [each for part in _parts(hint) if get_origin(part) is Literal for each in get_args(part)]
