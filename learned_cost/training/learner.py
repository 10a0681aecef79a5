"""How the model is trained: the prior when it is built, the specialist by the loop, an adapter when fine-tuning.

``GraphLearner`` is what ``train`` calls for. The prior stops early and is then fixed: trained for longer it
learns its devices rather than kernels, and errs more on those that it never saw. How far it errs there, and so how
wide its intervals are, is measured by leaving devices out while it is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ir.errors import WeightsError
from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Z90, Answer
from learned_cost.kernels.features import Features, features_of, layout
from learned_cost.kernels.gnn import PENALTY, WEIGHTS, Fusion, KernelNet, Rows, rows_of
from learned_cost.kernels.nodes import TEXTS, of_table
from learned_cost.kernels.predict import answer, family_of, known_of, ranges_of, regime_of, types_of
from learned_cost.weights import Arrays, Weights

PRIOR_STEPS, PRIOR_ROWS, PRIOR_RATE = 600, 1024, 2e-3
PRIOR_DECAY = 0.05
LEFT_OUT_GROUPS, LEFT_OUT_STEPS = 3, 250
SCORED = 20_000  # rows that a left-out group is scored on
SCALE_WEIGHT = 0.1  # of the scale's loss beside the error's
BATCH = 16_384
LEAST = 30  # errors of a family that its width is taken from


class GraphLearner:
    """Builds, trains, restores and exports ``KernelNet``."""

    def __init__(
        self,
        *,
        width: int = 256,
        depth: int = 3,
        edges: bool = True,
        physics: bool = True,
        prior_steps: int = PRIOR_STEPS,
    ) -> None:
        """``edges`` and ``physics`` can be left out, to see what they are good for (benchmarks/cost_accuracy.py)."""
        self.size, self.edges, self.physics, self.prior_steps = (width, depth), edges, physics, prior_steps

    @property
    def layout(self) -> str:
        """Hash of the layout of features."""
        return layout()

    def features(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Rows:
        """Of all rows of a table."""
        return rows_of(features_of(of_table(table, devices)), table.latency_s)

    def build(self, rows: Rows, chosen: NDArray[np.int64], seed: int) -> LearnedKernels:
        """A new module on these rows, its prior trained."""
        torch.manual_seed(seed)
        features = rows.features
        kernels, _ = rows.kernels(chosen)
        vocab = {name: _words(features, name, kernels) for name in TEXTS}
        seen = [features.devices[code] for code in np.unique(features.device[chosen])]
        sizes = features.blind.shape[1], features.own.shape[1]
        net = KernelNet(*sizes, vocab, seen, width=self.size[0], depth=self.size[1])
        net.normalise(rows, kernels)
        net.physics = self.physics
        net.known = known_of(features, kernels)
        single = chosen[np.diff(rows.start)[chosen] == 1]
        widths = _left_out_widths(net, rows, single, seed, self.prior_steps * LEFT_OUT_STEPS // PRIOR_STEPS)
        train_prior(net, rows, single, seed, self.prior_steps)
        net.prior.requires_grad_(requires_grad=False)
        if len(single) < len(chosen):
            net.fusion = Fusion(features.blind.shape[1], vocab, edges=self.edges)
        module = LearnedKernels(net)
        module.calibration["unseen"] = widths
        module.ranges, module.types = ranges_of(features, kernels), types_of(features, kernels)
        return module

    def restore(self, weights: Weights) -> LearnedKernels:
        """The module that a weight file holds.

        Raises:
            WeightsError: if its numbers do not fit its description.
        """
        model = weights.description["model"]
        width, depth = model["size"]
        net = KernelNet(model["blind"], model["own"], model["vocab"], model["devices"], width=width, depth=depth)
        net.known = {name: (its_chip, dtypes) for name, (its_chip, dtypes) in model["known"].items()}
        for name, vocab in model["adapters"].items():
            net.adapt(name, vocab)
        if model["fusion"] is not None:
            net.fusion = Fusion(model["blind"], model["fusion"]["vocab"], edges=model["fusion"]["edges"])
        try:
            net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.arrays.items()})
        except RuntimeError as error:
            raise WeightsError(
                f"{weights.name}: its numbers are not what its description says", mend="Train or fetch it again"
            ) from error
        module = LearnedKernels(net)
        module.calibration = {name: dict(widths) for name, widths in weights.description["calibration"].items()}
        module.ranges = {op: tuple(limits) for op, limits in weights.description["ranges"].items()}
        module.types = dict(weights.description.get("types", {}))
        return module

    def thaw(self, module: nn.Module, rows: Rows, chosen: NDArray[np.int64]) -> None:
        """One adapter for each device of the rows is trained, and fusion where there are subgraphs."""
        assert isinstance(module, LearnedKernels)
        net, features = module.net, rows.features
        net.requires_grad_(requires_grad=False)
        kernels, _ = rows.kernels(chosen)
        vocab = {name: _words(features, name, kernels) for name in TEXTS}
        for code in np.unique(features.device[chosen]):
            net.adapt(features.devices[code], vocab).requires_grad_(requires_grad=True)
        if np.diff(rows.start)[chosen].max() > 1:
            net.fusion = Fusion(features.blind.shape[1], vocab, edges=self.edges)
        module.ranges = _widen(module.ranges, ranges_of(features, kernels))
        for op, seen in types_of(features, kernels).items():
            module.types[op] = sorted({*module.types.get(op, ()), *seen})

    def loss(self, module: nn.Module, rows: Rows, chosen: NDArray[np.int64]) -> Tensor:
        """Mean error of log seconds, and how badly the scale fits it."""
        assert isinstance(module, LearnedKernels)
        module.net.train()
        mean, scale = module.net(rows, chosen)
        return laplace(mean - rows.latency[chosen], scale)

    def predict(self, module: nn.Module, rows: Rows, chosen: NDArray[np.int64]) -> Answer:
        """Of the rows, in order."""
        assert isinstance(module, LearnedKernels)
        mean, scale = _evaluate(module.net, rows, chosen)
        return answer(mean, scale, rows.features, chosen, rows.start, module.regime, module.calibration, module.ranges)

    def calibrate(self, module: nn.Module, rows: Rows, chosen: NDArray[np.int64]) -> None:
        """Width of intervals, by family, from rows that were not trained on: of devices that were."""
        assert isinstance(module, LearnedKernels)
        names = zip(rows.features.devices, rows.features.chips, strict=True)
        regimes = np.array([module.regime(*name) for name in names])[rows.features.device[chosen]]
        mean, scale = _evaluate(module.net, rows, chosen)
        error = np.abs(mean - rows.latency[chosen].numpy().astype(np.float64)) / np.exp(scale)
        families = family_of(rows.features, chosen, rows.start)
        for regime in np.unique(regimes):
            if regime not in ("unseen", "sibling"):
                here = regimes == regime
                module.calibration[str(regime)] = _widths(error[here], families[here])

    def export(self, module: nn.Module) -> tuple[Arrays, Mapping[str, Any]]:
        """Numbers, and what they mean."""
        assert isinstance(module, LearnedKernels)
        net = module.net
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in net.state_dict().items()}
        meaning = {"model": net.model(), "calibration": module.calibration}
        return arrays, {**meaning, "ranges": module.ranges, "types": module.types}


class LearnedKernels(nn.Module):
    """The net, with what was measured of it: widths of intervals, and ranges of what it saw."""

    def __init__(self, net: KernelNet) -> None:
        super().__init__()
        self.net = net
        self.calibration: dict[str, dict[str, float]] = {}
        self.ranges: dict[str, tuple[float, ...]] = {}
        self.types: dict[str, list[str]] = {}

    def regime(self, device: str, its_chip: str) -> str:
        """As ``predict.regime_of``."""
        return regime_of(device, its_chip, self.net.adapter_vocab, self.net.devices, self.net.known)


def laplace(error: Tensor, scale: Tensor) -> Tensor:
    """Mean absolute error, and beside it the likelihood of its size under exp(``scale``)."""
    size = error.abs()
    likelihood = size.detach() / scale.exp() + scale
    return size.mean() + SCALE_WEIGHT * likelihood.mean()


def train_prior(net: KernelNet, rows: Rows, single: NDArray[np.int64], seed: int, steps: int) -> None:
    """Short, on subgraphs of one kernel."""
    random = np.random.default_rng(seed)
    parameters = list(net.prior.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PRIOR_RATE, weight_decay=PRIOR_DECAY, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PRIOR_RATE, total_steps=steps + 1, pct_start=0.1, final_div_factor=1e3
    )
    weights = torch.tensor(WEIGHTS)
    net.train()
    for _ in range(steps):
        chosen = random.choice(single, min(PRIOR_ROWS, len(single)))
        mean, scale, departures = net.evaluation().prior(rows.features, rows.start[chosen])
        loss = laplace(mean - rows.latency[chosen], scale) + PENALTY * (departures.square() * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def _left_out_widths(net: KernelNet, rows: Rows, single: NDArray[np.int64], seed: int, steps: int) -> dict[str, float]:
    """90 % of the errors on devices left out, by family, in scales of the prior that did not see them."""
    devices = rows.features.device[single]
    codes = np.unique(devices)
    random = np.random.default_rng(seed)
    groups = [group for group in np.array_split(random.permutation(codes), LEFT_OUT_GROUPS) if len(group)]
    if len(groups) < LEFT_OUT_GROUPS:
        return {"all": 2 * Z90}
    begun = {name: tensor.clone() for name, tensor in net.prior.state_dict().items()}
    errors, families = [], []
    for group in groups:
        inside = np.isin(devices, group)
        net.prior.load_state_dict(begun)
        train_prior(net, rows, single[~inside], seed, steps)
        held = _by_device(single[inside], devices[inside], random)
        net.eval()
        with torch.no_grad():
            mean, scale, _ = net.evaluation().prior(rows.features, rows.start[held])
        errors.append(((mean - rows.latency[held]).abs() / scale.exp()).numpy())
        families.append(family_of(rows.features, held, rows.start))
    net.prior.load_state_dict(begun)
    return _widths(np.concatenate(errors), np.concatenate(families))


def _by_device(rows: NDArray[np.int64], devices: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """Some of each device."""
    each = SCORED // max(1, len(np.unique(devices)))
    parts = [rows[devices == code] for code in np.unique(devices)]
    return np.concatenate([random.choice(part, min(each, len(part)), replace=False) for part in parts])


def _widths(errors: NDArray[np.floating[Any]], families: NDArray[np.str_]) -> dict[str, float]:
    """Scales that hold 90 % of the errors, of each family and of all."""
    widths = {"all": float(np.quantile(errors, 0.9))}
    for family in np.unique(families):
        here = errors[families == family]
        if len(here) >= LEAST:
            widths[str(family)] = float(np.quantile(here, 0.9))
    return widths


def _evaluate(net: KernelNet, rows: Rows, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    net.eval()
    means, scales = [np.zeros(0)], [np.zeros(0)]
    with torch.no_grad():
        for begin in range(0, len(chosen), BATCH):
            mean, scale = net(rows, chosen[begin : begin + BATCH])
            means.append(mean.double().numpy())
            scales.append(scale.double().numpy())
    return np.concatenate(means), np.concatenate(scales)


def _words(features: Features, name: str, kernels: NDArray[np.int64]) -> tuple[str, ...]:
    codes, vocab = features.texts[name]
    used = np.unique(codes[kernels])
    return tuple(sorted(vocab[code] for code in used if code >= 0))


def _widen(known: Mapping[str, Sequence[float]], more: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Ranges that hold both: least and most of flops, then of bytes."""
    result = {op: tuple(limits) for op, limits in known.items()}
    for op, limits in more.items():
        old = result.get(op, tuple(limits))
        result[op] = (min(old[0], limits[0]), max(old[1], limits[1]), min(old[2], limits[2]), max(old[3], limits[3]))
    return result
