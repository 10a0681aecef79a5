"""Files as torch.onnx.export writes them: what it merged is apart again, copies are tied, doubts are said."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError
from pdv.check.file.reading import check_file
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
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


class Masked(nn.Module):
    """Attention under a mask that the exporter computes, layers that it transposes, biases that it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.q, self.out = nn.Conv1d(16, 16, 1), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
        self.single = nn.Linear(8, 4)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]  # it has one
        nn.init.zeros_(self.single.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        hidden = torch.full((6, 6), float("-inf")).triu(1).expand(x.shape[0], 1, 6, 6)
        q = self.q(x).unflatten(2, (2, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=hidden).transpose(1, 2).flatten(2)
        found: Tensor = self.single(self.out(y).mean(1))
        return found


class Placed(nn.Module):
    """Ids and positions: the exporter looks the positions up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(50, 16), nn.Embedding(9, 16), nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(x) + self.places(torch.arange(5)))
        return found


class Guarded(nn.Module):
    """Attention under a mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=(x[:, None, None, :, 0] > 1))


MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "tied": (Tied, torch.zeros(2, 5, dtype=torch.int64)),
    "normed": (Normed, torch.ones(2, 3, 8, 8)),
    "twice": (Twice, torch.ones(2, 16)),
    "masked": (Masked, torch.randn(2, 6, 16)),
    "placed": (Placed, torch.zeros(2, 5, dtype=torch.int64)),
    "guarded": (Guarded, torch.randn(7, 6, 16)),  # some rows see nothing
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


@pytest.mark.parametrize("dynamo", [True, False])
def test_weights_have_the_names_and_layouts_of_the_module(exported: Export, dynamo: bool) -> None:
    path = exported("masked", dynamo)
    program = load_program(path)
    torch.manual_seed(0)
    wanted = dict(Masked().named_parameters())
    assert {param.attr("source") for param in program.graph.params} == set(wanted)
    for name, parameter in wanted.items():
        assert program.weights.load(name).tolist() == parameter.tolist(), name
    assert "outputs are the same" in check_file(program, path)


def test_rows_that_were_looked_up_beforehand_are_the_parameter(exported: Export) -> None:
    path = exported("placed", True)
    program = load_program(path)
    assert not program.absent
    assert any(note.startswith("of places.weight the file has the") for note in program.notes)
    plan = pdv.optimize(path, cluster=cluster(2), mesh={"x": 2})
    assert "outputs are the same" in plan.document["reading"]


class Shifted(nn.Module):
    """Rows of a table that is not trained are added."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(16, 16), nn.Buffer(torch.randn(9, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.table[: x.shape[1]])
        return found


class Copied(nn.Module):
    """Two layers, one a copy of the other, as nn.TransformerEncoder makes them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(16, 16)
        self.layers = nn.ModuleList([layer, deepcopy(layer)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


UNKNOWN = {"what onnx::Add": Shifted, r"wh\w+ onnx::MatMul": Copied}


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_the_older_exporter_does_not_say_is_not_guessed(said: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(UNKNOWN[said](), (torch.randn(2, 5, 16),), tmp_path / "m.onnx", dynamo=False)
    with pytest.raises(pdv.ModelError, match=f"not in the file .{said}"):
        pdv.optimize(tmp_path / "m.onnx", cluster=cluster(2))
    assert pdv.optimize(tmp_path / "m.onnx", cluster=cluster(2), mode="infer").document["mode"] == "infer"


def test_positions_that_the_older_exporter_looked_up_may_be_no_parameter(exported: Export) -> None:
    assert load_program(exported("placed", False)).untold == {"onnx::Add_12": "what onnx::Add_12 was made of"}


def test_rows_that_see_nothing_are_zero_as_in_the_file(exported: Export) -> None:
    path = exported("guarded", False)
    program = load_program(path)
    assert "attention" in {node.op.name for node in program.graph.nodes}
    assert "outputs are the same" in check_file(program, path)


@pytest.mark.parametrize("dynamo", [True, False])
def test_dropout_in_training_mode_is_read(dynamo: bool, tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 4)), torch.randn(2, 16)
    path = tmp_path / "m.onnx"
    if dynamo:
        export_onnx(module, (x,), path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (x,), path, dynamo=False, training=torch.onnx.TrainingMode.TRAINING)
    program = load_program(path)
    assert program.graph.draws == load_program(module, (x,)).graph.draws == 1
    assert [node.attr("p") for node in program.graph.nodes if node.op.name == "dropout"] == [0.1]
    assert "both without dropout" in check_file(program, path)


class _Biased(nn.Module):
    """Attention with a learned bias, as vision models have it: torch takes it apart to other strides each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(1, 2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(3, 4, 2, 8).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        return (
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).transpose(1, 2).reshape(3, 4, 16)
        )


def test_our_export_needs_no_strides(tmp_path: Path) -> None:
    module, x = _Biased(), torch.randn(3, 4, 16)
    export_onnx(module, (x,), tmp_path / "m.onnx")
    assert load_program(tmp_path / "m.onnx").graph.digest == load_program(module, x).graph.digest
