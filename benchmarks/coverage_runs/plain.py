"""Models of plain torch, small, with the arguments that they are trained with. Entry point: ``PLAIN``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

ROWS, WIDTH, LENGTH, CLASSES = 4, 16, 8, 4
Built = tuple[nn.Module, dict[str, Any]]


class Down(nn.Module):
    """Two convolutions with group norms, each followed by SiLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)])
        self.norms = nn.ModuleList([nn.GroupNorm(4, after), nn.GroupNorm(4, after)])

    def forward(self, x: Tensor) -> Tensor:
        """Features."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.silu(norm(conv(x)))
        return x


class UNet(nn.Module):
    """Two levels, transposed convolution up (Ronneberger et al., 2015)."""

    def __init__(self, *, resize: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = Down(3, 16), Down(16, 32), Down(32, 16)
        self.up = (
            nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(32, 16, 3, padding=1))
            if resize
            else nn.ConvTranspose2d(32, 16, 2, stride=2)
        )
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        x = self.first(image)
        y = self.up(self.second(F.max_pool2d(x, 2)))
        return F.mse_loss(self.head(self.last(torch.cat([x, y], 1))), target)


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of torch, and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        y, _ = self.layer(self.table(ids))
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


class Cells(nn.Module):
    """A loop over a cell of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        state = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return F.cross_entropy(self.head(state), labels)


class Convolved(nn.Module):
    """Two graph convolutions over a dense normalised adjacency (Kipf and Welling, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        scale = adjacency.sum(-1, keepdim=True).clamp(min=1).rsqrt()
        adjacency = scale * adjacency * scale.transpose(-1, -2)
        x = F.relu(adjacency @ self.first(x))
        return F.cross_entropy((adjacency @ self.second(self.drop(x))).flatten(0, 1), labels.flatten())


class Edges(nn.Module):
    """A graph convolution over a list of edges, by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        h = self.first(x)
        h = F.relu(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        return F.cross_entropy(self.second(h), labels)


class Recommender(nn.Module):
    """DLRM: tables, two perceptrons, and the products of all pairs (Naumov et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(64, WIDTH) for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 32), nn.ReLU(), nn.Linear(32, 1))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.bottom(dense)
        all_ = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (all_ @ all_.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(torch.cat([x, pairs], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, labels)


class Autoencoder(nn.Module):
    """A variational autoencoder; its noise is an input, so that a step can be repeated (Kingma and Welling, 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The loss."""
        mean, log_variance = self.encode(x).chunk(2, -1)
        found = self.decode(mean + noise * torch.exp(0.5 * log_variance))
        distance = F.binary_cross_entropy(found, x.sigmoid(), reduction="sum")
        return {"loss": distance - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(), "image": found}


class Diffusion(nn.Module):
    """Two blocks of DiT: attention and perceptron, scaled and shifted by the time (Peebles and Xie, 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(3, 32, 4, stride=4), nn.Linear(32, 32)
        self.attention = nn.ModuleList([nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 32)) for _ in range(2)]
        )
        self.modulate = nn.ModuleList([nn.Linear(32, 6 * 32) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 48)

    def forward(self, image: Tensor, time: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        angles = time[:, None].float() * torch.exp(torch.arange(16) * (-math.log(1e4) / 16))
        condition = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], -1)))
        x = self.patches(image).flatten(2).transpose(1, 2)
        for attention, mlp, modulate in zip(self.attention, self.mlps, self.modulate, strict=True):
            a, b, c, d, e, f = modulate(condition).unsqueeze(1).chunk(6, -1)
            h = self.norm(x) * (1 + b) + a
            x = x + c * attention(h, h, h, need_weights=False)[0]
            x = x + f * mlp(self.norm(x) * (1 + e) + d)
        y = self.head(x).unflatten(1, (4, 4)).unflatten(-1, (3, 4, 4))
        return F.mse_loss(torch.einsum("bhwcpq->bchpwq", y).reshape(target.shape), target)


class Translator(nn.Module):
    """``nn.Transformer`` with its masks of padding and of what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.core = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.core(
            self.table(source), self.table(target), tgt_mask=later, src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0, tgt_is_causal=False,  # else it is found by the mask's values
        )  # fmt: skip
        return F.cross_entropy(self.head(y).transpose(1, 2), labels, ignore_index=0, label_smoothing=0.1)


def _ids(words: int = 32) -> Tensor:
    return torch.randint(1, words, (ROWS, LENGTH))


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], Built]:
    return lambda: (Recurrent(kind, **options), {"ids": _ids(), "labels": _ids()})


def _unet(*, resize: bool) -> Callable[[], Built]:
    images = {"image": torch.randn(ROWS, 3, 16, 16), "target": torch.randn(ROWS, 3, 16, 16)}
    return lambda: (UNet(resize=resize), images)


def _graph() -> Built:
    labels, edges = torch.randint(CLASSES, (ROWS, 8)), (torch.rand(ROWS, 8, 8) < 0.4).float()
    return Convolved(), {"x": torch.randn(ROWS, 8, WIDTH), "adjacency": edges, "labels": labels}


PLAIN: Mapping[str, Callable[[], Built]] = {
    "unet": _unet(resize=False),
    "unet-resize": _unet(resize=True),
    "lstm": _recurrent(nn.LSTM),
    "lstm-both-ways": _recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": _recurrent(nn.GRU),
    "gru-cell": lambda: (Cells(), {"x": torch.randn(ROWS, LENGTH, WIDTH), "labels": torch.randint(CLASSES, (ROWS,))}),
    "gcn": _graph,
    "gcn-edges": lambda: (
        Edges(),
        {"x": torch.randn(16, WIDTH), "edges": torch.randint(16, (2, 32)), "labels": torch.randint(CLASSES, (16,))},
    ),
    "dlrm": lambda: (
        Recommender(),
        {"dense": torch.randn(ROWS, 8), "sparse": torch.randint(64, (ROWS, 3)), "labels": torch.rand(ROWS).round()},
    ),
    "vae": lambda: (Autoencoder(), {"x": torch.randn(ROWS, 64), "noise": torch.randn(ROWS, 8)}),
    "dit": lambda: (
        Diffusion(),
        {
            "image": torch.randn(ROWS, 3, 16, 16),
            "time": torch.randint(1000, (ROWS,)),
            "target": torch.randn(ROWS, 3, 16, 16),
        },
    ),
    "transformer": lambda: (Translator(), {"source": _ids(), "target": _ids(), "labels": _ids()}),
}
