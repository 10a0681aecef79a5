"""Norms of each sample's channels are read as such: in operators that are cut along the batch, with their state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program

_KINDS: dict[int, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    1: (nn.Conv1d, nn.InstanceNorm1d),
    2: (nn.Conv2d, nn.InstanceNorm2d),
    3: (nn.Conv3d, nn.InstanceNorm3d),
}


class Normed(nn.Module):
    """A layer of points, normed, and used so that gradients differ between samples."""

    def __init__(self, dims: int, **options: bool) -> None:
        super().__init__()
        kind, norm = _KINDS[dims]
        self.layer, self.norm = kind(2, 3, 1), norm(3, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x))
        return y.sin() * x[:, :1]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norms_are_cut_along_the_batch(dims: int, affine: bool, tracked: bool, train: bool) -> None:
    torch.manual_seed(0)
    module = Normed(dims, affine=affine, track_running_stats=tracked).train(train)
    x = torch.randn(4, 2, *(4, 3, 2)[:dims])
    program = load_program(module, x)
    assert check_reading(program.graph, copy_of(module, x, train=train), train=train).endswith("are the same")
    assert all(what.startswith("aten.convolution") for what in program.opaque)  # of volumes: along the samples
    assert len(program.graph.updates) == (2 if tracked and train else 0)
