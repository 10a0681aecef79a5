"""States that are loaded: whether the pieces in them are those of this rank.

A DTensor that is pickled is the piece of the rank that saved it, and torch takes it for that of whoever reads it. Its
mesh is pickled with it, and says where that rank stood. Entry points: ``check_pieces``, ``check_loaded_states``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from .steps import note_load


def check_pieces(state: Mapping[str, Any], own: Iterable[Tensor]) -> None:
    """Whether cut tensors in a state, by name, are the pieces of the rank that has ``own`` parameters.

    Raises:
        ValueError: naming one that is not.
    """
    here = next((x.device_mesh for x in own if isinstance(x, DTensor)), None)
    for name, x in state.items():
        if isinstance(x, DTensor) and (place := _place(x, x.device_mesh)) and place != (now := _place(x, here)):
            where = ", ".join(f"{at} of {size}" for size, at in place)
            raise ValueError(
                f"other-pieces: {name} {list(x.shape)} is cut, and this is piece {where}, of another rank; this one "
                f"has {', '.join(f'{at} of {size}' for size, at in now) or 'the whole'}. What state_dict() gives is of "
                "one rank. Allowed: what this rank saved, or one that has the same pieces. Save whole tensors, on all "
                "ranks, by model.full_state_dict(), for load_full_state_dict; or what all ranks have, with the "
                "optimizer, by torch.distributed.checkpoint or save_checkpoint of pdv.loops.checkpoint."
            )


def _place(x: DTensor, mesh: DeviceMesh | None) -> list[tuple[int, int]]:
    """Size of each axis that cuts ``x``, and the place that this mesh's rank has along it."""
    at = mesh.get_coordinate() if mesh is not None and mesh.ndim == len(x.placements) else None
    cuts = [dim for dim, placed in enumerate(x.placements) if isinstance(placed, Shard)]
    return [(mesh.size(dim), at[dim]) for dim in cuts] if mesh is not None and at is not None else []


@cache
def check_loaded_states() -> None:
    """From now on, optimizers take no pieces of another rank."""
    if not hasattr(DTensor, "_op_dispatcher"):
        return  # of simulated ranks
    plain = Optimizer.load_state_dict

    @wraps(plain)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        checked = self.register_load_state_dict_pre_hook(_check_states)  # behind what puts parameters back
        try:
            plain(self, state_dict)
        finally:
            checked.remove()
        note_load(self)

    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]  # torch has no hook of all optimizers


def _check_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    named = {
        f"{name} of the optimizer's parameter {key}": x
        for key, state in state_dict.get("state", {}).items()
        if isinstance(state, Mapping)
        for name, x in state.items()
    }
    check_pieces(named, (p for group in optimizer.param_groups for p in group["params"]))
