"""Programs under ``torch.compile``, part by part. Entry points: ``compile_parts``, ``ready``.

A part is a block that a model has several of, or all of a model without such blocks: equal blocks share what was made
of the first (torchtitan compiles its layers so). What a part reads of its parameters is read before it runs, since that
notes how gradients are summed, which no compiler sees. Collectives stay outside of what is compiled, and so do random
numbers: a program draws the same, compiled or not.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])
READERS = ("local", "gather")
"""Functions by which a program reads a parameter: ``local(self.NAME, AXIS, ...)``."""
Read = tuple[Callable[..., Tensor], nn.Module, str, tuple[Any, ...]]
"""The function, whose parameter it reads, of which name, and what else it is told: axes and numbers."""


def compile_parts(model: nn.Module, **options: Any) -> None:
    """Have each part run as ``torch.compile(..., **options)`` makes it."""
    for part in list(_parts(model)):
        part.forward = Compiled(part, options)


def ready(function: Callable[..., Tensor], parameter: Tensor, *how: Any) -> Tensor:
    """What a part that is compiled reads of a parameter; one that is no part's is read between what is compiled."""
    read: dict[object, Tensor] | None = getattr(parameter, "read", None)
    return read[_key(function, how)] if read else _outside(function, parameter, *how)


def outside(function: Function) -> Function:
    """The function, which runs as it is where what calls it is compiled."""
    found: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


@outside
def _outside(function: Callable[..., Tensor], *given: Any) -> Tensor:
    return function(*given)


def _key(function: Callable[..., Tensor], how: tuple[Any, ...]) -> tuple[object, ...]:
    return (function.__name__, *(x if isinstance(x, int) else x.name for x in how))


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    runs = [run for run in model.modules() if isinstance(run, nn.ModuleList)]
    blocks = [block for run in runs for block in run if not isinstance(block, nn.ModuleList)]
    inside = {id(part) for block in blocks for part in block.modules() if part is not block}
    yield from (block for block in blocks if id(block) not in inside)
    if not blocks:
        yield model


class Compiled:
    """The forward pass of a part: its parameters are read, then what was compiled runs."""

    def __init__(self, part: nn.Module, options: dict[str, Any]) -> None:
        self._part, self._options = part, options
        self._reads: list[Read] | None = None
        self._run = torch.compile(type(part).forward, **options)

    def __call__(self, *given: Any, **named: Any) -> Any:  # Any: as the part takes and gives
        """As the part's own."""
        if self._reads is None:  # not before: a copy is made before what it holds
            self._reads = [read for inner in self._part.modules() for read in _reads(inner)]
        parameters: list[Any] = [getattr(inner, name) for _, inner, name, _ in self._reads]
        for parameter in parameters:
            parameter.read = {}
        for parameter, (function, _, _, how) in zip(parameters, self._reads, strict=True):
            parameter.read[_key(function, how)] = function(parameter, *how)
        try:
            return self._run(self._part, *given, **named)
        finally:
            for parameter in parameters:
                parameter.read.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the copied part."""
        return Compiled(memo[id(self._part)], self._options)


def _reads(part: nn.Module) -> Iterator[Read]:
    """What the text of a part reads."""
    text = vars(sys.modules[type(part).__module__])
    kind: Any = type(part)  # of a module, which hashes
    for function, name, how in _calls(kind):
        yield text[function], part, name, tuple(getattr(part, x) if isinstance(x, str) else x for x in how)


@cache
def _calls(kind: type[nn.Module]) -> tuple[tuple[str, str, tuple[str | int, ...]], ...]:
    """Of each reading of a parameter in the text of a class: the function, the parameter, and names and numbers."""
    if kind.__module__.startswith("torch."):
        return ()
    found: list[tuple[str, str, tuple[str | int, ...]]] = []
    for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        match call:
            case ast.Call(ast.Name(function), [ast.Attribute(ast.Name("self"), name), *how]) if function in READERS:
                told = [ast.unparse(x).removeprefix("self.") for x in how]
                found.append((function, name, tuple(int(x) if x.isdecimal() else x for x in told)))
    return tuple(dict.fromkeys(found))
