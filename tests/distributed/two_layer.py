"""A small model sharded by hand, the way the emitter writes one; with every axis of size one it is the serial model.

Over dp: batch sharded, matrices sharded and gathered per use (ZeRO-3). Over tp: Megatron's column and row linears,
with the norm between them on a sequence shard. The head is cut by both axes along one dim.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.gathers import regathering
from pdv.emit.templates.parallel import all_gather, combine, partition, reduce_scatter, replicate
from pdv.emit.templates.runtime import Mesh, Weights, local

BATCH, SEQ, DIM, HIDDEN, VOCAB = 8, 4, 16, 32, 24


class TwoLayer(nn.Module):
    """[batch, seq, dim] -> [batch, seq, vocab]."""

    def __init__(self, mesh: Mesh, weights: Weights, *, regather: bool = True) -> None:
        super().__init__()
        self.dp, self.tp, self.regather = mesh["dp"], mesh["tp"], regather
        self.norm = mesh.parameter(weights["norm"])
        self.up = mesh.parameter(weights["up"].permute(1, 0), {"tp": 0, "dp": 1})  # stored as [dim, hidden]
        self.up_bias = mesh.parameter(weights["biases"].narrow(0, 0, HIDDEN), {"tp": 0})  # stored with another
        self.down = mesh.parameter(weights["down"], {"tp": 1, "dp": 0})
        self.down_bias = mesh.parameter(weights["biases"].narrow(0, HIDDEN, DIM))
        self.head = mesh.parameter(weights["head"], {"dp": 0, "tp": 0})

    def forward(self, x: Tensor) -> Tensor:
        with regathering():
            return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        dp, tp, again = self.dp, self.tp, self.regather
        x = partition(partition(x, 0, dp), 1, tp)  # [b/dp, s/tp, d]
        norm = replicate(replicate(local(self.norm), dp), tp)
        n = all_gather(F.rms_norm(x, (DIM,), norm), 1, tp)  # [b/dp, s, d]
        up = all_gather(local(self.up), 1, dp, regather=again)
        h = F.gelu(F.linear(n, up, replicate(local(self.up_bias), dp)))  # [b/dp, s, h/tp]
        down = all_gather(local(self.down), 0, dp, regather=again)
        y = reduce_scatter(F.linear(h, down), 1, tp)  # [b/dp, s/tp, d]
        y = combine(x + y + replicate(replicate(local(self.down_bias), dp), tp), 1, tp)  # [b/dp, s, d]
        head = all_gather(combine(local(self.head), 0, tp, regather=again), 0, dp, regather=again)
        return F.linear(y, head)  # [b/dp, s, v]


def write_weights(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    tensors = {"norm": 1 + random(DIM), "up": random(DIM, HIDDEN), "biases": random(HIDDEN + DIM)}
    save_file(tensors | {"down": random(DIM, HIDDEN), "head": random(VOCAB, DIM)}, path)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """x: [batch, seq, dim], y: [batch, seq] class labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, SEQ, DIM, generator=generator, dtype=torch.float64)
    return x, torch.randint(VOCAB, (BATCH, SEQ), generator=generator)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over all positions, and their number."""
    return cross_entropy_sum(logits, labels), labels.numel()


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
