"""Diagonals are elements by number; and errors name lines that somebody wrote or typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.frontend.load import load_program
from tests.pdv.frontend.test_module import Function, run

DIAGONALS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "of two dims": (lambda x: x.diagonal(dim1=1, dim2=2), (2, 4, 4, 3)),
    "above, of the last dims": (lambda x: x.diagonal(2, -2, -1), (2, 3, 4, 5)),
    "below, turned": (lambda x: x.diagonal(-1, 3, 1) * 2, (2, 5, 3, 4)),
    "one element": (lambda x: x.diagonal(-3, 1, 2), (2, 4, 5)),
    "a trace": (lambda x: x.diagonal(dim1=-1, dim2=-2).sum(-1), (2, 4, 4)),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_a_diagonal_is_elements_by_number(name: str) -> None:
    function, shape = DIAGONALS[name]
    x = torch.randn(shape)
    program = load_program(Function(function), x)
    assert "opaque" not in {node.op.name for node in program.graph.nodes}
    np.testing.assert_array_equal(run(program, x), function(x).numpy())


TYPED = """
class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
    def forward(self, x):
        return self.table((x.mean(1) * 3).long())
"""


def test_a_line_that_was_typed_is_named() -> None:
    """Not one of ours, through which it was read."""
    names: dict[str, Any] = {"nn": nn}  # Any: what the text defines
    exec(compile(TYPED, "<stdin>", "exec"), names)
    with pytest.raises(ModelError, match="numbers computed of floats, at <stdin>:7"):
        load_program(names["Looked"](), torch.randn(4, 8))
