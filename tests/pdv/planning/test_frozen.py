"""Parameters that the caller freezes: files cannot say which of theirs are not trained."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.planning.frozen import freeze
from pdv.planning.model import read_model


def _sines(rows: int, columns: int) -> nn.Parameter:
    angles = torch.arange(rows)[:, None] * torch.exp(torch.arange(columns // 2) * (-math.log(1e4) / (columns // 2)))
    return nn.Parameter(torch.cat([angles.sin(), angles.cos()], 1), requires_grad=False)


class Positioned(nn.Module):
    """A layer behind positions that are not trained, and others whose halves turn what it is given."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.positions, self.turning = _sines(6, 8), _sines(16, 8) if turned else None
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.positions)
        if self.turning is not None:
            sine, cosine = self.turning[:6, :4], self.turning[:6, 4:]
            x = x * torch.cat([cosine, cosine], -1) + x.roll(4, -1) * torch.cat([-sine, sine], -1)
        return x


def _plain(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.train(), (torch.randn(4, 6, 8),), path, dynamo=True, verbose=False)
    return path


def _read(path: Path, frozen: list[str]) -> tuple[set[str], str]:
    program, reading = read_model(path, None, None, lambda *_: None, train=True, check=False, frozen=frozen)
    return {param.attr("name") for param in program.graph.params if param.attr("trainable")}, reading


def test_a_table_of_sines_is_doubted_until_it_is_frozen(tmp_path: Path) -> None:
    path = _plain(Positioned(turned=False), tmp_path / "m.onnx")
    trained, reading = _read(path, [])
    assert trained == {"layer.weight", "layer.bias", "positions"}
    assert "--freeze positions" in reading
    trained, reading = _read(path, ["pos*"])
    assert trained == {"layer.weight", "layer.bias"}
    assert "--freeze" not in reading


def test_what_was_computed_of_frozen_parameters_alone_is_a_constant(tmp_path: Path) -> None:
    module = Positioned(turned=True)
    path = _plain(module, tmp_path / "m.onnx")
    with pytest.raises(pdv.ModelError, match=r"not in the file \(turning\)"):
        _read(path, ["positions"])
    program = freeze(load_program(path), ["turning", "positions"])
    assert not program.absent
    source = copy_of(module, (torch.randn(4, 6, 8),), train=True)
    assert "are the same" in check_reading(program.graph, source, train=True)


def test_parameters_that_the_file_lacks_are_frozen_together_or_not_at_all(tmp_path: Path) -> None:
    program = load_program(_plain(Positioned(turned=True), tmp_path / "m.onnx"))
    other = freeze(replace(program, held=("turning", "other")), ["turning"])
    assert other.absent == program.absent == ("turning",)


def test_one_pattern_is_not_several_of_a_letter(tmp_path: Path) -> None:
    program = load_program(_plain(Positioned(turned=False), tmp_path / "m.onnx"))
    graph = freeze(program, "layer.*").graph
    assert {param.attr("name") for param in graph.params if param.attr("trainable")} == {"positions"}


def test_a_pattern_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pdv.UsageError, match=r"'nothing' names no parameter.*layer\.bias"):
        _read(_plain(Positioned(turned=False), tmp_path / "m.onnx"), ["nothing"])
