"""Attention of rows that see nothing (a row of a batch that is padding, padding in front under a causal mask): zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdv
from benchmarks.measured.parity import load_package
from ir.errors import ModelError
from pdv.check.file import reading
from pdv.check.file.reading import check_file
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from tests.pdv.worlds import cluster

LENGTHS = torch.tensor([5, 3, 0, 4])
ALL_PADDED = torch.arange(5) >= LENGTHS[:, None]
PADDED = torch.arange(5) >= LENGTHS.clamp(1)[:, None]
IN_FRONT = ALL_PADDED.flip(1)


class Encoder(nn.Module):
    """One layer of torch's."""

    def __init__(self, dropout: float, *, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)
        self.layers, self.causal = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), causal

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if self.causal else None
        return self.layers(x, mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_rows_of_padding_are_read_as_torch_has_them(dropout: float, causal: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Encoder(dropout, causal=causal)
    given = (torch.randn(4, 5, 16), IN_FRONT if causal else ALL_PADDED)
    source = copy_of(module, given, train=True)
    assert "gradients and state are the same" in check_reading(load_program(module, given).graph, source, train=True)
    export_onnx(module, given, tmp_path / "model.onnx")
    program = load_program(tmp_path / "model.onnx")
    assert "gradients and state are the same" in check_reading(program.graph, source, train=True)
    assert "the outputs are the same" in check_file(program, tmp_path / "model.onnx")


def test_a_program_takes_rows_of_padding_where_it_was_planned_without(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Encoder(0.1, causal=False), torch.randn(4, 5, 16)
    pdv.optimize(module, (x, PADDED), cluster=cluster(2)).save(tmp_path / "hidden_pdv")
    model = load_package(tmp_path / "hidden_pdv").build(device="cpu")
    assert bool(torch.isfinite(model(x, ALL_PADDED)).all())
    expected = module.eval()(x, ALL_PADDED)
    torch.testing.assert_close(model.eval()(x, ALL_PADDED), expected, atol=1e-5, rtol=1e-5)


class Written(nn.Module):
    """Attention in products, which is no number where nothing is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        scores = q @ x[:, None].mT + torch.zeros(padding.shape).masked_fill(padding, -torch.inf)[:, None, None]
        return functional.softmax(scores, -1) @ x[:, None]


def test_files_that_have_no_number_there_are_held_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, path = (torch.randn(4, 5, 8), PADDED), tmp_path / "model.onnx"
    export_onnx(Written(), given, path)
    program = load_program(path)
    assert any(node.op.name == "attention" for node in program.graph.nodes)

    def mostly_padding(*args: Any) -> dict[str, Any]:
        drawn = draw(*args)
        return {name: ALL_PADDED.numpy() if x.dtype == np.bool_ else x for name, x in drawn.items()}

    draw = reading._draw  # so that each try has rows that see nothing
    monkeypatch.setattr(reading, "_draw", mostly_padding)
    assert "the outputs are the same" in check_file(program, path)
    read = reading._read
    monkeypatch.setattr(reading, "_read", lambda *args: {name: x + 0.1 for name, x in read(*args).items()})
    with pytest.raises(ModelError, match="output 0 differs"):
        check_file(program, path)
