"""What calls of a module leave behind, taken away: in caches, in buffers. Entry points: ``tracing``, ``buffers_kept``.

A function that keeps what it made (``functools.cache``, a dict of its file or class) keeps tensors without values while
it is traced, and would give them to the next call: to another trace, or to the caller's own module.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_Cached = type(functools.cache(lambda: None))
_LIBRARIES = frozenset({"torch", "numpy", "sympy", "pdv", "ir", "learned_cost", *sys.stdlib_module_names})
_PLAIN = (dict, OrderedDict, defaultdict)  # others' may do whatever where they are looked at
_MAY_HOLD = {*_PLAIN, list, tuple}
_LINK = "_lru_list_elem"  # what bounded caches of Python are chained of
_DEPTH = 3  # a table of tuples of tensors; a bounded cache: its table, links, and what is linked


@contextmanager
def tracing(module: nn.Module) -> Iterator[None]:
    """Behind this, no cache of the code that was called holds tensors without values."""
    try:
        yield
    finally:
        _forget(module)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Behind this, buffers are what they were before."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _Kept:
    """What code of this process keeps by a name: dicts, and functions that keep what they made.

    A process has thousands of files and millions of objects, and modules are traced often: all objects are asked who
    they are once, and files that come behind that looked through as they come.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, list[str]]] = {}  # how many names each had, and which may be kept by
        self._caches: WeakSet[Any] = WeakSet()  # Any: caches have no public type

    def of(self, module: nn.Module) -> Iterator[Any]:  # Any: whatever is kept
        """What all files but a library's keep, for whatever they call; and the module's parts and their classes."""
        files = {
            name: getattr(file, "__dict__", {}) for name, file in list(sys.modules.items()) if not _is_of_library(name)
        }
        first = not self._files and not gc.get_freeze_count()  # what is frozen is not found by whom it refers to
        if first:
            self._caches.update(one for one in gc.get_referrers(_Cached) if type(one) is _Cached)
        for name, names in files.items():
            count, which = self._files.get(name, (0, []))
            if count != len(names):
                self._caches.update(() if first else _caches_in(name, names))
                which = [one for one, value in list(names.items()) if value is None or _is_kept(one, value)]
                self._files[name] = len(names), which
            yield from (value for one in which if _is_kept(one, value := names.get(one)))
        yield from (one for one in list(self._caches) if not _is_of_library(one.__module__))
        parts = list(module.modules())
        classes = {kind for part in parts for kind in type(part).__mro__ if not _is_of_library(kind.__module__)}
        for holder in (*parts, *classes):
            for name, value in list(vars(holder).items()):
                yield from (one for one in (value, *_enclosed(value)) if _is_kept(name, one))


_KEPT = _Kept()


def _forget(module: nn.Module) -> None:
    for kept in list(_KEPT.of(module)):
        if type(kept) is _Cached:
            if kept.cache_info().currsize and _has_fakes(gc.get_referents(kept)):
                kept.cache_clear()
        elif _has_fakes(_items(kept)):
            for key in [key for key, value in kept.items() if _has_fakes((value,))]:
                del kept[key]


def _is_kept(name: str, value: Any) -> bool:  # Any: whatever has the name
    return type(value) is _Cached or (type(value) in _PLAIN and not name.startswith("__"))


def _enclosed(value: Any, depth: int = _DEPTH) -> Iterator[Any]:  # Any: the same
    """What a function, and those within it, have of where they were defined."""
    for cell in (value.__closure__ or ()) if depth and isinstance(value, FunctionType) else ():
        with suppress(ValueError):  # it has nothing yet
            yield cell.cell_contents
            yield from _enclosed(cell.cell_contents, depth - 1)


def _caches_in(file: str, names: Mapping[str, Any]) -> Iterator[Any]:  # Any: the same
    """Of a file's functions and classes, and of where these were defined."""
    kinds = (FunctionType, type)
    kept = [value for value in list(names.values()) if isinstance(value, kinds)]
    own = [value for value in kept if getattr(value, "__module__", None) == file]
    for value in chain(own, *(list(vars(kind).values()) for kind in own if isinstance(kind, type))):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        yield from (one for one in (function, *_enclosed(function)) if type(one) is _Cached)


def _is_of_library(name: str | None) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _has_fakes(values: Iterable[Any]) -> bool:  # Any: whatever is kept
    """Level by level, of each what kinds there are: of tables of names or numbers nothing is looked at one by one."""
    for _ in range(_DEPTH + 1):
        values = list(values)
        kinds = {*map(type, values)}
        if any(issubclass(kind, FakeTensor) for kind in kinds):
            return True
        within = {kind for kind in kinds if kind in _MAY_HOLD or kind.__name__ == _LINK}
        if not within:
            return False
        values = chain.from_iterable(_items(one) for one in values if type(one) in within)
    return False


def _items(value: Any) -> Iterable[Any]:  # Any: the same
    if type(value) in _PLAIN:
        return list(value.values())
    return value if type(value) in (tuple, list) else gc.get_referents(value)
