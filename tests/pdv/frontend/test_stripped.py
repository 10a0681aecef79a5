"""Files of torch's newer exporter whose metadata a tool left out: trained as the module is, from its fresh weights."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.frontend.load import load_program
from pdv.plan.package import import_package
from pdv.planning.model import check_trained
from tests.pdv.frontend.test_equal_tensors import changed, exported, trained
from tests.pdv.worlds import cluster


class Rows(nn.Module):
    """Rows looked up at known places, each once or all the same, products with biases of zeros and without, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.kinds = nn.Embedding(12, 16), nn.Embedding(2, 16)
        self.up, self.inner, self.down = nn.Linear(16, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 16)
        nn.init.zeros_(self.up.bias)
        self.matrix, self.shift = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(9)
        y = x + self.places(ids) + self.kinds(torch.zeros_like(ids))
        mask = torch.where(ids[:, None] >= ids, 0.0, float("-inf"))
        y = torch.softmax(y @ y.transpose(1, 2) / 4.0 + mask, -1) @ y
        y = self.down(self.inner(self.up(y.reshape(-1, 16)).tanh()))
        return torch.addmm(self.shift, y, self.matrix).view(-1, 9, 8)


def trained_elements(path: Path) -> dict[str, int]:
    program = load_program(path)
    check_trained(program)
    sources = trained(program)
    return {
        node.attr("source"): node.type.num_elements for node in program.graph.params if node.attr("source") in sources
    }


def stripped(path: Path, module: nn.Module) -> Path:
    return changed(exported(path, module, (2, 9, 16), dynamo=True), nodes=True)


def test_rows_and_biases_are_parameters_again(tmp_path: Path) -> None:
    module = Rows()
    found = trained_elements(stripped(tmp_path / "m.onnx", module))
    unread = 3 * 16 + 16  # rows of the tables that nobody reads
    assert sum(found.values()) == sum(x.numel() for x in module.parameters()) - unread
    assert {"up.bias", "matrix.bias"} <= found.keys()
    assert "inner.bias" not in found


def check_same_training(path: Path, module: nn.Module, x: Tensor) -> None:
    pdv.optimize(path, cluster=cluster(1)).save(path.with_name("m_pdv"))
    built = import_package(path.with_name("m_pdv")).build("cpu")
    for model in (module.train(), built):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(built(x), module(x))


def test_it_is_trained_as_the_module_is(tmp_path: Path) -> None:
    module = Rows()
    check_same_training(stripped(tmp_path / "m.onnx", module), module, torch.randn(2, 9, 16))


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
def test_a_file_that_onnx_runtime_optimized_is_trained_as_the_module_is(level: str, tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8)
    nn.init.zeros_(module[0].bias)
    exported(tmp_path / "m.onnx", module, (6, 8), dynamo=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    check_same_training(tmp_path / "optimized.onnx", module, x)


def test_rows_of_a_table_that_is_stored_too_are_refused(tmp_path: Path) -> None:
    class Twice(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.places.weight[:, :8].T @ self.places.weight

    program = load_program(stripped(tmp_path / "m.onnx", Twice()))
    assert any("embedding" in what for what in program.untold.values())


def test_a_name_that_is_taken_is_left_to_whom_it_is_of(tmp_path: Path) -> None:
    class Named(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y + y @ self.embedding.weight

    found = trained_elements(stripped(tmp_path / "m.onnx", Named()))
    assert found["embedding.weight"] == 64
    assert found["rows of embedding"] == 9 * 16
    assert sum(found.values()) == sum(x.numel() for x in Named().parameters()) - 4 * 16


def test_convolutions_that_may_have_lost_a_bias_are_said(tmp_path: Path) -> None:
    path = changed(exported(tmp_path / "m.onnx", nn.Conv1d(9, 4, 3, bias=False), (2, 9, 16), dynamo=True), nodes=True)
    (doubt,) = load_program(path).doubts
    assert "1 convolutions have no bias" in doubt
