"""Sums and products of several parameters that torch's exporter computed beforehand, had back by the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.program import Program
from pdv.planning.model import check_trained


class Places(nn.Module):
    """Attention to places: rows of a table, dropped out, projected, scaled and laid out by heads; a token added to a
    place; and a bias that starts out as zeros and is laid out by the method that lays out what it is added to.
    """

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place, self.far = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.table, self.start = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.own, self.other = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        self.token, self.drop = nn.Parameter(torch.zeros(1, 1, 16)), nn.Dropout(0.25)
        nn.init.zeros_(self.place.bias)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 2, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = (self.token + self.start[:, :1]).expand(x.shape[0], -1, -1)
        x = self.drop(torch.cat((first, x), dim=1))  # [b, 5, 8]
        asked = self.query(x)
        heads = self.heads(asked) / 3.0
        asked = heads + self.heads(self.own[None, None])
        heads = heads * self.factor + self.heads(self.other[None, None])
        table = self.drop(self.table)[3:8][None]
        near = self.heads(self.place(table)) / 3.0
        far = self.heads(self.far(self.table[None, 5:10])).repeat(x.shape[0], 1, 1, 1)
        shares = torch.softmax(asked @ near.transpose(2, 3) + heads @ far.transpose(2, 3), -1)
        found: Tensor = (shares @ heads).transpose(1, 2).flatten(2)
        return found


class Padded(Places):
    """Of two rows that are read both are equal: which of them is read where is not told."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.table[6] = self.table[5]


class Alike(Places):
    """Two columns of a product are equal: in which order they lie is not told."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.far.weight[3] = self.far.weight[4]


class Same(Places):
    """Two biases that start out equal are added to one value: their sums become one node."""

    factor = 1.0


class Unseen(Places):
    """What a bias of zeros is turned by is nowhere else in the file."""

    def sides(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, 2).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x).unflatten(2, (2, 8)).transpose(1, 2)
        return found + self.sides(self.own[None, None])


class Chosen(nn.Module):
    """A token of zeros of which elements are chosen before it is added: as whole as any other by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.start = nn.Parameter(torch.zeros(1, 8)), nn.Parameter(torch.zeros(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.token[:, [1, 0, 2, 3, 4, 5, 6, 7]] + self.start[:1])


def _read(module: nn.Module, folder: Path, shape: tuple[int, ...] = (2, 4, 16)) -> Callable[[Path], Program]:
    save_file({name: x.clone() for name, x in module.state_dict().items()}, folder / "own.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.train(), (torch.randn(shape),), folder / "m.onnx", dynamo=True, verbose=False)
    return lambda weights: load_program(folder / "m.onnx", checkpoint=weights)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Callable[[Path], Program]]:
    torch.manual_seed(0)
    module, folder = Places(), tmp_path_factory.mktemp("products")
    return module, folder, _read(module, folder)


def test_a_file_is_the_module_again(exported: tuple[nn.Module, Path, Callable[[Path], Program]]) -> None:
    module, folder, read = exported
    with pytest.raises(ModelError, match="--weights FILE"):
        check_trained(load_program(folder / "m.onnx"))
    found = read(folder / "own.safetensors")
    check_trained(found)
    trained = {str(param.attr("name")) for param in found.graph.params if param.attr("trainable")}
    assert trained == {name for name, _ in module.named_parameters()}
    source = copy_of(module, {"x": torch.randn(2, 4, 16)}, train=True)
    assert "the same" in check_reading(found.graph, source, train=True)


def test_dropout_that_was_drawn_once_is_drawn_in_each_step(
    exported: tuple[nn.Module, Path, Callable[[Path], Program]],
) -> None:
    _, folder, read = exported
    found = read(folder / "own.safetensors")
    assert "dropout that the exporter drew once (table with p=0.25) is drawn in each step here" in found.notes
    drawn = [node.type.shape for node in found.graph.nodes if node.op.draws]
    assert sorted(drawn) == [(2, 5, 16), (12, 16)]


@pytest.mark.parametrize("changed", ["table", "place.weight", "place.bias", "far.weight", "own", "token", "start"])
def test_other_weights_prove_nothing(
    exported: tuple[nn.Module, Path, Callable[[Path], Program]], changed: str, tmp_path: Path
) -> None:
    module, _, read = exported
    state = {name: x.clone() for name, x in module.state_dict().items()}
    state[changed] = state[changed] + torch.rand(state[changed].shape) * 0.1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="parameters of the module are not in the file"):
        check_trained(read(tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    ("kind", "lost"), [(Padded, "place.weight"), (Alike, "far.weight"), (Unseen, "own"), (Same, "other")]
)
def test_what_values_do_not_tell_is_refused(kind: type[nn.Module], lost: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = _read(kind(), tmp_path)(tmp_path / "own.safetensors")
    assert lost in found.absent
    with pytest.raises(ModelError, match="parameters of the module are not in the file"):
        check_trained(found)


def test_elements_of_zeros_that_were_chosen_are_not_told(tmp_path: Path) -> None:
    read = _read(Chosen(), tmp_path, (2, 8))
    assert {"token", "start"} <= {*read(tmp_path / "own.safetensors").absent}
