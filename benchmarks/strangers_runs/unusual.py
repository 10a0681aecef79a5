"""Unusual habits: parametrizations, transforms of functions, statistics kept by hand, weights tied in odd places."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
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


class Adapter(nn.Module):
    """A frozen base with bottlenecks put into it by hooks, as adapter libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(OrderedDict(first=nn.Linear(10, 16), act=nn.GELU(), second=nn.Linear(16, 10)))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 3), nn.Linear(3, 16)
        self.base.first.register_forward_hook(lambda _, __, out: out + self.up(torch.relu(self.down(out))))
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


@stranger
def adapters_by_hooks() -> Made:
    return Adapter(), torch.randn(6, 10)


class Prompted(nn.Module):
    """A frozen encoder with trained prompts before its tokens, and their places cut off behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 12)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 20, 0.0, batch_first=True), 2)
        for p in (*self.embed.parameters(), *self.encoder.parameters()):
            p.requires_grad_(False)
        self.prompt, self.head = nn.Parameter(torch.randn(3, 12)), nn.Linear(12, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        b = tokens.size(0)
        x = torch.cat([self.prompt.expand(b, -1, -1), self.embed(tokens)], 1)
        hidden = torch.cat([mask.new_ones(b, 3), mask], 1) == 0
        return self.head(self.encoder(x, src_key_padding_mask=hidden)[:, 3:].mean(1))


@stranger
def prompt_tuning() -> Made:
    mask = torch.ones(4, 5)
    mask[2, 3:] = 0
    return Prompted(), (ids(4, 5, below=19), mask)


class Uncertainty(nn.Module):
    """Several tasks, each weighed by a variance that is learned; outputs in a defaultdict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16, affine=False), nn.SiLU())
        self.heads = nn.ModuleDict({"depth": nn.Linear(16, 1), "class": nn.Linear(16, 4), "multi": nn.Linear(16, 3)})
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x: Tensor, depth: Tensor, label: Tensor, multi: Tensor) -> dict[str, Tensor]:
        h, losses = self.trunk(x), defaultdict(lambda: x.new_zeros(()))
        losses["depth"] += F.smooth_l1_loss(self.heads["depth"](h).squeeze(-1), depth)
        losses["class"] += F.nll_loss(self.heads["class"](h).log_softmax(-1), label)
        losses["multi"] += F.binary_cross_entropy_with_logits(
            self.heads["multi"](h), multi, pos_weight=torch.ones(3) * 2
        )
        return {n: torch.exp(-self.log_vars[n]) * loss + self.log_vars[n] / 2 for n, loss in losses.items()}


@stranger
def weighed_tasks() -> Made:
    targets = torch.randn(6), ids(6, below=4), torch.randint(0, 2, (6, 3)).float()
    return Uncertainty(), (torch.randn(6, 10), *targets)


class Einsums(nn.Module):
    """Nothing but einsum: a triangle update, an outer product mean, a tensor train."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(5, 6) / 2), nn.Parameter(torch.randn(5, 6) / 2)
        self.cores = nn.ParameterList([torch.randn(1, 3, 4) / 2, torch.randn(4, 2, 4) / 2, torch.randn(4, 5, 1) / 2])

    def forward(self, pair: Tensor) -> Tensor:
        a, b = torch.einsum("bijc,cd->bijd", pair, self.left), torch.einsum("b i j c, c d -> b i j d", pair, self.right)
        triangle = torch.einsum("bikd,bjkd->bijd", a, b)
        outer = torch.einsum("bijd,bije->bide", triangle, a.softmax(-1))
        table = torch.einsum("apb,bqc,crd->pqr", *self.cores).flatten()[:30].view(5, 6)
        return torch.einsum("bide,ce,...c->bi...d", outer, table, pair.new_ones(2, 5))


@stranger
def einsum_only() -> Made:
    return Einsums(), torch.randn(4, 3, 3, 5)


class Ragged(nn.Module):
    """Rows that are valid are chosen by a mask, so that sizes depend on values; their mean is what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        h = torch.tanh(self.lin(x[valid]))
        return self.out(h).mean()


@stranger
def rows_by_mask() -> Made:
    return Ragged(), (torch.randn(4, 5, 6), torch.rand(4, 5) > 0.3)


class LazyConvs(nn.Module):
    """Lazy layers of several kinds, run once before as their documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@stranger
def lazy_run_once() -> Made:
    module, x = LazyConvs(), torch.randn(4, 3, 6, 6)
    module(x)
    return module, x


@stranger
def lazy_convolutions() -> Made:
    return LazyConvs(), torch.randn(4, 3, 6, 6)


class Capsules(nn.Module):
    """Routing by agreement, logits detached in all rounds but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 6, 3, 4, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        u = (self.weight @ x[:, :, None, :, None]).squeeze(-1)
        logits, hat = torch.zeros(x.size(0), 6, 3, 1), u.detach()
        for round_ in range(3):
            c = logits.softmax(dim=2)
            s = (c * (u if round_ == 2 else hat)).sum(1, keepdim=True)
            norm = s.square().sum(-1, keepdim=True)
            v = norm / (1 + norm) * s / (norm.sqrt() + 1e-8)
            logits = logits + (hat * v).sum(-1, keepdim=True)
        return torch.linalg.vector_norm(v.squeeze(1), dim=-1)


@stranger
def capsules() -> Made:
    return Capsules(), torch.randn(4, 6, 5)


class Neural(nn.Module):
    """A differential equation by Runge and Kutta, a Kalman gain by ``linalg.solve``, a log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.noise = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)), nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.1
        for _ in range(3):
            k1 = self.f(x)
            k2 = self.f(x + h / 2 * k1)
            k3 = self.f(x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.f(x + h * k3))
        cov = self.noise @ self.noise.T + 0.5 * torch.eye(4)
        return torch.linalg.solve(cov, x.unsqueeze(-1)).squeeze(-1), torch.logdet(cov) + math.log(2)


@stranger
def neural_ode() -> Made:
    return Neural(), torch.randn(6, 4)
