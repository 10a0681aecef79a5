"""Checks of values that end in an error do not decide what a program is.

PYTEST_DONT_REWRITE: pytest would make other code of their assertions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program


def labels_of_wav2vec2(x: Tensor, labels: Tensor | None) -> Tensor:
    if labels is not None and labels.max() >= 12:
        raise ValueError("Label values must be <= vocab_size")
    return x


def denied(x: Tensor, labels: Tensor) -> Tensor:
    if not (labels >= 0).all() or (labels > 99).any():
        message = "beyond"
        raise ValueError(message)
    return x


def number(x: Tensor, labels: Tensor) -> Tensor:
    if labels.max().item() - 1 >= 12:
        raise ValueError
    return x


def otherwise(x: Tensor, labels: Tensor) -> Tensor:
    if labels.min() >= 0 and labels.max() < 12:
        x = x * 2
    else:
        raise ValueError
    return x


def asserted(x: Tensor, labels: Tensor) -> Tensor:
    assert torch.all(labels >= 0) and 0 <= labels.max() < 12, f"{labels}"  # noqa: PT018  # as people write it
    assert not torch.isnan(x).any()
    assert not any(bool((part < 0).any()) for part in (labels, labels))
    return x


class Checking(nn.Module):
    """Looks at its inputs first."""

    def __init__(self, check: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.check, self.layer = check, nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.layer(self.check(x, labels))  # type: ignore[no-any-return]


INPUTS = torch.randn(2, 4), torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize("check", [labels_of_wav2vec2, denied, number, otherwise, asserted])
def test_what_may_raise_goes_where_it_does_not(check: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Checking(check)
    program = load_program(module, INPUTS)
    assert "scale" in [node.op.name for node in program.graph.nodes] or check is not otherwise
    assert "Not checked by the program" in program.notes[0]
    assert "test_guards.py:" in program.notes[0]


def test_what_was_read_is_the_module() -> None:
    module = Checking(otherwise)
    source = copy_of(module, INPUTS, train=True)
    assert check_reading(load_program(module, INPUTS).graph, source, train=True).endswith("are the same")


def left(x: Tensor, labels: Tensor) -> Tensor:
    if (labels > 2).any():
        if x.dim() == 2:
            return x * 2
        raise ValueError
    return x


def caught(x: Tensor, labels: Tensor) -> Tensor:
    try:
        assert (labels < 2).all()
    except AssertionError:
        x = x * 2
    return x


@pytest.mark.parametrize("check", [left, caught])
def test_what_goes_on_behind_its_error_is_refused(check: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="depends on values of tensors"):
        load_program(Checking(check), INPUTS)
