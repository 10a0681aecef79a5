"""What torch's newer exporter says of a module and leaves out of the file, put back or named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ir.errors import ModelError
from pdv.check.file.reading import check_file
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.planning.model import check_trained

INPUTS = {
    "x": torch.randn(2, 4, 8),
    "memory": torch.randn(2, 4, 8),
    "labels": torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]),
}


class Decoder(nn.Module):
    """Two layers, copied, with dropout of attention, over a memory whose keys and values are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)
        for weight in filter(lambda each: each.dim() > 1, self.parameters()):  # else copies are equal throughout
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, memory: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Losses with smoothed labels of which one does not count: their mean, their sum, and themselves."""
        y = self.layers(x, memory).transpose(1, 2)
        how: dict[str, Any] = {"ignore_index": 3, "label_smoothing": 0.2}
        whole = F.cross_entropy(y, labels, **how), F.cross_entropy(y, labels, reduction="sum", **how)
        return (*whole, F.cross_entropy(y, labels, reduction="none", **how))


class Others(nn.Module):
    """A pool that divides by another number, and smoothed labels of classes that have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        y = F.avg_pool2d(self.up(x)[None], 2, divisor_override=3)[0]
        return F.cross_entropy(y, y.argmax(1).detach(), torch.arange(1.0, 3.0), label_smoothing=0.1)


def _write(module: nn.Module, inputs: dict[str, Tensor], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.train(), (), path, kwargs=inputs, dynamo=True, verbose=False)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    folder, module = tmp_path_factory.mktemp("left"), Decoder()
    save_file({name: x.clone() for name, x in module.state_dict().items()}, folder / "own.safetensors")
    return module, _write(module, INPUTS, folder / "m.onnx")


def test_dropout_and_smoothing_are_put_back(exported: tuple[nn.Module, Path]) -> None:
    module, path = exported
    found = load_program(path, checkpoint=path.with_name("own.safetensors"))
    check_trained(found)
    assert not found.doubts
    assert found.graph.draws == load_program(module, INPUTS).graph.draws
    assert any("label_smoothing=0.2" in note for note in found.notes)
    source = copy_of(module, INPUTS, train=True)
    assert "gradients and state are the same" in check_reading(found.graph, source, train=True)
    assert "the outputs are the same" in check_file(found, path)


def test_a_reading_that_smooths_otherwise_is_refused(
    exported: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = exported
    found = load_program(path)
    monkeypatch.setattr("pdv.check.file.run._smooth_labels", lambda _: None)
    with pytest.raises(ModelError, match="is not what ONNX Runtime makes of it"):
        check_file(found, path)


def test_whose_parameter_a_node_without_words_reads_is_not_guessed(exported: tuple[nn.Module, Path]) -> None:
    _, path = exported
    with pytest.raises(ModelError, match=r"multihead_attn\.in_proj_bias"):
        check_trained(load_program(path))


def test_what_cannot_be_put_back_is_named(tmp_path: Path) -> None:
    found = load_program(_write(Others(), {"x": torch.randn(4, 4, 8)}, tmp_path / "m.onnx"))
    (text,) = found.doubts
    assert "divisor_override=3.0" in text
    assert "label_smoothing=0.1" in text
