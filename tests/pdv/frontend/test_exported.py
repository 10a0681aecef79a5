"""Files as torch.onnx.export writes them: what it merged is apart again, copies are tied, doubts are said."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from pdv.check.file.reading import check_file
from pdv.frontend import load_program
from tests.pdv.worlds import cluster

Export = Callable[[str, bool], Path]


class Tied(nn.Module):
    """Token ids to logits by the same table; biases start as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.head.weight = self.table.weight
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.relu(self.up(self.table(x))))
        found: Tensor = self.head(self.second(torch.relu(self.down(x))))
        return found


class Normed(nn.Module):
    """A convolution with its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Twice(nn.Module):
    """One layer, applied twice: its bias of ones is one parameter however often it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        nn.init.ones_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.relu(self.layer(x)))
        return found


MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "tied": (Tied, torch.zeros(2, 5, dtype=torch.int64)),
    "normed": (Normed, torch.ones(2, 3, 8, 8)),
    "twice": (Twice, torch.ones(2, 16)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """exported(name, dynamo): a file as users write it, each once."""

    @cache
    def export(name: str, dynamo: bool) -> Path:  # as torch calls it
        path = tmp_path_factory.mktemp(name) / f"{name}.onnx"
        kind, x = MODELS[name]
        torch.manual_seed(0)
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(kind().eval(), (x,), path, dynamo=dynamo, verbose=False)
        logging.disable(logging.NOTSET)
        return path

    return export


@pytest.mark.parametrize("dynamo", [True, False])
def test_tied_and_merged_weights_are_as_in_the_module(exported: Export, dynamo: bool) -> None:
    path = exported("tied", dynamo)
    program = load_program(path)
    elements = sum(node.type.num_elements for node in program.graph.params)
    assert elements == sum(p.numel() for p in Tied().parameters())
    assert len(program.graph.params) == len(list(Tied().parameters()))
    notes = " ".join(program.notes)
    assert "one parameter here" in notes
    assert "0.0 throughout" in notes
    assert "outputs are the same" in check_file(program, path)


def test_names_of_merged_weights_are_those_of_their_modules(exported: Export) -> None:
    names = {param.attr("name") for param in load_program(exported("tied", True)).graph.params}
    assert {"up.bias", "down.bias", "first.bias", "second.bias", "first.weight", "second.weight"} <= names


def test_one_layer_applied_twice_stays_one(exported: Export) -> None:
    program = load_program(exported("twice", True))
    assert sorted(param.type.shape for param in program.graph.params) == [(16,), (16, 16)]


@pytest.mark.parametrize("dynamo", [True, False])
def test_folded_batch_norms_are_not_trained_without_a_word(exported: Export, dynamo: bool) -> None:
    path = exported("normed", dynamo)
    with pytest.raises(ModelError, match=r"folded into convolutions.*training mode with pdv\.frontend\.onnx\.export"):
        pdv.optimize(path, cluster=cluster(2), mesh={"x": 2})
    plan = pdv.optimize(path, cluster=cluster(2), mesh={"x": 2}, mode="infer")
    assert "outputs are the same" in plan.document["reading"]


def test_plans_say_what_was_tied(exported: Export) -> None:
    plan = pdv.optimize(exported("tied", True), cluster=cluster(2), mesh={"x": 2})
    assert "one parameter here" in plan.document["reading"]
