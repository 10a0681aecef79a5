"""On an axis of size one every operator is the identity, and needs no process group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pdv.emit.templates import parallel
from pdv.emit.templates.parallel import Axis


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("partition", (1,)),
        ("combine", (1,)),
        ("replicate", ()),
        ("reduce", ()),
        ("all_gather", (0,)),
        ("reduce_scatter", (0,)),
        ("all_to_all", (0, 1)),
    ],
)
def test_identity_on_an_axis_of_size_one(name: str, dims: tuple[int, ...]) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    y: Tensor = getattr(parallel, name)(x, *dims, Axis("tp"))
    assert y is x


def test_an_uneven_cut_names_tensor_axis_and_mend() -> None:
    with pytest.raises(ValueError, match=r"uneven-cut: dim 1 of a tensor of shape \[2, 3\] over axis tp of size 2"):
        parallel.partition(torch.zeros(2, 3), 1, Axis("tp", size=2))


def test_regathering_leaves_other_tensors_alone() -> None:
    x = torch.arange(3.0, requires_grad=True)
    with saved_tensors_hooks(parallel.pack, parallel.unpack):
        y = (parallel.all_gather(x, 0, Axis("dp"), regather=True) ** 2).sum()
    (grad,) = torch.autograd.grad(y, x)
    assert torch.equal(grad, 2 * x.detach())
