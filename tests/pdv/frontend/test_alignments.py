"""ctc_loss in a module: run row by row, of targets that are rows, or that a mask chose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import ModelError
from ir.ops.opaque import Foreign
from pdv.check.module_run import copy_module
from pdv.check.reading import check_reading
from pdv.frontend import load_program
from pdv.frontend.torch.opaque import call_torch
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.filterwarnings("ignore:no declaration of")

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Transcribed(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 6), loss

    def forward(self, x: Tensor, labels: Tensor, of_x: Tensor, of_labels: Tensor) -> Tensor:
        return self.loss(self.linear(x).log_softmax(-1).transpose(0, 1), labels, of_x, of_labels)


def masked(log_probs: Tensor, labels: Tensor, of_x: Tensor, _: Tensor) -> Tensor:
    mask = labels > 0
    return F.ctc_loss(log_probs, labels.masked_select(mask), of_x, mask.sum(-1), zero_infinity=True)


def indexed(log_probs: Tensor, labels: Tensor, of_x: Tensor, _: Tensor) -> Tensor:
    mask = labels > 0
    return F.ctc_loss(log_probs, labels[mask], of_x, mask.sum(dim=1), reduction="none")


def batch() -> tuple[Tensor, ...]:
    """Rows of several lengths; the second has a hole, the last is too short for its targets."""
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, 2], [3, -100, 4], [5, -100, -100], [1, 1, 1]])
    return torch.randn(4, 12, 8), labels, torch.tensor([12, 9, 12, 3]), torch.tensor([3, 1, 1, 3])


LOSSES: dict[str, Loss] = {
    "mean": F.ctc_loss,
    "sum": lambda *x: F.ctc_loss(*x, reduction="sum"),
    "each, by another blank": lambda *x: F.ctc_loss(*x, blank=5, reduction="none"),
    "a module": nn.CTCLoss(zero_infinity=True),
    "torch's own": lambda *x: torch.ctc_loss(*x, 0, 2, True),
    "numbers": lambda x, labels, *_: F.ctc_loss(x, labels, [12, 9, 12, 8], [3, 1, 1, 2]),
    "chosen by a mask": masked,
    "indexed by a mask": indexed,
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_that_of_torch(name: str) -> None:
    inputs, module = batch(), Transcribed(LOSSES[name])
    program = load_program(module, inputs)
    assert any("aten.ctc_loss" in text for text in program.opaque)
    found = check_reading(program.graph, copy_module(module, inputs, {}), train=True)
    assert "outputs of two calls, gradients and state are the same" in found


def test_it_is_cut_along_the_rows(tmp_path: Path) -> None:
    module = Transcribed(nn.CTCLoss(zero_infinity=True))
    plan = pdv.optimize(module, batch(), cluster=cluster(4), mesh={"dp": 4})
    plan.save(tmp_path / "cut")
    text = (tmp_path / "cut" / "model.py").read_text()
    assert "partition(labels, 0, dp)" in text
    assert "torch.ops.aten.ctc_loss.Tensor(" in text
    assert "within 1e-09" in plan.document["run"]["statement"]


def other_lengths(log_probs: Tensor, labels: Tensor, of_x: Tensor, of_labels: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels.masked_select(labels > 0), of_x, of_labels)


def of_another_mask(log_probs: Tensor, labels: Tensor, of_x: Tensor, _: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels[labels > 0], of_x, (labels > 1).sum(-1))


def one_behind_the_other(log_probs: Tensor, labels: Tensor, of_x: Tensor, of_labels: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels.flatten(), of_x, of_labels)


@pytest.mark.parametrize("loss", [other_lengths, of_another_mask, one_behind_the_other])
def test_targets_of_which_no_row_is_known_are_refused(loss: Loss) -> None:
    with pytest.raises(ModelError, match="where the targets of a row of ctc_loss lie") as told:
        load_program(Transcribed(loss), batch())
    assert "Pad them" in str(told.value)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_function_of_torch_is_run_in_the_type_of_its_operands(kind: Any) -> None:
    """Else a module that itself computes in float32 could not be told from one that was read wrong."""
    foreign = Foreign("torch.ops.aten.special_erfcx.default", "{0}", -1, ("float64",))
    x = np.linspace(0.1, 3, 50)
    found, _ = call_torch(foreign, [x.astype(kind)], [False])
    gap = np.abs(found - torch.special.erfcx(torch.tensor(x)).numpy()).max()
    assert gap > 1e-12 if kind is np.float32 else gap == 0


def test_lengths_that_are_counted_are_run_at_the_programs_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask of few elements there would be lengths below zero."""
    monkeypatch.setattr("pdv.check.checked.FEW_ELEMENTS", 0)

    class Counted(Transcribed):
        def forward(self, x: Tensor, labels: Tensor, mask: Tensor, of_labels: Tensor) -> Tensor:
            return super().forward(x, labels, (mask.sum(-1) - 4).clamp(max=12), of_labels)

    x, labels, _, of_labels = batch()
    module = Counted(nn.CTCLoss(zero_infinity=True))
    mask = torch.ones(4, 64, dtype=torch.long)
    plan = pdv.optimize(module, (x, labels, mask, of_labels), cluster=cluster(2), mesh={"dp": 2})
    assert "at full size" in plan.document["run"]["statement"]
