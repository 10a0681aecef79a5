"""What torch's exporter computed of parameters beforehand: had back where it was only moved, else named."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from pdv.check.file.reading import check_file
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from tests.pdv.worlds import cluster

Inputs = Mapping[str, Any]  # Any: tensors


def _plain(module: nn.Module, inputs: Inputs, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.train(), (), path, kwargs=dict(inputs), dynamo=True, verbose=False)
    return path


class Cell(nn.Module):
    """Two steps of a cell from a state of zeros: its biases are read once beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0], torch.zeros(x.shape[0], 8))
        found: Tensor = self.cell(x[:, 1], state)
        return found


class Recurrent(nn.Module):
    """Layers of gates, one of them both ways, and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True, num_layers=2, bidirectional=True)
        self.gru, self.cell = nn.GRU(8, 8, batch_first=True), Cell()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(self.gru(self.lstm(x)[0])[0])
        return found


class Placed(nn.Module):
    """Positions and a kind of all tokens, looked up, a token in front of each row, and norms over groups alike."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.kinds = nn.Embedding(16, 8), nn.Embedding(2, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.positions(ids) + self.kinds(torch.zeros_like(ids))
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        found: Tensor = self.second(torch.relu(self.first(x)))
        return found


class OneMore(nn.Module):
    """A scale that is kept less one, as Gemma has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x * (1 + self.scale))
        return found


MOVED = {"recurrent": Recurrent, "placed": Placed}


@pytest.mark.parametrize("name", MOVED)
def test_moved_parameters_are_trained_as_in_the_module(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = MOVED[name](), {"x": torch.randn(4, 3, 8)}
    path = _plain(module, inputs, tmp_path / "m.onnx")
    program = load_program(path)
    assert not program.absent
    assert {node.attr("name") for node in program.graph.params} == dict(module.named_parameters()).keys()
    assert "are the same" in check_reading(program.graph, _fitting(module, inputs, program), train=True)
    assert "outputs are the same" in check_file(program, path)


def _fitting(module: nn.Module, inputs: Inputs, program: Any) -> Any:
    """The module, with of its tables the rows that the file has."""
    stored = {name: torch.from_numpy(program.weights.load(name).copy()) for name in program.weights.names}
    for name, table in (each for each in module.named_modules() if isinstance(each[1], nn.Embedding)):
        table.weight = nn.Parameter(stored[f"{name}.weight"])
    return copy_of(module, inputs, train=True)


@pytest.mark.parametrize("change", ["scaled", "zeros"])
def test_what_was_calculated_with_is_named(change: str, tmp_path: Path) -> None:
    module = OneMore() if change == "scaled" else Cell()
    if isinstance(module, Cell):
        nn.init.zeros_(module.cell.bias_hh)  # of which nobody can say what was added to what
    path = _plain(module, {"x": torch.randn(4, 2, 8)}, tmp_path / "m.onnx")
    with pytest.raises(pdv.ModelError, match=r"the exporter computed with.*optimize=False"):
        pdv.optimize(path, cluster=cluster(2))


class TwoNorms(nn.Module):
    """Two norms of one value, whose scales start out equal."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.one(x)) * self.other(x)
        return found


class Modulated(nn.Module):
    """Scales and shifts of two layers, made of one value by projections that start out as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.head = nn.ModuleList([nn.Linear(8, 16) for _ in range(2)]), nn.Linear(8, 8)
        for made in self.made:
            nn.init.zeros_(made.weight)  # type: ignore[arg-type]
            nn.init.zeros_(made.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        about = x.mean(1)
        for made in self.made:
            scale, shift = made(about).unsqueeze(1).chunk(2, -1)
            x = x + self.head(x * (1 + scale) + shift)
        return x


@pytest.mark.parametrize(("module", "lost"), [(TwoNorms(), "other.bias, other.weight"), (Modulated(), "made.1.bias")])
def test_what_went_with_an_equal_node_is_named(module: nn.Module, lost: str, tmp_path: Path) -> None:
    path = _plain(module, {"x": torch.randn(4, 2, 8)}, tmp_path / "m.onnx")
    with pytest.raises(pdv.ModelError, match=f"not in the file .{lost}.*took them for others.*optimize=False"):
        pdv.optimize(path, cluster=cluster(2))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert not load_program(_plain(module, {"x": torch.randn(4, 2, 8)}, path)).absent


class Dropped(nn.Module):
    """Attention with dropout, under a mask of truth values, over fewer heads of keys, and a smoothed loss."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, k, mask, 0.5 if self.training else 0.0)
        return F.cross_entropy(y.sum(1).transpose(1, 2), labels, label_smoothing=0.1, ignore_index=0)


def test_our_export_writes_what_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {
        "q": torch.randn(4, 4, 6, 8), "k": torch.randn(4, 1, 6, 8), "mask": torch.rand(4, 1, 6, 6) < 0.8,
        "labels": torch.randint(8, (4, 6)),
    }  # fmt: skip
    module = Dropped().train()
    export_onnx(module, inputs, tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx")
    assert program.graph.draws == 1
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=False)


def test_smoothing_that_torch_left_out_is_named(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Module())
    module[1].forward = lambda y: F.cross_entropy(y, y.argmax(-1).detach(), label_smoothing=0.1)  # type: ignore[method-assign]
    program = load_program(_plain(module, {"input": torch.randn(4, 8)}, tmp_path / "m.onnx"))
    assert any("label_smoothing=0.1" in text for text in program.doubts)
    export_onnx(module, {"input": torch.randn(4, 8)}, tmp_path / "ours.onnx")
    assert not load_program(tmp_path / "ours.onnx").doubts


def test_what_torch_cannot_write_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:  # as torch does of Swin's windows, of strides that change on the way
        raise torch.onnx.OnnxExporterError("[step 2/3]\nand a screen") from RuntimeError("Cannot view a tensor\nwith")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(pdv.ModelError, match=r"cannot write Linear: Cannot view a tensor\. .*pdv\.optimize\(module"):
        export_onnx(nn.Linear(2, 2), (torch.randn(1, 2),), tmp_path / "m.onnx")
