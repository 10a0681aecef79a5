"""Values whose gradient a module stops: ``detach``, and what it computes without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pdv.check.module_run import copy_module
from pdv.check.reading import check_reading
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx


class Stopped(nn.Module):
    """y, and what `form` makes of it without a gradient."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(4, 4)
        self.register_buffer("trail", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.form == "detach":
            return y * y.detach()
        with torch.no_grad():
            mean = (x if self.form == "input" else y).mean(0)
            if self.form == "buffer":
                self.get_buffer("trail").mul_(0.9).add_(mean * 0.1)
        return mean if self.form == "returned" else y if self.form == "buffer" else y - mean


@pytest.mark.parametrize("form", ["detach", "no_grad", "returned"])
def test_a_gradient_that_is_stopped_does_not_flow_on(form: str) -> None:
    model, x = Stopped(form), torch.randn(4, 4)
    program = load_program(model, x)
    assert [node.needs_grad for node in program.graph.nodes if node.op.name == "detach"] == [False]
    check_reading(program.graph, copy_module(model, (x,), {}), train=True)


@pytest.mark.parametrize("form", ["input", "buffer"])
def test_where_there_is_no_gradient_none_is_stopped(form: str) -> None:
    exported = torch.export.export(Stopped(form), (torch.randn(3, 4),), strict=False)
    before = str(exported.graph)
    graph = load_program(exported).graph
    assert "detach" not in {node.op.name for node in graph.nodes}
    assert [name for name, _ in graph.updates] == (["trail"] if form == "buffer" else [])
    assert str(exported.graph) == before


@pytest.mark.parametrize("form", ["detach", "no_grad", "returned", "input"])
def test_our_own_files_keep_where_gradients_stop(form: str, tmp_path: Path) -> None:
    model, x = Stopped(form), torch.randn(4, 4)
    export_onnx(model, (x,), tmp_path / "model.onnx")
    for program in (load_program(model, x), load_program(tmp_path / "model.onnx")):
        assert [node.op.name for node in program.graph.nodes].count("detach") == int(form != "input")
