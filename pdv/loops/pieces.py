"""How the parameters and buffers of an emitted model lie in the tensors of its source: the same under every plan.

A parameter of a plan is a view (a part, transposed, several joined) of tensors that the source stores, and each rank
holds a block of it. Entry points: ``pieces_of``, ``share``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ir.errors import UsageError

Box = tuple[tuple[int, int], ...]
"""Start and stop along each dim of a stored tensor."""


@dataclass(frozen=True)
class Piece:
    """A parameter or buffer, what it is of the source, and what of that this rank holds.

    whole, own: views of stored tensors (``stored.py`` of the package). cuts: (axis, dim) by which ranks differ.
    """

    tensor: Tensor
    whole: Any  # Any: a class of the package, which pdv does not import
    own: Any
    cuts: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors that it is made of."""
        return tuple(self.whole.names())

    @property
    def is_box(self) -> bool:
        """Whether it is a box of one stored tensor, its dims in some order; else it is reshaped or joined."""
        return self.whole.base is None

    def as_stored(self, local: Tensor) -> Tensor:
        """What this rank holds with dims in the order of the stored tensor, in the same memory."""
        order = [source for source, _, _ in self.own.dims]
        return local.permute([order.index(dim) for dim in range(len(order))])


def box_of(view: Any) -> Box:  # Any: as ``Piece``
    """Where a view lies in its stored tensor."""
    return tuple((start, stop) for _, start, stop in sorted(view.dims))


def notes_of(pieces: Sequence[Piece]) -> dict[str, Any]:  # Any: JSON
    """What the package says of its tensors, beside them: further names, unread and computed ones."""
    said = (pieces[0].whole.file.metadata() or {}).get("pdv", "{}") if pieces else "{}"
    found: dict[str, Any] = json.loads(said)
    return found


def local_of(x: Tensor) -> Tensor:
    """What this rank holds of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def pieces_of(model: nn.Module) -> list[Piece]:
    """Every parameter and buffer of an emitted model on this rank.

    Raises:
        UsageError: if ``model`` is none, or a parameter is no longer the one that ``build`` made.
    """
    mesh: Any = getattr(model, "mesh", None)
    if not hasattr(mesh, "origins"):
        raise UsageError(
            f"a {type(model).__name__} is not what an emitted package builds",
            "The model that build() of a package gives",
            "Pass the model itself, not what wraps it",
        )
    held = {id(x) for x in (*model.parameters(), *model.buffers())}
    found = [_piece(mesh, tensor, stored) for tensor, stored in mesh.origins]
    if gone := [", ".join(piece.names) for piece in found if id(piece.tensor) not in held]:
        raise UsageError(
            f"{gone[0]} is no longer what build made of it",
            "Parameters and buffers that are changed in place",
            "Give build the device and the dtype",
        )
    return found


def check_kept(pieces: Sequence[Piece]) -> None:
    """Whether all tensors are the source's.

    Raises:
        UsageError: if not, as in a package for inference that holds what was computed of weights.
    """
    if names := notes_of(pieces).get("computed"):
        raise UsageError(
            f"{names[0]} was computed of weights, which a package for inference does not keep",
            "Checkpoints of the model's training package, which load_checkpoint reads into both",
            "Save there, or keep the file that this one's weights were loaded from",
        )


def _piece(mesh: Any, tensor: Tensor, stored: Any) -> Piece:  # Any: as ``Piece``
    own, cuts = stored, []
    for axis, placement in zip(mesh.axes, getattr(tensor, "placements", ()), strict=False):  # outer axis first
        if isinstance(placement, Shard):
            own = own.cut(placement.dim, axis)
            cuts.append((axis.name, placement.dim))
    return Piece(tensor, stored, own, tuple(cuts))


def shape_of(piece: Piece, name: str) -> tuple[int, ...]:
    """Of a stored tensor that a piece is made of."""
    return tuple(piece.whole.file.get_slice(name).get_shape())


def share(value: Any) -> Sequence[Any]:  # Any: what can be pickled between ranks
    """What each rank passes, on all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def is_first() -> bool:
    """Whether this is rank 0, or there is no other."""
    return not dist.is_initialized() or dist.get_rank() == 0
