"""Rows that depend on one another: losses over pairs, statistics of groups of rows, experts that choose tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class Embedder(nn.Module):
    """What all of these train."""

    def __init__(self, outs: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, outs)

    def embed(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


class GroupDeviation(Embedder):
    """StyleGAN's discriminator: the deviation over groups of rows as one more feature."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(17, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        groups = h.view(4, -1, h.size(1))
        deviation = (groups.var(0, unbiased=False) + 1e-8).sqrt().mean(1)
        return self.b(torch.cat([h, deviation.repeat(4).unsqueeze(1)], 1))


@stranger
def deviation_of_groups() -> Made:
    return GroupDeviation(), torch.randn(12, 8)


class MixedRows(Embedder):
    """Mixup inside the model, of each row with the one at the other end."""

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(0.7 * x + 0.3 * x.flip(0))


@stranger
def rows_mixed_with_others() -> Made:
    return MixedRows(), torch.randn(12, 8)


class RolledNegatives(Embedder):
    """The next row is the negative."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one, other = F.normalize(self.embed(x), dim=-1), F.normalize(self.embed(y), dim=-1)
        negative = torch.roll(other, 1, 0)
        return F.relu(0.5 - (one * other).sum(-1) + (one * negative).sum(-1)).mean(), one


@stranger
def negatives_by_rolling() -> Made:
    return RolledNegatives(), (torch.randn(12, 8), torch.randn(12, 8))


class Halves(Embedder):
    """SimSiam: both views in one batch, one behind the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.embed(x)
        one, other = z.chunk(2, 0)
        return -F.cosine_similarity(one, other.detach(), -1).mean(), z


@stranger
def two_views_in_one_batch() -> Made:
    return Halves(), torch.randn(12, 8)


class Covariances(Embedder):
    """VICReg."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, other = self.embed(x), self.embed(y)
        spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (one, other))
        centred = one - one.mean(0)
        covariance = centred.T @ centred / (one.size(0) - 1)
        apart = (covariance - torch.diag(torch.diag(covariance))).pow(2).sum() / 6
        return {"loss": 25 * F.mse_loss(one, other) + 25 * spread + apart, "apart": apart}


@stranger
def covariances_over_rows() -> Made:
    return Covariances(), (torch.randn(12, 8), torch.randn(12, 8))


class Ghosts(nn.Module):
    """A batch norm of parts of the batch, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.01), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(torch.cat([self.norm(part) for part in self.a(x).chunk(3, 0)], 0)))


@stranger
def ghost_batch_norm() -> Made:
    return Ghosts(), torch.randn(12, 8)


class ShiftedInTime(Embedder):
    """A temporal shift module: rows are frames, three a clip."""

    def forward(self, x: Tensor) -> Tensor:
        clips = F.relu(self.a(x)).view(x.size(0) // 3, 3, -1)
        moved = torch.zeros_like(clips)
        moved[:, :-1, :4] = clips[:, 1:, :4]
        moved[:, 1:, 4:8] = clips[:, :-1, 4:8]
        moved[:, :, 8:] = clips[:, :, 8:]
        return self.b(moved.view(x.size(0), -1)).view(x.size(0) // 3, 3, -1).mean(1)


@stranger
def frames_as_rows() -> Made:
    return ShiftedInTime(), torch.randn(12, 8)


class AcrossRows(nn.Module):
    """Attention over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.qkv, self.b = nn.Linear(8, 12), nn.Linear(12, 36), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        q, k, v = self.qkv(h).unflatten(-1, (2, -1)).permute(1, 0, 2).chunk(3, -1)
        return self.b(F.scaled_dot_product_attention(q, k, v).permute(1, 0, 2).flatten(1) + h)


@stranger
def attention_over_rows() -> Made:
    return AcrossRows(), torch.randn(12, 8)


class Choosing(nn.Module):
    """Experts that choose tokens of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 8)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) * 0.3), nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(0, 1)
        gates, chosen = self.router(h).softmax(-1).t().topk(h.size(0) // 3, -1)
        y = torch.bmm(F.relu(torch.bmm(h[chosen], self.up)), self.down) * gates.unsqueeze(-1)
        summed = torch.zeros_like(h).index_add(0, chosen.flatten(), y.flatten(0, 1))
        return self.out(summed + h).view_as(x)


@stranger
def experts_that_choose() -> Made:
    return Choosing(), torch.randn(12, 3, 8)


class Capacity(nn.Module):
    """Two experts a token, of so many tokens each as come first, and a loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.shared = nn.Embedding(32, 12), nn.Linear(12, 4, bias=False), nn.Linear(12, 12)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 16) * 0.2), nn.Parameter(torch.randn(4, 16, 12) * 0.2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(tokens).flatten(0, 1)
        p = self.router(h).softmax(-1)
        gates, experts = p.topk(2, -1)
        one_hot = F.one_hot(experts, 4).to(h.dtype)
        place = (one_hot.flatten(0, 1).cumsum(0) - 1).view_as(one_hot) * one_hot
        kept = (place < int(1.25 * 2 * h.size(0) / 4)).to(h.dtype) * one_hot
        weight = ((gates / gates.sum(-1, keepdim=True)).unsqueeze(-1) * kept).sum(1)
        each = torch.einsum("nef,efd->end", F.gelu(torch.einsum("nd,edf->nef", h, self.up)), self.down)
        y = torch.einsum("ne,end->nd", weight, each) + self.shared(h)
        return y.view(*tokens.shape, -1), 4 * (one_hot.sum(1).mean(0) * p.mean(0)).sum()


@stranger
def experts_with_capacity() -> Made:
    return Capacity(), ids(12, 4)
