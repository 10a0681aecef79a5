"""Parameters that several stages of a pipeline hold, such as a table that is embedding and head. Entry: ``Tied``.

Each holder steps for itself, so that what a loop does to one of them, such as noise of its own, parts them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdv.emit.templates.parallel import own_group
from pdv.emit.templates.stored import local_piece

if TYPE_CHECKING:
    from pdv.emit.templates.pipeline import PipelinedModule
    from pdv.emit.templates.runtime import Mesh


class Tied:
    """Parameters that several stages hold: one where these are on one rank, else with the sum of their gradients."""

    def __init__(self, model: PipelinedModule, tied: Sequence[Mapping[int, str]]) -> None:
        self._here: list[tuple[Tensor, Any]] = []  # a parameter, and the group of its holders
        self.names = ["/".join(dict.fromkeys(places.values())) for places in tied]
        self._numbers: list[int] = []  # of those here, among all
        mesh, self._device = model.mesh, model.mesh.device
        for number, places in enumerate(tied):
            own = [(model.stages[str(stage)], name) for stage, name in places.items() if stage in model.own]
            for stage, name in own[1:]:
                dropped = getattr(stage, name)
                setattr(stage, name, getattr(*own[0]))
                mesh.origins[:] = [(tensor, stored) for tensor, stored in mesh.origins if tensor is not dropped]
            ranks = sorted({model.place(stage) for stage in places})
            group = own_group(mesh.by_stage()[ranks].T) if len(ranks) > 1 else None
            if own and group is not None:
                self._here.append((getattr(*own[0]), group))
                self._numbers.append(number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tied:
        """Of a copied model: its parameters, the same ranks."""
        copied = copy(self)
        copied._here = [(deepcopy(parameter, memo), group) for parameter, group in self._here]  # noqa: SLF001
        return copied

    def held_before(self) -> list[Tensor]:
        """Those here that an earlier stage holds too."""
        return [parameter for parameter, group in self._here if dist.get_rank(group)]

    def sum_gradients(self) -> None:
        """Every holder gets the sum of all."""
        for parameter, group in self._here:
            given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece = local_piece(given)
            total = piece.to(self._device)
            dist.all_reduce(total, group=group)
            piece.copy_(total)
            parameter.grad = given if parameter.requires_grad else parameter.grad

    def check(self, mesh: Mesh, checksum: Callable[[Tensor], Tensor], *, go_on: bool = False) -> None:
        """Whether all holders have the same bits.

        Raises:
            RuntimeError: naming those that differ, on all ranks; to ``go_on`` all take the first holder's, with a
                warning.
        """
        names = self._differ(mesh, checksum)
        if not names:
            return
        told = (
            f"ranks-differ: {', '.join(names)} should be the same on several stages of this pipeline, and is not: "
            "noise that each stage draws for its own parameters, or another learning rate or a frozen copy on one. "
        )
        if not go_on:
            raise RuntimeError(told + "Load a checkpoint.")
        warnings.warn(told + "All go on with the first one's.", stacklevel=2)
        for number, (parameter, group) in zip(self._numbers, self._here, strict=True):
            if self.names[number] in names:
                piece = local_piece(parameter)
                first = piece.detach().to(self._device, copy=True)
                dist.broadcast(first, group=group, group_src=0)
                piece.data.copy_(first)

    def _differ(self, mesh: Mesh, checksum: Callable[[Tensor], Tensor]) -> list[str]:
        """Names of those whose holders differ, the same on all ranks."""
        if not self.names or mesh.stage.size == 1:
            return []
        differ = torch.zeros(len(self.names), dtype=torch.int64, device=self._device)
        for number, (parameter, group) in zip(self._numbers, self._here, strict=True):
            found = checksum(local_piece(parameter)).to(self._device)
            ends = torch.stack([found, -found])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            differ[number] = (ends[0] != -ends[1]).long()
        for axis in (*mesh.axes, mesh.stage):
            if axis.size > 1:
                dist.all_reduce(differ, dist.ReduceOp.MAX, group=axis.group)
        return [name for name, other in zip(self.names, differ.tolist(), strict=True) if other]
