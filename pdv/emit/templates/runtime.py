"""What surrounds the model: the mesh of this run, parameters from their stored slices, and one training step.

Stored tensors are read by ``stored.py``, gradients summed by ``gradients.py``; ``optimizers.py`` makes steps fast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .accumulate import Given, check_count, train_in_parts
from .calls import check_in_sync, check_inputs, watch_calls
from .checkpoints import full_gradients, full_state, load, save, whole_parts
from .gradients import GradientSums, Leaves, local
from .kernels.compiled import compile_parts
from .kernels.launched import check_world, world_size
from .kernels.named import Named, note_source
from .kernels.scaled import sum_gradients
from .losses import LossFn
from .optimizers import step_on_local_tensors
from .parallel import NONE, Axis, join_axes, lay_out, make_axis
from .rounding import Rounding
from .stored import Stored, Weights, join, placed_as
from .training import (
    Batch,
    Target,
    apply_to_all,
    check_names,
    clip_grad_norm,
    copy_model,
    seed_draws,
    self_check,
    shard_batch,
    start_processes,
    train_step,
)

__all__ = ["Mesh", "ParallelModule", "Weights", "join", "local", "make_mesh", "train_step"]

Shapes = Mapping[str, Sequence[int | str]]
Cuts = Mapping[str, Sequence[str]]
Bounds = Mapping[str, int]
Levels = Mapping[str, Sequence[int]]


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
    levels: Levels = field(default_factory=dict, compare=False)
    own_sums: Sequence[str] = ()
    stage: Axis = field(default_factory=partial(Axis, "stage"))
    """Where this rank stands in a pipeline; the axes are those of its stage."""
    ranks: DeviceMesh | None = None
    """All stages; one stage alone is the device mesh."""
    sums: GradientSums = field(default_factory=GradientSums, compare=False)
    rounding: Rounding | None = None  # of parameters, when they are read

    def __getitem__(self, name: str | tuple[str, ...]) -> Axis:
        """An axis, or several as one: ``mesh["dp", "tp"]``."""
        if isinstance(name, str):
            return next(axis for axis in (*self.axes, self.stage) if axis.name == name)
        if name not in self.joint:
            self.joint[name] = join_axes([self[one] for one in name], self.ranks, self.levels, self.own_sums)
        return self.joint[name]

    def by_stage(self) -> Tensor:
        """Ranks, [stages, those of each]."""
        assert self.ranks is not None, "of pipelines"
        return self.ranks.mesh.view(self.stage.size, -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Of a copied model: the same ranks, the tensors of the copy, and sums of its own."""
        return replace(self, **{name: deepcopy(getattr(self, name), memo) for name in ("origins", "sums", "rounding")})

    def alone(self) -> Mesh:
        """A mesh of this process, with the same axes."""
        rounding = self.rounding and Rounding(self.rounding.dtype, self.rounding.device)
        return Mesh(tuple(Axis(axis.name) for axis in self.axes), self.device, rounding=rounding)

    def tensor(self, stored: Stored, cuts: Mapping[str, int] | None = None) -> Tensor:
        """The piece of a stored tensor that this rank holds; ``cuts`` maps an axis to the dim that it shards."""
        cuts = cuts or {}
        for axis in self.axes:  # outer axis first
            if axis.name in cuts:
                stored = stored.cut(cuts[axis.name], axis)
        return stored.read(self.device)

    def parameter(self, stored: Stored, cuts: Mapping[str, int] | None = None) -> nn.Parameter:
        """A trainable parameter: a DTensor on a mesh, a plain tensor on one process."""
        rests = stored.dtype or (self.rounding.rests if self.rounding else None)
        piece = self.tensor(replace(stored, dtype=rests), cuts)
        kept = self.rounding.on_host(piece) if self.rounding else piece
        if self.device_mesh is not None:
            dims = [(cuts or {}).get(axis.name) for axis in self.axes]
            placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
            here = DTensor.from_local(piece, self.device_mesh, placements, run_check=False)
            kept = placed_as(here, kept, self.device_mesh)
        parameter = nn.Parameter(kept)
        note_source(parameter, stored)
        if self.device_mesh is not None:
            parameter.leaves = Leaves(self.sums, cuts or {})  # type: ignore[attr-defined]
        if self.rounding is not None:
            self.rounding.mark([parameter])
        self.origins.append((parameter, stored))
        return parameter

    def buffer(self, stored: Stored) -> nn.Buffer:
        """A tensor that is saved with the model but not trained, the same on every rank."""
        buffer = nn.Buffer(self.tensor(stored))
        self.origins.append((buffer, stored))
        return buffer


def make_mesh(
    sizes: Mapping[str, int],
    device: str | torch.device | None = None,
    *,
    stages: int = 1,
    ranks: Sequence[int] = (),
    levels: Levels = NONE,
    own_sums: Sequence[str] = (),
    bucket_mb: float | None = None,
    compute: torch.dtype | None = None,
    offload: bool = False,
) -> Mesh:
    """The mesh of the process group, or of what torchrun started; a single process gets every axis with size one.

    stages: of a pipeline, each on a mesh of its own. On as many processes as one has, all stages are on each.
    ranks: which processes are the first stage, the second, and so on, ascending in each; default is in order.
    levels: of axes that run through links of different speeds, the sizes of their levels, slow to fast, such as hosts
    and devices of one: ``{"dp": (2, 4), "dp_tp": (2, 4)}``. Sums over such an axis take its levels one by one.
    own_sums: axes along which gradients are summed in groups of their own, beside other collectives.
    bucket_mb: how many MiB of gradients are summed at once; default is 25.
    compute: to what parameters, which rest in float32, are rounded when they are read; default is no rounding.
    offload: parameters rest in the host's memory, where the optimizer steps; the device has copies to compute with.

    Raises:
        RuntimeError: if the number of processes is neither one nor that of the mesh, or the environment is half set.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    world, inside = world_size(), math.prod(sizes.values())
    offload = offload and kind.type != "meta"
    if world == 1:
        seed_draws(torch.initial_seed() % 2**63)
        return Mesh(tuple(Axis(name) for name in sizes), kind, rounding=Rounding.of(compute, kind if offload else None))
    check_world(world, sizes, stages)
    kind = start_processes(kind)
    step_on_local_tensors()
    outer = {"stage": world // inside} if world > inside else {}
    every = lay_out({**outer, **sizes}, ranks if outer else (), kind)
    axes = {name: make_axis(every, name, levels, own_sums) for name in (*outer, *sizes)}
    stage = axes.pop("stage") if outer else Axis("stage")
    mesh = (every[tuple(sizes)] if sizes else None) if outer else every
    rounding = Rounding.of(compute, kind if offload else None)
    sums = GradientSums(mesh, int((bucket_mb or 25) * 2**20), rounding if offload else None)
    return Mesh(tuple(axes.values()), kind, mesh, [], {}, levels, own_sums, stage, every, sums, rounding)


class ParallelModule(Named):
    """A sharded model.

    batch_axes: slow to fast, those along which its outputs are cut by rows.
    inputs: the whole shape of each; a name instead of a number is a size that may be any, the same wherever it stands.
    cuts: the axes that cut such a size, by name: it is a multiple of theirs.
    most: the largest that such a size may be, by name.
    own_types: inputs of floats that are taken as they are; others are cast to what the model computes in.
    micro_batches: in which a step takes the batch, one after the other.
    joined: what puts rows together, so that no step takes a batch in parts; nothing if each is by itself.
    check_every: every so many calls, ``train_step`` calls ``check_in_sync``; 0 is never.
    own_loss: outside of ``train_step``, of whose gradients ranks have parts: "mean", where each takes the mean of its
    own rows' losses, or "sum", where losses of ranks add up; None, not said, refuses backward if the batch is cut.
    """

    def __init__(
        self,
        mesh: Mesh,
        batch_axes: Sequence[str],
        inputs: Shapes = NONE,
        cuts: Cuts = NONE,
        most: Bounds = NONE,
        micro_batches: int = 1,
        own_types: Sequence[str] = (),
        joined: str = "",
    ) -> None:
        super().__init__()
        self.mesh, self.micro_batches, self.takes, self.own_types = mesh, micro_batches, tuple(inputs), own_types
        ways = {size: math.prod(mesh[name].size for name in names) for size, names in cuts.items()}
        self.check_sizes = partial(check_inputs, inputs, ways, most)
        self.register_forward_pre_hook(self.check_sizes, with_kwargs=True)
        if mesh.rounding is not None:
            self.register_forward_pre_hook(mesh.rounding.mark_others)
        self.batch_axes = tuple(mesh[name] for name in batch_axes)
        self.check_every, self._steps, self.calls, self.evaluation, self.joined = 0, 0, 0, watch_calls(self), joined
        self.own_loss: Literal["mean", "sum"] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """On the same ranks, with parameters and buffers of its own, and without gradients, as of any module."""
        return copy_model(self, memo)

    def train_step(
        self,
        inputs: Batch,
        target: Target,
        loss_fn: LossFn,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        rows: Literal["global", "local"] = "global",
        micro_batches: int | None = None,
    ) -> Tensor:
        """Forward, loss and backward on one batch; the loss of the whole batch, detached, the same on every rank.

        ``loss_fn(output, target)`` sees this rank's rows and returns ``(sum, weight)``: of their losses, and of what
        they weigh, such as the tokens that are not padding. The loss is all sums over all weights; of a list of pairs,
        these means are added. A loss of torch, such as ``nn.CrossEntropyLoss()`` with its mean or sum, may be given as
        it is, and any loss where the batch is not cut. With ``reduction="sum"`` the loss is all sums, or plain scalars.

        Inputs may be a mapping by their names; ``loss_fn`` gets rows of a target in the form that it has: a tensor,
        several, a mapping, or None.

        Every rank passes the whole batch, or with ``rows="local"`` its own block of rows. Gradients add up over calls,
        each of which takes its own mean. For one mean over several calls, return the sum over the weight of all of
        them, with ``reduction="sum"``.

        A model that was planned for micro-batches, or is given a number of them, takes the batch in equal parts, and
        ``loss_fn`` sees the rows of one and returns one pair.
        """
        self._steps += 1
        if self.check_every and self._steps % self.check_every == 0:
            self.check_in_sync()
        check_count(self, count := self.micro_batches if micro_batches is None else micro_batches, rows)
        if count == 1 and self.mesh.stage.size == 1:
            return train_step(self, inputs, target, loss_fn, self.batch_axes, reduction=reduction, rows=rows)
        return train_in_parts(self, inputs, target, loss_fn, count, reduction=reduction, rows=rows)

    def run_given(self, given: Given) -> Tensor:
        """Run a batch; its loss."""
        return given.run(self, partial(self.run_batches, given))

    def run_batches(self, given: Given) -> None:
        """Forward and backward of each micro-batch; gradients are summed behind the last."""
        *held, last = range(len(given.batches))
        with self.mesh.sums.hold_quietly():
            for number in held:
                given.go_through(self, number)
        given.go_through(self, last)

    @property
    def data_world(self) -> int:
        """In how many blocks of rows the batch is cut: ``num_replicas`` of a ``DistributedSampler``."""
        return math.prod(axis.size for axis in self.batch_axes)

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        rank = 0
        for axis in self.batch_axes:
            rank = rank * axis.size + axis.rank
        return rank

    def shard_batch(self, batch: Any) -> Any:  # Any: tensors in dicts, lists and tuples
        """The rows of this rank, of every tensor of a whole batch; for ``train_step(..., rows="local")``."""
        return shard_batch(batch, self.batch_axes)

    def sum_over_data(self, parameters: Iterable[Tensor]) -> None:
        """From now on, each backward pass sums gradients of parameters of your own as ``own_loss`` has it."""
        sum_gradients(self, parameters)

    def own_parameters(self) -> Sequence[Tensor]:
        """Of parameters that several stages hold, one: what a sum over stages counts."""
        return list(self.parameters())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` of all parameters of all stages, in a few collectives."""
        return clip_grad_norm(self, max_norm, norm_type, must_be_finite=error_if_nonfinite)

    def check_in_sync(self) -> None:
        """Compare checksums of parameters and buffers between the ranks that hold the same ones.

        Raises:
            RuntimeError: naming those that differ.
        """
        check_in_sync(self)

    def self_check(
        self, inputs: Batch, target: Target, loss_fn: LossFn, *, tolerance: float = 1e-3
    ) -> dict[str, float]:
        """Relative differences of loss, gradient norm and gradients from the same model on one device.

        Every rank runs the whole model on the whole batch, so both must fit. Weights and buffers are left as they were.

        Raises:
            RuntimeError: if one is larger than ``tolerance``, or there are gradients already.
        """
        return self_check(self, inputs, target, loss_fn, tolerance)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of backward passes whose gradients wait for the next one outside it, or for ``flush``.

        All but the last before a step go inside. ``zero_grad`` of the model drops what waits, an optimizer's does not.
        """
        return self.mesh.sums.hold()

    def flush(self) -> None:
        """Sum all gradients that wait. All ranks must call it."""
        self.mesh.sums.flush()

    def parameters_in_graph(self) -> AbstractContextManager[None]:
        """Context of forward passes after which ``torch.autograd.grad`` knows the parameters; sums are slower there."""
        return self.mesh.sums.without_leaves()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that were not summed yet are dropped."""
        self.mesh.sums.scaling.look(self.parameters())
        self.mesh.sums.drop()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module: what ``state_dict()`` of this program gave, of this rank; ValueError of other names."""
        check_names(self, state_dict, assign=assign)
        return super().load_state_dict(state_dict, strict, assign)

    def compile(self, **options: Any) -> None:
        """As of any module, part by part (compiled.py)."""
        compile_parts(self, **options)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:  # Any: itself, as of any module
        """As of any module; RuntimeError if nothing changed, as by what looks for modules of the source."""
        return apply_to_all(self, fn, super().apply)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer, whole, under all names and in the layout of the source model.

        All ranks must call it, else RuntimeError, and each gets all of the model, what it does not read as it was
        stored. A program for inference that holds values computed of weights in their place raises a ValueError.
        """
        return full_state(self)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, whole, under all names of the source; zero of what is not read."""
        return full_gradients(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights from whole tensors under the source's names, such as its ``state_dict()``.

        Raises:
            ValueError: naming a tensor that is missing, or of another shape; then all stays as it was.
        """
        load(self, state)

    def save_safetensors(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9, overwrite: bool = False
    ) -> None:
        """Write all weights as safetensors files under the source's names, as ``from_pretrained`` reads them.

        All ranks must call it; rank 0 writes. One tensor at a time is whole in memory. Where a file would be larger
        than ``max_shard_bytes`` there are several, and an index. They appear together or not at all.

        Raises:
            OSError: on all ranks, if it could not be written, or there are such files and they are not to be replaced.
            ValueError: as ``full_state_dict``.
        """
        save(self, folder, max_shard_bytes, overwrite=overwrite)

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Take weights, under the source's names, from a safetensors file, the index of several, or their folder.

        Each rank reads the part that it holds; ValueError as of ``load_full_state_dict``.
        """
        load(self, path)

    def whole(self, read: Callable[[Tensor], Tensor | None], *, rest: bool) -> dict[str, Tensor]:
        """What ``read`` gives of each parameter and buffer, whole, by the names under which they are stored."""
        return {name: tensor for part in self.whole_parts(read, rest=rest) for name, tensor in part.items()}

    def whole_parts(self, read: Callable[[Tensor], Tensor | None], *, rest: bool) -> Iterator[dict[str, Tensor]]:
        """As ``whole``, one stored tensor after the other; all ranks must take all."""
        return whole_parts(self, read, rest=rest)
