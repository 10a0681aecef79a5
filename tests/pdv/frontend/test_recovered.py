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


class Scaled(nn.Module):
    """Scales kept less one, as Gemma has them, and as logarithms, as Mamba and CLIP do, some with other dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.log, self.rate = (nn.Parameter(torch.full((8,), number)) for number in (0.0, 0.0, 0.25))
        self.kernel, self.one = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.full((8,), 3.0))
        self.all, self.other = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1.0 + self.scale.float())
        x = torch.tanh(x * -self.log.exp()[None, None])
        x = torch.sin(x * torch.exp(-self.rate).unsqueeze(0))
        x = x * self.kernel.squeeze(1).unsqueeze(1) - self.one.unsqueeze(0)
        x = torch.cos(x) - self.other.unsqueeze(0)
        return x * self.all.exp()


class Twice(nn.Module):
    """Layers whose scales start out equal, and become one in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Scaled(), Scaled())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Calculated(nn.Module):
    """A parameter, and what nobody can calculate back from what is left of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.p, self.two = how, nn.Parameter(torch.randn(1, 8)), 2.0
        self.rate, self.ones = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "scaled":
                return x * (2 * self.p)
            case "named number":
                return x * (self.two + self.p)
            case "on another line":
                q = self.p + 1
                return x * q
            case "two numbers":
                q = self.p + 3
                return x * q + torch.sin(x * (1 + self.p))
            case "twice":
                return x * self.p.exp().exp()
            case "of two":
                return x * self.p.exp2()
            case "bounded":
                return x * self.p.clamp(-0.5, 0.5).exp()
            case "equal otherwise":
                x = torch.sin(x * torch.exp(-self.rate).unsqueeze(0))
                return x - self.ones.unsqueeze(0) + self.p
            case "side by side":
                return torch.cat([x, x], -1) * self.p.repeat(1, 2)
            case _:
                return x * self.p.expand(4, 2, 8) * (self.p * self.p)


MOVED = {"recurrent": Recurrent, "placed": Placed, "scaled": Scaled, "twice": Twice}


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


CALCULATED = [
    "scaled", "named number", "on another line", "two numbers", "twice", "of two", "bounded", "side by side", "squared",
    "equal otherwise",
]  # fmt: skip


@pytest.mark.parametrize("change", ["zeros", "equal tokens", *CALCULATED])
def test_what_was_calculated_with_is_named(change: str, tmp_path: Path) -> None:
    module: nn.Module = Calculated(change)
    if change == "zeros":
        module = Cell()
        nn.init.zeros_(module.cell.bias_hh)  # of which nobody can say what was added to what
    if change == "equal tokens":
        module = Placed()
        nn.init.zeros_(module.token)  # of which nobody can say how often it was repeated
    inputs = {"x": torch.randn(4, 3 if change == "equal tokens" else 2, 8)}
    path = _plain(module, inputs, tmp_path / "m.onnx")
    with pytest.raises(pdv.ModelError, match=r"the exporter computed with.*optimize=False"):
        pdv.optimize(path, cluster=cluster(2))
    assert "outputs are the same" in check_file(load_program(path), path)


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


class TwoShifts(nn.Module):
    """Two shifts of one value, which start out as zeros: their sums become one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.one) * torch.tanh(x + self.other)
        return found


@pytest.mark.parametrize(
    ("module", "lost"),
    [(TwoNorms(), "other.bias, other.weight"), (Modulated(), "made.1.bias"), (TwoShifts(), "other")],
)
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


def test_what_torch_cannot_write_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:  # as torch does of Swin's windows, of strides that change on the way
        raise torch.onnx.OnnxExporterError("[step 2/3]\nand a screen") from RuntimeError("Cannot view a tensor\nwith")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(pdv.ModelError, match=r"cannot write Linear: Cannot view a tensor\. .*pdv\.optimize\(module"):
        export_onnx(nn.Linear(2, 2), (torch.randn(1, 2),), tmp_path / "m.onnx")


class Parallel(nn.Module):
    """Two norms of one value, each before a layer of its own; ``shared``: one of them, called twice."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.first_norm, self.second_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.shared:
            found: Tensor = x + self.first(self.first_norm(x)) + self.second(self.first_norm(x))
            return found
        one = self.first(self.first_norm(x))
        two = self.second(self.second_norm(x))
        return x + one + two


def test_norms_that_became_one_are_apart_where_the_source_calls_them(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), Parallel(shared=False), Parallel(shared=False)), torch.randn(4, 3, 8)
    path = _plain(module, {"input": x}, tmp_path / "m.onnx")
    program = load_program(path)
    assert not program.absent
    assert any("1.second_norm.weight" in text for text in program.notes)
    assert {param.attr("name") for param in program.graph.params} == {name for name, _ in module.named_parameters()}
    assert "are the same" in check_reading(program.graph, copy_of(module, (x,), train=True), train=True)
    assert "are the same" in check_file(program, path)


def test_a_norm_that_is_called_twice_stays_one(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), Parallel(shared=True)), torch.randn(4, 3, 8)
    program = load_program(_plain(module, {"input": x}, tmp_path / "m.onnx"))
    assert "1.second_norm.weight" not in {param.attr("name") for param in program.graph.params}


class Unweighted(nn.Module):
    """Norms with weights beside some without, whose ones and zeros are stored as the weights of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.groups = nn.LayerNorm(8), nn.GroupNorm(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 16, 8]."""
        x = self.groups(F.layer_norm(x * 2, (8,)))
        found: Tensor = F.layer_norm(self.norm(x) + x, (8,))
        return found


def test_ones_of_norms_without_weights_are_no_parameter(tmp_path: Path) -> None:
    """Equal tensors become one in a file: LayerNorm's scale was trained by what norms without scale gave, too."""
    module, inputs = Unweighted(), {"x": torch.randn(4, 16, 8)}
    found = load_program(_plain(module, inputs, path := tmp_path / "m.onnx"))
    assert "the same" in check_reading(found.graph, copy_of(module, inputs, train=True), train=True)
    assert "the same" in check_file(found, path)
