"""``torch.distributed`` of a simulated rank: the collectives, exact, and strict where NCCL and gloo are.

Sums are taken in the order of ranks. Buffers must be contiguous and of one type, and sizes must fit exactly: what a
real backend would refuse, crash or hang on is a ``CollectiveError`` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdv.check.ranks import Call, CollectiveError, Group, World

_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_REDUCE = SimpleNamespace(SUM="sum", AVG="avg", MAX="max", MIN="min")


class Done:
    """The handle of an asynchronous collective, which is done already."""

    def wait(self) -> bool:
        """True."""
        return True


class Store:
    """In which ranks say what they are about to do; a rank that looks finds all doing as it does.

    Whether they do is seen in the collectives that follow, which here are named and compared.
    """

    def __init__(self) -> None:
        self._said = ""

    def set(self, key: str, value: str) -> None:
        """Say something."""
        del key
        self._said = value

    def check(self, keys: Sequence[str]) -> bool:
        """True: all are there."""
        del keys
        return True

    def get(self, key: str) -> bytes:
        """What this rank said last."""
        del key
        return self._said.encode()

    def delete_key(self, key: str) -> bool:
        """True: it is gone."""
        del key
        return True


class Distributed:
    """What ``import torch.distributed as dist`` gives one rank."""

    ReduceOp = _REDUCE
    ProcessGroup = Group

    def __init__(self, world: World[Any], rank: int) -> None:
        self._world = world
        self._rank = rank
        self._made = 0
        store = Store()
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)
        self.group = SimpleNamespace(WORLD=Group("all ranks", tuple(range(world.size))))

    def __getattr__(self, name: str) -> Any:
        # AttributeError, for programs ask for names that a version of torch may lack
        raise AttributeError(f"simulated ranks have no torch.distributed.{name}")

    # ---- Who is there ----

    def is_available(self) -> bool:
        """True."""
        return True

    def is_initialized(self) -> bool:
        """True: the ranks are there."""
        return True

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def get_rank(self, group: Group | None = None) -> int:
        """Where the rank stands in a group."""
        return self._group(group).ranks.index(self._rank)

    def get_world_size(self, group: Group | None = None) -> int:
        """How many ranks a group has."""
        return len(self._group(group).ranks)

    def barrier(self, group: Group | None = None, async_op: bool = False) -> Done | None:
        """Wait for all."""
        return self._meet("barrier", group, (), (), lambda calls: None, async_op)

    def new_subgroups_by_enumeration(self, ranks: Sequence[Sequence[int]]) -> tuple[Group, list[Group]]:
        """The group of this rank, and all; every rank has to call it, as it would have to make them."""
        self._made += 1  # groups of the same ranks are different ones
        groups = [Group(f"ranks {', '.join(map(str, found))} ({self._made})", tuple(found)) for found in ranks]
        self._meet("new_subgroups", None, tuple(groups), (), lambda calls: None, False)
        return next(group for group in groups if self._rank in group.ranks), groups

    # ---- Collectives ----

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False
    ) -> Done | None:
        """``tensor`` becomes the reduction over ranks."""

        def carry(calls: Sequence[Call]) -> None:
            total = _total([call.tensors[0] for call in calls], op)
            for call in calls:
                call.tensors[0].copy_(total)

        return self._meet("all_reduce", group, (_describe(tensor), op), (tensor,), carry, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Done | None:
        """``output_tensor``: every rank's ``input_tensor``, one after the other."""
        self._fits("all_gather", output_tensor, input_tensor, group)

        def carry(calls: Sequence[Call]) -> None:
            row = torch.cat([call.tensors[1].reshape(-1) for call in calls])
            for call in calls:
                call.tensors[0].view(-1).copy_(row)

        tensors = (output_tensor, input_tensor)
        return self._meet("all_gather", group, (_describe(input_tensor),), tensors, carry, async_op)

    all_gather_single = all_gather_into_tensor  # its name from torch 2.13 on

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False  # noqa: A002  # torch's name
    ) -> Done | None:  # fmt: skip
        """``output``: this rank's part of the reduction of ``input`` over ranks."""
        self._fits("reduce_scatter", input, output, group)

        def carry(calls: Sequence[Call]) -> None:
            total = _total([call.tensors[1] for call in calls], op).view(-1)
            for call, part in zip(calls, torch.split(total, output.numel()) if output.numel() else (), strict=False):
                call.tensors[0].view(-1).copy_(part)

        return self._meet("reduce_scatter", group, (_describe(input), op), (output, input), carry, async_op)

    reduce_scatter_single = reduce_scatter_tensor  # its name from torch 2.13 on

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,  # noqa: A002  # torch's name
        group: Group | None = None, async_op: bool = False,
    ) -> Done | None:  # fmt: skip
        """``output``: from each rank the part of its ``input`` that is for this one; parts are equal."""
        if output_split_sizes or input_split_sizes:
            raise CollectiveError("simulated ranks exchange equal parts only")
        parts = len(self._group(group).ranks)
        if output.numel() != input.numel() or output.dtype != input.dtype or (input.dim() and input.size(0) % parts):
            raise CollectiveError(
                f"all_to_all over {parts} ranks from {_describe(input)} into {_describe(output)} does not fit"
            )

        def carry(calls: Sequence[Call]) -> None:
            sent = [call.tensors[1].reshape(parts, -1).clone() for call in calls]
            for place, call in enumerate(calls):
                call.tensors[0].view(-1).copy_(torch.cat([row[place] for row in sent]))

        return self._meet("all_to_all", group, (_describe(input),), (output, input), carry, async_op)

    def broadcast(
        self, tensor: Tensor, src: int = 0, group: Group | None = None, async_op: bool = False
    ) -> Done | None:
        """``tensor`` becomes that of rank ``src`` (its number among all)."""

        def carry(calls: Sequence[Call]) -> None:
            value = calls[self._group(group).ranks.index(src)].tensors[0].clone()
            for call in calls:
                call.tensors[0].copy_(value)

        return self._meet("broadcast", group, (_describe(tensor), src), (tensor,), carry, async_op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Done | None:
        """``tensor_list``: every rank's ``tensor``."""
        if len(tensor_list) != len(self._group(group).ranks) or any(x.shape != tensor.shape for x in tensor_list):
            raise CollectiveError(f"all_gather of {_describe(tensor)} into {[_describe(x) for x in tensor_list]}")

        def carry(calls: Sequence[Call]) -> None:
            given = [call.tensors[0].clone() for call in calls]
            for call in calls:
                for target, value in zip(call.tensors[1:], given, strict=True):
                    target.copy_(value)

        return self._meet("all_gather list", group, (_describe(tensor),), (tensor, *tensor_list), carry, async_op)

    # ---- Inside ----

    def _group(self, group: Group | None) -> Group:
        return self.group.WORLD if group is None else group

    def _fits(self, name: str, whole: Tensor, part: Tensor, group: Group | None) -> None:
        ranks = len(self._group(group).ranks)
        if whole.numel() != ranks * part.numel() or whole.dtype != part.dtype:
            raise CollectiveError(
                f"{name} over {ranks} ranks between {_describe(part)} and {_describe(whole)} does not fit"
            )

    def _meet(
        self,
        name: str,
        group: Group | None,
        same: Hashable,
        tensors: tuple[Tensor, ...],
        carry: Callable[[Sequence[Call]], None],
        async_op: bool,
    ) -> Done | None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise CollectiveError(f"{name}: tensors must be contiguous, not of strides {tuple(tensor.stride())}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise CollectiveError(f"{name} of a tensor that requires a gradient: autograd does not see through it")

        def exact(calls: Sequence[Call]) -> None:
            with torch.no_grad():
                carry(calls)

        self._world.meet(self._group(group), self._rank, Call(name, same, tensors), exact)
        return Done() if async_op else None


def _total(tensors: Sequence[Tensor], op: str) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _SUMS[op](total, tensor)
    return total / len(tensors) if op == "avg" else total


def _describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} of {str(tensor.dtype).removeprefix('torch.')}"


class DeviceMesh:
    """The device mesh of a simulated rank."""

    def __init__(self, rank: int, sizes: Sequence[int], names: Sequence[str]) -> None:
        self.shape = tuple(sizes)
        self.mesh_dim_names = tuple(names)
        self._rank = rank

    @property
    def mesh(self) -> Tensor:
        """The ranks, row-major."""
        return torch.arange(math.prod(self.shape)).reshape(self.shape)

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks along an axis, or in all."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_coordinate(self) -> tuple[int, ...]:
        """Where the rank stands along each axis."""
        inner = (math.prod(self.shape[at + 1 :]) for at in range(len(self.shape)))
        return tuple(self._rank // step % size for step, size in zip(inner, self.shape, strict=True))

    def get_group(self, mesh_dim: str | int) -> Group:
        """The ranks that differ from this one along an axis only."""
        at = self._at(mesh_dim)
        step = math.prod(self.shape[at + 1 :])
        first = self._rank - self.get_coordinate()[at] * step
        return Group(self.mesh_dim_names[at], tuple(first + place * step for place in range(self.shape[at])))

    def _at(self, mesh_dim: str | int) -> int:
        return mesh_dim if isinstance(mesh_dim, int) else self.mesh_dim_names.index(mesh_dim)
