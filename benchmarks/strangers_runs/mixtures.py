"""Everything else: experts, adapters, statistics, graphs, tables, losses inside, many outputs."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base
        self.base.weight.requires_grad_(False)
        if base.bias is not None:
            base.bias.requires_grad = False
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


@stranger
def lora() -> Made:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])
    return model, torch.randn(8, 16)


class DenseMoE(nn.Module):
    """All experts on all tokens, weighed by a softmax of the two largest scores; a loss of balance beside."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts, bias=False)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(experts)
        ])  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        top, where = torch.topk(scores, 2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, where, F.softmax(top, dim=-1))
        out = torch.stack([expert(x) for expert in self.experts], dim=-2)
        balance = weights.mean(dim=(0, 1)).pow(2).sum()
        return (out * weights.unsqueeze(-1)).sum(dim=-2), balance


@stranger
def dense_moe() -> Made:
    return DenseMoE(), torch.randn(4, 6, 16)


class StackedExperts(nn.Module):
    """Weights of all experts in one tensor, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24) * 0.2), nn.Parameter(torch.randn(4, 24, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        h = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("btef,efd,bte->btd", h, self.down, p)


@stranger
def stacked_experts() -> Made:
    return StackedExperts(), torch.randn(4, 5, 16)


class RunningCentre(nn.Module):
    """Statistics moved by hand in forward, while training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.tensor(0))
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.steps += 1
        return self.lin(x - self.mean)


@stranger
def running_centre() -> Made:
    return RunningCentre(), torch.randn(8, 16)


class RebindsBuffer(nn.Module):
    """The buffer is bound anew, as ``self.mean = ...``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.lin(x - self.mean)


@stranger
def rebinds_buffer() -> Made:
    return RebindsBuffer(), torch.randn(8, 16)


@stranger
def rebinds_buffer_inside() -> Made:
    return nn.Sequential(OrderedDict(first=nn.Linear(16, 16), centre=RebindsBuffer())), torch.randn(8, 16)


class VectorQuantizer(nn.Module):
    """The nearest code, straight-through gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(12, 8), nn.Linear(8, 12)
        self.codes = nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x)
        distance = z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(-1)
        index = distance.argmin(-1)
        q = self.codes(index)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.dec(z + (q - z).detach()), loss, index


@stranger
def vector_quantizer() -> Made:
    return VectorQuantizer(), torch.randn(8, 12)


class ParameterHolders(nn.Module):
    """Lists and dicts of parameters, scalars, a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(12, 12) * 0.3) for _ in range(3)])
        self.bs = nn.ParameterDict({"a": nn.Parameter(torch.zeros(12)), "b": nn.Parameter(torch.ones(12))})
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, w in enumerate(self.ws):
            x = torch.tanh(F.linear(x, w, self.bs["a" if i % 2 else "b"])) + x
        return x / self.temperature.exp()


@stranger
def parameter_holders() -> Made:
    return ParameterHolders(), torch.randn(8, 12)


class GCN(nn.Module):
    """A graph by its edges: index_add and degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        src, dst = edges[0], edges[1]
        degree = torch.zeros(x.size(0)).index_add(0, dst, torch.ones(dst.size(0))).clamp(min=1)
        for i, lin in enumerate((self.lin1, self.lin2)):
            messages = lin(x)[src] / degree[dst].unsqueeze(1)
            x = torch.zeros(x.size(0), messages.size(1)).index_add_(0, dst, messages)
            x = F.relu(x) if i == 0 else x
        return x


@stranger
def gcn() -> Made:
    return GCN(), (torch.randn(12, 8), ids(2, 40, below=12))


class DLRM(nn.Module):
    """Bags of embeddings, pairwise products below the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        rows, cols = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("cols", cols)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        feats = torch.stack([x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(feats, feats.transpose(1, 2))[:, self.rows, self.cols]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


@stranger
def dlrm() -> Made:
    return DLRM(), (torch.randn(8, 5), ids(8, 3, 4, below=50))


@stranger
def bags_with_padding() -> Made:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
            return self.head(self.bag(x, offsets))

    return Bags(), ids(8, 5, below=30)


@dataclass
class Output:
    """As ModelOutput is, plain."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class DataclassOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        h = torch.relu(self.body(x))
        logits = self.head(h)
        return Output(F.cross_entropy(logits, labels, label_smoothing=0.1), logits, (h,))


@stranger
def dataclass_output() -> Made:
    return DataclassOut(), {"x": torch.randn(8, 16), "labels": ids(8, below=4)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Nested(nn.Module):
    """Keyword arguments, None and numbers among them; a nested output with None inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, flag: bool = False) -> Any:
        p, q = self.a(x) * scale, self.b(x)
        if mask is not None:
            p = p.masked_fill(mask.unsqueeze(-1), 0.0)
        return {"pair": Pair(p, q), "nothing": None, "more": [p + q if flag else p - q]}


@stranger
def nested_outputs() -> Made:
    return Nested(), {"x": torch.randn(8, 16), "mask": torch.arange(8) > 5, "scale": 0.5, "flag": True}


@stranger
def optional_left_out() -> Made:
    return Nested(), (torch.randn(8, 16), None, 2)


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.l2(self.drop(F.relu(self.l1(x)))), 0.2, self.training)


@stranger
def dropouts() -> Made:
    return Dropouts(), torch.randn(8, 16)


@stranger
def dropouts_evaluated() -> Made:
    return Dropouts().eval(), torch.randn(8, 16)


class TiedAutoencoder(nn.Module):
    """A weight used transposed, a slice of a weight, weights shared between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(16, 8)
        self.mid = nn.Linear(8, 8)
        self.again = self.mid
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.again(torch.tanh(self.mid(self.enc(x))))
        return F.linear(z, self.enc.weight.t(), self.bias) + z @ self.enc.weight[:, :16]


@stranger
def tied_autoencoder() -> Made:
    return TiedAutoencoder(), torch.randn(8, 16)


class ShapeCode(nn.Module):
    """Branches and loops by shapes, views, unbind, slices with steps, in-place writes into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and x.shape[1] % 2 == 0:
            x = torch.cat([x[:, ::2], x[:, 1::2]], dim=2)
        out = torch.zeros(x.shape[0], x.shape[1], 12)
        for i, row in enumerate(x.unbind(1)):
            out[:, i] = self.lin(row[..., :6])
        out[:, :, 0] += 1
        return out.view(x.shape[0], -1).contiguous()


@stranger
def shape_code() -> Made:
    return ShapeCode(), torch.randn(4, 6, 3)


@stranger
def not_contiguous_input() -> Made:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), torch.randn(3, 6, 8).permute(2, 0, 1)


@stranger
def expanded_input() -> Made:
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus()), torch.randn(1, 6).expand(8, 6)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.n1(x).mT).mT
        return x + self.channels(self.n2(x))


@stranger
def mixer() -> Made:
    return Mixer(), torch.randn(4, 6, 8)
