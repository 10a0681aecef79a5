"""The model as torch trains it: its weights, how they start, and torch's arithmetic for ``forward``.

Fine-tuning trains an ``Adapter`` alone: what was known stays as it was. Losses are absolute errors of log seconds, with
a Laplace scale learned beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import scatter

from learned_cost.kernels.features import GRAPH_NUMBERS, RESOURCES, Features
from learned_cost.kernels.forward import BOUND_SHARPNESS, Arithmetic, Codes, Forward, kernels_of, module_name
from learned_cost.kernels.nodes import TEXTS

ADAPTER_TEXTS = ("op", "kind", "dtype", "stack", "direction")
WIDTHS: Mapping[str, int] = {
    "op": 20,
    "kind": 4,
    "dtype": 8,
    "kv_dtype": 2,
    "stack": 8,
    "kernel": 16,
    "distribution": 3,
    "direction": 2,
}
DROPPED = ("kv_dtype", "stack", "kernel", "distribution")  # words that a question may lack: so does training, at times
PRIOR_DROP, SPECIALIST_DROP = 0.1, 0.03
DEVICE_WIDTH = 12
GRAPH_WIDTH = 64
# Penalties on departures from ``PRIOR_LOG_USE``, most for memory, so that what several resources could explain is not
# put on the one whose rate differs most by device; the last is the launch's.
WEIGHTS = (1.0, 30.0, 0.2, 0.2, 0.2, 0.2, 3.0)
PENALTY = 0.02
LAUNCH_LOG_S = -12.3  # 4.5 us


@dataclass(frozen=True)
class Rows:
    """Features, with the first kernel of each subgraph, and what was measured."""

    features: Features
    start: Codes  # [g + 1]
    latency: Tensor  # [g] log seconds; NaN where not measured

    def __len__(self) -> int:
        return len(self.features)

    def kernels(self, rows: Codes) -> tuple[Codes, Codes]:
        """Kernels of subgraphs, and which of ``rows`` (by place) each is of."""
        return kernels_of(self.start, rows)


def rows_of(features: Features, latency_s: NDArray[np.float64]) -> Rows:
    """Features and measured seconds."""
    start = np.searchsorted(features.graph, np.arange(len(features) + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        latency = torch.from_numpy(np.log(latency_s).astype(np.float32))
    return Rows(features, start, latency)


class _Torch(Arithmetic):
    """By torch, with gradients; ``drop`` is how many of the words that may be missing are left out, by table prefix."""

    def __init__(self, drop: Mapping[str, float]) -> None:
        self._drop = drop

    def array(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def words(self, prefix: str, name: str, codes: Codes) -> Codes:
        drop = self._drop.get(prefix, 0.0)
        return np.where(torch.rand(codes.shape).numpy() < drop, 0, codes) if drop and name in DROPPED else codes

    def rows(self, table: Tensor, codes: Codes) -> Tensor:
        return F.embedding(torch.from_numpy(codes), table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def normal(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], weight, bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def clip(self, x: Tensor, most: float) -> Tensor:
        return x.clamp(-most, most)

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    def where(self, condition: NDArray[np.bool_], x: Tensor, y: Tensor | float) -> Tensor:
        return torch.where(torch.from_numpy(condition), x, y)

    def put(self, x: Tensor, at: Codes, values: Tensor) -> Tensor:
        return x.index_copy(0, torch.from_numpy(at), values)

    def log_sum_exp(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x, dim=1, keepdim=True)

    def above(self, mean: Tensor, bound: Tensor) -> Tensor:
        return bound + F.softplus(BOUND_SHARPNESS * (mean - bound)) / BOUND_SHARPNESS

    def sums(self, values: Tensor, place: Codes, count: int) -> Tensor:
        found: Tensor = scatter(values, torch.from_numpy(place), dim=0, dim_size=count, reduce="sum")
        return found

    def means(self, values: Tensor, place: Codes, count: int) -> Tensor:
        found: Tensor = scatter(values, torch.from_numpy(place), dim=0, dim_size=count, reduce="mean")
        return found

    def most(self, values: Tensor, place: Codes, count: int) -> Tensor:
        found: Tensor = scatter(values.detach(), torch.from_numpy(place), dim=0, dim_size=count, reduce="max")
        return found


class Words(nn.Module):
    """Embeddings of texts; 0 is a word that was never seen."""

    def __init__(self, vocab: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.vocab = {name: tuple(vocab[name]) for name in vocab}
        self.width = sum(WIDTHS[name] for name in vocab)
        self.tables = nn.ModuleDict({name: nn.Embedding(len(words) + 1, WIDTHS[name]) for name, words in vocab.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]


class Trunk(nn.Module):
    """A residual perceptron: [n, inputs] -> [n, outputs]. Starts as zero."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, outputs)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)


class Prior(nn.Module):
    """Seconds from resources, knowing no device."""

    def __init__(self, numbers: int, vocab: Mapping[str, Sequence[str]], width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.words = Words(vocab)
        self.trunk = Trunk(numbers + self.words.width, len(RESOURCES) + 2, width, depth)
        self.launch = nn.Embedding(len(vocab["stack"]) + 1, 1)
        nn.init.constant_(self.launch.weight, LAUNCH_LOG_S)


class Adapter(nn.Module):
    """Correction of one device's kernels."""

    def __init__(self, numbers: int, vocab: Mapping[str, Sequence[str]], width: int = 96) -> None:
        super().__init__()
        self.words = Words({name: vocab[name] for name in ADAPTER_TEXTS})
        self.trunk = Trunk(numbers + self.words.width, 2, width, 2)


class Fusion(nn.Module):
    """What a subgraph takes relative to the sum of its kernels."""

    def __init__(self, numbers: int, vocab: Mapping[str, Sequence[str]], *, edges: bool = True) -> None:
        super().__init__()
        self.words = Words({name: vocab[name] for name in ADAPTER_TEXTS})
        self.enter = nn.Linear(numbers + self.words.width + len(RESOURCES) + 1, GRAPH_WIDTH)
        self.along = nn.ModuleList(SAGEConv(GRAPH_WIDTH, GRAPH_WIDTH) for _ in range(2))
        self.against = nn.ModuleList(SAGEConv(GRAPH_WIDTH, GRAPH_WIDTH) for _ in range(2))
        self.leave = Trunk(2 * GRAPH_WIDTH + len(GRAPH_NUMBERS), 2, GRAPH_WIDTH, 1)
        self.edges = edges


class KernelNet(nn.Module):
    """All parts. ``devices`` are those that the specialist was trained on."""

    blind_mean: Tensor
    blind_std: Tensor
    own_mean: Tensor
    own_std: Tensor

    def __init__(
        self,
        blind: int,
        own: int,
        vocab: Mapping[str, Sequence[str]],
        devices: Sequence[str],
        *,
        width: int = 256,
        depth: int = 3,
    ) -> None:
        super().__init__()
        self.vocab = {name: tuple(vocab[name]) for name in TEXTS}
        self.devices = tuple(devices)
        self.size = (width, depth)
        for name, count in (("blind", blind), ("own", own)):
            self.register_buffer(f"{name}_mean", torch.zeros(count))
            self.register_buffer(f"{name}_std", torch.ones(count))
        self.prior = Prior(blind, self.vocab)
        self.words = Words(self.vocab)
        self.device = nn.Embedding(len(devices) + 1, DEVICE_WIDTH)
        inputs = blind + own + len(RESOURCES) + 2 + self.words.width + DEVICE_WIDTH
        self.specialist = Trunk(inputs, 2, width, depth)
        self.adapters = nn.ModuleDict()
        self.adapter_vocab: dict[str, dict[str, tuple[str, ...]]] = {}
        self.fusion: Fusion | None = None
        self.known: dict[str, tuple[str, Sequence[str]]] = {}  # chip and dtypes of each device
        self.physics = True  # without: a plain network of the same size, neither prior nor bound

    def normalise(self, rows: Rows, kernels: NDArray[np.int64]) -> None:
        """Means and deviations of these kernels' numbers."""
        for name in ("blind", "own"):
            chosen = torch.from_numpy(getattr(rows.features, name)[kernels]).double()
            getattr(self, f"{name}_mean").copy_(chosen.mean(0))
            getattr(self, f"{name}_std").copy_(chosen.std(0, correction=0) + 1e-3)

    def model(self) -> dict[str, Any]:
        """The description that goes with the weights (JSON)."""
        fusion = None
        if self.fusion is not None:
            words = self.fusion.words.vocab
            fusion = {"vocab": {name: words.get(name, ()) for name in TEXTS}, "edges": self.fusion.edges}
        return {
            "blind": len(self.blind_mean),
            "own": len(self.own_mean),
            "vocab": self.vocab,
            "devices": self.devices,
            "size": self.size,
            "adapters": self.adapter_vocab,
            "fusion": fusion,
            "known": self.known,
        }

    def evaluation(self) -> Forward:
        """The model at these weights; some words are left out while it is trained."""
        drop = {"prior.words": PRIOR_DROP, "words": SPECIALIST_DROP} if self.training else {}
        arrays = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return Forward(arrays, self.model(), _Torch(drop), self.physics)

    def forward(self, rows: Rows, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(log seconds, log scale) of subgraphs."""
        return self.evaluation().subgraphs(rows.features, chosen, rows.start)

    def adapt(self, name: str, vocab: Mapping[str, Sequence[str]]) -> Adapter:
        """A new adapter for a device."""
        adapter = Adapter(len(self.blind_mean) + 1, vocab)
        self.adapters[module_name(name)] = adapter
        self.adapter_vocab[name] = {text: tuple(vocab[text]) for text in ADAPTER_TEXTS}
        return adapter
