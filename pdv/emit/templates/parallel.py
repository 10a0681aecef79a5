"""The operators that move a tensor between its states along a mesh axis, each with its dual as gradient.

Along an axis a tensor is Shard(dim): each rank holds a block; Invariant: each rank computes the same whole;
Replicate: each rank uses a copy of the whole differently, so gradients are summands; or Partial: a summand.

    operator        forward                                   backward
    partition       Invariant  -> Shard(dim)   slice          all-gather
    combine         Shard(dim) -> Invariant    all-gather     slice
    replicate       Invariant  -> Replicate    nothing        all-reduce
    reduce          Partial    -> Invariant    all-reduce     nothing
    all_gather      Shard(dim) -> Replicate    all-gather     reduce-scatter    combine, then replicate
    reduce_scatter  Partial    -> Shard(dim)   reduce-scatter all-gather        reduce, then partition
    all_to_all      Shard(src) -> Shard(dst)   all-to-all     all-to-all        combine(src), then partition(dst)

Every operator acts on this rank's piece, is the identity on an axis of size one, and takes any dtype and any strides.
Cuts are even; a dim cut by two axes is cut by the outer (slower) axis first, and so combined by the inner one first.
What is gathered with ``regather=True`` inside ``regathering()`` is not kept for backward but gathered again (ZeRO-3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .kernels.compiled import outside
from .kernels.remembered import Shared, check_version, pack, remember, unpack

# torch 2.13 renamed both.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Axis:
    """One direction of the device mesh, as this rank sees it.

    levels: where links differ, axes that are this one together, slow to fast, such as hosts and the devices of one;
    sums then go through a slow level with the fewest bytes.
    sums: the same ranks in groups of their own, for sums of gradients, which other collectives need not wait for.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    levels: tuple[Axis, ...] = ()
    sums: Axis | None = None

    def __hash__(self) -> int:
        """Of the name alone: it is asked for each parameter that is read."""
        return hash(self.name)

    @property
    def of_sums(self) -> Axis:
        """For sums of gradients."""
        return self.sums or self

    def __deepcopy__(self, memo: Any) -> Axis:
        """Itself: a copy of a model runs on the same ranks."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is saved; TypeError of an axis of several ranks, whose group is there while these run."""
        if self.group is not None:
            raise TypeError(
                "cannot-pickle: a model on several ranks holds their process groups, which no file keeps. Save "
                "model.full_state_dict() or model.state_dict(), and build() the model again where it is read."
            )
        return self.__dict__


def join_axes(
    axes: Sequence[Axis],
    mesh: DeviceMesh | None,
    levels: Mapping[str, Sequence[int]] = NONE,
    own_sums: Collection[str] = (),
) -> Axis:
    """Several axes, slow to fast, as one; every rank has to ask for the same ones in the same order.

    levels: sizes of an axis' levels, slow to fast, by name of the axis, such as ``{"dp_tp": (2, 4)}``.
    own_sums: names of axes with groups of their own for sums of gradients.
    """
    name, size, rank, group = "_".join(axis.name for axis in axes), 1, 0, None
    for axis in axes:
        size, rank = size * axis.size, rank * axis.size + axis.rank
    if mesh is None or size == 1:
        return Axis(name, size, rank)
    places = [(mesh.mesh_dim_names or ()).index(axis.name) for axis in axes]
    ranks = mesh.mesh.movedim(places, list(range(-len(places), 0))).reshape(-1, size)
    if len(axes) == 1:
        group = axes[0].group
    elif size == mesh.size():
        group = dist.group.WORLD
    else:
        group = own_group(ranks)

    def over(group: dist.ProcessGroup | None) -> Axis:
        return Axis(name, size, rank, group, _split_levels(name, levels.get(name, ()), rank, ranks))

    return replace(over(group), sums=over(own_group(ranks))) if name in own_sums else over(group)


def lay_out(sizes: Mapping[str, int], ranks: Sequence[int], device: torch.device) -> DeviceMesh:
    """The axes of all processes, slow to fast, with ``ranks`` along them, or each at its number."""
    if not ranks:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return DeviceMesh(device.type, torch.tensor(ranks).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def make_axis(ranks: DeviceMesh, name: str, levels: Mapping[str, Sequence[int]], own_sums: Collection[str]) -> Axis:
    """One axis of all ranks; levels, own_sums: as ``join_axes``."""
    at = (ranks.mesh_dim_names or ()).index(name)
    axis = Axis(name, ranks.shape[at], (ranks.get_coordinate() or ())[at], ranks.get_group(name))
    return join_axes([axis], ranks, levels, own_sums) if name in levels or name in own_sums else axis


def _split_levels(name: str, sizes: Sequence[int], rank: int, ranks: Tensor) -> tuple[Axis, ...]:
    """An axis as several, slow to fast, of these sizes; ranks: [groups, axis.size]."""
    if not sizes:
        return ()
    if math.prod(sizes) != ranks.size(1):
        raise ValueError(
            f"wrong-levels: axis {name} of size {ranks.size(1)} has levels of sizes {tuple(sizes)}. "
            f"Their product must be {ranks.size(1)}. Mend them where the mesh is made, or leave them out."
        )
    found = []
    for at, size in enumerate(sizes):
        inner = math.prod(sizes[at + 1 :])
        rows = ranks.reshape(-1, size, inner).transpose(1, 2).reshape(-1, size)
        found.append(Axis(f"{name}.{at}", size, rank // inner % size, own_group(rows)))
    return tuple(level for level in found if level.size > 1)


def own_group(ranks: Tensor) -> dist.ProcessGroup:
    """The group that this process is in, of those that are the rows; every rank has to ask."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks.tolist())[0]  # type: ignore[no-untyped-call]
    return group


def partition(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Invariant -> Shard(dim): keep this rank's block."""
    return _move(x, axis, lambda t: own_block(t, dim, axis), lambda g: _all_gather(g, dim, axis))


def combine(x: Tensor, dim: int, axis: Axis, *, regather: bool = False) -> Tensor:
    """Shard(dim) -> Invariant: every rank gets the whole and goes on computing the same with it."""
    whole = _move(x, axis, lambda t: _all_gather(t, dim, axis), lambda g: own_block(g, dim, axis))
    return _remembered(whole, x, dim, axis) if regather else whole


def replicate(x: Tensor, axis: Axis) -> Tensor:
    """Invariant -> Replicate: from here each rank uses its copy differently (Megatron's f)."""
    return _move(x, axis, _same, lambda g: _all_reduce(g, axis))


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial -> Invariant: the sum of the ranks' terms (Megatron's g)."""
    return _move(x, axis, lambda t: _all_reduce(t, axis), _same)


def all_gather(x: Tensor, dim: int, axis: Axis, *, regather: bool = False) -> Tensor:
    """Shard(dim) -> Replicate: as combine, and each rank uses its copy of the whole differently."""
    whole = _move(x, axis, lambda t: _all_gather(t, dim, axis), lambda g: _reduce_scatter(g, dim, axis))
    return _remembered(whole, x, dim, axis) if regather else whole


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Partial -> Shard(dim): this rank's block of the sum."""
    return _move(x, axis, lambda t: _reduce_scatter(t, dim, axis), lambda g: _all_gather(g, dim, axis))


def all_to_all(x: Tensor, src: int, dst: int, axis: Axis) -> Tensor:
    """Shard(src) -> Shard(dst): gather along ``src`` and cut along ``dst`` in one exchange."""
    return _move(x, axis, lambda t: _all_to_all(t, src, dst, axis), lambda g: _all_to_all(g, dst, src, axis))


# ---- A linear map and its dual as one autograd function ----


class _Linear(torch.autograd.Function):
    """``forward`` with ``dual`` as its gradient; differentiable any number of times, as both are linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], dual: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.maps = dual, forward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(grad, *ctx.maps), None, None


def _move(x: Tensor, axis: Axis, forward: Callable[[Tensor], Tensor], dual: Callable[[Tensor], Tensor]) -> Tensor:
    return x if axis.size == 1 else _apply(x, forward, dual)


def _apply(x: Tensor, forward: Callable[[Tensor], Tensor], dual: Callable[[Tensor], Tensor]) -> Tensor:
    given = x, forward, dual
    return _outside(*given) if torch.compiler.is_compiling() else _Linear.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


_outside: Any = outside(_Linear.apply)  # a collective is waited for: nothing is lost


# ---- The collectives, on any dim; each returns a tensor of its own, row-major (empty_like keeps odd strides) ----


def _row_major(x: Tensor) -> Tensor:
    """A copy, one element behind another in memory, which is all that a process group takes."""
    return x.clone(memory_format=torch.contiguous_format)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def own_block(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's, as a copy: a view would keep the whole tensor alive until backward."""
    block = _block_size(x, dim, axis)
    return _row_major(x.narrow(dim, axis.rank * block, block))


def _all_gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    blocks = x.new_empty((axis.size, *x.shape))
    gather_single(blocks.view(-1), x.contiguous().view(-1), group=axis.group)
    return join_blocks(blocks, dim)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    total = _row_major(x)
    if not axis.levels:
        dist.all_reduce(total, group=axis.group)
        return total
    for _ in all_reduce_steps(total.view(-1), [axis]):
        pass
    return total


def all_reduce_steps(x: Tensor, axes: Sequence[Axis]) -> Iterator[bool]:
    """Sum ``x`` [n] over axes, fastest first, in place.

    It stops behind each collective that it starts, and waits for it when it goes on. Where it yields True, that is
    soon, and more is to be started.
    """
    for at, axis in reversed(list(enumerate(axes))):
        if len(axis.levels) > 1 and x.numel() >= axis.size:
            yield from _all_reduce_by_levels(x, axis.levels)
            continue
        work = dist.all_reduce(x, group=axis.group, async_op=True)
        yield at > 0
        work.wait()


def _all_reduce_by_levels(x: Tensor, levels: Sequence[Axis]) -> Iterator[bool]:
    """Each rank of the fastest level sums its part of ``x`` over the slower ones."""
    *slower, inner = levels
    rest = -x.numel() % inner.size
    whole = torch.cat([x, x.new_zeros(rest)]) if rest else x
    part = x.new_empty(whole.numel() // inner.size)
    work = scatter_single(part, whole, group=inner.group, async_op=True)
    yield True
    work.wait()
    yield from all_reduce_steps(part, slower)
    work = gather_single(whole, part, group=inner.group, async_op=True)
    yield False
    work.wait()
    if rest:
        x.copy_(whole[: x.numel()])


def _reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    blocks = _blocks(x, dim, axis)
    total = x.new_empty(blocks.shape[1:])
    scatter_single(total.view(-1), blocks.view(-1), group=axis.group)
    return total


def _all_to_all(x: Tensor, src: int, dst: int, axis: Axis) -> Tensor:
    sent = _blocks(x, dst, axis)
    received = x.new_empty(sent.shape)
    dist.all_to_all_single(received, sent, group=axis.group)
    return join_blocks(received, src)


def _blocks(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """[axis.size, *block]: the block for each rank, one after the other in memory."""
    split = (*x.shape[:dim], axis.size, _block_size(x, dim, axis), *x.shape[dim + 1 :])
    return x.view(split).movedim(dim, 0).contiguous()  # a dim can be split whatever the strides


def join_blocks(blocks: Tensor, dim: int) -> Tensor:
    """The blocks of all ranks, [axis.size, *block], one behind another along ``dim``."""
    return blocks.flatten(0, 1) if dim == 0 else torch.cat(blocks.unbind(), dim)


def _block_size(x: Tensor, dim: int, axis: Axis) -> int:
    if x.size(dim) % axis.size:
        raise ValueError(
            f"uneven-cut: dim {dim} of a tensor of shape {list(x.shape)} over axis {axis.name} of size {axis.size}. "
            f"Its size must be a multiple of {axis.size}. Pass inputs of another size; drop the last, smaller batch."
        )
    return x.size(dim) // axis.size


# ---- What is gathered again in backward ----


@dataclass(eq=False)
class _Gathered(Shared):
    """From its shard, which may itself be gathered along another axis."""

    shard: Any  # as ``pack`` has it
    dim: int
    axis: Axis
    version: int

    def make(self) -> Tensor:
        """See ``Shared``."""
        if isinstance(self.shard, Tensor):
            check_version(self.shard._version, self.version)  # noqa: SLF001
        return _all_gather(unpack(self.shard), self.dim, self.axis)


def _remembered(whole: Tensor, shard: Tensor, dim: int, axis: Axis) -> Tensor:
    if axis.size > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        remember([(whole, _Gathered(pack(shard.detach()), dim, axis, shard._version))])  # noqa: SLF001
    return whole
