"""Parameters by the names of the source's tensors: ``parameter.sources``, and ``Named``, the class above all models.

A parameter of the program may hold several tensors of the source (joined, tied), or a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pdv.emit.templates.gradients import Leaves
from pdv.emit.templates.stored import SourceNames, Stored, local_piece

if TYPE_CHECKING:
    from pdv.emit.templates.runtime import Mesh

_OWN = "constants."  # stored tensors that the program made itself


class Named(nn.Module):
    """A module whose parameters are found by the names that the source has for them."""

    mesh: Mesh

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # Any: itself, as of any module
        """What ``to``, ``float`` and their kin do with each tensor; what is known of it stays."""
        with staying(self, self.mesh):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def share_memory(self) -> Any:  # Any: itself, as of any module
        """As of any module.

        Raises:
            TypeError: on several ranks, of DTensors: torch ends the process that shares the memory of one.
        """
        if any(isinstance(x, DTensor) for x in (*self.parameters(), *self.buffers())):
            raise TypeError(
                "cannot-share: a model on several ranks has parts of its parameters on each, and torch can share no "
                "memory of those. Start each rank by torchrun, and let others read model.full_state_dict()."
            )
        return super().share_memory()

    def parameters_of(self, *names: str) -> list[nn.Parameter]:
        """The parameters that hold tensors of the source, in its order, by names or patterns (``"*.bias"``).

        Of a pipeline those of this rank's stages. What no line of the program reads has none.

        Raises:
            ValueError: of a name that the source does not have, or of what is not trained; of one that the plan joined
                with others which are not named.
        """
        held = _tensors_of(self)
        trained = {id(p) for p in self.parameters()}
        chosen = {name: _matching(name, held) for name in names}
        for pattern, found in chosen.items():
            if not found:
                near = get_close_matches(pattern, held, 3, 0.4) or sorted(held)[:3]
                raise ValueError(
                    f"no-such-parameter: {pattern!r} is no name of the source's, and matches none. Allowed: names of "
                    f"its state_dict(), such as {', '.join(near)}, and patterns such as '*.bias'. Check the name."
                )
            tensors = [x for name in found for x in held[name]]
            if tensors and not any(id(x) in trained for x in tensors):
                raise _untrained(self, found)
        stored_of = {id(x): stored for x, stored in self.mesh.origins}
        named = {name for found in chosen.values() for name in found}
        meant = {id(x) for name in named for x in held[name]}
        wanted = [p for p in self.parameters() if id(p) in meant]
        for parameter in wanted:
            for own in _names_of(stored_of[id(parameter)]):
                if own and named.isdisjoint(own):
                    raise ValueError(
                        f"joined-parameter: the plan joined {', '.join(names)} with {own[0]} in one parameter "
                        f"{list(parameter.shape)}, which is trained as one. Allowed: both, or neither. Name both, in "
                        "one call."
                    )
        return wanted

    def requires_grad_(self, requires_grad: bool = True) -> Any:  # Any: itself, as of any module
        """As of any module.

        Raises:
            ValueError: if all are to be trained, and some were frozen when the program was planned.
        """
        frozen = _said(self).frozen if self.mesh.origins else ()
        is_infer = bool(self.mesh.origins) and self.mesh.stage.size == 1 and next(self.parameters(), None) is None
        if requires_grad and (frozen or is_infer):
            raise _frozen(frozen)
        return super().requires_grad_(requires_grad)


def note_source(parameter: Any, stored: Stored) -> None:  # Any: a parameter, which gets attributes
    """What is known of a parameter of the source: how it is kept, and the names that it has there."""
    parameter.kept = stored.kept
    parameter.sources = tuple(name for own in _names_of(stored) for name in own)


def _names_of(stored: Stored) -> list[tuple[str, ...]]:
    """Of each stored tensor that it is made of, the names that the source has for it, or for views of it."""
    said, others = _of_file(stored.file)
    return [
        (*(() if name in (*said.joint, *said.computed) else (name,)), *others.get(name, ())) for name in stored.names()
    ]


def _of_file(file: Any) -> tuple[SourceNames, Mapping[str, Sequence[str]]]:  # Any: an open safetensors file
    return _read((file.metadata() or {}).get("pdv", "{}"))


@lru_cache(maxsize=4)
def _read(said: str) -> tuple[SourceNames, Mapping[str, Sequence[str]]]:
    """What a file says, and the further names of each of its tensors."""
    found: dict[str, list[str]] = {}
    names = SourceNames.read(said)
    for name, (source, _) in names.names.items():
        found.setdefault(source, []).append(name)
    return names, found


def _said(model: Named) -> SourceNames:
    return _of_file(model.mesh.origins[0][1].file)[0]


def _tensors_of(model: Named) -> dict[str, list[Any]]:
    """All names that the source has; of each the parameters and buffers of this rank that hold it."""
    found: dict[str, list[Any]] = {}
    if model.mesh.origins:
        file = model.mesh.origins[0][1].file
        said = _said(model)
        ours = {*said.joint, *said.computed}
        stored = [name for name in file.keys() if name not in ours and not name.startswith(_OWN)]  # noqa: SIM118
        found = {name: [] for name in (*stored, *said.names)}
    for x, each in model.mesh.origins:
        for own in _names_of(each):
            for name in own:
                found.setdefault(name, []).append(x)
    return found


def _matching(pattern: str, names: Mapping[str, object]) -> list[str]:
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def _untrained(model: Named, names: Sequence[str]) -> ValueError:
    frozen = [name for name in names if name in _said(model).frozen]
    if frozen or next(model.parameters(), None) is None:
        return _frozen(frozen or names)
    return ValueError(
        f"not-a-parameter: {', '.join(names[:3])} is a buffer, which is saved and not trained. Allowed: parameters. "
        "Find buffers by named_buffers()."
    )


def _frozen(names: Sequence[str]) -> ValueError:
    some = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "all weights of this program"
    return ValueError(
        f"frozen-at-planning: {some}: not trained when the program was planned (requires_grad=False, --freeze, or for "
        "inference): it has a buffer in its place, and no gradient. Allowed: parameters that were trained then, frozen "
        "and thawed at will. Plan the module with all that is ever trained unfrozen, and freeze by "
        "parameters_of(...) here; load_full_state_dict takes the weights over."
    )


# ---- Parameters and buffers that ``model.to`` and its kin put into other memory, or other tensors in the place of ----

# torch swaps a DTensor with what it was made into, attributes and all, even where nothing changes (``model.to("cpu")``
# on a CPU). What is known of a parameter has to stay with it, but for what was made of its old memory.


@contextmanager
def staying(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Context that moves tensors of a model: what is known of each is known of what is in its place behind it.

    Raises:
        RuntimeError: if gradients wait to be summed, or a batch is under way that reads older weights.
    """
    if mesh.sums.is_waiting:
        raise RuntimeError(
            "unsummed-gradients: the model is moved, or cast, while gradients wait for their sum over ranks. Do it "
            "before no_sync, call flush of the model, or drop them with its zero_grad."
        )
    if getattr(model, "is_under_way", False):
        raise RuntimeError(
            "batch-under-way: the model is moved, or cast, while a batch that was begun reads older weights. Call "
            "drain, and step, before it."
        )
    places = [(module, name) for module in model.modules() for name in (*module._parameters, *module._buffers)]  # noqa: SLF001
    before = [getattr(module, name) for module, name in places]
    known = {id(x): dict(vars(x)) for x in before if x is not None}
    try:
        yield
    finally:
        moved = {id(x): (x, getattr(module, name)) for x, (module, name) in zip(before, places, strict=True)}
        for old, (_, new) in moved.items():
            if new is not None:
                _carry(known[old], new)
        mesh.origins[:] = [(moved[id(x)][1] if id(x) in moved else x, stored) for x, stored in mesh.origins]


def _carry(known: Mapping[str, Any], x: Any) -> None:  # Any: a tensor, which gets attributes
    """Let a tensor have what was known of the one before it."""
    for name, value in known.items():
        if name not in vars(x):
            setattr(x, name, value)
    leaves = getattr(x, "leaves", None)
    if isinstance(leaves, Leaves) and not _lies_in(x, leaves):
        leaves.sums.forget(x)
        x.leaves = Leaves(leaves.sums, leaves.cuts)
        x.leaves.unit = leaves.unit
        if leaves.unit is not None:
            leaves.unit.forget()


def _lies_in(parameter: Tensor, leaves: Leaves) -> bool:
    """Whether the memory is still that which the leaves are in."""
    shard, piece = leaves.shard(parameter), local_piece(parameter)
    return (shard.data_ptr(), shard.dtype, shard.device) == (piece.data_ptr(), piece.dtype, piece.device)
