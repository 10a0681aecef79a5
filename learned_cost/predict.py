"""The model's answers in NumPy alone: what the search asks, without torch. Entry point: ``Predictor``.

The arithmetic is that of ``learned_cost.gnn`` in evaluation, which a test holds it to; the weights are a file's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.device import DeviceRecord
from learned_cost.evaluate import Z90, family
from learned_cost.features import RESOURCES, Features, features_of, layout, stand_ins
from learned_cost.kernel import Subgraph
from learned_cost.nodes import TEXTS, of_subgraphs, of_table
from learned_cost.table import Table
from learned_cost.weights import SHIPPED, Weights, load_weights

Singles = NDArray[np.float32]
Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Known = Mapping[str, tuple[str, Sequence[str]]]  # chip and dtypes by device

NAME = "kernels"  # of the shipped weights
# A100 80 GB PCIe left out, its 40 GB sibling trained on: median error 11 % where rows of seen devices have 3 %
# (docs/decisions/0011).
SIBLING_STRETCH = 4.0
RANGE_MARGIN = float(np.log(4.0))  # beyond the least and most arithmetic and traffic that were seen of an operator
BATCH = 8192

# What the arithmetic of both, here and in learned_cost.gnn, has in it.
CLIP = 5.0  # deviations from the mean that a number may be
BOUND_SHARPNESS = 8.0
ADAPTER_TEXTS = ("op", "kind", "dtype", "stack", "direction")
# Log seconds by resource that a well-written kernel is taken to need before anything was measured: memory and
# arithmetic at some 80-95 % of their rates, and little of the rest.
PRIOR_LOG_USE = (0.25, 0.05, -0.7, -1.5, -1.0, -2.5)
# Where the logs of scales start, by part: what each errs when little is learned yet.
PRIOR_LOG_SCALE, SEEN_LOG_SCALE, ADAPTED_LOG_SCALE = -1.0, -2.0, -1.5
MIDDLE_LOG_S = -10.0  # 45 us, about the middle of what there is


@dataclass(frozen=True)
class Answer:
    """By row: log of seconds (a median), its deviation, and whether the like was trained on."""

    mean_log_s: Floats
    std_log: Floats
    in_range: NDArray[np.bool_]


def family_of(features: Features, chosen: Codes, start: Codes) -> NDArray[np.str_]:
    """Family of each subgraph's operator; "subgraph" of those of several kernels."""
    codes, vocab = features.texts["op"]
    names = np.array([*(family(op) for op in vocab), "other"])
    found = names[codes[start[chosen]]]
    return np.where(np.diff(start)[chosen] > 1, "subgraph", found)


def ranges_of(features: Features, kernels: Codes) -> dict[str, tuple[float, ...]]:
    """Least and most log arithmetic and traffic of each operator."""
    codes, vocab = features.texts["op"]
    numbers = features.blind[kernels, :2]  # of features._shape: arithmetic, traffic
    result: dict[str, tuple[float, ...]] = {}
    for code in np.unique(codes[kernels]):
        here = numbers[codes[kernels] == code]
        low, high = here.min(axis=0), here.max(axis=0)
        result[vocab[code]] = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    return result


def answer(
    mean: Floats,
    scale: Floats,
    features: Features,
    chosen: Codes,
    start: Codes,
    regime: Callable[[str, str], str],
    calibration: Mapping[str, Mapping[str, float]],
    ranges: Mapping[str, Sequence[float]],
) -> Answer:
    """Deviations from Laplace scales, so that 1.64 of them hold 90 %, and which rows are in range."""
    families = family_of(features, chosen, start)
    device = features.device[chosen]
    width = np.ones(len(chosen))
    for code, (name, its_chip) in enumerate(zip(features.devices, features.chips, strict=True)):
        widths = widths_of(calibration, regime(name, its_chip))
        here = device == code
        for word in np.unique(families[here]):
            width[here & (families == word)] = widths.get(str(word), widths["all"])
    return Answer(mean, np.exp(scale) * width / Z90, _in_range(features, chosen, start, ranges))


def regime_of(device: str, its_chip: str, adapters: Collection[str], devices: Collection[str], known: Known) -> str:
    """Who answers for a device: its adapter, the specialist ("seen"), that of a device of the same chip ("sibling"),
    or the prior ("unseen").
    """
    if device in adapters:
        return f"adapter {device}"
    if device in devices:
        return "seen"
    return "sibling" if its_chip in {other for other, _ in known.values()} else "unseen"


def known_of(features: Features, kernels: Codes) -> dict[str, tuple[str, Sequence[str]]]:
    """Chip of each device, and the dtypes of its kernels."""
    codes, names = features.texts["dtype"]
    on = features.device[features.graph[kernels]]
    found: dict[str, tuple[str, Sequence[str]]] = {}
    for place in np.unique(on):
        dtypes = sorted(names[code] for code in np.unique(codes[kernels[on == place]]) if code >= 0)
        found[features.devices[place]] = (features.chips[place], dtypes)
    return found


def widths_of(calibration: Mapping[str, Mapping[str, float]], regime: str) -> Mapping[str, float]:
    """Widths of intervals by family."""
    if regime == "sibling" and "seen" in calibration:
        return {name: SIBLING_STRETCH * width for name, width in calibration["seen"].items()}
    return calibration.get(regime) or {"all": 2 * Z90}


def _in_range(
    features: Features, chosen: Codes, start: Codes, ranges: Mapping[str, Sequence[float]]
) -> NDArray[np.bool_]:
    """All kernels of a subgraph are of known operators, and of sizes like those seen."""
    codes, vocab = features.texts["op"]
    never = (np.inf, -np.inf, np.inf, -np.inf)
    limits = np.array([*(tuple(ranges.get(op, never)) for op in vocab), never])[codes]
    numbers = features.blind[:, :2]
    inside = (numbers >= limits[:, (0, 2)] - RANGE_MARGIN) & (numbers <= limits[:, (1, 3)] + RANGE_MARGIN)
    inside_all = np.concatenate([[0], np.cumsum(inside.all(axis=1))])
    counts = start[chosen + 1] - start[chosen]
    found: NDArray[np.bool_] = (inside_all[start[chosen + 1]] - inside_all[start[chosen]]) == counts
    return found


class Predictor:
    """Weights of a file, ready to answer."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.model: Mapping[str, Any] = weights.description["model"]  # Any: JSON
        self.name, self.digest = weights.name, weights.digest
        self.arrays = {name: np.asarray(array, dtype=np.float32) for name, array in weights.arrays.items()}

    @classmethod
    def load(cls, path: Path | None = None) -> Predictor:
        """Of a weight file, or the shipped one.

        Raises:
            WeightsError: if it is missing, damaged, or of another version or layout.
        """
        return cls(load_weights(SHIPPED / NAME if path is None else path, "kernels", features=layout()))

    def regime(self, device: str, its_chip: str) -> str:
        """As ``regime_of``."""
        return regime_of(device, its_chip, self.model["adapters"], self.model["devices"], self.model["known"])

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        """Of each subgraph on a device."""
        return self.predict_features(features_of(of_subgraphs(subgraphs, device)))

    def predict_table(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:
        """Of each row of a profile."""
        return self.predict_features(features_of(of_table(table, devices)))

    def predict_features(self, features: Features) -> Answer:
        """Of each subgraph of features made already."""
        count = len(features)
        start = np.searchsorted(features.graph, np.arange(count + 1))
        means, scales = np.zeros(count), np.zeros(count)
        for begin in range(0, count, BATCH):
            chosen = np.arange(begin, min(begin + BATCH, count))
            means[chosen], scales[chosen] = self._subgraphs(features, chosen, start)
        description = self.weights.description
        return answer(
            means, scales, features, np.arange(count), start, self.regime, description["calibration"],
            description["ranges"],
        )  # fmt: skip

    def _subgraphs(self, features: Features, chosen: Codes, start: Codes) -> tuple[Singles, Singles]:
        kernels = np.arange(start[chosen[0]], start[chosen[-1] + 1])
        mean, scale = self._kernels(features, kernels)
        if len(kernels) == len(chosen):
            return mean, scale
        place = features.graph[kernels] - chosen[0]
        total = _sum_of_logs(mean, place, len(chosen))
        counts = np.bincount(place, minlength=len(chosen))
        scale = (np.bincount(place, weights=scale, minlength=len(chosen)) / np.maximum(counts, 1)).astype(np.float32)
        if self.model["fusion"] is None:
            return total, scale
        out = self._fusion(features, kernels, chosen, place, mean - total[place])
        return total + np.where(counts > 1, out[:, 0], 0.0), np.where(counts > 1, out[:, 1] + ADAPTED_LOG_SCALE, scale)

    def _kernels(self, features: Features, kernels: Codes) -> tuple[Singles, Singles]:
        blind = self._scaled("blind", features.blind[kernels])
        resources = features.resources[kernels]
        words = self._codes("prior.words", self.model["vocab"], features, kernels)
        out = self._trunk("prior.trunk", np.concatenate([blind, self._embedded("prior.words", words)], axis=1))
        count = len(RESOURCES)
        launch = self.arrays["prior.launch.weight"][words["stack"]] + out[:, count : count + 1]
        mean = _log_sum_exp(
            np.concatenate([resources + np.array(PRIOR_LOG_USE, dtype=np.float32) + out[:, :count], launch], axis=1)
        )
        scale = out[:, count + 1] + PRIOR_LOG_SCALE
        on = features.device[features.graph[kernels]]
        dtypes, _ = features.texts["dtype"]
        device = stand_ins(features, self.model["devices"], self.model["known"])[on, dtypes[kernels]]
        if (device > 0).any():
            correction = self._corrected(features, kernels, blind, mean, scale, device)
            mean = mean + np.where(device > 0, correction[:, 0], 0.0)
            scale = np.where(device > 0, correction[:, 1] + SEEN_LOG_SCALE, scale)
        for code, name in enumerate(features.devices):
            here = np.flatnonzero(on == code)
            if name in self.model["adapters"] and len(here):
                prefix = f"adapters.{name.replace('.', '_')}"
                words = self._codes(f"{prefix}.words", self.model["adapters"][name], features, kernels[here])
                inside = np.concatenate([blind[here], mean[here, None] - MIDDLE_LOG_S], axis=1)
                both = np.concatenate([inside, self._embedded(f"{prefix}.words", words)], axis=1)
                out = self._trunk(f"{prefix}.trunk", both)
                mean[here] += out[:, 0]
                scale[here] = out[:, 1] + ADAPTED_LOG_SCALE
        return _above(mean, features.bound[kernels]), scale

    def _corrected(
        self, features: Features, kernels: Codes, blind: Singles, mean: Singles, scale: Singles, device: Codes
    ) -> Singles:
        words = self._embedded("words", self._codes("words", self.model["vocab"], features, kernels))
        parts = [
            blind, self._scaled("own", features.own[kernels]), features.resources[kernels] - mean[:, None],
            np.stack([mean - MIDDLE_LOG_S, scale], axis=1), words, self.arrays["device.weight"][device],
        ]  # fmt: skip
        return self._trunk("specialist", np.concatenate(parts, axis=1))

    def _fusion(self, features: Features, kernels: Codes, chosen: Codes, place: Codes, share: Singles) -> Singles:
        resources = features.resources[kernels]
        relative = resources - _log_sum_exp(resources)[:, None]
        vocab = self.model["fusion"]["vocab"]
        words = self._embedded("fusion.words", self._codes("fusion.words", vocab, features, kernels))
        numbers = [self._scaled("blind", features.blind[kernels]), words, relative, share[:, None]]
        x = _silu(self._linear("fusion.enter", np.concatenate(numbers, axis=1)))
        inside = np.isin(features.edges[0], kernels) if features.edges.size else np.zeros(0, dtype=bool)
        edges = features.edges[:, inside] - kernels[0]
        for layer in range(2 if self.model["fusion"]["edges"] else 0):
            along = self._sage(f"fusion.along.{layer}", x, edges)
            x = x + _silu(along + self._sage(f"fusion.against.{layer}", x, edges[::-1]))
        count = len(chosen)
        weighted = _summed(x * np.exp(share)[:, None], place, count)
        sizes = np.maximum(np.bincount(place, minlength=count), 1)[:, None]
        both = [weighted, (_summed(x, place, count) / sizes).astype(np.float32), features.graphs[chosen]]
        return self._trunk("fusion.leave", np.concatenate(both, axis=1))

    def _sage(self, name: str, x: Singles, edges: Codes) -> Singles:
        counts = np.maximum(np.bincount(edges[1], minlength=len(x)), 1)[:, None]
        mean = (_summed(x[edges[0]], edges[1], len(x)) / counts).astype(np.float32)
        return self._linear(f"{name}.lin_l", mean) + x @ self.arrays[f"{name}.lin_r.weight"].T

    def _scaled(self, name: str, values: Singles) -> Singles:
        scaled = (values - self.arrays[f"{name}_mean"]) / self.arrays[f"{name}_std"]
        result: Singles = np.clip(scaled, -CLIP, CLIP)
        return result

    def _codes(
        self, prefix: str, vocab: Mapping[str, Sequence[str]], features: Features, kernels: Codes
    ) -> dict[str, Codes]:
        found = {}
        for name in TEXTS:
            if f"{prefix}.tables.{name}.weight" in self.arrays:
                codes, spelled = features.texts[name]
                place = {word: code + 1 for code, word in enumerate(vocab[name])}
                found[name] = np.array([*(place.get(word, 0) for word in spelled), 0])[codes[kernels]]
        return found

    def _embedded(self, prefix: str, codes: Mapping[str, Codes]) -> Singles:
        tables = [self.arrays[f"{prefix}.tables.{name}.weight"][code] for name, code in codes.items()]
        return np.concatenate(tables, axis=1)

    def _linear(self, name: str, x: Singles) -> Singles:
        result: Singles = x @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"]
        return result

    def _normal(self, name: str, x: Singles) -> Singles:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5)
        result: Singles = scaled * self.arrays[f"{name}.weight"] + self.arrays[f"{name}.bias"]
        return result

    def _trunk(self, name: str, x: Singles) -> Singles:
        x = self._linear(f"{name}.enter", x.astype(np.float32, copy=False))
        block = 0
        while f"{name}.blocks.{block}.0.weight" in self.arrays:
            inner = self._linear(f"{name}.blocks.{block}.1", self._normal(f"{name}.blocks.{block}.0", x))
            x = x + self._linear(f"{name}.blocks.{block}.3", _silu(inner))
            block += 1
        return self._linear(f"{name}.leave", _silu(self._normal(f"{name}.norm", x)))


def _silu(x: Singles) -> Singles:
    return (x / (1.0 + np.exp(-np.clip(x, -80.0, 80.0)))).astype(np.float32, copy=False)


def _above(mean: Singles, bound: Singles) -> Singles:
    over: Singles = np.logaddexp(np.float32(0.0), BOUND_SHARPNESS * (mean - bound))
    return bound + over / BOUND_SHARPNESS


def _log_sum_exp(values: Singles) -> Singles:
    top = values.max(axis=1)
    result: Singles = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    return result


def _sum_of_logs(values: Singles, place: Codes, count: int) -> Singles:
    top = np.full(count, -np.inf, dtype=np.float32)
    np.maximum.at(top, place, values)
    result: Singles = top + np.log(_summed(np.exp(values - top[place])[:, None], place, count)[:, 0])
    return result


def _summed(values: Singles, place: Codes, count: int) -> Singles:
    result = np.zeros((count, values.shape[1]), dtype=np.float32)
    np.add.at(result, place, values)
    return result
