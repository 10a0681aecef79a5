"""What one rank sees of a training step of a package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pdv.plan.package import import_package

Observed = tuple[tuple[int, int], Tensor, dict[str, Tensor]]


def observe_step(folder: Path, *x: Tensor) -> Observed:
    """(this rank's block, of how many), the rows that it returns, and the gradients of whole weights by name."""
    model = import_package(folder).build(device="cpu")
    count, index = 1, 0
    for axis in model.batch_axes:
        count, index = count * axis.size, index * axis.size + axis.rank
    y = model(*x)
    model.train_step(x if len(x) > 1 else x[0], torch.zeros_like(x[0]), lambda y, _: (y.square().sum(), float(len(y))))
    return (index, count), y.detach(), model.full_gradients()
