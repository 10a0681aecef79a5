"""The model: a kernel's time from what its resources take, corrected for its device; a subgraph's from its kernels'.

Three parts, one after the other (docs/cost-model.md):

1. ``prior`` knows no device. It says how much of each resource (``features.RESOURCES``) a kernel of this shape uses,
   and how much a launch costs; time is their sum. What it learned on some devices therefore holds on others.
2. ``specialist`` corrects the prior on devices it was trained on; an ``Adapter`` does for one device more, and is all
   that fine-tuning trains: what was known stays as it was.
3. ``fusion`` is a graph network over the kernels of a subgraph: how much less (or more) than the sum of its kernels the
   subgraph takes.

Losses are absolute errors of log seconds, with a Laplace scale learned beside them. Message passing is GraphSAGE's
(Hamilton, Ying and Leskovec, NeurIPS 2017), along edges and against them, by torch-geometric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import scatter

from learned_cost.features import GRAPH_NUMBERS, RESOURCES, Features, stand_ins
from learned_cost.nodes import TEXTS
from learned_cost.predict import (
    ADAPTED_LOG_SCALE,
    ADAPTER_TEXTS,
    BOUND_SHARPNESS,
    CLIP,
    MIDDLE_LOG_S,
    PRIOR_LOG_SCALE,
    PRIOR_LOG_USE,
    SEEN_LOG_SCALE,
)

WIDTHS: Mapping[str, int] = {
    "op": 20, "kind": 4, "dtype": 8, "kv_dtype": 2, "stack": 8, "kernel": 16, "distribution": 3, "direction": 2,
}  # fmt: skip
DROPPED = ("kv_dtype", "stack", "kernel", "distribution")  # words that a question may lack: so does training, at times
PRIOR_DROP, SPECIALIST_DROP = 0.1, 0.03
DEVICE_WIDTH = 12
GRAPH_WIDTH = 64
# Penalties on departures from ``PRIOR_LOG_USE``, most for memory, so that what several resources could explain is not
# put on the one whose rate differs most by device; the last is the launch's.
WEIGHTS = (1.0, 30.0, 0.2, 0.2, 0.2, 0.2, 3.0)
PENALTY = 0.02
WITHOUT_PHYSICS_LOG_S = -9.0  # 0.12 ms, the middle of what there is
LAUNCH_LOG_S = -12.3  # 4.5 us


@dataclass(frozen=True)
class Rows:
    """Features as tensors, with the first kernel of each subgraph."""

    features: Features
    resources: Tensor
    bound: Tensor
    blind: Tensor
    own: Tensor
    graphs: Tensor
    start: NDArray[np.int64]  # [g + 1]
    latency: Tensor  # [g] log seconds; NaN where not measured

    def __len__(self) -> int:
        return len(self.features)

    def kernels(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Kernels of subgraphs, and which of ``rows`` (by place) each is of."""
        counts = self.start[rows + 1] - self.start[rows]
        if len(rows) and counts.max() == 1:
            return self.start[rows], np.arange(len(rows))
        place = np.repeat(np.arange(len(rows)), counts)
        return np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts) + self.start[rows][place], place


def rows_of(features: Features, latency_s: NDArray[np.float64]) -> Rows:
    """Tensors of features and measured seconds."""
    start = np.searchsorted(features.graph, np.arange(len(features) + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        latency = torch.from_numpy(np.log(latency_s).astype(np.float32))
    return Rows(
        features=features, start=start, latency=latency,
        resources=torch.from_numpy(features.resources), bound=torch.from_numpy(features.bound),
        blind=torch.from_numpy(features.blind), own=torch.from_numpy(features.own),
        graphs=torch.from_numpy(features.graphs),
    )  # fmt: skip


class Words(nn.Module):
    """Embeddings of texts; 0 is a word that was never seen."""

    def __init__(self, vocab: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.vocab = {name: tuple(vocab[name]) for name in vocab}
        self.tables = nn.ModuleDict({name: nn.Embedding(len(words) + 1, WIDTHS[name]) for name, words in vocab.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """Of the embeddings together."""
        return sum(WIDTHS[name] for name in self.vocab)

    def codes(self, features: Features, kernels: NDArray[np.int64], drop: float = 0.0) -> dict[str, Tensor]:
        """Places of the kernels' words; ``drop`` of those that may be missing are left out."""
        found = {}
        for name, words in self.vocab.items():
            codes, spelled = features.texts[name]
            place = {word: i + 1 for i, word in enumerate(words)}
            table = np.array([*(place.get(word, 0) for word in spelled), 0], dtype=np.int64)
            code = torch.from_numpy(table[codes[kernels]])
            if drop and name in DROPPED:
                code = code.masked_fill(torch.rand(code.shape) < drop, 0)
            found[name] = code
        return found

    def forward(self, codes: Mapping[str, Tensor]) -> Tensor:
        """[n, width]."""
        return torch.cat([table(codes[name]) for name, table in self.tables.items()], dim=1)


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

    def forward(self, x: Tensor) -> Tensor:
        """[n, outputs]."""
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.leave(F.silu(self.norm(x)))
        return out.float()


class Prior(nn.Module):
    """Seconds from resources, knowing no device."""

    def __init__(self, numbers: int, vocab: Mapping[str, Sequence[str]], width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.words = Words(vocab)
        self.trunk = Trunk(numbers + self.words.width, len(RESOURCES) + 2, width, depth)
        self.launch = nn.Embedding(len(vocab["stack"]) + 1, 1)
        nn.init.constant_(self.launch.weight, LAUNCH_LOG_S)

    def forward(self, blind: Tensor, resources: Tensor, codes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(log seconds [n], log scale [n], departures [n, R + 1])."""
        out = self.trunk(torch.cat([blind, self.words(codes)], dim=1))
        count = len(RESOURCES)
        use = resources + resources.new_tensor(PRIOR_LOG_USE) + out[:, :count]
        launch = self.launch(codes["stack"]) + out[:, count : count + 1]
        return (
            torch.logsumexp(torch.cat([use, launch], dim=1), dim=1),
            out[:, count + 1] + PRIOR_LOG_SCALE,
            out[:, : count + 1],
        )


class Adapter(nn.Module):
    """Correction of one device's kernels."""

    def __init__(self, numbers: int, vocab: Mapping[str, Sequence[str]], width: int = 96) -> None:
        super().__init__()
        self.words = Words({name: vocab[name] for name in ADAPTER_TEXTS})
        self.trunk = Trunk(numbers + self.words.width, 2, width, 2)

    def forward(self, blind: Tensor, codes: Mapping[str, Tensor]) -> Tensor:
        """[n, 2]: correction of log seconds, and of the log scale."""
        out: Tensor = self.trunk(torch.cat([blind, self.words(codes)], dim=1))
        return out


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

    def forward(
        self, blind: Tensor, resources: Tensor, codes: Mapping[str, Tensor], share: Tensor, edges: Tensor,
        place: Tensor, graphs: Tensor,
    ) -> Tensor:  # fmt: skip
        """[g, 2] from kernels [n], of which ``share`` [n, 1] is the log of the part of the subgraph's time."""
        relative = resources - torch.logsumexp(resources, dim=1, keepdim=True)
        x = F.silu(self.enter(torch.cat([blind, self.words(codes), relative, share], dim=1)))
        if self.edges:
            for along, against in zip(self.along, self.against, strict=True):
                x = x + F.silu(along(x, edges) + against(x, edges.flip(0)))
        count = len(graphs)
        weighted = scatter(x * share.exp(), place, dim=0, dim_size=count, reduce="sum")
        mean = scatter(x, place, dim=0, dim_size=count, reduce="mean")
        out: Tensor = self.leave(torch.cat([weighted, mean, graphs], dim=1))
        return out


class KernelNet(nn.Module):
    """All parts. ``devices`` are those that the specialist was trained on."""

    blind_mean: Tensor
    blind_std: Tensor
    own_mean: Tensor
    own_std: Tensor

    def __init__(
        self, blind: int, own: int, vocab: Mapping[str, Sequence[str]], devices: Sequence[str], *, width: int = 256,
        depth: int = 3,
    ) -> None:  # fmt: skip
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
        for name, values in (("blind", rows.blind), ("own", rows.own)):
            chosen = values[kernels].double()
            getattr(self, f"{name}_mean").copy_(chosen.mean(0))
            getattr(self, f"{name}_std").copy_(chosen.std(0, correction=0) + 1e-3)

    def scaled(self, rows: Rows, kernels: NDArray[np.int64]) -> Tensor:
        """[n, blind]."""
        return ((rows.blind[kernels] - self.blind_mean) / self.blind_std).clamp(-CLIP, CLIP)

    def prior_of(self, rows: Rows, kernels: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Prior``, of kernels."""
        codes = self.prior.words.codes(rows.features, kernels, PRIOR_DROP if self.training else 0.0)
        found: tuple[Tensor, Tensor, Tensor] = self.prior(self.scaled(rows, kernels), rows.resources[kernels], codes)
        return found

    def kernels(self, rows: Rows, kernels: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(log seconds, log scale) of each kernel alone, above its bound."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(p.requires_grad for p in self.prior.parameters())):
            mean, scale, _ = self.prior_of(rows, kernels)
        if not self.physics:
            mean, scale = torch.full_like(mean, WITHOUT_PHYSICS_LOG_S), torch.zeros_like(scale)
        features = rows.features
        on = features.device[features.graph[kernels]]
        dtypes, _ = features.texts["dtype"]
        device = torch.from_numpy(stand_ins(features, self.devices, self.known)[on, dtypes[kernels]])
        known = device > 0
        if bool(known.any()):
            correction = self._corrected(rows, kernels, mean, scale, device)
            mean = mean + torch.where(known, correction[:, 0], 0.0)
            scale = torch.where(known, correction[:, 1] + SEEN_LOG_SCALE, scale)
        for index, name in enumerate(features.devices):
            if _key(name) in self.adapters and bool((here := on == index).any()):
                mean, scale = self._adapted(rows, kernels, mean, scale, name, np.flatnonzero(here))
        return (_above(mean, rows.bound[kernels]) if self.physics else mean), scale

    def _corrected(self, rows: Rows, kernels: NDArray[np.int64], mean: Tensor, scale: Tensor, device: Tensor) -> Tensor:
        own = ((rows.own[kernels] - self.own_mean) / self.own_std).clamp(-CLIP, CLIP)
        codes = self.words.codes(rows.features, kernels, SPECIALIST_DROP if self.training else 0.0)
        relative = (rows.resources[kernels] - mean[:, None]) * float(self.physics)
        base = torch.stack([mean - MIDDLE_LOG_S, scale], dim=1)
        parts = [self.scaled(rows, kernels), own, relative, base, self.words(codes), self.device(device)]
        out: Tensor = self.specialist(torch.cat(parts, dim=1))
        return out

    def _adapted(
        self, rows: Rows, kernels: NDArray[np.int64], mean: Tensor, scale: Tensor, name: str, here: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        adapter = self.adapters[_key(name)]
        assert isinstance(adapter, Adapter)
        codes = adapter.words.codes(rows.features, kernels[here])
        out = adapter(torch.cat([self.scaled(rows, kernels[here]), mean[here, None] - MIDDLE_LOG_S], dim=1), codes)
        at = torch.from_numpy(here)
        return mean.index_add(0, at, out[:, 0]), scale.index_copy(0, at, out[:, 1] + ADAPTED_LOG_SCALE)

    def forward(self, rows: Rows, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(log seconds, log scale) of subgraphs."""
        kernels, place = rows.kernels(chosen)
        mean, scale = self.kernels(rows, kernels)
        if len(kernels) == len(chosen):
            return mean, scale
        at = torch.from_numpy(place)
        total = _sum_of_logs(mean, at, len(chosen))
        widest = scatter(scale, at, dim=0, dim_size=len(chosen), reduce="mean")
        counts = torch.bincount(at, minlength=len(chosen))
        many = counts > 1
        if self.fusion is None:
            return total, widest
        numbers = torch.cat([self.scaled(rows, kernels)], dim=1)
        share = (mean - total[at])[:, None]
        codes = self.fusion.words.codes(rows.features, kernels)
        edges = torch.from_numpy(_edges_of(rows, chosen, kernels))
        out = self.fusion(numbers, rows.resources[kernels], codes, share, edges, at, rows.graphs[chosen])
        return total + torch.where(many, out[:, 0], 0.0), torch.where(many, out[:, 1] + ADAPTED_LOG_SCALE, widest)

    def adapt(self, name: str, vocab: Mapping[str, Sequence[str]]) -> Adapter:
        """A new adapter for a device."""
        adapter = Adapter(len(self.blind_mean) + 1, vocab)
        self.adapters[_key(name)] = adapter
        self.adapter_vocab[name] = {text: tuple(vocab[text]) for text in ADAPTER_TEXTS}
        return adapter


def _key(name: str) -> str:
    """A device's name as torch takes it for a module."""
    return name.replace(".", "_")


def _above(mean: Tensor, bound: Tensor) -> Tensor:
    """Never under the bound, and where well above it as it was."""
    return bound + F.softplus(BOUND_SHARPNESS * (mean - bound)) / BOUND_SHARPNESS


def _sum_of_logs(values: Tensor, place: Tensor, count: int) -> Tensor:
    """[count] log of the sums of exp(values) by place."""
    top = scatter(values.detach(), place, dim=0, dim_size=count, reduce="max")
    total: Tensor = top + scatter((values - top[place]).exp(), place, dim=0, dim_size=count, reduce="sum").log()
    return total


def _edges_of(rows: Rows, chosen: NDArray[np.int64], kernels: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, e] of the chosen subgraphs, by place among ``kernels``."""
    edges, graph = rows.features.edges, rows.features.graph
    if edges.size == 0:
        return edges
    place = np.full(len(graph), -1, dtype=np.int64)
    place[kernels] = np.arange(len(kernels))
    wanted = np.isin(graph[edges[0]], chosen)
    found: NDArray[np.int64] = place[edges[:, wanted]]
    return found
