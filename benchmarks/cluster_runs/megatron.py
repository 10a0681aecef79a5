"""Tensor parallelism as Megatron-LM writes it: plain tensors, two all-reduces forward and two backward a block.

For decoders. Queries, keys, values and the first linear layer are cut by columns, the others by rows, the embedding and
the head by the vocabulary; logits are gathered, as those of the emitted program are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from benchmarks.cluster_runs.models import Block, Head, Tokens
from benchmarks.cluster_runs.trainers import Place, Settings, Trainer, adamw

BY_COLUMNS, BY_ROWS = ("q", "k", "v", "up", "gate"), ("o", "down")


class Megatron(Trainer):
    """All ranks cut each layer."""

    def __init__(self, place: Place, settings: Settings) -> None:
        del settings
        self.task, self.module = place.task, place.task.module()
        for part in self.module:
            if isinstance(part, Tokens):
                part.table = Vocabulary(part.table)  # type: ignore[assignment]
            elif isinstance(part, Head):
                part.norm = nn.Sequential(part.norm, Enter())  # type: ignore[assignment]
                part.out = Gathered(part.out)  # type: ignore[assignment]
            else:
                assert isinstance(part, Block), "a decoder"
                for name in ("norm_1", "norm_2"):
                    setattr(part, name, nn.Sequential(getattr(part, name), Enter()))
                for layers in (part.attention, part.inner):
                    cut(layers)
        self.optimizer = adamw(self.module.parameters())

    def train(self) -> Tensor:
        """See Trainer."""
        x, y = self.task.batch()
        loss = self.task.loss(self.module(x), y)
        torch.autograd.backward(loss)
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer; of what has its name and is not cut."""
        whole = {name: tuple(p.shape) for name, p in self.task.module().named_parameters()}
        named = {name.replace("norm_1.0", "norm_1").replace("norm_2.0", "norm_2"): p for name, p in self.named()}
        return {name: p.grad for name, p in named.items() if p.grad is not None and whole.get(name) == tuple(p.shape)}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by name."""
        return list(self.module.named_parameters())


def cut(layers: nn.Module) -> None:
    """Cut the linear layers, in place."""
    for name, layer in list(layers.named_children()):
        if isinstance(layer, nn.Linear):
            assert name in BY_COLUMNS + BY_ROWS, name
            setattr(layers, name, Columns(layer) if name in BY_COLUMNS else Rows(layer))


def own(x: Tensor, dim: int) -> nn.Parameter:
    """The block of this rank."""
    return nn.Parameter(x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class Columns(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = own(layer.weight, 0)
        given: Tensor | None = layer.bias
        self.bias = None if given is None else own(given, 0)

    def forward(self, x: Tensor) -> Tensor:
        """x: the same on every rank."""
        return linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer of which each rank has some inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = own(layer.weight, 1)
        self.bias: nn.Parameter | None = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: this rank's block."""
        total: Tensor = _Sum.apply(linear(x, self.weight))  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + self.bias


class Vocabulary(nn.Module):
    """An embedding of which each rank has some rows."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = own(table.weight, 0)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, s] -> [b, s, d]."""
        ids = ids - dist.get_rank() * self.weight.size(0)
        elsewhere = (ids < 0) | (ids >= self.weight.size(0))
        rows = embedding(ids.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0)
        total: Tensor = _Sum.apply(rows)  # type: ignore[no-untyped-call]
        return total


class Gathered(nn.Module):
    """A linear layer of which each rank has some outputs, which are gathered."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = own(layer.weight, 0)

    def forward(self, x: Tensor) -> Tensor:
        """x: the same on every rank."""
        outputs: Tensor = _Gather.apply(linear(x, self.weight))  # type: ignore[no-untyped-call]
        return outputs


class Enter(nn.Module):
    """From here on ranks compute different things of the same x: its gradient is a sum."""

    def forward(self, x: Tensor) -> Tensor:
        """x: any."""
        same: Tensor = _Enter.apply(x)  # type: ignore[no-untyped-call]
        return same


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


class _Gather(torch.autograd.Function):
    """[..., n/w] -> [..., n]"""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()
