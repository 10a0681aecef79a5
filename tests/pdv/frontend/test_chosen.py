"""Rows that a mask chooses: what is made of each, and sums and means of them, as the module has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.file.reading import check_file
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """x: [4, 8, 5], mask: [4, 8], labels: [4, 8] -> a loss of the rows that the mask chooses."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(5, 6), loss

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.inner(x), mask == 1, labels)


def _given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(4, 8, 5), "mask": torch.randint(2, (4, 8)), "labels": torch.randint(6, (4, 8)),
    }  # fmt: skip


def put_back(x: Tensor, m: Tensor) -> Tensor:
    """Some rows through a function of their own, as adapters are."""
    found = torch.zeros_like(x)
    found[m] = x[m].tanh() * 3
    return found + x


LOSSES: dict[str, Loss] = {
    "of two values": lambda x, m, y: F.binary_cross_entropy_with_logits(x[..., 0][m], (y[m] > 2).float()),
    "squares": lambda x, m, y: (x[m] - y[m].unsqueeze(-1)).square().mean(),
    "logarithms": lambda x, m, y: (x.abs() + 0.1)[m].log().sum() + (y[m] > 3).sum() / m.sum(),
    "each row": lambda x, m, y: (F.layer_norm(x[m], (6,)).softmax(-1) * torch.arange(6.0)).sum(-1).mean(),
    "over rows": lambda x, m, y: (x[m].mean(0) * x[m].sum(0, keepdim=True)).sum(),
    "picked": lambda x, m, y: -x[m].log_softmax(1).gather(1, y[m][:, None]).squeeze(1).mean(),
    "counted": lambda x, m, y: x[m].sum() / x[m].shape[0],
    "whole": lambda x, m, y: (x.abs() + 0.1)[x > 0.2].log().mean(),
    "put back": lambda x, m, y: put_back(x, m).square().mean(),
    "turned": lambda x, m, y: (x[m] @ x.new_ones(6, 3)).view(-1, 3, 1).sum((1, 2)).tanh().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_chosen_rows(name: str) -> None:
    module = Head(LOSSES[name])
    program = load_program(module, _given())
    assert not program.opaque
    said = check_reading(program.graph, copy_of(module, _given(), train=True), train=True)
    assert "the same" in said, said


class Deep(nn.Module):
    """x: [4, 8, 5], mask: [4, 8], images: [4, 2, 5] -> x with images added where the mask holds, as Qwen3-VL has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.vision, self.out = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
        h = self.words(x).clone()
        mask = mask == 1
        added = h[mask, :].clone() + self.vision(images).flatten(0, 1)
        h[mask, :] = added
        found: Tensor = self.out(h.tanh())
        return found


@pytest.mark.parametrize("batch", [4, 1])
def test_rows_are_added_to_chosen_ones_in_turn(batch: int) -> None:
    torch.manual_seed(0)
    mask = torch.rand(batch, 8).argsort(1).lt(2).long()
    given = {"x": torch.randn(batch, 8, 5), "mask": mask, "images": torch.randn(batch, 2, 5)}
    module = Deep()
    program = load_program(module, given)
    assert not program.opaque
    assert "the same" in check_reading(program.graph, copy_of(module, given, train=True), train=True)


@pytest.mark.parametrize("name", ["of two values", "logarithms", "over rows", "whole"])
def test_losses_of_chosen_rows_in_files(name: str, tmp_path: Path) -> None:
    module, path = Head(LOSSES[name]), tmp_path / "m.onnx"
    export_onnx(module, _given(), path)
    program = load_program(path)
    assert "the same" in check_file(program, path)
    assert "the same" in check_reading(program.graph, copy_of(module, _given(), train=True), train=True)


def test_chosen_rows_are_no_output_of_a_file(tmp_path: Path) -> None:
    export_onnx(Head(lambda x, m, y: x[m] * 2), _given(), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="a mask chooses"):
        load_program(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, m, y: (x[m][: m.sum().item()] * 2).sum(),
        lambda x, m, y: x[m].cumsum(0).sum(),
        lambda x, m, y: x.index_put((~m,), x[m]).sum(),
        lambda x, m, y: x[m].softmax(0).square().sum(),
        lambda x, m, y: x[m].sum() + (x[m].mean(-1) * x[~m].mean(-1).sum()).max(),
    ],
)
def test_what_depends_on_other_rows_is_refused(loss: Loss) -> None:
    with pytest.raises((UnsupportedOperatorsError, ModelError)):
        load_program(Head(loss), _given())


def test_a_loss_that_torch_does_not_take_apart_says_what_to_give_it() -> None:
    with pytest.raises(ModelError, match="ignore"):
        load_program(Head(lambda x, m, y: F.cross_entropy(x[m], y[m])), _given())


def test_chosen_rows_are_no_output() -> None:
    with pytest.raises(ModelError, match="as many rows as a mask chooses"):
        load_program(Head(lambda x, m, y: x[m] * 2), _given())
