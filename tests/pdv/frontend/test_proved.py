"""What torch's exporter computed of parameters beforehand, had back by the weights that the module had."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.origins.proofs.moves import find_moves
from pdv.planning.model import check_trained, read_model


class Folded(nn.Module):
    """A norm behind a convolution, a norm of a weight, distances looked up under a mask, tokens that start out equal,
    and scales kept less one, to which one is added elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1), dim=2)
        self.distances = nn.Embedding(9, 2)
        self.token, self.other = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))
        self.scale = nn.Parameter(torch.randn(8) * 0.1)
        with torch.no_grad():
            for part in (self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var):
                assert part is not None
                part.copy_(torch.rand(8) + 0.5)
            self.scaled.parametrizations.weight.original0.mul_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(self.norm(self.conv(x)).flatten(2)).transpose(1, 2)  # [b, 4, 8]
        tokens, others = self.token.expand(x.shape[0], -1, -1), self.other.expand(x.shape[0], -1, -1)
        x = torch.cat((tokens, others, x), dim=1)  # [b, 6, 8]
        place = torch.arange(6)
        bias = self.distances((place[:, None] - place).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        seen = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        shares = torch.softmax(heads @ heads.transpose(2, 3) + (bias + seen), -1)
        one = self.scale
        one = one + 1
        found: Tensor = nn.functional.layer_norm((shares @ heads).transpose(1, 2).flatten(2), (8,), one)
        return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    folder, module = tmp_path_factory.mktemp("proved"), Folded().train()
    save_file({name: x.clone() for name, x in module.state_dict().items()}, folder / "own.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 3, 2, 2),), folder / "m.onnx", dynamo=True, verbose=False)
    return module, folder


def test_a_file_is_the_module_again(exported: tuple[nn.Module, Path]) -> None:
    module, folder = exported
    with pytest.raises(ModelError, match="--weights FILE"):
        check_trained(load_program(folder / "m.onnx"))
    found = load_program(folder / "m.onnx", checkpoint=folder / "own.safetensors")
    check_trained(found)
    trained = {str(param.attr("name")) for param in found.graph.params if param.attr("trainable")}
    assert trained == {name for name, _ in module.named_parameters()}
    assert not found.doubts
    source = copy_of(module, {"x": torch.randn(2, 3, 2, 2)}, train=True)
    assert "the same" in check_reading(found.graph, source, train=True)


def test_the_first_command_takes_weights_as_proof(exported: tuple[nn.Module, Path]) -> None:
    module, folder = exported
    weights = folder / "own.safetensors"
    program, reading = read_model(folder / "m.onnx", None, None, lambda *_: None, train=True, weights=weights)
    assert "1 batch norms that were folded into convolutions (norm) are layers again" in reading
    np.testing.assert_array_equal(program.weights.load("scale"), module.state_dict()["scale"].numpy())


@pytest.mark.parametrize("changed", ["norm.running_var", "conv.weight", "distances.weight", "scale", "token"])
def test_other_weights_prove_nothing(exported: tuple[nn.Module, Path], changed: str, tmp_path: Path) -> None:
    module, folder = exported
    state = {name: x.clone() for name, x in module.state_dict().items()}
    state[changed] = state[changed] + torch.rand(state[changed].shape) * 0.1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"batch norms were folded|parameters of the module are not in the file"):
        check_trained(load_program(folder / "m.onnx", checkpoint=tmp_path / "other.safetensors"))


@pytest.mark.parametrize("seed", range(20))
def test_moves_are_found_by_values(seed: int) -> None:
    """Rows of a table, split and turned, repeated, some of them hidden: what is found gives them again."""
    rng = np.random.default_rng(seed)
    rows, sizes = int(rng.integers(2, 7)), [int(n) for n in rng.integers(1, 4, 2)]
    table = rng.normal(size=(rows, int(np.prod(sizes)))).astype(np.float32)
    grid = rng.integers(0, rows, (3, 4))
    made = table[grid].reshape(3, 4, *sizes).transpose(order := rng.permutation(4))
    hidden = np.zeros((3, 4, 1, 1), bool)
    hidden[0, rng.integers(4)] = seed % 2 == 1
    made = np.where(hidden.transpose(order), np.float32(-3e38), made)
    made = np.broadcast_to(made[None], (2, *made.shape))
    found = find_moves(table, made)
    assert found is not None
    again = table.reshape(-1, found.width)
    again = again if found.rows is None else again[list(found.rows)]
    again = again.reshape(found.between)
    again = np.broadcast_to(again.transpose(found.turned) if found.turned else again, made.shape)
    np.testing.assert_array_equal(again if found.hidden is None else np.where(found.hidden[0], made, again), made)


def test_what_values_do_not_tell_is_no_move() -> None:
    assert find_moves(np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)) is None
    table = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert find_moves(table, table + 100) is None
    table[1] = table[0]
    assert find_moves(table, table.T.copy()) is None
