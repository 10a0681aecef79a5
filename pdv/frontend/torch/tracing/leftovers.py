"""What calls of a module leave behind, taken away: in caches, in buffers. Entry points: ``tracing``, ``buffers_kept``.

A function that keeps what it made (``functools.cache``, a dict of its file or class) keeps tensors without values while
it is traced, and would give them to the next call: to another trace, or to the caller's own module.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_Cached = type(functools.cache(lambda: None))
_LIBRARIES = frozenset({"torch", "numpy", "pdv", *sys.stdlib_module_names})
_PLAIN = (dict, OrderedDict, defaultdict)  # others' may do whatever where they are looked at
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


def _forget(module: nn.Module) -> None:
    for cached in [one for one in gc.get_objects() if type(one) is _Cached and not _is_of_library(one.__module__)]:
        if cached.cache_info().currsize and any(_has_fakes(one) for one in gc.get_referents(cached)):
            cached.cache_clear()
    for table in _tables(module):
        for key in [key for key, value in table.items() if _has_fakes(value)]:
            del table[key]


def _tables(module: nn.Module) -> Iterator[MutableMapping[Any, Any]]:  # Any: whatever the code keeps under whatever
    """Dicts that files of the module's code, and its classes, call by a name."""
    files = [one for name, one in list(sys.modules.items()) if not _is_of_library(name)]
    classes = {kind for part in module.modules() for kind in type(part).__mro__ if not _is_of_library(kind.__module__)}
    for holder in (*files, *classes):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if type(value) in _PLAIN and not name.startswith("__"):
                yield value


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
