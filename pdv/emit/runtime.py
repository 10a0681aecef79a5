"""What surrounds the model: the mesh of this run, parameters from their stored slices, and one training step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .parallel import Axis, combine, partition, reduce

Batch = Tensor | Sequence[Tensor]


# ---- The mesh ----


@dataclass(frozen=True)
class Mesh:
    """The named axes of this run, slow to fast; on one process each has size one and there is no device mesh."""

    axes: tuple[Axis, ...]
    device: torch.device
    device_mesh: DeviceMesh | None = None

    def __getitem__(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def tensor(self, stored: Stored, cuts: Mapping[str, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The piece of a stored tensor that this rank holds; ``cuts`` maps an axis to the dim that it shards."""
        cuts = cuts or {}
        for axis in self.axes:  # outer axis first
            if axis.name in cuts:
                stored = stored.cut(cuts[axis.name], axis)
        return stored.read(self.device, dtype)

    def parameter(
        self, stored: Stored, cuts: Mapping[str, int] | None = None, dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """A trainable parameter: a DTensor on a mesh, a plain tensor on one process."""
        piece = self.tensor(stored, cuts, dtype)
        if self.device_mesh is None:
            return nn.Parameter(piece)
        dims = [(cuts or {}).get(axis.name) for axis in self.axes]
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return nn.Parameter(DTensor.from_local(piece, self.device_mesh, placements, run_check=False))


def make_mesh(sizes: Mapping[str, int], device: str | torch.device | None = None) -> Mesh:
    """The mesh of the processes that torchrun started; a single process gets every axis with size one.

    Raises:
        RuntimeError: if the number of processes is neither one nor that of the mesh.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    world, wanted = int(os.environ.get("WORLD_SIZE", "1")), math.prod(sizes.values())
    if world == 1:
        return Mesh(tuple(Axis(name) for name in sizes), kind)
    if world != wanted:
        shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise RuntimeError(
            f"wrong-world-size: {world} processes for the mesh {shape}. It runs on {wanted}, or unsharded on 1. "
            f"Start it with torchrun and {wanted} processes in all, e.g. --nproc-per-node={wanted} on one machine."
        )
    if kind.type == "cuda":
        kind = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(kind)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    mesh = init_device_mesh(kind.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = (Axis(name, size, mesh.get_local_rank(name), mesh.get_group(name)) for name, size in sizes.items())
    return Mesh(tuple(axes), kind, mesh)


# ---- Weights: read lazily, and only the slice that this rank holds ----


class Weights:
    """A safetensors file; ``weights[name]`` names a stored tensor without reading it."""

    def __init__(self, path: str | Path) -> None:
        self.file: Any = safe_open(str(path), framework="pt", device="cpu")  # Any: safetensors ships no types

    def __getitem__(self, name: str) -> Stored:
        return Stored(self.file, name, tuple((d, 0, n) for d, n in enumerate(self.file.get_slice(name).get_shape())))


@dataclass(frozen=True)
class Stored:
    """A view of a stored tensor: per dim of the view, (dim of the stored tensor, start, stop)."""

    file: Any  # an open safetensors file
    name: str
    dims: tuple[tuple[int, int, int], ...]

    def permute(self, *perm: int) -> Stored:
        """As ``Tensor.permute``."""
        return replace(self, dims=tuple(self.dims[dim] for dim in perm))

    def narrow(self, dim: int, start: int, length: int) -> Stored:
        """As ``Tensor.narrow``."""
        source, first, stop = self.dims[dim]
        assert 0 <= start <= stop - first - length, f"{self.name}: [{start}, +{length}) of {stop - first}"
        cut = (source, first + start, first + start + length)
        return replace(self, dims=(*self.dims[:dim], cut, *self.dims[dim + 1 :]))

    def cut(self, dim: int, axis: Axis) -> Stored:
        """The block along ``dim`` that this rank holds."""
        _, start, stop = self.dims[dim]
        block, rest = divmod(stop - start, axis.size)
        assert rest == 0, f"{self.name}: dim {dim} of size {stop - start} over axis {axis.name} of size {axis.size}"
        return self.narrow(dim, axis.rank * block, block)

    def read(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The values, row-major; ``dtype`` replaces floating-point dtypes only."""
        ranges = [slice(start, stop) for _, start, stop in sorted(self.dims)]
        stored: Tensor = self.file.get_slice(self.name)[tuple(ranges)] if ranges else self.file.get_tensor(self.name)
        view = stored.permute([source for source, _, _ in self.dims])
        target = dtype if dtype is not None and view.is_floating_point() else view.dtype
        return torch.empty(view.shape, dtype=target, device=device).copy_(view)


def local(parameter: Tensor) -> Tensor:
    """The piece of a parameter that this rank holds, for the forward pass; its gradient is the same piece."""
    if isinstance(parameter, DTensor):
        piece: Tensor = parameter.to_local(grad_placements=parameter.placements)
        return piece
    return parameter


# ---- Training ----


def train_step(
    model: nn.Module,
    inputs: Batch,
    target: Batch,
    loss_fn: Callable[[Any, Any], Tensor],
    batch_axes: Sequence[Axis],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    rows: Literal["global", "local"] = "global",
) -> Tensor:
    """Forward, loss and backward on one batch; the loss of the global batch, detached, the same on every rank.

    ``batch_axes``, slow to fast, are those along which the output is Shard(0); along the others it is Invariant.
    ``loss_fn(output, target)`` must be a mean (or a sum: say so) over the batch's rows. Every rank passes the whole
    batch, or with ``rows="local"`` its own block of rows: the same on ranks that differ only along other axes.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if rows == "local":
        inputs = [_combine_rows(x, batch_axes) for x in inputs]
    elif isinstance(target, Tensor):
        target = _own_rows(target, batch_axes)
    else:
        target = [_own_rows(y, batch_axes) for y in target]
    loss = loss_fn(model(*inputs), target)
    if reduction == "mean":
        loss = loss / math.prod(axis.size for axis in batch_axes)  # each rank's share of the rows
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach()
    for axis in batch_axes:
        total = reduce(total, axis)
    return total


def _own_rows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = partition(x, 0, axis)
    return x


def _combine_rows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in reversed(axes):
        x = combine(x, 0, axis)
    return x
