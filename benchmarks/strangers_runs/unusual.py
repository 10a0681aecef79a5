"""Unusual habits: towers, parametrizations, transforms of functions, statistics by hand, odd ties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


@dataclass
class TowerOutput:
    """Embeddings of both towers, and the loss."""

    query: Tensor
    passage: Tensor
    loss: Tensor | None = None
    accuracy: Tensor | None = None


class TwoTowers(nn.Module):
    """Queries and passages, negatives of the batch and hard ones, means under masks, a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(41, 12, mode="mean")
        self.query, self.passage = nn.Linear(12, 9), nn.Linear(12, 9)
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, q: Tensor, p: Tensor, hard: Tensor) -> TowerOutput:
        query = F.normalize(self.query(self.embed(q)), dim=-1)
        passages = torch.cat([p, hard], dim=0)
        passage = F.normalize(self.passage(self.embed(passages)), dim=-1)
        scores = query @ passage.mT / self.temperature.clamp(min=0.01)
        labels = torch.arange(q.size(0), device=q.device)
        accuracy = (scores.argmax(-1) == labels).float().mean()
        return TowerOutput(query, passage, F.cross_entropy(scores, labels), accuracy)


@stranger
def two_towers() -> Made:
    return TwoTowers(), tuple(torch.randint(1, 41, (4, 5)) for _ in range(3))


class Triplets(nn.Module):
    """Distances of all pairs, the hardest of each kind, a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.PReLU(16), nn.Linear(16, 6))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.net(x)
        distance = torch.cdist(z, z)
        same = labels[:, None] == labels[None]
        positive = (distance * same).max(1).values
        negative = torch.where(same, torch.inf, distance).amin(1)
        return F.relu(positive - negative + 0.3).mean()


@stranger
def hardest_triplets() -> Made:
    return Triplets(), (torch.randn(6, 10), torch.tensor([0, 1, 2, 0, 1, 2]))


class Symmetric(nn.Module):
    """A parametrization: W + W^T."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class LowRank(nn.Module):
    """A parametrization with parameters of its own (LoRA)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, columns) / 4), nn.Parameter(torch.randn(rows, 2) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@stranger
def own_parametrizations() -> Made:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    parametrize.register_parametrization(net[2], "weight", LowRank(6, 8))
    net[2].parametrizations.weight.original.requires_grad_(False)
    return net, torch.randn(6, 8)


@stranger
def orthogonal_weights() -> Made:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 2)), torch.randn(6, 6)


@stranger
def spectral_norm_evaluated() -> Made:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12)), nn.ReLU(), nn.Linear(12, 4))
    return net.eval(), torch.randn(6, 8)


class Functional(nn.Module):
    """Networks of an ensemble as stacked weights, run by ``functional_call`` under ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        nets = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)) for _ in range(3)]
        self.base = [nets[0]]  # no submodule
        stacked, _ = torch.func.stack_module_state(nets)  # type: ignore[arg-type]
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(w.detach()) for name, w in stacked.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = {name.replace("_", "."): w for name, w in self.weights.items()}
        run = partial(torch.func.functional_call, self.base[0])
        return torch.vmap(lambda w, y: run(w, (y,)), in_dims=(0, None))(weights, x).mean(0)  # type: ignore[no-any-return]


@stranger
def vmapped_ensemble() -> Made:
    return Functional(), torch.randn(6, 6)


class Jacobian(nn.Module):
    """A field's divergence by ``jacrev`` under ``vmap``, added to what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
        return jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)


@stranger
def divergence() -> Made:
    return Jacobian(), torch.randn(5, 3)


class Energy(nn.Module):
    """Forces by ``autograd.grad`` of an energy, inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_(True)
        energy = self.net(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -force


@stranger
def forces() -> Made:
    return Energy(), torch.randn(5, 3)


class Normalizer(nn.Module):
    """Running mean, square and count by hand, buffers bound anew (``self.mean = ...``)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(wide))
        self.register_buffer("square", torch.ones(wide))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.gain = nn.Parameter(torch.ones(wide))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = torch.lerp(self.mean, x.mean(0), 0.1)
                self.square = self.square * 0.9 + x.pow(2).mean(0) * 0.1
                self.count += 1
        return self.gain * (x - self.mean) / (self.square - self.mean**2).clamp(min=1e-2).sqrt()


@stranger
def statistics_by_hand() -> Made:
    return nn.Sequential(nn.Linear(8, 12), Normalizer(12), nn.ReLU(), Normalizer(12), nn.Linear(12, 4)), torch.randn(
        6, 8
    )


@stranger
def statistics_by_hand_evaluated() -> Made:
    return nn.Sequential(nn.Linear(8, 12), Normalizer(12), nn.Linear(12, 4)).eval(), torch.randn(6, 8)


class Momentum(nn.Module):
    """MoCo's: a slow copy that follows, a queue that turns, both inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 12), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.fast(a), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                mine.data = mine.data * 0.99 + theirs.data * 0.01
            k = F.normalize(self.slow(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.07
        at = int(self.at)
        self.queue[:, at : at + k.size(0)] = k.T
        self.at[0] = (at + k.size(0)) % 12
        return F.cross_entropy(logits, torch.zeros(a.size(0), dtype=torch.long))


@stranger
def momentum_contrast() -> Made:
    return Momentum(), (torch.randn(4, 8), torch.randn(4, 8))


class OddTies(nn.Module):
    """One tensor as an embedding, as a convolution's bias, transposed as a head, and once more in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.norm.bias = self.conv.bias
        self.mixers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)])
        self.mixers[1].weight = self.mixers[0].weight
        self.mixers[2] = self.mixers[0]

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        for mixer in self.mixers:
            h = h + torch.relu(mixer(h))
        return F.linear(h, self.embed.weight, self.conv.bias.sum().expand(15))


@stranger
def odd_ties() -> Made:
    return OddTies(), ids(4, 6, below=15)


class StraightRound(torch.autograd.Function):
    """Rounds, with gradients clipped to where it does not saturate; a scale that is learned by LSQ's rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.clamp(torch.round(x / scale), -4, 3) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        y = x / scale
        inside = ((y >= -4) & (y <= 3)).float()
        of_scale = torch.where(inside.bool(), torch.round(y) - y, torch.clamp(y, -4, 3))
        return grad * inside, (grad * of_scale).sum().reshape(scale.shape)


class Quantized(nn.Linear):
    """A layer whose weights are quantized as it is trained."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, StraightRound.apply(self.weight, self.scale), self.bias)  # type: ignore[no-untyped-call]


@stranger
def quantized_training() -> Made:
    return nn.Sequential(Quantized(8, 12), nn.ReLU(), Quantized(12, 4)), torch.randn(6, 8)


@stranger
def straight_through_detach() -> Made:
    class Straight(nn.Module):
        """The same trick by ``detach``."""

        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            return self.out(h + (torch.sign(h) - h).detach())

    return Straight(), torch.randn(6, 8)
