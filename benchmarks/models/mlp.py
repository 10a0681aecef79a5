"""Networks of linear layers, embedding tables and gates, as modules of plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def layers(ci: int, widths: Sequence[int], *, bias: bool = True, last: nn.Module | None = None) -> nn.Sequential:
    """Linear layers with a ReLU after each but the last, which ``last`` follows (None: a ReLU too)."""
    stack: list[nn.Module] = []
    for number, co in enumerate(widths):
        final = number == len(widths) - 1
        stack += [nn.Linear(ci, co, bias=bias), last if final and last is not None else nn.ReLU()]
        ci = co
    return nn.Sequential(*stack)


class Tables(nn.Module):
    """The sum of each bag of rows of each table: ids [b, tables, bag] -> one [b, d] per table."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """ids: [b, tables, bag]."""
        return [table(ids[:, number]).sum(1) for number, table in enumerate(self.tables)]


class Dlrm(nn.Module):
    """Dense features and table rows, interacting by the inner product of every pair.

    dense features [b, f], ids [b, tables, bag] -> [b, top[-1]].
    """

    def __init__(self, tables: Sequence[int], *, dense: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        width, count = bottom[-1], len(tables) + 1
        self.bottom = layers(dense, bottom)
        self.tables = Tables(tables, width)
        self.below = [row * count + column for row in range(count) for column in range(row)]
        self.top = layers(width + len(self.below), top, last=nn.Identity())

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        """features: [b, f], ids: [b, tables, bag]."""
        x = self.bottom(features)
        vectors = torch.stack([x, *self.tables(ids)], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)  # [b, n n]
        pairs = products.index_select(1, torch.tensor(self.below))
        logit: Tensor = self.top(torch.cat((x, pairs), 1))
        return logit


class Xdl(nn.Module):
    """Table rows concatenated, then layers ending in a sigmoid: ids [b, tables, bag] -> [b, widths[-1]]."""

    def __init__(self, tables: Sequence[int], width: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.tables = Tables(tables, width)
        self.top = layers(len(tables) * width, widths, last=nn.Sigmoid())

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, tables, bag]."""
        scores: Tensor = self.top(torch.cat(self.tables(ids), 1))
        return scores


class CandleUno(nn.Module):
    """Two scalars and several feature vectors, each vector encoded, all concatenated: -> [b, 1]."""

    def __init__(self, features: Sequence[int], encoder: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(layers(count, encoder, bias=False) for count in features)
        self.top = layers(2 + len(features) * encoder[-1], top, bias=False)
        self.out = nn.Linear(top[-1], 1, bias=False)

    def forward(self, dose: Tensor, other_dose: Tensor, *features: Tensor) -> Tensor:
        """doses: [b, 1] each, features: [b, f_i]."""
        encoded = [encoder(x) for encoder, x in zip(self.encoders, features, strict=True)]
        growth: Tensor = self.out(self.top(torch.cat((dose, other_dose, *encoded), 1)))
        return growth


class TwoTowers(nn.Module):
    """softmax(f(x) + g(y)) for two stacks without biases: x, y [b, ci] -> [b, widths[-1]]."""

    def __init__(self, ci: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.left = layers(ci, widths, bias=False, last=nn.Identity())
        self.right = layers(ci, widths, bias=False, last=nn.Identity())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [b, ci]."""
        return torch.softmax(self.left(x) + self.right(y), -1)


class NasCell(nn.Module):
    """One step of NasRNN: x, h [b, d] -> h [b, d]; each of eight gates adds a map of x and one of h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_input = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))
        self.of_state = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """x, h: [b, d]."""
        sigmoid, tanh, relu = torch.sigmoid, torch.tanh, torch.relu
        t = [f(x) + g(h) for f, g in zip(self.of_input, self.of_state, strict=True)]
        first = tanh(relu(t[0]) + sigmoid(t[3])) * tanh(sigmoid(t[6]) * relu(t[7]))
        second = sigmoid(sigmoid(t[1]) + tanh(t[2])) + tanh(sigmoid(t[4]) * tanh(t[5]))
        return tanh(tanh(second) * tanh(first))


class NasRnn(nn.Module):
    """Cells in a row, from a learned first state: x [b, steps, d] -> [b, d]."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(NasCell(width) for _ in range(steps))
        self.first = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, steps, d]."""
        h = self.first.expand(x.size(0), -1)
        for step, cell in enumerate(self.cells):
            h = cell(x[:, step], h)
        return h
