"""Modules that torch.export cannot follow: the cause, the line of the model and what to do, in one screen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.frontend import load_program


class Chosen(nn.Module):
    """Runs a layer or not."""

    def __init__(self, **config: object) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(4, 4), SimpleNamespace(**config)

    def forward(self, x: Tensor) -> Tensor:
        label_index = x.sum()
        if label_index > 0:
            x = self.layer(x)
        return self.layer(x)  # type: ignore[no-any-return]


class Raising(nn.Module):
    """Has a fault of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, 5)


@pytest.mark.parametrize(
    ("module", "cause", "remedy"),
    [
        (Chosen(), "depends on values of tensors", "choose with torch.where"),
        (Chosen(layerdrop=0.1), "depends on values of tensors", "Set layerdrop of its configuration to 0"),
        (Chosen(problem_type=None), "depends on values of tensors", 'e.g. "single_label_classification"'),
        (Raising(), "shape '[3, 5]' is invalid", "torch.export.export"),
    ],
)
def test_a_module_that_cannot_be_exported_is_explained(module: nn.Module, cause: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_program(module, (torch.randn(2, 4),))
    text = str(caught.value)
    assert cause in text
    assert remedy in text
    assert "at test_export_errors.py:" in text
    assert ("if label_index > 0:" if isinstance(module, Chosen) else "return x.reshape(3, 5)") in text
    assert len(text) < 20 * 80
