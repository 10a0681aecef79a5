"""Copies of modules that read nothing of what they are copies of. Entry points: ``copy_with``; for export,
``prepared_copy``, ``distinct_inputs`` and ``check_inputs_apart``; ``take_apart``.

Python's ``deepcopy`` takes functions as they are: a hook, or a ``lambda`` that is an attribute, in whose closure a
module lies would go on reading that module, and what a copy trains would not be what its function reads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from ir.errors import ModelError
from pdv.frontend.torch.draws import say_drop_paths


def copy_with(module: nn.Module, known: Mapping[int, Any]) -> nn.Module:  # Any: as ``copy.deepcopy`` takes them
    """A deep copy, also of functions in whose closures parts of the module lie.

    known: by ``id``, what stands for an object in the copy.
    """
    memo = dict(known)
    own = copy.deepcopy(module, memo)
    stand_ins = _StandIns(memo)
    for part in own.modules():
        held = vars(part)
        for name, value in list(held.items()):
            held[name] = stand_ins.of(value)
    return own


def prepared_copy(module: nn.Module) -> nn.Module:
    """A copy with the same tensors: what a forward that is traced leaves in its module are tensors without values.

    It keeps no keys and values of earlier calls: nothing that a program returns holds them.
    """
    held = (*module.parameters(), *module.buffers())
    try:
        own = copy_with(module, {id(tensor): tensor for tensor in held})
    except Exception:  # noqa: BLE001  # whatever a module's attributes raise
        own = module
    else:
        say_drop_paths(own)
        take_apart(own)
        _overwrite_rebound(own)
    for part in own.modules():
        config = cast(Any, getattr(part, "config", None))
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
    return own


def distinct_inputs(module: nn.Module, inputs: Any) -> Any:  # Any: a tree of what a forward takes
    """The same values, each tensor an object of its own, and none of the module's.

    torch.export knows inputs by the tensors that they are: of one tensor that is passed twice (``labels`` that are the
    ``ids``) its program reads the last place alone, and of one that is the module's none.
    """
    taken = {id(held) for held in (*module.parameters(), *module.buffers())}

    def own(value: Any) -> Any:  # Any: arguments need not be tensors
        if isinstance(value, Tensor) and id(value) in taken:
            value = value.detach().clone().requires_grad_(value.requires_grad)
        taken.add(id(value))
        return value

    return tree_map(own, inputs)


def check_inputs_apart(program: ExportedProgram) -> None:
    """No input is unread because the program was exported with one tensor in its place and in another's.

    Raises:
        ModelError: naming one that is.
    """
    given = tree_leaves(program.example_inputs)
    names = program.graph_signature.user_inputs
    if len(given) != len(names):
        return
    unread = {node.name for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    for name, value in zip(names, given, strict=True):
        twins = [other for other, its in zip(names, given, strict=True) if its is value and other != name]
        if isinstance(value, Tensor) and name in unread and twins:
            raise ModelError(
                f"the exported program reads {', '.join(map(str, twins))} in the place of {name}: it was exported with "
                "one tensor as both, which torch.export does not tell apart",
                "Another tensor for each input",
                "Export it again with a clone() of that tensor for each",
            )


def take_apart(module: nn.Module) -> None:
    """Have a module of one's own give dataclasses as dicts of their fields, as torch knows them."""
    module.register_forward_hook(_taken_apart)


def _taken_apart(module: nn.Module, args: Any, outputs: Any) -> Any:  # Any: what a forward takes and gives
    del module, args
    return tree_map(_fields_of, outputs)


def _fields_of(value: Any) -> Any:  # Any: outputs
    """A dataclass that is registered with torch is no leaf, and so not among these."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {one.name: tree_map(_fields_of, getattr(value, one.name)) for one in fields(value)}


def _overwrite_rebound(module: nn.Module) -> None:
    """Have what a call binds to the name of a buffer (``self.mean = …``) written to the buffer behind the call.

    torch.export sees what is written to buffers, and of what is bound anew only what the outermost module binds.
    """
    before: dict[tuple[nn.Module, str], Tensor] = {}

    def remember(*_: object) -> None:
        held = ((part, name, x) for part in module.modules() for name, x in part._buffers.items())  # noqa: SLF001
        before.update({(part, name): x for part, name, x in held if x is not None})

    def overwrite(*_: object) -> None:
        for (part, name), buffer in before.items():
            bound = part._buffers.get(name)  # noqa: SLF001  # no setter is to see this
            if bound is None or bound is buffer:
                continue
            if (bound.shape, bound.dtype) == (buffer.shape, buffer.dtype):
                buffer.copy_(bound)  # of another size, it is a table that is made anew where it is too small
            part._buffers[name] = buffer  # noqa: SLF001
        before.clear()

    if any(True for _ in module.buffers()):
        module.register_forward_pre_hook(remember, prepend=True)
        module.register_forward_hook(overwrite)


@dataclass
class _StandIns:
    """What stands for an object in a copy; ``made``: by ``id``."""

    made: dict[int, Any]
    at_work: set[int] = field(default_factory=set)

    def of(self, value: Any) -> Any:  # Any: attributes, and what closures hold
        """The object itself, if there is none for it or for what it holds."""
        if id(value) in self.made:
            return self.made[id(value)]
        if id(value) in self.at_work:
            return value
        self.at_work.add(id(value))
        try:
            return self._made_of(value)
        finally:
            self.at_work.discard(id(value))

    def _made_of(self, value: Any) -> Any:  # Any: as above
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            holder = self.of(value.__self__)
            return value if holder is value.__self__ else MethodType(value.__func__, holder)
        if isinstance(value, partial):
            func, args, keywords = (self.of(one) for one in (value.func, value.args, value.keywords))
            same = func is value.func and args is value.args and keywords is value.keywords
            return value if same else partial(func, *args, **keywords)
        if isinstance(value, dict | list):
            places = list(value) if isinstance(value, dict) else range(len(value))
            changed = {place: one for place in places if (one := self.of(value[place])) is not value[place]}
            found = copy.copy(value) if changed else value
            for place, one in changed.items():
                found[place] = one
            return found
        if type(value) is tuple:
            each = tuple(map(self.of, value))
            return each if any(x is not y for x, y in zip(each, value, strict=True)) else value
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        own = tuple(CellType() for _ in cells)
        found = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, own)
        found.__kwdefaults__, found.__qualname__ = function.__kwdefaults__, function.__qualname__
        found.__dict__.update(function.__dict__)
        self.made[id(function)] = found  # it may hold itself
        changed = False
        for cell, its in zip(own, cells, strict=True):
            try:
                kept = its.cell_contents
            except ValueError:  # a name that its function was never given
                continue
            cell.cell_contents = self.of(kept)
            changed |= cell.cell_contents is not kept and cell.cell_contents is not found
        if not changed:
            del self.made[id(function)]
        return found if changed else function
