"""Files of torch's newer exporter whose metadata a tool left out: trained as the module is, from its fresh weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
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


def optimized(path: Path, level: str) -> Path:
    """What ONNX Runtime's optimizer makes of a file."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return path.with_name("optimized.onnx")


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
def test_a_file_that_onnx_runtime_optimized_is_trained_as_the_module_is(level: str, tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 8)
    nn.init.zeros_(module[0].bias)
    exported(tmp_path / "m.onnx", module, (6, 8), dynamo=True)
    check_same_training(optimized(tmp_path / "m.onnx", level), module, x)


NORMED: dict[str, Callable[[bool], tuple[nn.Sequential, tuple[int, ...]]]] = {
    "conv": lambda bias: (nn.Sequential(nn.Conv1d(9, 4, 3, bias=bias), nn.BatchNorm1d(4)), (2, 9, 16)),
    "transposed": lambda bias: (nn.Sequential(nn.ConvTranspose1d(9, 4, 3, bias=bias), nn.BatchNorm1d(4)), (2, 9, 16)),
    "product": lambda bias: (nn.Sequential(nn.Linear(9, 4, bias=bias), nn.BatchNorm1d(4)), (2, 9)),
}


def normed(path: Path, kind: str, *, bias: bool, dynamo: bool, optimize: bool = True) -> tuple[Path, nn.Module]:
    """A file of a module with a batch norm as in evaluation, and a function behind it, and the module."""
    module, shape = NORMED[kind](bias)
    for tensor in module[1].state_dict().values():  # none is equal to another
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
    options: dict[str, Any] = {"optimize": optimize, "verbose": False} if dynamo else {"do_constant_folding": False}
    whole = nn.Sequential(module, nn.ReLU()).eval()
    if not dynamo:
        options["training"] = torch.onnx.TrainingMode.PRESERVE  # else norms are folded as it writes the file
    torch.onnx.export(whole, (torch.randn(shape),), path, dynamo=dynamo, **options)
    return path, whole


def is_trained_whole_or_refused(path: Path, module: nn.Module) -> str:
    """Whether a file is refused, trained as the module is, or said to hold more perhaps."""
    program = load_program(path)
    try:
        check_trained(program)
    except ModelError as error:
        return "refused" if "batch norms were folded" in str(error) else str(error)
    count = sum(node.type.num_elements for node in program.graph.params if node.attr("trainable"))
    whole = count == sum(x.numel() for x in module.parameters())
    return "whole" if whole else "said" if any("of a batch norm, too" in each for each in program.doubts) else "less"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMED)
def test_batch_norms_that_were_folded_are_not_left_out(kind: str, bias: bool, tmp_path: Path) -> None:  # a parameter
    path, module = normed(tmp_path / "m.onnx", kind, bias=bias, dynamo=True)
    assert is_trained_whole_or_refused(changed(path, nodes=True), module) == "refused"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the older exporter
@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
@pytest.mark.parametrize("exporter", ["newer", "unoptimized", "older"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMED)
def test_batch_norms_that_onnx_runtime_folded_are_not_left_out(
    kind: str,
    bias: bool,
    exporter: str,
    level: str,
    tmp_path: Path,  # a parameter
) -> None:
    path, module = normed(
        tmp_path / "m.onnx", kind, bias=bias, dynamo=exporter != "older", optimize=exporter == "newer"
    )
    found = is_trained_whole_or_refused(optimized(path, level), module)
    fused = exporter == "newer" and level == "EXTENDED"  # with what stands behind it, whose name alone is left
    assert found in ({"refused", "said"} if fused else {"refused", "whole"})


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
def test_fresh_batch_norms_are_trained_though_their_statistics_are_equal(level: str, tmp_path: Path) -> None:
    body = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4))
    module = nn.Sequential(body, nn.BatchNorm1d(4)).eval()
    torch.onnx.export(module, (torch.randn(6, 9),), tmp_path / "m.onnx", dynamo=True, optimize=False, verbose=False)
    program = load_program(optimized(tmp_path / "m.onnx", level))
    check_trained(program)
    count = sum(node.type.num_elements for node in program.graph.params if node.attr("trainable"))
    assert count == sum(x.numel() for x in module.parameters())


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
