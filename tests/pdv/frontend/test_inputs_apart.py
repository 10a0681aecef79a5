"""One tensor passed as several inputs, such as labels that are the ids: each is an input of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from ir.errors import ModelError
from pdv.frontend import Program, load_program
from pdv.frontend.onnx.export import export_onnx


class Towers(nn.Module):
    """Other layers for each input, and a buffer: x, y [b, 4] -> [b, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("own", torch.ones(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = torch.tanh(self.left(x)) - self.right(y) * self.own.sum()
        return z


def inputs_read(program: Program) -> set[str]:
    return {operand.attr("name") for node in program.graph.nodes for operand in node.operands if operand.is_input}


@pytest.mark.parametrize("given", [lambda x: (x, x), lambda x: {"x": x, "y": x}, lambda x: (x, x.detach())])
def test_a_tensor_that_is_passed_twice_is_two_inputs(given: Any) -> None:
    assert inputs_read(load_program(Towers(), given(torch.ones(8, 4)))) == {"x", "y"}


def test_a_buffer_that_is_passed_in_is_an_input(tmp_path: Path) -> None:
    module, x = Towers(), torch.ones(8, 4)
    program = load_program(module, (module.own, module.own))
    assert inputs_read(program) == {"x", "y"}
    assert "own" in {param.attr("name") for param in program.graph.params}
    export_onnx(module, (x, x), tmp_path / "towers.onnx")
    assert inputs_read(load_program(tmp_path / "towers.onnx")) == {"x", "y"}


@pytest.mark.parametrize("shapes", [None, {"x": {0: Dim("b")}, "y": {0: Dim("b")}}])
def test_an_exported_program_that_reads_one_input_for_two_is_refused(shapes: Any) -> None:
    x = torch.ones(8, 4)
    with pytest.raises(ModelError, match="reads y in the place of x"):
        load_program(torch.export.export(Towers(), (x, x), dynamic_shapes=shapes))
    assert inputs_read(load_program(torch.export.export(Towers(), (x, x.clone())))) == {"x", "y"}
