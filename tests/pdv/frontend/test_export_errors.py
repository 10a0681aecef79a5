"""Modules that torch.export cannot follow: the cause, the line of the model and what to do, in one screen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

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


class Transcribed(nn.Module):
    def forward(self, x: Tensor, labels: Tensor, of_x: Tensor, of_labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels, of_x, of_labels)


def test_a_loss_of_lengths_is_to_be_taken_outside() -> None:
    lengths = torch.full((2,), 3)
    with pytest.raises(ModelError, match="ctc_loss runs depends on its lengths") as told:
        load_program(Transcribed(), (torch.randn(3, 2, 5), torch.ones(2, 3, dtype=torch.long), lengths, lengths))
    assert "model.train_step(x, y, loss_fn)" in str(told.value)


def test_norms_that_count_their_batches_are_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(ModelError, match="batch norms with momentum=None: 1"):
        load_program(module, (torch.randn(3, 4),))
    load_program(module.eval(), (torch.randn(3, 4),))
