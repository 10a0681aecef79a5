"""torch.quantile over a dim of known size is read as sorted rows and what lies between two places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.check.module_run import copy_module
from pdv.check.reading import check_reading
from pdv.frontend import load_program
from pdv.frontend.torch.opaque import call_torch


class Quantile(nn.Module):
    def __init__(self, q: Any, **how: Any) -> None:
        super().__init__()
        self.linear, self.q, self.how = nn.Linear(5, 6), q, how

    def forward(self, x: Tensor) -> Tensor:
        return torch.quantile(self.linear(x), self.q, **self.how)


WAYS: list[tuple[Any, dict[str, Any]]] = [
    (0.9, {}),
    (0.25, {"dim": 1}),
    (1.0, {"dim": 0, "keepdim": True}),
    (torch.tensor([0.1, 0.5, 0.0]), {"dim": -1}),
    (torch.tensor([0.3]), {"keepdim": True}),
]


@pytest.mark.parametrize(("q", "how"), WAYS)
def test_a_quantile_is_that_of_torch(q: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = Quantile(q, **how), torch.randn(4, 5)
    program = load_program(module, (x,))
    assert any("aten.quantile" in text for text in program.opaque)
    found = check_reading(program.graph, copy_module(module, (x,), {}), train=True)
    assert "outputs of two calls, gradients and state are the same" in found


def test_what_is_no_number_makes_a_quantile_none() -> None:
    module, x = Quantile(0.5, dim=1), torch.randn(4, 5)
    x[1, 2] = torch.nan
    program = load_program(module, (x,))
    values = {name: program.weights.load(name) for name in program.weights.names}
    found = evaluate(program.graph, {**values, "x": x.numpy()}, field=FloatField(foreign=call_torch)).gather()["output"]
    assert np.allclose(found, module(x).detach().numpy(), atol=1e-6, equal_nan=True)
