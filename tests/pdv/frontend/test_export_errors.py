"""Modules that torch.export cannot follow: the cause, the line of the model and what to do, in one screen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
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
        (nn.Sequential(Chosen(layerdrop=0.1)), "depends on values of tensors", "Set layerdrop of its configuration"),
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
    assert ("if label_index > 0:" if not isinstance(module, Raising) else "return x.reshape(3, 5)") in text
    assert len(text) < 20 * 80


class Listed(nn.Module):
    """Takes places one by one, as numbers."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        rows, columns = zip(*places, strict=True)
        mask = torch.ones_like(x)
        mask[rows, columns] = 0
        return x * mask


def test_values_that_python_asks_torch_for_are_said_to_be_such() -> None:
    with pytest.raises(ModelError, match=r"depends on values of tensors, at .*mask\[rows, columns\] = 0"):
        load_program(Listed(), (torch.randn(2, 4), torch.tensor([[0, 1], [1, 2]])))


class Masked(nn.Module):
    """Looks at the values of its mask; ``way``: on a line of its own, or of torch's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        if self.way == "own" and mask.any():
            x = self.layer(x)
        if self.way == "loop":
            for chosen in mask.nonzero():
                x = x + self.layer(x) * chosen[0]
        if self.way == "numbers":
            x = self.layer(x) * [0.5, 2.0][mask[0, :1].sum().item()]
        if self.way == "torch":
            x = self.encoder(x, mask=mask @ mask.T)
        return x


@pytest.mark.parametrize(
    ("way", "remedy"),
    [
        ("own", "choose with torch.where"),
        ("loop", "Loop over a fixed number"),
        ("numbers", "Give such numbers as Python's own"),
        ("torch", "is_causal="),
    ],
)
def test_what_to_do_is_of_the_line_that_looks_at_values(way: str, remedy: str) -> None:
    with pytest.raises(ModelError, match="depends on values of tensors") as told:
        load_program(Masked(way), (torch.randn(2, 4),))
    assert remedy in str(told.value)


class Guarded(nn.Module):
    """Clamps or complains where what it computes is not finite."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.way == "all" and not torch.isfinite(y).all():
            y = y.clamp(-9, 9)
        if self.way == "any" and (y.isinf().any() or torch.isnan(y).any().item()):
            raise ValueError("not finite")
        if self.way == "sides" and torch.isinf(y).logical_not().all():
            y = y * 2
        if self.way == "hidden" and y.masked_fill(x > 0, -torch.inf).isinf().any():
            y = y * 5
        if self.way == "input" and x.isinf().any():
            y = y * 3
        return y.square().mean()


@pytest.mark.parametrize("way", ["all", "any", "sides"])
def test_what_is_trained_counts_as_finite(way: str) -> None:
    module, inputs = Guarded(way), (torch.randn(2, 4),)
    program = load_program(module, inputs)
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


def test_what_is_not_finite_all_the_same_is_found() -> None:
    module, inputs = Guarded("hidden"), (torch.randn(2, 4),)
    program = load_program(module, inputs)
    with pytest.raises(ModelError, match="what was read of the model is not the module"):
        check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


def test_of_inputs_nothing_is_known() -> None:
    with pytest.raises(ModelError, match="depends on values of tensors"):
        load_program(Guarded("input"), (torch.randn(2, 4),))


class Asking(nn.Module):
    """Makes a list of counts, takes each value once, or draws."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        if "drawn" in self.ways:
            x = x + torch.poisson(x.exp())
        if "counts" in self.ways:
            x = torch.cat([part * 2 for part in x.split((x > 0).sum(1).tolist())])
        if "unique" in self.ways:
            x = x.unique().cumsum(0).exp()
        return x


@pytest.mark.parametrize(
    ("ways", "remedies"),
    [
        (("counts",), ["Give such numbers as Python's own"]),
        (("unique",), ["give those that are not chosen a weight of zero"]),
        (("drawn",), ["declare the operators"]),
        (("drawn", "counts"), ["declare the operators"]),
    ],
)
def test_what_to_do_about_operators_that_depend_on_values(ways: tuple[str, ...], remedies: list[str]) -> None:
    with pytest.raises(UnsupportedOperatorsError) as told:
        load_program(Asking(*ways), (torch.randn(2, 4),))
    assert all(remedy in str(told.value) for remedy in remedies)


class Transcribed(nn.Module):
    def forward(self, x: Tensor, labels: Tensor, of_x: Tensor, of_labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels.flatten(), of_x, of_labels)


def test_a_loss_of_targets_in_one_row_is_to_be_taken_outside() -> None:
    lengths = torch.full((2,), 3)
    with pytest.raises(ModelError, match="of ctc_loss lie depends on lengths") as told:
        load_program(Transcribed(), (torch.randn(3, 2, 5), torch.ones(2, 3, dtype=torch.long), lengths, lengths))
    assert "model.train_step(x, y, loss_fn)" in str(told.value)


def test_norms_that_count_their_batches_are_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(ModelError, match="batch norms with momentum=None: 1"):
        load_program(module, (torch.randn(3, 4),))
    load_program(module.eval(), (torch.randn(3, 4),))
