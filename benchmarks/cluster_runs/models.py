"""The models that are trained: each a row of parts, so that a pipeline can be cut between any two of them.

Entry point: ``TASKS``; a task has a module, one global batch and a loss that is a mean over the batch's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, relu, scaled_dot_product_attention, silu

VOCABULARY, SEQUENCE, HEAD = 8192, 128, 32
ROWS, TABLE_WIDTH, FIELDS = 65_536, 64, 16  # of the recommender's table; ids that each example looks up in it


@dataclass(frozen=True)
class Task:
    """A model and the batch it is trained on. ``small`` makes the model of the smoke test."""

    name: str
    make_parts: Callable[[], list[nn.Module]]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def module(self) -> nn.Sequential:
        """The model, the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*self.make_parts()).train()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_batch()


class Attention(nn.Module):
    """Self-attention: x [b, s, d] -> [b, s, d]. Heads are counted from what is here, so that a shard of them runs."""

    def __init__(self, width: int, *, causal: bool, rotary: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.causal = causal
        self.rotary = Rotary(HEAD, SEQUENCE) if rotary else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, d]."""
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        h = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.o(h.transpose(1, 2).flatten(2))
        return out


class Rotary(nn.Module):
    """Rotary positions: x [b, heads, s, d] -> the same shape."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, width, 2).float() / width))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, heads, s, d]."""
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin


class FeedForward(nn.Module):
    """Two linear layers with GELU between them: [b, s, d] -> [b, s, d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, d]."""
        out: Tensor = self.down(gelu(self.up(x)))
        return out


class SwiGlu(nn.Module):
    """Llama's feed-forward layer: [b, s, d] -> [b, s, d]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, d]."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A transformer's layer, normalised first: [b, s, d] -> [b, s, d]."""

    def __init__(self, width: int, *, causal: bool = True, llama: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width, eps=1e-5), norm(width, eps=1e-5)
        self.attention = Attention(width, causal=causal, rotary=llama, bias=not llama)
        self.inner = SwiGlu(width, 8 * width // 3 // 64 * 64) if llama else FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, d]."""
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.inner(self.norm_2(x))
        return out


class Tokens(nn.Module):
    """Token embedding, with learned positions or none: ids [b, s] -> [b, s, d]."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02) if length else None

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, s]."""
        x: Tensor = self.table(ids)
        return x if self.positions is None else x + self.positions


class Head(nn.Module):
    """Norm and linear layer: [b, s, d] -> [b, s, n]; with ``pool`` the mean over s is taken first: -> [b, n]."""

    def __init__(self, width: int, outputs: int, *, llama: bool = False, pool: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5) if llama else nn.LayerNorm(width)
        self.out, self.pool = nn.Linear(width, outputs, bias=False), pool

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, d]."""
        x = self.norm(x)
        out: Tensor = self.out(x.mean(1) if self.pool else x)
        return out


class Patches(nn.Module):
    """Image patches with learned positions: [b, 3, h, h] -> [b, (h/p)^2, d]."""

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn((side // patch) ** 2, width) * 0.02)

    def forward(self, image: Tensor) -> Tensor:
        """image: [b, 3, h, h]."""
        x = self.patch(image).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = x.contiguous()  # a stage sends row-major tensors
        return out


class Fields(nn.Module):
    """Rows of one table, side by side: ids [b, f] -> [b, f d]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, f]."""
        rows: Tensor = self.table(ids)
        return rows.flatten(1)


class Layer(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, inputs]."""
        return relu(self.linear(x))


def language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over all tokens."""
    return cross_entropy(logits.flatten(0, 1), ids.flatten())


def transformer(width: int, *, llama: bool = False, layers: int = 4, vocabulary: int = VOCABULARY) -> list[nn.Module]:
    """A decoder: ids [b, s] -> logits [b, s, vocabulary]; input and output embeddings are not tied."""
    first = Tokens(vocabulary, width, 0 if llama else SEQUENCE)
    return [first, *(Block(width, llama=llama) for _ in range(layers)), Head(width, vocabulary, llama=llama)]


def vision(width: int) -> list[nn.Module]:
    """An encoder over patches: [b, 3, 32, 32] -> [b, 64]."""
    return [Patches(32, 4, width), *(Block(width, causal=False) for _ in range(4)), Head(width, 64, pool=True)]


def recommender() -> list[nn.Module]:
    """A table and layers: ids [b, f] -> score [b, 1]."""
    widths = (FIELDS * TABLE_WIDTH, 512, 256)
    inner = [Layer(a, b) for a, b in itertools.pairwise(widths)]
    return [Fields(ROWS, TABLE_WIDTH), *inner, nn.Linear(widths[-1], 1)]


def wide() -> list[nn.Module]:
    """Wide linear layers: [b, 1024] -> [b, 1024]."""
    return [Layer(1024, 2048), Layer(2048, 2048), Layer(2048, 2048), nn.Linear(2048, 1024)]


def text(rows: int, vocabulary: int = VOCABULARY) -> Callable[[], tuple[Tensor, Tensor]]:
    """Ids, and the ids to be foretold."""
    return lambda: (
        torch.randint(1, vocabulary, (rows, SEQUENCE)),
        torch.randint(1, vocabulary, (rows, SEQUENCE)),
    )


def pictures() -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    return torch.randn(32, 3, 32, 32), torch.randint(64, (32,))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gpt-256", lambda: transformer(256), text(16), language_loss),
        Task("gpt-512", lambda: transformer(512), text(16), language_loss),
        Task("llama", lambda: transformer(256, llama=True), text(16), language_loss),
        Task("vit", lambda: vision(256), pictures, cross_entropy),
        Task(
            "recommender", recommender,
            lambda: (torch.randint(ROWS, (256, FIELDS)), torch.randn(256, 1)), mse_loss,
        ),
        Task("mlp", wide, lambda: (torch.randn(64, 1024), torch.randn(64, 1024)), mse_loss),
        Task("tiny", lambda: transformer(128, layers=2, vocabulary=512), text(8, 512), language_loss),  # smoke test
    )
}  # fmt: skip
