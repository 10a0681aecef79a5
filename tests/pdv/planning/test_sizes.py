"""Whether a model takes any number of rows, asked of the model."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.rows import what_joins_rows
from ir.types import DType
from pdv.frontend import load_program
from pdv.frontend.program import Program
from pdv.passes.precision import with_dtype
from pdv.planning.sizes import sizes_document

ROWS = 4


class Model(nn.Module):
    """A function as a module."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 6, 8]"""
        rows = x.size(0)
        match self.function:
            case "zeros":  # rows of a constant
                return torch.cat((torch.zeros(rows, 1, 8), x), 1)
            case "state":
                return x + self.linear(torch.ones(rows, 8))[:, None]
            case "mean":
                return x - x.sum(0, keepdim=True) / rows
            case "count":
                return x * rows
            case "number":
                return x.reshape(ROWS, -1, 8)
            case "half":
                return x + x[: rows // 2].mean(0)
            case "refused":
                if rows != ROWS:
                    raise ValueError("four rows, please")
                return x
            case "numbered":
                return x + torch.arange(rows)[:, None, None]
            case _:
                return x * (2 if rows == ROWS else 3)


def why_fixed(program: Program) -> str:
    return str(sizes_document(program)["b"]["fixed_by"])


def program(function: str) -> Program:
    return load_program(Model(function), torch.randn(ROWS, 6, 8))


@pytest.mark.parametrize("function", ["zeros", "state", "mean"])
def test_models_of_any_number_of_rows(function: str) -> None:
    assert why_fixed(program(function)) == ""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("count", r"at twice as many the model takes scale mul \(factor=8"),
        ("number", "at twice as many the model takes reshape"),
        ("half", "at twice as many the model takes slice"),
        ("refused", "twice as many cannot be read: Model cannot be exported: four rows, please"),
        ("numbered", r"a constant of shape \[4, 1, 1\] has 4 there"),
        ("otherwise", r"at twice as many the model takes scale mul \(factor=3"),
    ],
)
def test_models_that_name_their_rows(function: str, reason: str) -> None:

    assert re.search(reason, why_fixed(program(function)))


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (nn.LSTM, ROWS),
        (nn.GRU, 2 * ROWS),
        (nn.RNN, 12),
        *(
            pytest.param(layer, width, marks=pytest.mark.slow)
            for layer, others in ((nn.LSTM, (12, 2 * ROWS)), (nn.GRU, (12, ROWS)), (nn.RNN, (ROWS, 2 * ROWS)))
            for width in others
        ),
    ],
)
def test_recurrent_layers_begin_with_states_of_any_number_of_rows(layer: Callable[..., nn.Module], width: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(8, width, 2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x)[0]
            return made

    found = load_program(Recurrent(), torch.randn(ROWS, 3, 8))
    assert why_fixed(found) == ""
    assert what_joins_rows(found.graph) == ""


def test_a_source_of_one_size_is_doubted_where_numbers_may_follow_from_it() -> None:
    exported = torch.export.export(Model("half"), (torch.randn(ROWS, 6, 8),))
    assert "takes 0 to 2 of it" in why_fixed(load_program(exported))
    exported = torch.export.export(Model("zeros"), (torch.randn(ROWS, 6, 8),))
    assert why_fixed(load_program(exported)) == ""


def test_another_type_leaves_the_same_open() -> None:
    assert why_fixed(program("mean").map(lambda graph: with_dtype(graph, DType.BF16))) == ""
