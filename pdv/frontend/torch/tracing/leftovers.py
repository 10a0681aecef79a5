"""What calls of a module leave behind, taken away: in caches, in buffers. Entry points: ``tracing``, ``buffers_kept``.

A function that keeps what it made (``functools.cache``, a dict of its file or class) keeps tensors without values while
it is traced, and would give them to the next call: to another trace, or to the caller's own module.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_Cached = type(functools.cache(lambda: None))
_LIBRARIES = frozenset({"torch", "numpy", "sympy", "pdv", "ir", "learned_cost", *sys.stdlib_module_names})
_PLAIN = (dict, OrderedDict, defaultdict)  # others' may do whatever where they are looked at
_MAY_HOLD = (FakeTensor, *_PLAIN, list, tuple)
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


class Code(NamedTuple):
    """What may run where a module is called: files by name, classes, and parts."""

    files: dict[str, ModuleType]
    classes: set[type]
    parts: list[nn.Module]

    @classmethod
    def of(cls, module: nn.Module) -> Code:
        """All files but a library's, for whatever these call; of the module itself its parts and their classes."""
        files = {name: file for name, file in list(sys.modules.items()) if not _is_of_library(name)}
        parts = list(module.modules())
        classes = {kind for part in parts for kind in type(part).__mro__ if not _is_of_library(kind.__module__)}
        return cls(files, classes, parts)

    def held(self) -> Iterator[Any]:  # Any: whatever the code keeps
        """Dicts and caches that they call by a name."""
        for holder in (*self.files.values(), *self.classes):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if (type(value) in _PLAIN and not name.startswith("__")) or type(value) is _Cached:
                    yield value
        for part in self.parts:
            yield from (value for value in vars(part).values() if type(value) is _Cached)


class _Caches:
    """Functions of this process that keep what they made.

    All objects are asked who they are only where code is new: there may be millions, and modules are traced often.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._classes: WeakSet[type] = WeakSet()
        self._known: WeakSet[Any] = WeakSet()  # Any: caches have no public type

    def all(self, code: Code, near: Iterable[Any]) -> list[Any]:  # Any: the same
        """Those that there were when files and classes were new, and those that are ``near`` these."""
        if not (self._files.issuperset(code.files) and self._classes.issuperset(code.classes)):
            self._files.update(code.files)
            self._classes.update(code.classes)
            self._known.update(one for one in gc.get_referrers(_Cached) if type(one) is _Cached)
        self._known.update(near)
        return [one for one in self._known if not _is_of_library(one.__module__)]


_CACHES = _Caches()


def _forget(module: nn.Module) -> None:
    code = Code.of(module)
    held = list(code.held())
    for cached in _CACHES.all(code, (one for one in held if type(one) is _Cached)):
        if cached.cache_info().currsize and any(_has_fakes(one) for one in gc.get_referents(cached)):
            cached.cache_clear()
    for table in held:
        if type(table) in _PLAIN and any(issubclass(kind, _MAY_HOLD) for kind in {*map(type, table.values())}):
            for key in [key for key, value in table.items() if _has_fakes(value)]:
                del table[key]


def _is_of_library(name: str | None) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _has_fakes(value: Any, depth: int = _DEPTH) -> bool:  # Any: whatever is kept
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or isinstance(value, type | nn.Module) or not gc.is_tracked(value):
        return False
    inner = gc.get_referents(value) if _is_link(value) else _items(value)
    return any(_has_fakes(one, depth - 1) for one in inner)


def _is_link(value: Any) -> bool:
    """True for what bounded caches of Python are chained of."""
    return type(value).__name__ == "_lru_list_elem"


def _items(value: Any) -> tuple[Any, ...]:
    if type(value) in _PLAIN:
        return tuple(value.values())
    return tuple(value) if type(value) in (tuple, list) else ()
