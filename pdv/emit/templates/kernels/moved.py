"""Parameters and buffers that ``model.to`` and its kin put into other memory, or other tensors in the place of.

torch swaps a DTensor with what it was made into, attributes and all, even where nothing changes (``model.to("cpu")`` on
a CPU). What is known of a parameter has to stay with it, but for what was made of its old memory. Entry: ``staying``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pdv.emit.templates.gradients import Leaves
from pdv.emit.templates.stored import local_piece

if TYPE_CHECKING:
    from pdv.emit.templates.runtime import Mesh


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
