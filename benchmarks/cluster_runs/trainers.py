"""Training programs as an expert writes them with torch's own parts, but for pipelines; and an emitted package.

Each trains one task on all ranks. ``train`` is forward, loss and backward of one global batch, ``update`` the
optimizer; ``gradients`` are whole, under the names of the task's module, as far as this rank has them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster_runs.models import Task

LEARNING_RATE = 1e-4
Settings = dict[str, Any]  # Any: numbers and names, one of each dimension that a strategy is tuned over


@dataclass(frozen=True)
class Place:
    """What a trainer is made for: the task, this rank's speed among all, and meshes of all ranks."""

    task: Task
    speeds: tuple[float, ...]
    mesh: Callable[[tuple[int, ...], bool], DeviceMesh]


class Trainer(ABC):
    """One way to train a task."""

    optimizer: torch.optim.Optimizer

    @abstractmethod
    def train(self) -> Tensor | None:
        """The mean loss of the rows that this rank saw, or None where it saw no loss."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name; collective."""

    def update(self) -> None:
        """A step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW; a fused update takes plain tensors and DTensors apart."""
    given = list(parameters)
    groups = [[p for p in given if isinstance(p, DTensor) == kind] for kind in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=LEARNING_RATE, fused=True)


def own_rows(task: Task) -> tuple[Tensor, Tensor]:
    """The rows of this rank, where all ranks are data parallel."""
    x, y = task.batch()
    rank, world = dist.get_rank(), dist.get_world_size()
    return own_block(x, rank, world), own_block(y, rank, world)


def own_block(x: Tensor, index: int, count: int) -> Tensor:
    """One of ``count`` equal blocks of rows."""
    return x.chunk(count)[index]


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_mb: float) -> None:
    """Mean over a group, in place, through flat buckets that are all under way at once."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if buckets[-1] and size + tensor.nbytes > bucket_mb * 2**20:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    flat = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets if bucket]
    for work in [dist.all_reduce(one, group=group, async_op=True) for one in flat]:
        work.wait()
    for bucket, total in zip(buckets, flat, strict=False):
        pieces = torch.split(total / group.size(), [tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def accumulate(
    module: nn.Module, task: Task, rows: tuple[Tensor, Tensor], micro: int, last: Callable[[bool], Any]
) -> Tensor:
    """Forward and backward of each micro-batch; ``last(is_last)`` is the context of each."""
    total = torch.zeros(())
    for number, (x, y) in enumerate(zip(rows[0].chunk(micro), rows[1].chunk(micro), strict=True)):
        with last(number == micro - 1):
            loss = task.loss(module(x), y) / micro
            torch.autograd.backward(loss)
        seen = loss.detach()
        total += seen.full_tensor() if isinstance(seen, DTensor) else seen
    return total


class DataParallel(Trainer):
    """torch's DistributedDataParallel."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self.task, self.micro = place.task, int(settings["micro"])
        self.module = DistributedDataParallel(
            place.task.module(), bucket_cap_mb=settings["bucket"], broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.rows = own_rows(place.task)
        self.optimizer = adamw(self.module.parameters())

    def train(self) -> Tensor:
        """See Trainer."""
        return accumulate(self.module, self.task, self.rows, self.micro, self._context)

    def _context(self, last: bool) -> Any:
        return contextlib.nullcontext() if last else self.module.no_sync()

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        return whole(self.module.module)


class FullyShard(Trainer):
    """FSDP2; over a mesh of (hosts, ranks of a host) it shards inside a host and replicates among them (HSDP)."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self.task, self.micro = place.task, int(settings["micro"])
        shape = (dist.get_world_size(),) if settings["shape"] == "flat" else (2, dist.get_world_size() // 2)
        mesh = place.mesh(shape, settings.get("order") == "strided")
        self.module = place.task.module()
        for part in self.module:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh, reshard_after_forward=settings["reshard"])
        fully_shard(self.module, mesh=mesh, reshard_after_forward=settings["reshard"])
        self.rows = own_rows(place.task)
        self.optimizer = adamw(self.module.parameters())

    def train(self) -> Tensor:
        """See Trainer."""
        return accumulate(self.module, self.task, self.rows, self.micro, self._context)

    def _context(self, last: bool) -> Any:
        self.module.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard adds the method
        return contextlib.nullcontext()

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        return whole(self.module)


class TableHybrid(Trainer):
    """What recommenders are trained as: the table cut by columns, rows exchanged all to all, layers data parallel."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self.task, self.bucket = place.task, settings["bucket"]
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        module = place.task.module()
        table: Tensor = module[0].table.weight  # type: ignore[assignment,union-attr]
        self.table = nn.Parameter(table.detach().chunk(self.world, 1)[self.rank].clone())
        self.layers = module[1:]
        ids, y = place.task.batch()
        self.ids, self.y = ids, own_block(y, self.rank, self.world)
        self.optimizer = adamw([self.table, *self.layers.parameters()])

    def train(self) -> Tensor:
        """See Trainer."""
        columns = nn.functional.embedding(self.ids, self.table)  # [b, f, d/w], of all rows of the batch
        received: Tensor = _Exchange.apply(columns.contiguous())  # type: ignore[no-untyped-call]  # torch's; [w, b/w, f, d/w]
        x = received.permute(1, 2, 0, 3).flatten(1)  # [b/w, f d]
        loss = self.task.loss(self.layers(x), self.y)
        torch.autograd.backward(loss)
        grads = [p.grad for p in self.layers.parameters() if p.grad is not None]
        group = dist.group.WORLD
        assert group is not None
        assert self.table.grad is not None
        average(grads, group, self.bucket)
        self.table.grad /= self.world  # each rank's rows weigh 1/w of the mean
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        found = {name: p.grad for name, p in self.layers.named_parameters() if p.grad is not None}
        assert self.table.grad is not None
        parts = [torch.empty_like(self.table.grad) for _ in range(self.world)]
        dist.all_gather(parts, self.table.grad)
        return {**found, "0.table.weight": torch.cat(parts, 1)}


class _Exchange(torch.autograd.Function):
    """[b, ...] of every rank -> [w, b/w, ...]: of each rank, this rank's rows."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received.view(dist.get_world_size(), -1, *x.shape[1:])

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        sent = grad.flatten(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return received


class Package(Trainer):
    """What pdv wrote, trained as its README says."""

    def __init__(self, place: Place, settings: Settings) -> None:
        directory = Path(settings["package"])
        sys.path.insert(0, str(directory.parent))
        self.model = importlib.import_module(directory.name).build(device="cpu")
        sys.path.pop(0)
        x, self.y = place.task.batch()
        self.x, self.loss = x, place.task.loss
        self.optimizer = adamw(self.model.parameters())

    def train(self) -> Tensor:
        """See Trainer."""
        loss: Tensor = self.model.train_step(self.x, self.y, self._loss)
        return loss.detach()

    def _loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return self.loss(output, target) * target.numel(), target.numel()

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        found: dict[str, Tensor] = self.model.full_gradients()
        return found


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of a module, DTensors gathered."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}
