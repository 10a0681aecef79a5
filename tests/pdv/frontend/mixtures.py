"""Mixtures of experts, each of which takes the rows that chose it, in loops as models have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, EXPERTS, CHOSEN = 4, 3, 2
Loop = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        found: Tensor = self.down(F.silu(gate) * up)
        return found


class Mixture(nn.Module):
    """x: [b, 2, w] -> the same, each row through those of the experts that it chooses."""

    def __init__(self, loop: Loop, expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.loop = nn.ModuleList(expert() for _ in range(EXPERTS)), loop

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x).view(-1, WIDTH)
        weights, selected = torch.topk(self.router(rows).softmax(-1), CHOSEN)
        return self.loop(self.experts, rows, weights, selected).view_as(x) + x


def added_in_place(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """As mistral-inference and DeepSeek have it."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        b, n = torch.where(selected == i)
        out[b] += w[b, n, None] * expert(x[b])
    return out


def one_hot(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """As Mixtral of transformers had it."""
    out, mask = torch.zeros_like(x), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
    for i, expert in enumerate(experts):
        n, b = torch.where(mask[i])
        out.index_add_(0, b, expert(x[None, b].reshape(-1, WIDTH)) * w[b, n, None])
    return out


def one_hot_in_place(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """The places of different experts that one row chooses differ: of one expert there is one."""
    out, mask = torch.zeros_like(x), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
    for i, expert in enumerate(experts):
        n, b = torch.where(mask[i])
        out[b] = out[b] * 0.5 + expert(x[b]) * w[b, n, None]
    return out


def columns(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """By the columns of ``nonzero``."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        at = torch.nonzero(selected == i)
        found = expert(x.index_select(0, at[:, 0])) * w[at[:, 0], at[:, 1]].unsqueeze(-1)
        out = out.scatter_add(0, at[:, :1].select(1, 0).unsqueeze(-1).expand(-1, WIDTH), found)
    return out


def pairs(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """Of all pairs of rows and experts in one line."""
    out, flat = torch.zeros_like(x), w.flatten()
    for i, expert in enumerate(experts):
        at = (selected.flatten() == i).nonzero().squeeze(-1)
        out.index_add_(0, at // CHOSEN, expert(x[at // CHOSEN]) * flat[at, None])
    return out


def switch(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """One expert for each row."""
    out = x.new_zeros(x.shape)
    for i, expert in enumerate(experts):
        b = torch.eq(selected[:, 0], i).nonzero(as_tuple=True)[0]
        out[b, :] = expert(x[b, :])
    return out * w[:, :1]


def masked(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """By a mask of rows."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = (selected == i).any(-1)
        out[mask] += expert(x[mask]) * (w * (selected == i)).sum(-1)[mask].unsqueeze(-1)
    return out


def left_out(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """Experts that no row chose are left out."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        b, n = torch.where(selected == i)
        if b.shape[0] == 0:
            continue
        found = expert(x[b])
        found = found * w[b, n, None]
        out.index_add_(0, b, found)
    return out


def run_if_any(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """The same by a mask."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = (selected == i).any(dim=-1)
        flat = mask.view(-1)
        if flat.any():
            out[mask] += expert(x[flat]) * w[:, 0][mask].unsqueeze(1)
    return out


def run_if_rows(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """The same by the rows."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = selected[:, 0] == i
        rows = x[mask]
        if rows.numel() > 0:
            out[mask] = expert(rows)
    return out * w[:, :1]


def left_out_by_counts(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """As DeepSeek-V3's own code has it."""
    out = torch.zeros_like(x)
    indices = selected.view(-1, CHOSEN)
    counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
    for i in range(1, EXPERTS):
        if counts[i] == 0:
            continue
        expert = experts[i]
        b, n = torch.where(indices == i)
        out[b] += expert(x[b]) * w[b, n, None]
    return out


def hit(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """As transformers has it: experts that some row chose."""
    out, mask = torch.zeros_like(x), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
    expert_hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in expert_hit:
        expert = experts[number]
        n, b = torch.where(mask[number].squeeze(0))
        state = x[None, b].reshape(-1, WIDTH)
        found = expert(state) * w[b, n, None]
        out.index_add_(0, b, found.to(x.dtype))
    return out


def hit_by_number(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """The same, of which one is left out, and another does nothing."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(selected, num_classes=EXPERTS)
        mask = mask.permute(2, 1, 0)
        expert_hit = (mask.sum(dim=(-1, -2)) > 0).nonzero(as_tuple=False).squeeze(-1)
    for one in expert_hit:
        number = int(one.item())
        if number == EXPERTS:
            continue
        n, b = torch.where(mask[number])
        if b.numel() == 0:
            continue
        if number > 0:
            expert = experts[number]
            found = expert(x[b])
        else:
            found = x[b] * 2
        out.index_add_(0, b, found * w[b, n, None])
    return out


def over_hit(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """As ``hit``, and in some way more than that."""
    out, mask = torch.zeros_like(x), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        n, b = torch.where(mask[number].squeeze(0))
        out.index_add_(0, b, experts[number](x[b]) * w[b, n, None])
    return out


def over_mask(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As transformers' Switch has it: whether the mask is of zeros and ones, only its maker knows; experts by name."""
    out, mask = torch.zeros_like(x), chosen.permute(2, 1, 0)
    expert_hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in expert_hit:
        n, b = torch.where(mask[number].squeeze(0))
        expert = experts.get_submodule(f"{number[0]}")
        out.index_add_(0, b, expert(x[None, b].reshape(-1, WIDTH)) * w[b, n, None])
    return out


def hit_of_a_router(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """With experts that take a row at most, as some have a capacity."""
    mask = F.one_hot(selected, EXPERTS)
    return over_mask(experts, x, w, (mask * (mask.cumsum(0) <= 1)).view(-1, CHOSEN, EXPERTS))


def hit_by_signs(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """Of ones of both signs, of which the sum is zero where some row chose an expert."""
    return over_mask(experts, x, w, F.one_hot(selected, EXPERTS) * (w[..., None] - 0.3).sign().long())


LOOPS: list[Loop] = [
    hit,
    hit_of_a_router,
    hit_by_number,
    over_hit,
    added_in_place,
    one_hot,
    one_hot_in_place,
    columns,
    pairs,
    switch,
    masked,
    left_out,
    run_if_any,
    run_if_rows,
    left_out_by_counts,
]
