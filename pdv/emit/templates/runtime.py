"""What surrounds the model: the mesh of this run, parameters from their stored slices, and one training step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .losses import LossFn, batch_loss, check_rows, combine_rows, own_rows
from .parallel import Axis, combine, join_axes, replicate

Batch = Tensor | Sequence[Tensor]
Shapes = Mapping[str, Sequence[int | str]]
Cuts = Mapping[str, Sequence[str]]
Bounds = Mapping[str, int]
NONE: Mapping[str, Any] = {}


# ---- The mesh ----


@dataclass(frozen=True)
class Mesh:
    """The named axes of this run, slow to fast; on one process each has size one and there is no device mesh."""

    axes: tuple[Axis, ...]
    device: torch.device
    device_mesh: DeviceMesh | None = None
    origins: list[tuple[Tensor, Stored]] = field(default_factory=list, compare=False)
    """Which stored tensor each parameter and buffer is (a view of)."""
    joint: dict[tuple[str, ...], Axis] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str | tuple[str, ...]) -> Axis:
        """An axis, or several as one: ``mesh["dp", "tp"]``."""
        if isinstance(name, str):
            return next(axis for axis in self.axes if axis.name == name)
        if name not in self.joint:
            self.joint[name] = join_axes([self[one] for one in name], self.device_mesh)
        return self.joint[name]

    def tensor(self, stored: Stored, cuts: Mapping[str, int] | None = None) -> Tensor:
        """The piece of a stored tensor that this rank holds; ``cuts`` maps an axis to the dim that it shards."""
        cuts = cuts or {}
        for axis in self.axes:  # outer axis first
            if axis.name in cuts:
                stored = stored.cut(cuts[axis.name], axis)
        return stored.read(self.device)

    def parameter(self, stored: Stored, cuts: Mapping[str, int] | None = None) -> nn.Parameter:
        """A trainable parameter: a DTensor on a mesh, a plain tensor on one process."""
        piece = self.tensor(stored, cuts)
        if self.device_mesh is not None:
            dims = [(cuts or {}).get(axis.name) for axis in self.axes]
            placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
            piece = DTensor.from_local(piece, self.device_mesh, placements, run_check=False)
        parameter = nn.Parameter(piece)
        self.origins.append((parameter, stored))
        return parameter

    def buffer(self, stored: Stored) -> nn.Buffer:
        """A tensor that is saved with the model but not trained, the same on every rank."""
        buffer = nn.Buffer(self.tensor(stored))
        self.origins.append((buffer, stored))
        return buffer


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
    """A safetensors file; ``weights[name]`` names a stored tensor without reading it.

    dtype: what floating-point tensors are read as; default is as they are stored.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        self.file: Any = safe_open(str(path), framework="pt", device="cpu")  # Any: safetensors ships no types
        self.dtype = dtype

    def __getitem__(self, name: str) -> Stored:
        dims = tuple((d, 0, n) for d, n in enumerate(self.file.get_slice(name).get_shape()))
        return Stored(self.file, name, dims, self.dtype)


@dataclass(frozen=True)
class Stored:
    """A view of a stored tensor: per dim of the view, (dim of the stored tensor, start, stop).

    What is reshaped or joined is a view of ``base``, whose dims in turn are those of the reshaped or joined tensor.
    """

    file: Any  # an open safetensors file
    name: str
    dims: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype | None = None
    base: Stored | Joined | None = None
    base_shape: tuple[int, ...] = ()

    def permute(self, *perm: int) -> Stored:
        """As ``Tensor.permute``."""
        return replace(self, dims=tuple(self.dims[dim] for dim in perm))

    def reshape(self, *shape: int) -> Stored:
        """As ``Tensor.reshape``; what is cut from it is cut after reading the whole."""
        dims = tuple((dim, 0, size) for dim, size in enumerate(shape))
        return replace(self, dims=dims, base=self, base_shape=shape)

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

    def read(self, device: torch.device) -> Tensor:
        """The values, row-major, in memory of their own."""
        view = self.view()
        dtype = self.dtype if self.dtype is not None and view.is_floating_point() else view.dtype
        return torch.empty(view.shape, dtype=dtype, device=device).copy_(view)

    def view(self) -> Tensor:
        """The values as they are stored."""
        ranges = self._ranges()
        if self.base is not None:
            piece = self.base.view().reshape(self.base_shape)[ranges]
        else:
            piece = self.file.get_slice(self.name)[ranges] if ranges else self.file.get_tensor(self.name)
        return piece.permute([source for source, _, _ in self.dims])

    def write(self, value: Tensor, wholes: dict[str, Tensor], *, rest: bool) -> None:
        """Put ``value``, all of this view, where it belongs in the stored tensors, by name.

        Of what is new, the ``rest`` is as it is stored, or else zero.
        """
        value = value.permute([[source for source, _, _ in self.dims].index(dim) for dim in range(len(self.dims))])
        if self.base is not None:
            self.base.write(value.reshape(self.base.shape), wholes, rest=rest)
            return
        if self.name not in wholes:
            whole = value.new_zeros(self.file.get_slice(self.name).get_shape())
            partial = rest and value.numel() < whole.numel()
            wholes[self.name] = whole.copy_(self.file.get_tensor(self.name)) if partial else whole
        wholes[self.name][self._ranges()].copy_(value)

    @property
    def shape(self) -> list[int]:
        """Of the view."""
        return [stop - start for _, start, stop in self.dims]

    def _ranges(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for _, start, stop in sorted(self.dims))


@dataclass(frozen=True)
class Joined:
    """Views of stored tensors, one behind another along ``dim``."""

    parts: tuple[Stored, ...]
    dim: int

    @property
    def shape(self) -> list[int]:
        """Of all together."""
        shape = self.parts[0].shape
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return shape

    def view(self) -> Tensor:
        """The values as they are stored."""
        return torch.cat([part.view() for part in self.parts], self.dim)

    def write(self, value: Tensor, wholes: dict[str, Tensor], *, rest: bool) -> None:
        """As ``Stored.write``."""
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, piece in zip(self.parts, torch.split(value, sizes, self.dim), strict=True):
            part.write(piece, wholes, rest=rest)


def join(dim: int, *parts: Stored) -> Stored:
    """Several stored tensors as one, as ``torch.cat``."""
    joined = Joined(parts, dim)
    dims = tuple((d, 0, size) for d, size in enumerate(joined.shape))
    names = " and ".join(part.name for part in parts)
    return Stored(parts[0].file, names, dims, parts[0].dtype, joined, tuple(joined.shape))


def local(parameter: Tensor, *axes: Axis) -> Tensor:
    """The piece of a parameter that this rank holds, for the forward pass; its gradient is the same piece.

    Along ``axes`` each rank uses it differently, as of different data: there its gradients are summed.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=parameter.placements)
    for axis in axes:
        parameter = replicate(parameter, axis)
    return parameter


# ---- Training ----


class ParallelModule(nn.Module):
    """A sharded model.

    batch_axes: slow to fast, those along which its outputs are cut by rows.
    inputs: the whole shape of each; a name instead of a number is a size that may be any, the same wherever it stands.
    cuts: the axes that cut such a size, by name: it is a multiple of theirs.
    most: the largest that such a size may be, by name.
    """

    def __init__(
        self, mesh: Mesh, batch_axes: Sequence[str], inputs: Shapes = NONE, cuts: Cuts = NONE, most: Bounds = NONE
    ) -> None:
        super().__init__()
        self.mesh = mesh
        ways = {size: math.prod(mesh[name].size for name in names) for size, names in cuts.items()}
        self.register_forward_pre_hook(partial(_check_inputs, inputs, ways, most), with_kwargs=True)
        self.batch_axes = tuple(mesh[name] for name in batch_axes)

    def train_step(
        self,
        inputs: Batch,
        target: Batch,
        loss_fn: LossFn,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        rows: Literal["global", "local"] = "global",
    ) -> Tensor:
        """Forward, loss and backward on one batch; the loss of the whole batch, detached, the same on every rank.

        ``loss_fn(output, target)`` sees this rank's rows and returns ``(sum, weight)``: of their losses, and of what
        they weigh, such as the tokens that are not padding. The loss is all sums over all weights; of a list of pairs,
        these means are added. A loss of torch that takes a mean, such as ``nn.CrossEntropyLoss()``, may be given as it
        is, and any loss where the batch is not cut. With ``reduction="sum"`` the loss is all sums, or plain scalars.

        Every rank passes the whole batch, or with ``rows="local"`` its own block of rows. Gradients add up over calls,
        each of which takes its own mean. For one mean over several calls, return the sum over the weight of all of
        them, with ``reduction="sum"``.
        """
        return train_step(self, inputs, target, loss_fn, self.batch_axes, reduction=reduction, rows=rows)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer, whole, under the name and in the layout of the source model.

        All ranks must call it, and each gets all of the model. What the program does not read is as it was stored.
        """
        return self._whole(lambda tensor: tensor.detach(), rest=True)

    def full_gradients(self) -> dict[str, Tensor]:
        """As ``full_state_dict``, of the gradients that there are; they are zero of what the program does not read."""
        return self._whole(lambda tensor: tensor.grad, rest=False)

    @torch.no_grad()
    def _whole(self, read: Callable[[Tensor], Tensor | None], *, rest: bool) -> dict[str, Tensor]:
        held = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        found: dict[str, Tensor] = {}
        for tensor, stored in self.mesh.origins:
            if id(tensor) not in held:
                raise RuntimeError(
                    f"replaced-tensor: {stored.name} is no longer what build made of it. "
                    "Parameters and buffers must be changed in place. Give build the device and the dtype."
                )
            value = read(tensor)
            if value is None:
                continue
            if isinstance(value, DTensor):
                value = self._combine(value)
            stored.write(value, found, rest=rest)
        return found

    def _combine(self, x: DTensor) -> Tensor:
        """All of a parameter: as ``full_tensor``, by this file's own collectives."""
        piece = x.to_local()
        for axis, placement in reversed(list(zip(self.mesh.axes, x.placements, strict=True))):  # inner axis first
            if isinstance(placement, Shard):
                piece = combine(piece, placement.dim, axis)
        return piece


def train_step(
    model: nn.Module,
    inputs: Batch,
    target: Batch,
    loss_fn: LossFn,
    batch_axes: Sequence[Axis],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    rows: Literal["global", "local"] = "global",
) -> Tensor:
    """As ``ParallelModule.train_step``, of any model.

    ``batch_axes``, slow to fast, are those along which its output is Shard(0); along the others it is Invariant. With
    ``rows="local"`` ranks that differ only along the others pass the same rows.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if rows == "local":
        check_rows(inputs, batch_axes)
        inputs = [combine_rows(x, batch_axes) for x in inputs]
    elif isinstance(target, Tensor):
        target = own_rows(target, batch_axes)
    else:
        target = [own_rows(y, batch_axes) for y in target]
    loss = batch_loss(loss_fn, model(*inputs), target, batch_axes, reduction)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _check_inputs(
    wanted: Shapes, ways: Bounds, most: Bounds, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Sizes that a program names are those of its inputs.

    Raises:
        ValueError: if an input has others.
    """
    del model
    named: dict[str, int] = {}
    given = {**dict(zip(wanted, args, strict=False)), **kwargs}
    for name, shape in wanted.items():
        sizes = list(given[name].shape) if name in given else []
        for size, found in zip(shape, sizes, strict=False):
            if isinstance(size, str):
                named.setdefault(size, found)
        allowed = [named.get(str(size), size) for size in shape]
        if name in given and sizes != allowed:
            form = f"[{', '.join(map(str, shape))}]"
            values = ", ".join(f"{size} = {found}" for size, found in named.items() if size in shape)
            raise ValueError(
                f"wrong-size: input {name} has shape {sizes}. This program takes {form}"
                + (f", and {values} here" if values else "")
                + ". Pass inputs of these sizes, or plan the model again at others."
            )
    for name, found in named.items():
        if found % ways.get(name, 1) or found > most.get(name, found):
            what = (
                f"up to {most[name]}" if found > most.get(name, found) else f"in multiples of {ways[name]}: it is cut"
            )
            raise ValueError(
                f"wrong-size: {name} = {found} in the shapes of the inputs. This program takes {name} {what}."
            )
