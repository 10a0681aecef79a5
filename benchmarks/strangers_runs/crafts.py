"""Trades of their own: graphs, points, images, sound, recommenders, control, as their repositories write them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


class GraphAttention(nn.Module):
    """GAT over a list of edges: a softmax over those that end at a node, by scatters."""

    def __init__(self, wide: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.lin = heads, nn.Linear(6, heads * wide, bias=False)
        self.att_src, self.att_dst = (
            nn.Parameter(torch.randn(1, heads, wide)),
            nn.Parameter(torch.randn(1, heads, wide)),
        )
        self.register_buffer("edge_index", EDGES)

    def forward(self, x: Tensor) -> Tensor:
        src, dst = self.edge_index
        h = self.lin(x).view(x.size(0), self.heads, -1)
        alpha = F.leaky_relu((h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst], 0.2)
        top = torch.full((x.size(0), self.heads), -1e9).scatter_reduce(0, dst[:, None].expand_as(alpha), alpha, "amax")
        alpha = torch.exp(alpha - top.detach()[dst])
        total = torch.zeros_like(top).index_add_(0, dst, alpha)
        alpha = alpha / (total[dst] + 1e-16)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * alpha.unsqueeze(-1))
        return F.elu(out.flatten(1))


@stranger
def graph_attention() -> Made:
    return GraphAttention(), torch.randn(6, 6)


class PointNet(nn.Module):
    """Points turned by a matrix that they say, maxima over relus (which tie at zero), an orthogonality loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tnet, self.to_matrix = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU()), nn.Linear(8, 9)
        self.mlp, self.head = nn.Sequential(nn.Conv1d(3, 12, 1), nn.BatchNorm1d(12), nn.ReLU()), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        iden = torch.eye(3).view(1, 9).repeat(x.shape[0], 1)
        m = (self.to_matrix(torch.max(self.tnet(x), 2, keepdim=True)[0].view(-1, 8)) + iden).view(-1, 3, 3)
        h = torch.bmm(x.transpose(2, 1), m).transpose(2, 1)
        h = self.mlp(h).amax(dim=2)
        loss = torch.mean(torch.norm(torch.bmm(m, m.transpose(2, 1)) - torch.eye(3)[None], dim=(1, 2)))
        return F.log_softmax(self.head(h), dim=1), loss


@stranger
def point_net() -> Made:
    return PointNet(), torch.randn(4, 3, 10)


class EdgeConv(nn.Module):
    """DGCNN: the nearest neighbours of each point by topk, gathered by flat places, maxima over them."""

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        self.k, self.conv = k, nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        b, c, n = x.size()
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        idx = (idx + torch.arange(0, b).view(-1, 1, 1) * n).view(-1)
        flat = x.transpose(2, 1).contiguous()
        feature = flat.view(b * n, -1)[idx, :].view(b, n, self.k, c)
        flat = flat.view(b, n, 1, c).repeat(1, 1, self.k, 1)
        return self.conv(torch.cat((feature - flat, flat), dim=3).permute(0, 3, 1, 2)).max(dim=-1, keepdim=False)[0]


@stranger
def edge_conv() -> Made:
    return EdgeConv(), torch.randn(4, 3, 8)


class Radiance(nn.Module):
    """NeRF: frequencies of places, densities, transmittance as an exclusive product along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sigma, self.rgb = nn.Linear(3 + 24, 16), nn.Linear(16, 1), nn.Linear(16 + 3, 3)

    def forward(self, origins: Tensor, directions: Tensor) -> dict[str, Tensor]:
        z = torch.linspace(2.0, 6.0, 5)
        pts = origins[..., None, :] + directions[..., None, :] * z[:, None]
        coded = torch.cat([pts] + [f(2.0**i * pts) for i in range(4) for f in (torch.sin, torch.cos)], -1)
        h = F.relu(self.trunk(coded))
        dists = torch.cat([z[1:] - z[:-1], torch.tensor([1e10])]) * directions[..., None, :].norm(dim=-1)
        alpha = 1.0 - torch.exp(-F.relu(self.sigma(h)[..., 0]) * dists)
        seen = torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * seen
        rgb = torch.sigmoid(self.rgb(torch.cat([h, directions[:, None].expand(-1, 5, -1)], -1)))
        depth = torch.sum(weights * z, -1)
        return {"rgb": torch.sum(weights[..., None] * rgb, -2), "depth": depth, "acc": weights.sum(-1)}


@stranger
def radiance_field() -> Made:
    return Radiance(), (torch.randn(4, 3), F.normalize(torch.randn(4, 3), dim=-1))


class FactorizationMachine(nn.Module):
    """DeepFM: fields at offsets in one table, pairs by the square of sums less the sum of squares, an MLP."""

    def __init__(self, fields: tuple[int, ...] = (5, 7, 4), wide: int = 6) -> None:
        super().__init__()
        self.linear, self.bias = nn.Embedding(sum(fields), 1), nn.Parameter(torch.zeros((1,)))
        self.embedding = nn.Embedding(sum(fields), wide)
        self.register_buffer("offsets", torch.tensor((0, *torch.tensor(fields).cumsum(0)[:-1].tolist())))
        self.mlp = nn.Sequential(nn.Linear(len(fields) * wide, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offsets.unsqueeze(0)
        e = self.embedding(x)
        pairs = 0.5 * (e.sum(dim=1).pow(2) - e.pow(2).sum(dim=1)).sum(dim=1, keepdim=True)
        y = self.linear(x).sum(dim=1) + self.bias + pairs + self.mlp(e.view(x.size(0), -1))
        return torch.sigmoid(y.squeeze(1))


@stranger
def factorization_machine() -> Made:
    return FactorizationMachine(), ids(8, 3, below=4)


class Conformer(nn.Module):
    """Half steps around attention and a gated depthwise convolution with a batch norm."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        half = [
            nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.SiLU(), nn.Linear(2 * wide, wide))
            for _ in "ab"
        ]
        self.ff1, self.ff2 = half
        self.norm, self.attn = nn.LayerNorm(wide), nn.MultiheadAttention(wide, 2, batch_first=True)
        self.ln, self.pw1, self.dw = (
            nn.LayerNorm(wide),
            nn.Conv1d(wide, 2 * wide, 1),
            nn.Conv1d(wide, wide, 3, padding="same", groups=wide),
        )
        self.bn, self.pw2, self.out = nn.BatchNorm1d(wide), nn.Conv1d(wide, wide, 1), nn.LayerNorm(wide)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        pad = torch.arange(x.size(1))[None, :] >= lengths[:, None]
        x = x + 0.5 * self.ff1(x)
        h = self.norm(x)
        x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
        h = self.ln(x).masked_fill(pad.unsqueeze(-1), 0.0).transpose(1, 2)
        x = x + self.pw2(F.silu(self.bn(self.dw(F.glu(self.pw1(h), dim=1))))).transpose(1, 2)
        return self.out(x + 0.5 * self.ff2(x)), (~pad).sum(1)


@stranger
def conformer() -> Made:
    return Conformer(), (torch.randn(4, 6, 16), torch.tensor([6, 4, 5, 2]))


class CRF(nn.Module):
    """An LSTM whose tags are scored by a chain: all paths by a loop of log-sum-exps, the gold one by gathers."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.emb, self.lstm, self.to_tags = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 6, batch_first=True, bidirectional=True),
            nn.Linear(12, tags),
        )
        self.start, self.end, self.trans = (nn.Parameter(torch.randn(*s)) for s in ((tags,), (tags,), (tags, tags)))

    def forward(self, tokens: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        e = self.to_tags(self.lstm(self.emb(tokens))[0])
        m = mask.float()
        score, alpha = self.start[tags[:, 0]] + e[:, 0].gather(1, tags[:, :1]).squeeze(1), self.start + e[:, 0]
        for i in range(1, tokens.shape[1]):
            step = self.trans[tags[:, i - 1], tags[:, i]] + e[:, i].gather(1, tags[:, i].unsqueeze(1)).squeeze(1)
            score = score + step * m[:, i]
            nxt = torch.logsumexp(alpha.unsqueeze(2) + self.trans + e[:, i].unsqueeze(1), dim=1)
            alpha = torch.where(mask[:, i].unsqueeze(1), nxt, alpha)
        last = tags.gather(1, mask.long().sum(1, keepdim=True) - 1).squeeze(1)
        return (torch.logsumexp(alpha + self.end, dim=1) - score - self.end[last]).mean()


@stranger
def lstm_crf() -> Made:
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 4, 2])[:, None]
    return CRF(), (ids(4, 5, below=20), ids(4, 5, below=5), mask)


class Output(NamedTuple):
    """What an actor-critic gives."""

    loss: Tensor
    entropy: Tensor
    action: Tensor


class ActorCritic(nn.Module):
    """PPO: a tanh trunk, a Categorical, a clipped ratio, a value clipped around the old one, a greedy action."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pi, self.v = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 4), nn.Linear(16, 1)
        nn.init.orthogonal_(self.pi.weight, 0.01)

    def forward(self, obs: Tensor, act: Tensor, old: Tensor, adv: Tensor, ret: Tensor, val: Tensor) -> Output:
        h = self.trunk(obs)
        dist = torch.distributions.Categorical(logits=self.pi(h))
        ratio = (dist.log_prob(act) - old).exp()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        v = self.v(h).squeeze(-1)
        clipped = val + (v - val).clamp(-0.2, 0.2)
        value = 0.5 * torch.max((v - ret) ** 2, (clipped - ret) ** 2).mean()
        return Output(policy + 0.5 * value, dist.entropy().mean(), dist.probs.argmax(-1))


@stranger
def actor_critic() -> Made:
    return ActorCritic(), (
        torch.randn(8, 6),
        ids(8, below=4),
        torch.randn(8) - 1,
        torch.randn(8),
        torch.randn(8),
        torch.randn(8),
    )


class Slots(nn.Module):
    """Slot attention: a softmax over the slots, renormed over places, a GRU cell, three rounds of it."""

    def __init__(self, slots: int = 3, wide: int = 12) -> None:
        super().__init__()
        self.slots, self.scale = nn.Parameter(torch.randn(1, slots, wide)), wide**-0.5
        self.to_q, self.to_k, self.to_v, self.gru = (
            nn.Linear(wide, wide),
            nn.Linear(wide, wide),
            nn.Linear(wide, wide),
            nn.GRUCell(wide, wide),
        )
        self.norm_in, self.norm_slots = nn.LayerNorm(wide), nn.LayerNorm(wide)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, _, d = x.shape
        slots, x = self.slots.expand(b, -1, -1), self.norm_in(x)
        k, v = self.to_k(x), self.to_v(x)
        for _ in range(3):
            previous = slots
            dots = torch.einsum("bid,bjd->bij", self.to_q(self.norm_slots(slots)), k) * self.scale
            attn = dots.softmax(dim=1) + 1e-8
            updates = torch.einsum("bjd,bij->bid", v, attn / attn.sum(dim=-1, keepdim=True))
            slots = self.gru(updates.reshape(-1, d), previous.reshape(-1, d)).reshape(b, -1, d)
        return slots, attn.argmax(1)


@stranger
def slot_attention() -> Made:
    return Slots(), torch.randn(4, 6, 12)


class Spectrogram(nn.Module):
    """torch.stft of padded waves, sizes of its complex bins (zero where nothing sounds), mel by a fixed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.register_buffer("mel", torch.rand(5, 4))
        self.gain, self.head = nn.Parameter(torch.ones(1)), nn.Conv1d(4, 6, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        found = torch.stft(wave * self.gain, 8, 4, window=self.window, return_complex=True, center=True)
        mel = torch.einsum("bft,fm->bmt", found.abs(), self.mel)
        return self.head(torch.log(mel + 1e-5))


@stranger
def spectrogram() -> Made:
    wave = torch.randn(4, 32)
    wave[1, 8:] = 0
    return Spectrogram(), wave


class MovedInPlace(nn.Module):
    """Views that are written to: strides, diagonals, a loop that fills a tensor, masks set in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, *, scale: float = 2.0, keep: Tensor | None = None) -> list[Tensor]:
        h = self.a(x).clone()
        even = h[:, ::2]
        even.mul_(scale).add_(1)
        h.view(-1)[: h.numel() // 2].neg_()
        out = h.new_zeros(x.size(0), 6, 6)
        for i in range(6):
            out[:, i, : i + 1] = self.b(h)[:, : i + 1] * (i + 1)
        torch.diagonal(out, dim1=1, dim2=2).fill_(0.5)
        if keep is not None:
            out.masked_fill_(~keep[:, None], 0.0)
        out[out.abs() < 0.1] = 0
        return [out.sum(1), out.tril().transpose(1, 2)]


@stranger
def moved_in_place() -> Made:
    return MovedInPlace(), {"x": torch.randn(4, 6), "scale": 3.0, "keep": torch.rand(4, 6) > 0.3}


class Clever(nn.Module):
    """StyleGAN's deviation of a minibatch in groups, equalized rates, a blur by a fixed kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, 3, 3)), nn.Parameter(torch.zeros(6))
        k = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("kernel", (k[None, :] * k[:, None]) / k.sum() ** 2)
        self.fc = nn.Linear(7 * 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(F.conv2d(x, self.weight / math.sqrt(27), self.bias, padding=1), 0.2) * math.sqrt(2)
        h = F.conv2d(F.pad(h, (2, 1, 2, 1)), self.kernel[None, None].repeat(6, 1, 1, 1), groups=6)[:, :, ::2, ::2]
        c, hh, w = h.shape[1:]
        std = (
            torch.sqrt(h.view(2, -1, 1, c, hh, w).var(0, unbiased=False) + 1e-8)
            .mean([2, 3, 4], keepdim=True)
            .squeeze(2)
        )
        h = torch.cat([h, std.repeat(2, 1, hh, w)], 1)
        return self.fc(h.flatten(1))


@stranger
def minibatch_deviation() -> Made:
    return Clever(), torch.randn(4, 3, 6, 6)
