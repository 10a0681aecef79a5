"""What is rarer: losses over the whole batch, parts held still, several types, gradients of one's own, chance."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class Siamese(nn.Module):
    """One tower twice, a contrastive loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = F.normalize(self.tower(a), dim=-1), F.normalize(self.tower(b), dim=1)
        logits = self.logit_scale.exp() * za @ zb.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@stranger
def clip_loss() -> Made:
    return Siamese(), (torch.randn(8, 12), torch.randn(8, 12))


class Physics(nn.Module):
    """A network of coordinates with sines and powers, several losses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, xy: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.sin(30 * self.first(xy) / 30)
        y = self.last(torch.sin(self.hidden(h)))
        return {"mse": F.mse_loss(y, target), "l1": (y - target).abs().mean(), "reg": 1e-3 * self.hidden.weight.norm()}


@stranger
def several_losses() -> Made:
    return Physics(), (torch.rand(8, 2), torch.rand(8, 1))


class FrozenBackbone(nn.Module):
    """A part without gradients, statistics held still, a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        for p in self.backbone.parameters():
            p.requires_grad = False
        self.backbone.eval()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            f = self.backbone(x)
        return self.head(f)


@stranger
def frozen_backbone() -> Made:
    return FrozenBackbone(), torch.randn(8, 16)


class Highway(nn.Module):
    """Residuals of different widths by padding and projection; where; maximum; cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(10, 14), nn.Linear(14, 10), nn.Linear(14, 14)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 4)) + torch.relu(self.a(x))
        g = torch.sigmoid(self.gate(y))
        y = torch.where(g > 0.5, y * g, torch.maximum(y, -y))
        return torch.cumsum(self.b(y), dim=-1) + x


@stranger
def highway() -> Made:
    return Highway(), torch.randn(6, 10)


class Bilinear(nn.Module):
    """nn.Bilinear, cosine similarity, cdist, log-sum-exp, outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.bi, self.centres = nn.Bilinear(6, 5, 4), nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.bi(x, y)
        d = torch.cdist(z, self.centres)
        s = F.cosine_similarity(z.unsqueeze(1), self.centres.unsqueeze(0), dim=-1)
        return torch.logsumexp(-d, dim=1), s


@stranger
def bilinear() -> Made:
    return Bilinear(), (torch.randn(8, 6), torch.randn(8, 5))


class IntegerFeatures(nn.Module):
    """Categories as integers, one-hot vectors, comparisons, floor divisions."""

    def __init__(self) -> None:
        super().__init__()
        self.embs = nn.ModuleDict({name: nn.Embedding(6, 4) for name in ("colour", "size")})
        self.out = nn.Linear(4 + 4 + 6 + 1, 3)

    def forward(self, colour: Tensor, size: Tensor, price: Tensor) -> Tensor:
        hot = F.one_hot(colour, 6).float()
        odd = (size % 2 == 1).float().unsqueeze(1) * (price // 2).unsqueeze(1)
        return self.out(torch.cat([self.embs["colour"](colour), self.embs["size"](size // 2), hot, odd], 1))


@stranger
def integer_features() -> Made:
    return IntegerFeatures(), {
        "colour": ids(8, below=6), "size": ids(8, below=10), "price": torch.rand(8) * 9,
    }  # fmt: skip


class ConvCTC(nn.Module):
    """Speech: two convolutions with strides, a GRU, log-probabilities with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(8, 16, 5, 2, 2), nn.Conv1d(16, 16, 3, 2, 1)
        self.gru, self.fc = nn.GRU(16, 12, batch_first=True), nn.Linear(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.c2(F.gelu(self.c1(x)))).transpose(1, 2)
        return self.fc(self.gru(y)[0]).log_softmax(-1).transpose(0, 1)


@stranger
def speech() -> Made:
    return ConvCTC(), torch.randn(4, 8, 24)


class HalfInside(nn.Module):
    """Numbers of several types inside: a cast to bfloat16 and back, float64 constants."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(0, 1, 16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.table.to(x.dtype)
        return self.b(h).double().mean(-1).float()


@stranger
def several_types() -> Made:
    return HalfInside(), torch.randn(8, 16)


class Checkpointed(nn.Module):
    """torch.utils.checkpoint inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


@stranger
def checkpointed() -> Made:
    return Checkpointed(), torch.randn(8, 16)


class Autocast(nn.Module):
    """torch.autocast inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
        return y.float()


@stranger
def autocast_inside() -> Made:
    return Autocast(), torch.randn(8, 16)


class Forecast(nn.Module):
    """Normalisation by the input's own statistics, undone at the end; a sum without the batch left out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.affine = nn.Linear(12, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        y = ((x - mean) / std * self.affine).transpose(1, 2)
        y = self.lin(y).transpose(1, 2)
        return (y / (self.affine + 1e-9)) * std + mean


@stranger
def forecast() -> Made:
    return Forecast(), torch.randn(6, 12, 3)


class Transformed(nn.Module):
    """torch.func.vmap, and a function of a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda w, row: row @ w, in_dims=(0, 1), out_dims=1)(self.w, x)


@stranger
def vmapped() -> Made:
    return Transformed(), torch.randn(4, 6, 8)


class HardConcrete(torch.autograd.Function):
    """Gradients of one's own: straight through a rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return HardConcrete.apply(self.a(x))


@stranger
def own_gradient() -> Made:
    return OwnGradient(), torch.randn(8, 8)


class Stochastic(nn.Module):
    """Noise drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x + 0.1 * torch.randn_like(x))


@stranger
def noise_inside() -> Made:
    return Stochastic(), torch.randn(8, 8)


class ByValue(nn.Module):
    """A branch by a value: cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else -self.a(x)


@stranger
def branch_by_value() -> Made:
    return ByValue(), torch.randn(8, 8)


@stranger
def lazy() -> Made:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)), torch.randn(8, 6)


@stranger
def in_bfloat16() -> Made:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).bfloat16(), torch.randn(8, 16).bfloat16()


@stranger
def in_float64() -> Made:
    return nn.Sequential(nn.Linear(16, 32), nn.Mish(), nn.Linear(32, 8)).double(), torch.randn(8, 16).double()


@stranger
def renormed_embedding() -> Made:
    return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 4)), ids(4, 6, below=20)


@stranger
def sparse_embedding() -> Made:
    return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)), ids(4, 6, below=20)


@stranger
def instance_norms() -> Made:
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.InstanceNorm1d(8, affine=True, track_running_stats=True), nn.ELU(),
        nn.Conv1d(8, 4, 3, padding=2, dilation=2), nn.LocalResponseNorm(2), nn.AdaptiveMaxPool1d(5), nn.GLU(1),
    ), torch.randn(4, 4, 10)  # fmt: skip


@stranger
def activations() -> Made:
    slope = partial(nn.RReLU, 0.2, 0.2)  # drawn from one number: other slopes are others on both sides
    kinds = (nn.CELU, nn.SELU, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, slope)
    return nn.Sequential(*[part for kind in kinds for part in (nn.Linear(8, 8), kind())]), torch.randn(8, 8)
