"""Parameters that lie in one memory: one is kept, the others become views of it that forward computes.

What an optimizer writes to one of them changes the others, so that they are one parameter, whose gradient is the sum of
theirs. Entry point: ``with_views``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ir.graph import View
from pdv.frontend.program import Program
from pdv.frontend.torch.copies import copy_with
from pdv.frontend.torch.exported_state import memory_of, storage_of

_OWNER = "_pdv_owner"  # of a part: who holds the memory that its tensors are views of


@dataclass(frozen=True)
class Place:
    """An attribute of a module that is a tensor."""

    path: str
    part: nn.Module
    attribute: str
    tensor: Tensor

    @property
    def name(self) -> str:
        """As in a state_dict."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass
class Shared:
    """What is a view of what.

    Attributes:
        names: of a tensor of the module -> the parameter that it is a view of, and the view.
        joint: parameters that the module has not: memory that several of its tensors lie in.
        stored: names of the module's own state.
    """

    names: dict[str, tuple[str, View]] = field(default_factory=dict)
    joint: list[str] = field(default_factory=list)
    stored: frozenset[str] = frozenset()

    def name(self, program: Program) -> Program:
        """The program of the module with views, by the names of the module without."""
        stored = {name: program.names.get(base, (base, ()))[0] for name, (base, _) in self.names.items()}
        names = {name: (stored[name], view) for name, (_, view) in self.names.items() if name in self.stored}
        notes = (*program.notes, *([self._note(list(names))] if names else []))
        return replace(program, names={**program.names, **names}, joint=frozenset(self.joint), notes=notes)

    def _note(self, names: Sequence[str]) -> str:
        pairs = [f"{name} of {self.names[name][0]}" for name in names]
        some = ", ".join(pairs[:3]) + (", …" if len(pairs) > 3 else "")
        return (
            f"tensors that share memory are views of one parameter here ({some}), whose gradient is the sum of theirs: "
            "optimizers with a state of their own step it once, where the module's would step each"
        )


def with_views(module: object) -> tuple[Any, Shared]:  # Any: what was given
    """A module that computes the same, in which no trained parameters overlap in memory; the same if there are none.

    Tensors that are no views of one are left as they are, for ``check_trainable`` to name.
    """
    if not isinstance(module, nn.Module) or not _overlapping(module):
        return module, Shared()
    kept = [place.tensor for place in _places(module, trained=False)]
    own = copy_with(module, {id(tensor): tensor for tensor in kept})
    shared = Shared(stored=frozenset(module.state_dict()))
    for group in _overlapping(own):
        _share(own, group, shared)
    return own, shared


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one memory may have elements in common."""
    (start, end), (other_start, other_end) = _range(x), _range(y)
    return start < other_end and other_start < end


def _range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start, start + (last + 1 if x.numel() else 0)


def _places(module: nn.Module, *, trained: bool) -> Iterator[Place]:
    """Tensors that a module holds: parameters and plain attributes, with their gradients; or all there are."""
    for path, part in module.named_modules(remove_duplicate=False):
        held: dict[str, Any] = {**part._parameters, **vars(part)}  # noqa: SLF001  # by every name
        if not trained:
            held |= part._buffers  # noqa: SLF001
        for name, value in held.items():
            plain = isinstance(value, Tensor) and not nn.parameter.is_lazy(value)
            if plain and (not trained or value.requires_grad):
                yield Place(path, part, name, value)


def _overlapping(module: nn.Module) -> list[list[Place]]:
    """Groups of places whose tensors, not all the same, overlap in memory one with the next; each has a parameter."""
    by_memory: dict[int, list[Place]] = {}
    for place in _places(module, trained=True):
        by_memory.setdefault(storage_of(place.tensor), []).append(place)
    found = []
    for places in by_memory.values():
        group: list[Place] = []
        for place in sorted(places, key=lambda each: _range(each.tensor)[0]):
            if group and _range(place.tensor)[0] >= max(_range(each.tensor)[1] for each in group):
                found.append(group)
                group = []
            group.append(place)
        found.append(group)
    several = [group for group in found if len({id(place.tensor) for place in group}) > 1]
    return [group for group in several if any(isinstance(place.tensor, nn.Parameter) for place in group)]


def _share(module: nn.Module, group: Sequence[Place], shared: Shared) -> None:
    """Put views in place of all tensors of a group but one."""
    base = next((place for place in group if _views(place.tensor, group) is not None), None)
    if base is None:
        whole = _joint(group)
        views = None if whole is None else _views(whole, group)
        if whole is None or views is None:
            return
        name = "_and_".join(dict.fromkeys(place.name for place in group)).replace(".", "_")[:64]
        base = Place("", module, name, whole)
        module.register_parameter(name, whole)
        shared.joint.append(name)
    found = _views(base.tensor, group)
    assert found is not None, base.name
    for place in group:
        if place.tensor is base.tensor:
            continue
        view = found[id(place.tensor)]
        if memory_of(apply(view, base.tensor)) != memory_of(place.tensor):
            raise AssertionError(f"{place.name} is no view {view} of {base.name}")
        _compute(place, base, view)
        shared.names[place.name] = base.name, view


def _views(base: Tensor, group: Sequence[Place]) -> dict[int, View] | None:
    """Of each tensor of a group the view of ``base`` that it is; None if one is none, or it is no trained parameter."""
    if not (isinstance(base, nn.Parameter) and base.requires_grad):
        return None
    found: dict[int, View] = {}
    for place in group:
        view = view_of(base, place.tensor)
        if view is None or place.tensor.dtype != base.dtype:
            return None
        found[id(place.tensor)] = view
    return found


def view_of(base: Tensor, x: Tensor) -> View | None:
    """Steps (``slice``, ``permute``, ``reshape``) from one tensor to another of its memory; None if there are none."""
    by_dims = _view_by_dims(base, x)
    return _view_of_row(base, x) if by_dims is None else by_dims


def _order(x: Tensor) -> list[int]:
    """Dims, those of large strides first."""
    return sorted(range(x.dim()), key=lambda dim: (x.stride()[dim], x.shape[dim]), reverse=True)


def _view_by_dims(base: Tensor, x: Tensor) -> View | None:
    """A part of each dim, in another order."""
    rest = int(x.storage_offset() - base.storage_offset())
    parts: dict[int, tuple[int, int]] = {}
    for dim in _order(base):
        start, rest = divmod(rest, base.stride(dim)) if base.size(dim) > 1 else (0, rest)
        parts[dim] = start, start + 1
    perm: list[int] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 1:
            continue
        same = [d for d in parts if d not in perm and base.stride(d) == stride and base.size(d) > 1]
        if not same:
            return None
        parts[same[0]] = parts[same[0]][0], parts[same[0]][0] + size
        perm.append(same[0])
    if rest or any(start < 0 or stop > base.size(dim) for dim, (start, stop) in parts.items()):
        return None
    steps: list[Any] = [
        ("slice", dim, *parts[dim], base.size(dim)) for dim in sorted(parts) if parts[dim] != (0, base.size(dim))
    ]
    perm = [*(dim for dim in range(base.dim()) if dim not in perm), *perm]
    if perm != sorted(perm):
        steps.append(("permute", tuple(perm)))
    if tuple(parts[dim][1] - parts[dim][0] for dim in perm) != tuple(x.shape):
        steps.append(("reshape", tuple(x.shape)))
    return tuple(steps)


def _view_of_row(base: Tensor, x: Tensor) -> View | None:
    """A stretch of the elements as they lie, in another shape."""
    rows, own = base.permute(_order(base)), x.permute(_order(x))
    start = int(x.storage_offset() - base.storage_offset())
    if not (rows.is_contiguous() and own.is_contiguous()) or not 0 <= start <= base.numel() - x.numel():
        return None
    steps: list[Any] = [] if _order(base) == sorted(_order(base)) else [("permute", tuple(_order(base)))]
    steps += [("reshape", (base.numel(),)), ("slice", 0, start, start + x.numel(), base.numel())]
    steps.append(("reshape", tuple(own.shape)))
    back = tuple(_order(x).index(dim) for dim in range(x.dim()))
    return tuple(steps if back == tuple(sorted(back)) else [*steps, ("permute", back)])


def _joint(group: Sequence[Place]) -> nn.Parameter | None:
    """A parameter over the memory of all: of rows as long as the largest stride of one says."""
    start = min(_range(place.tensor)[0] for place in group)
    end = max(_range(place.tensor)[1] for place in group)
    first = max((place.tensor for place in group), key=lambda x: max(x.stride(), default=0))
    strides = [first.stride(dim) for dim in _order(first) if first.size(dim) > 1] or [1]
    if any(above % below for above, below in itertools.pairwise(strides)):
        return None
    inner = [above // below for above, below in itertools.pairwise(strides)]
    start -= start % strides[0] if len(strides) > 1 else 0
    shape = (-(-(end - start) // strides[0]), *inner)
    if strides[-1] != 1 or start + math.prod(shape) > first.untyped_storage().nbytes() // first.element_size():
        return None
    return nn.Parameter(first.detach().as_strided(shape, strides, start))


def apply(view: View, x: Tensor) -> Tensor:
    """A view as torch takes it."""
    for step in view:
        match step:
            case ("slice", dim, start, stop, _):
                x = x.narrow(dim, start, stop - start)
            case ("permute", perm):
                x = x.permute(perm)
            case ("reshape", shape):
                x = x.view(shape) if x.is_contiguous() else x.reshape(shape)
    return x


def _compute(place: Place, base: Place, view: View) -> None:
    """Let a part compute an attribute from the parameter that it is a view of."""
    part, attribute = place.part, place.attribute
    part._parameters.pop(attribute, None)  # noqa: SLF001
    vars(part).pop(attribute, None)
    owners: Mapping[str, tuple[nn.Module, str, View]] = vars(part).get(_OWNER, {})
    vars(part)[_OWNER] = {**owners, attribute: (base.part, base.attribute, view)}

    def read(self: nn.Module) -> Tensor:
        owner, name, steps = vars(self)[_OWNER][attribute]
        return apply(steps, getattr(owner, name))

    kind = type(part)
    part.__class__ = type(kind.__name__, (kind,), {attribute: property(read), "__module__": kind.__module__})
