"""operators.py: what torch computes in one call, where torch is right."""

from __future__ import annotations

import itertools

import pytest
import torch

from pdv.emit.templates.kernels.operators import (
    batch_norm,
    channel_mean,
    embedding_block,
    fused_batch_norm,
    per_channel,
)


@pytest.mark.parametrize("shape", [(4, 3, 5, 1), (4, 3, 1, 5), (1, 3, 5, 6), (4, 3, 5, 6), (4, 3, 2, 1, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_is_right_for_all_strides_of_its_gradient(shape: tuple[int, ...], training: bool) -> None:
    """torch's own is not, where a size is one: a gradient's strides then suit two layouts."""
    torch.manual_seed(0)
    channels = shape[1]
    mean, variance, weight, bias = (torch.rand(channels) for _ in range(4))
    x = torch.randn(shape, requires_grad=True)
    y = fused_batch_norm(x, mean.clone(), variance.clone(), weight, bias, training)
    if training:
        mean, variance = channel_mean(x, 1), channel_mean((x - per_channel(channel_mean(x, 1), x)).square(), 1)
    expected = batch_norm(x, mean, variance, weight, bias, 1e-5)
    assert torch.allclose(y, expected, atol=1e-5)
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(dim) for dim in range(len(shape))]
        gradient = torch.randn([shape[dim] for dim in order]).permute(back)
        (found,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, x, gradient, retain_graph=True)
        assert torch.allclose(found, wanted, atol=1e-4), order


@pytest.mark.parametrize("outside", [-1, 6])
def test_ids_outside_of_the_whole_table_fail_on_each_block(outside: int) -> None:
    table, ids = torch.randn(6, 2), torch.tensor([0, 5, 2])
    parts = [embedding_block(ids, table[3 * block :][:3], block, 2) for block in range(2)]
    assert torch.equal(parts[0] + parts[1], table[ids])
    for block in range(2):
        with pytest.raises(RuntimeError, match="ids outside of the table"):
            embedding_block(torch.tensor([0, outside]), table[:3], block, 2)
