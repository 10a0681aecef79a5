"""Megatron's tensor parallelism by ``parallelize_module``, alone and with data parallelism over it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.cluster_runs.models import Attention, FeedForward, Fields, Head, Layer, SwiGlu, Tokens
from benchmarks.cluster_runs.trainers import Place, Settings, Trainer, accumulate, adamw, average, own_block, whole


class TensorParallel(Trainer):
    """Each part cut over ``ways`` ranks; where there are more ranks, rows of the batch are cut over the others."""

    def __init__(self, place: Place, settings: Settings) -> None:
        world, ways = dist.get_world_size(), int(settings["ways"])
        self.task, self.micro, self.bucket = place.task, int(settings["micro"]), settings["bucket"]
        mesh = place.mesh((world // ways, ways), settings.get("order") == "strided")
        self.module = place.task.module()
        self.vocabulary = isinstance(self.module[0], Tokens)
        parallelize_module(self.module, mesh["inner"], plan_of(self.module))
        self.outer = mesh.get_group("outer") if ways < world else None
        index = mesh.get_local_rank("outer")
        x, y = place.task.batch()
        self.rows = own_block(x, index, world // ways), own_block(y, index, world // ways)
        self.optimizer = adamw(self.module.parameters())

    def train(self) -> Tensor:
        """See Trainer."""
        with loss_parallel() if self.vocabulary else contextlib.nullcontext():
            loss = accumulate(self.module, self.task, self.rows, self.micro, lambda last: contextlib.nullcontext())
        if self.outer is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
            average(local, self.outer, self.bucket)
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        return whole(self.module)


def plan_of(module: nn.Module) -> dict[str, ParallelStyle]:
    """How each linear layer and table is cut."""
    found: dict[str, ParallelStyle] = {}
    for name, part in module.named_modules():
        if isinstance(part, Attention):
            found |= {f"{name}.{one}": ColwiseParallel() for one in "qkv"} | {f"{name}.o": RowwiseParallel()}
        elif isinstance(part, FeedForward):
            found |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        elif isinstance(part, SwiGlu):
            found |= {
                f"{name}.gate": ColwiseParallel(),
                f"{name}.up": ColwiseParallel(),
                f"{name}.down": RowwiseParallel(),
            }
        elif isinstance(part, Tokens):
            found[f"{name}.table"] = RowwiseParallel(input_layouts=Replicate())
        elif isinstance(part, Fields):
            found[f"{name}.table"] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(part, Head) and not part.pool:
            found[f"{name}.out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return found | _alternating(module)


def _alternating(module: nn.Module) -> dict[str, ParallelStyle]:
    """Layers of a perceptron, in pairs: by columns, then by rows; a last one without partner stays whole."""
    layers = [
        f"{n}.linear" if isinstance(p, Layer) else n
        for n, p in module.named_children()
        if isinstance(p, Layer | nn.Linear)
    ]
    pairs: list[tuple[str, str]] = list(zip(layers[::2], layers[1::2], strict=False))
    styles: dict[str, Any] = {a: ColwiseParallel() for a, _ in pairs} | {b: RowwiseParallel() for _, b in pairs}
    return styles
