"""Small models of every kind that is planned, with weights that are the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

V, D, H, S = 48, 16, 4, 8  # vocabulary, width, heads, positions


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """q [b, s, (h e)], k and v [b, s, (g e)] with g dividing h -> [b, s, (h e)]."""
    q, k, v = (x.unflatten(2, (-1, D // H)).transpose(1, 2) for x in (q, k, v))
    if k.shape[1] < H:  # each serves several heads of q
        k, v = (x.unsqueeze(2).expand(-1, -1, H // x.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class GptLayer(nn.Module):
    """Pre-norm attention and MLP, its query, key and value in one product: [b, s, d] -> [b, s, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(attend(*self.qkv(self.ln_1(x)).chunk(3, -1)))
        y: Tensor = x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return y


class Gpt(nn.Module):
    """Learned positions, tied embedding: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(S, D)
        self.h = nn.ModuleList(GptLayer() for _ in range(layers))
        self.ln_f = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight
        for layer in self.h:
            x = layer(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


class LlamaLayer(nn.Module):
    """RMS norms, rotary positions, grouped heads, a gated MLP: [b, s, d] -> [b, s, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.q, self.o = (nn.Linear(D, D, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(D, D // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(D, 2 * D, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k = (rotated(y, cos, sin) for y in (self.q(h), self.k(h)))
        x = x + self.o(attend(q, k, self.v(h)))
        h = self.norm_2(x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions turned into heads' coordinates: x [b, s, (h e)], cos and sin [s, 1, e]."""
    x = x.unflatten(2, (-1, D // H))
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((-high, low), -1) * sin).flatten(2)


class Llama(nn.Module):
    """ids [b, s] -> logits [b, s, v]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(layers))
        self.norm = nn.RMSNorm(D, eps=1e-5)
        angles = torch.arange(S * D // H).reshape(S, 1, D // H)
        self.register_buffer("cos", angles % 3 / 4, persistent=False)  # no sines: their last bits differ by machine
        self.register_buffer("sin", angles % 5 / 8, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Bert(nn.Module):
    """Post-norm layers that look both ways: ids and segments [b, s] -> hidden [b, s, d], pooled [b, d]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.segments, self.positions = nn.Embedding(V, D), nn.Embedding(2, D), nn.Embedding(S, D)
        self.norm, self.pooler = nn.LayerNorm(D), nn.Linear(D, D)
        self.layers = nn.ModuleList(nn.ModuleDict(BertLayer()) for _ in range(layers))

    def forward(self, ids: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.words(ids) + self.segments(segments) + self.positions.weight)
        for layer in self.layers:
            x = layer["norm_1"](x + layer["o"](attend(layer["q"](x), layer["k"](x), layer["v"](x), causal=False)))
            x = layer["norm_2"](x + layer["down"](F.gelu(layer["up"](x))))
        return x, torch.tanh(self.pooler(x[:, 0]))


def BertLayer() -> dict[str, nn.Module]:  # noqa: N802  # a module by another name
    """The parts of one layer."""
    products = {name: nn.Linear(D, D) for name in "qkvo"}
    ends = {"up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D)}
    return {**products, **ends, "norm_1": nn.LayerNorm(D), "norm_2": nn.LayerNorm(D)}


class Mixture(nn.Module):
    """Four experts run dense, of which each token weighs two: x [t, d] -> [t, d]."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D, experts, bias=False)
        self.up, self.down = nn.Parameter(torch.ones(experts, D, 2 * D)), nn.Parameter(torch.ones(experts, 2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = F.softmax(self.router(x), -1)
        values, chosen = probabilities.topk(2, -1)
        share = torch.zeros_like(probabilities).scatter(-1, chosen, values)
        y = F.silu(x @ self.up) * share.t().unsqueeze(-1)
        return x + (y @ self.down).sum(0)


class Recommender(nn.Module):
    """Table rows and dense features, interacting by products: features [b, 8], ids [b, 3, 2] -> score [b, 1]."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, D) for _ in range(3))
        self.bottom, self.top, self.score = nn.Linear(8, D), nn.Linear(D + 6, 2 * D), nn.Linear(2 * D, 1)

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        x = torch.relu(self.bottom(features))
        vectors = torch.stack([x, *(table(ids[:, i]).sum(1) for i, table in enumerate(self.tables))], 1)
        pairs = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, torch.tensor([4, 8, 9, 12, 13, 14]))
        return torch.sigmoid(self.score(torch.relu(self.top(torch.cat((x, pairs), 1)))))


class Convolutions(nn.Module):
    """Two residual blocks with batch norms, one of them narrowing: images [b, 4, 8, 8] -> classes [b, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm_1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.norm_2 = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.short, self.head = nn.Conv2d(8, 16, 1, 2), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        x = x + torch.relu(self.norm_1(self.one(x)))
        x = torch.relu(self.norm_2(self.two(x)) + self.short(x))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Towers(nn.Module):
    """Two chains of products that share their input, without biases: x [b, d] -> two of [b, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.e = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = self.b(self.a(x)), self.e(torch.relu(self.c(x)))
        return {"left": left, "sum": left + right}


def settled(module: nn.Module) -> nn.Module:
    """The module, its tensors filled with the same exact fractions everywhere; variances above zero."""
    with torch.no_grad():
        for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
            if tensor.is_floating_point():
                values = torch.arange(tensor.numel()) * 37 % 101 - (0 if name.endswith("var") else 50)
                tensor.copy_(((values + 1) / 256).reshape(tensor.shape))
    return module


def ids(*shape: int) -> Tensor:
    """Indices of zero."""
    return torch.zeros(shape, dtype=torch.int64)
