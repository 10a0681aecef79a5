"""A learner of a few parameters, to test what surrounds one: log-seconds linear in log-sizes and log-rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learned_cost.data.table import Table
from learned_cost.devices.device import DeviceRecord
from learned_cost.evaluation.evaluate import Z90, Answer
from learned_cost.weights import Arrays, Weights

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [rows, 5]
    y: Tensor  # [rows], log seconds

    def __len__(self) -> int:
        return len(self.y)


class Normal(nn.Module):
    """Columns of mean 0 and deviation 1 on some rows."""

    mean: Tensor
    scale: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("scale", x.std(0) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


class LinearLearner:
    """Two layers; the deviation is one number."""

    layout = "linear-1"

    def features(self, table: Table, devices: Mapping[str, DeviceRecord]) -> Inputs:
        peak = np.array([devices[name].peak_flops["fp32"] for name in table.vocab["gpu"]])[table["gpu"]]
        band = np.array([devices[name].memory_bandwidth_bytes_per_s for name in table.vocab["gpu"]])[table["gpu"]]
        compute, memory = np.log(table["flops"] / peak), np.log(table["bytes"] / band)
        columns = [compute, memory, np.maximum(compute, memory), table.is_text("op", "linear"), np.log(band)]
        x = torch.tensor(np.stack(columns, axis=1), dtype=torch.float32)
        return Inputs(x, torch.tensor(np.log(table.latency_s), dtype=torch.float32))

    def build(self, features: Inputs, rows: Rows, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        inputs = features
        module = nn.Sequential(Normal(inputs.x[rows]), nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        last = cast(nn.Linear, module[3])
        nn.init.constant_(last.bias, float(inputs.y[rows].mean()))
        module.register_buffer("std", torch.tensor(0.1))
        return module

    def restore(self, weights: Weights) -> nn.Module:
        module = self.build(Inputs(torch.zeros(2, 5), torch.zeros(2)), np.arange(2), 0)
        module.load_state_dict({name: torch.tensor(value) for name, value in weights.arrays.items()})
        return module

    def thaw(self, module: nn.Module, features: Inputs, rows: Rows) -> None:  # noqa: ARG002
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("3."))

    def loss(self, module: nn.Module, features: Inputs, rows: Rows) -> Tensor:
        inputs = features
        return nn.functional.smooth_l1_loss(module(inputs.x[rows]).squeeze(1), inputs.y[rows])

    def predict(self, module: nn.Module, features: Inputs, rows: Rows) -> Answer:
        module.eval()
        with torch.no_grad():
            mean = module(features.x[rows]).squeeze(1).numpy().astype(np.float64)
        module.train()
        return Answer(mean, np.full(len(rows), float(cast(Tensor, module.std))), np.ones(len(rows), dtype=bool))

    def calibrate(self, module: nn.Module, features: Inputs, rows: Rows) -> None:
        error = np.abs(self.predict(module, features, rows).mean_log_s - features.y[rows].numpy())
        cast(Tensor, module.std).fill_(float(np.quantile(error, 0.9)) / Z90)

    def export(self, module: nn.Module) -> tuple[Arrays, Mapping[str, Any]]:
        arrays = {name: value.numpy() for name, value in module.state_dict().items()}
        return arrays, {"model": {"width": 16}, "calibration": {}}
