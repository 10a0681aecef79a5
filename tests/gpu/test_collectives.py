"""The collectives of parallel.py on the device's own backend, over a group of one: NCCL on a GPU, gloo on a CPU.

A group of one proves nothing about sums (tests/distributed does, on CPU); it shows that the calls exist in this torch,
take this device's tensors with any dtype and strides, and give them back in place and shape.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pdv.emit.templates import parallel
from pdv.emit.templates.gathers import Unit, gather, regathering
from pdv.emit.templates.gradients import GradientSums, Leaves
from pdv.emit.templates.kernels import remembered
from pdv.emit.templates.parallel import Axis

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def axis(device: torch.device, tmp_path: Path) -> Iterator[Axis]:
    """An axis of one rank with a process group."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Axis("dp", 1, 0, dist.group.WORLD)
    dist.destroy_process_group()


def strided(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A [4, 6, 2] tensor that is not row-major."""
    return torch.arange(48, device=device).to(dtype).reshape(2, 6, 4).permute(2, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_over_one_rank_are_the_identity(dtype: torch.dtype, device: torch.device, axis: Axis) -> None:
    x = strided(device, dtype)
    for dim in range(3):
        results = (
            parallel._all_gather(x, dim, axis),
            parallel._reduce_scatter(x, dim, axis),
            parallel._all_to_all(x, dim, (dim + 1) % 3, axis),
            parallel.own_block(x, dim, axis),
        )
        for result in (*results, parallel._all_reduce(x, axis)):
            torch.testing.assert_close(result, x, rtol=0, atol=0)
            assert result.is_contiguous()
            assert result.data_ptr() != x.data_ptr()


def test_a_gathered_weight_is_dropped_and_gathered_again(device: torch.device, axis: Axis) -> None:
    """What `remember` notes on a larger axis, noted by hand: memory goes after forward, gradients are right."""
    shard = torch.randn(256, 64, device=device, requires_grad=True)
    x = torch.randn(8, 64, device=device, requires_grad=True)
    grad = torch.randn(8, 256, device=device)
    with saved_tensors_hooks(remembered.pack, remembered.unpack):
        whole = parallel._apply(
            shard, lambda t: parallel._all_gather(t, 0, axis), lambda g: parallel._reduce_scatter(g, 0, axis)
        )
        memory = torch.multiprocessing.reductions.StorageWeakRef(whole.untyped_storage())  # type: ignore[no-untyped-call]
        remembered.remember([(whole, parallel._Gathered(shard.detach(), 0, axis, shard._version))])
        y = torch.nn.functional.linear(x, whole)
    del whole
    parallel._all_reduce(grad, axis)  # gloo's thread lets go of a collective's tensors when it takes up the next one
    gc.collect()
    assert memory.expired()  # type: ignore[no-untyped-call]
    torch.autograd.backward(y, grad)
    with torch.no_grad():
        expected = (grad @ shard, grad.T @ x)
    torch.testing.assert_close((x.grad, shard.grad), expected)


def test_weights_gathered_at_once_have_the_gradients_of_whole_ones(device: torch.device, axis: Axis) -> None:
    """Two units, the second one ahead of use from the second pass on; on a GPU by streams of NCCL."""
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    sums = GradientSums(mesh)
    plain = [torch.randn(64, 64, device=device, requires_grad=True) for _ in range(4)]
    weights = [
        torch.nn.Parameter(DTensor.from_local(w.detach().clone(), mesh, [Shard(n % 2)], run_check=False))
        for n, w in enumerate(plain)
    ]
    for n, weight in enumerate(weights):
        weight.leaves = Leaves(sums, {"dp": n % 2})  # type: ignore[attr-defined]
    for first in (0, 2):
        Unit(axis, [w for w in weights[first : first + 2] if isinstance(w, DTensor)])
    for _ in range(3):
        x = torch.randn(8, 64, device=device)
        with regathering():
            y = x
            for n, weight in enumerate(weights):
                y = torch.tanh(torch.nn.functional.linear(y, gather(weight, n % 2, axis)))
        wanted = x
        for w in plain:
            wanted = torch.tanh(torch.nn.functional.linear(wanted, w))
        torch.testing.assert_close(y, wanted)
        torch.autograd.backward([y.sum(), wanted.sum()])
        for weight, w in zip(weights, plain, strict=True):
            assert isinstance(weight.grad, DTensor)
            torch.testing.assert_close(weight.grad.to_local(), w.grad)
            weight.grad = w.grad = None
