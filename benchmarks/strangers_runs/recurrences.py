"""Recurrences: LSTM, GRU with attention, a state-space scan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class LanguageLSTM(nn.Module):
    """Two layers, both directions, a state that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(24, 20)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(self.emb(x))
        return self.fc(y) + h[-1].mean()


@stranger
def language_lstm() -> Made:
    return LanguageLSTM(), ids(4, 6, below=20)


class Seq2SeqGRU(nn.Module):
    """A cell in a loop over time, attention over what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.attn = nn.GRUCell(8, 16), nn.Linear(32, 8), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, seen, outs = x.new_zeros(x.size(0), 16), [], []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            seen.append(h)
            past = torch.stack(seen, 1)
            a = torch.softmax((past * self.attn(h).unsqueeze(1)).sum(-1), -1)
            outs.append(self.out(torch.cat([h, (a.unsqueeze(-1) * past).sum(1)], -1)))
        return torch.stack(outs, dim=1)


@stranger
def gru_with_attention() -> Made:
    return Seq2SeqGRU(), torch.randn(4, 4, 8)


class StateSpace(nn.Module):
    """A selective scan written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.dt, self.bc = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(8, 1)))
        self.D = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.inp(x).chunk(2, -1)
        dt = F.softplus(self.dt(x))
        b, c = self.bc(x).split([4, 4], -1)
        a = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log))
        h, ys = torch.zeros(x.shape[0], 8, 4), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
        return (torch.stack(ys, 1) + u * self.D) * F.silu(z)


@stranger
def state_space() -> Made:
    return StateSpace(), torch.randn(4, 5, 8)
