"""The model's answers in NumPy alone: what the search asks, without torch. Entry point: ``Predictor``.

The model is ``forward``'s, as it is trained (``gnn``); the weights are a file's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.data.kernel import Kernel, Subgraph, family
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Z90, Answer
from learned_cost.kernels.correction import PREFIX, Correction, as_planned
from learned_cost.kernels.features import Features, features_of, layout
from learned_cost.kernels.forward import Arithmetic, Codes, Forward
from learned_cost.kernels.nodes import of_subgraphs, of_table
from learned_cost.weights import SHIPPED, Weights, load_weights

Floats = NDArray[np.float64]
Known = Mapping[str, tuple[str, Sequence[str]]]  # chip and dtypes by device

NAME = "kernels"  # of the shipped weights
# A100 80 GB PCIe left out, its 40 GB sibling trained on: median error 11 % where rows of seen devices have 3 %
# (docs/decisions/0011).
SIBLING_STRETCH = 4.0
RANGE_MARGIN = float(np.log(4.0))  # beyond the least and most arithmetic and traffic that were seen of an operator
BATCH = 8192
WHOLE, HALVES = "fp32", frozenset({"bf16", "fp16"})


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


def types_of(features: Features, kernels: Codes) -> dict[str, list[str]]:
    """The types of elements that each operator was seen in."""
    (ops, vocab), (types, names) = features.texts["op"], features.texts["dtype"]
    pairs = np.unique(np.stack([ops[kernels], types[kernels]]), axis=1).T.tolist()
    found: dict[str, list[str]] = {}
    for op, dtype in pairs:
        found.setdefault(vocab[op], []).append(names[dtype])
    return {op: sorted(seen) for op, seen in found.items()}


def is_alone(one: Subgraph) -> bool:
    """True of a kernel that nothing is fused with."""
    return len(one.kernels) == 1 and not one.fused


def stand_in(kernel: Kernel, types: Mapping[str, Sequence[str]]) -> Kernel:
    """What a kernel is asked as: one on rows that were seen in float32 alone, as half of the rows in float32.

    It moves as many bytes, which is all that takes it time; of the type a network that never saw it says anything.
    """
    seen = types.get(kernel.op, ())
    if family(kernel.op) != "rows" or kernel.dtype not in HALVES or WHOLE not in seen or HALVES & {*seen}:
        return kernel
    rows = max(1, kernel.extents[0] // 2)
    dims = {**kernel.dims, "m": max(1, int(kernel.dims.get("m", rows * 2)) // 2)}
    return replace(kernel, dtype=WHOLE, dims=dims, extents=(rows, *kernel.extents[1:]), flops=kernel.flops / 2)


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
    """Weights of a file, ready to answer.

    Attributes:
        correction: of one device, by a few measurements of it.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.model: Mapping[str, Any] = weights.description["model"]  # Any: JSON
        self.name, self.digest = weights.name, weights.digest
        arrays = {name: np.asarray(array, dtype=np.float64) for name, array in weights.arrays.items()}
        self.correction = Correction.read(weights.arrays, weights.description.get("correction"))
        self._forward = Forward(arrays, self.model, Arithmetic())

    @classmethod
    def load(cls, path: Path | None = None) -> Predictor:
        """Of a weight file, or the shipped one.

        Raises:
            WeightsError: if it is missing, damaged, or of another version or layout.
        """
        return cls(load_weights(SHIPPED / NAME if path is None else path, "kernels", features=layout()))

    def corrected(self, correction: Correction) -> Predictor:
        """The same model, corrected; what corrected it before is dropped."""
        arrays = {name: array for name, array in self.weights.arrays.items() if not name.startswith(PREFIX)}
        description = {**self.weights.description, "correction": correction.meaning()}
        return Predictor(replace(self.weights, arrays=arrays | correction.arrays(), description=description))

    def regime(self, device: str, its_chip: str) -> str:
        """As ``regime_of``."""
        return regime_of(device, its_chip, self.model["adapters"], self.model["devices"], self.model["known"])

    def predict(self, subgraphs: Sequence[Subgraph], device: DeviceRecord) -> Answer:
        """Of each subgraph on a device."""
        # what corrects it may have been measured in any type, and says of that one how far the network is off
        types = self.weights.description.get("types", {}) if self.correction is None else {}
        asked = [
            replace(one, kernels=(stand_in(one.kernels[0], types),)) if is_alone(one) else one for one in subgraphs
        ]
        return self.predict_features(features_of(of_subgraphs(asked, device)))

    def predict_table(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Answer:
        """Of each row of a profile."""
        return self.predict_features(features_of(of_table(table, devices)))

    def predict_features(self, features: Features) -> Answer:
        """Of each subgraph of features made already."""
        if self.correction is None:
            return self.uncorrected(features)
        features = as_planned(features)
        start = np.searchsorted(features.graph, np.arange(len(features) + 1))
        return self.correction.apply(features, self.uncorrected(features), np.flatnonzero(np.diff(start) == 1))

    def uncorrected(self, features: Features) -> Answer:
        """The model's own answers."""
        count = len(features)
        start = np.searchsorted(features.graph, np.arange(count + 1))
        means, scales = np.zeros(count), np.zeros(count)
        for begin in range(0, count, BATCH):
            chosen = np.arange(begin, min(begin + BATCH, count))
            means[chosen], scales[chosen] = self._forward.subgraphs(features, chosen, start)
        description = self.weights.description
        return answer(
            means,
            scales,
            features,
            np.arange(count),
            start,
            self.regime,
            description["calibration"],
            description["ranges"],
        )
