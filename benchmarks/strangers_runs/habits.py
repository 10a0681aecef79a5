"""More habits: adapters by hooks, prompts, tasks that are weighed, einsum alone, lazy layers, solvers."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


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
        self.heads = nn.ModuleDict({"depth": nn.Linear(16, 1), "kind": nn.Linear(16, 4), "multi": nn.Linear(16, 3)})
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x: Tensor, depth: Tensor, label: Tensor, multi: Tensor) -> dict[str, Tensor]:
        h, losses = self.trunk(x), defaultdict(lambda: x.new_zeros(()))
        losses["depth"] += F.smooth_l1_loss(self.heads["depth"](h).squeeze(-1), depth)
        losses["kind"] += F.nll_loss(self.heads["kind"](h).log_softmax(-1), label)
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


class Spectral(nn.Module):
    """FNO's layer: a real transform, few frequencies multiplied by complex weights, the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, 2) / 4)
        self.lift, self.skip, self.project = nn.Linear(2, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros(x.size(0), 4, spectrum.size(-1), dtype=torch.cfloat, device=x.device)
        out[..., :5] = torch.einsum("bim,iom->bom", spectrum[..., :5], torch.view_as_complex(self.weight))
        h = F.gelu(torch.fft.irfft(out, n=h.size(-1)) + self.skip(h))
        return self.project(h.transpose(1, 2))


@stranger
def fourier_operator() -> Made:
    return Spectral(), torch.randn(4, 16, 2)


class Hyena(nn.Module):
    """A long convolution by transforms of twice the length, its filter made by a small network of positions."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.filter = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, wide))
        self.decay = nn.Parameter(torch.rand(wide))

    def forward(self, u: Tensor) -> Tensor:
        n = u.size(1)
        x1, x2, v = self.proj(u).transpose(1, 2).chunk(3, dim=1)
        t = torch.linspace(0, 1, n, device=u.device)
        feats = torch.stack([t, torch.sin(2 * math.pi * t), torch.cos(2 * math.pi * t)], dim=-1)
        h = (self.filter(feats) * torch.exp(-t[:, None] * self.decay.abs())).t()
        y = torch.fft.irfft(torch.fft.rfft(v * x1, n=2 * n) * torch.fft.rfft(h, n=2 * n), n=2 * n)[..., :n]
        return self.out((y * x2).transpose(1, 2))


@stranger
def long_convolution() -> Made:
    return Hyena(), torch.randn(4, 10, 8)


class Longformer(nn.Module):
    """Windows by ``unfold`` over time, each token with its neighbours, padded at both ends."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(wide, 3 * wide), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (F.pad(y, (0, 0, 2, 2)).unfold(1, 5, 1) for y in (k, v))
        scores = torch.einsum("bsd,bsdw->bsw", q, k) * x.size(-1) ** -0.5 + self.bias
        inside = torch.arange(x.size(1))[:, None] + torch.arange(-2, 3)[None]
        scores = scores.masked_fill((inside < 0) | (inside >= x.size(1)), torch.finfo(scores.dtype).min)
        return torch.einsum("bsw,bsdw->bsd", scores.softmax(-1), v)


@stranger
def sliding_window() -> Made:
    return Longformer(), torch.randn(4, 8, 12)
