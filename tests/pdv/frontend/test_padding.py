"""Rows of padding are trained as torch trains them: not by lookups, but by a head that shares the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from tests.pdv.as_modules import TOLERANCE, gap_of, plan_for_two
from tests.pdv.frontend.test_masks import said

ROWS, WIDTH, PADDING = 12, 8, 9


class Model(nn.Module):
    """ids [b, s] -> [b, s, 12]; the head's weight is the table, or its own."""

    def __init__(self, *, tied: bool, padding: int = PADDING) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        nn.init.normal_(self.table.weight)  # torch starts that row at zero, at which little shows
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.table(ids)))  # type: ignore[no-any-return]


class Lookups(nn.Module):
    """One table, looked up with paddings of its own and without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        first = functional.embedding(ids, self.weight, padding_idx=2)
        return first * functional.embedding(ids, self.weight, padding_idx=-1) + functional.embedding(ids, self.weight)


def ids_with_padding(padding: int = PADDING) -> Tensor:
    ids = torch.randint(0, ROWS, (8, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 4:], ids[0] = padding, 3
    return ids


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("technique", ["megatron", "zero-3"])
def test_a_table_that_is_cut_is_trained_as_a_whole_one(tied: bool, technique: str) -> None:
    module, ids = Model(tied=tied), ids_with_padding()
    plan = plan_for_two(module, [ids], {"mesh": {"a": 2}, "techniques": {"a": technique}})
    assert gap_of(plan, module, [ids]) < TOLERANCE
    gradient = module.table.weight.grad
    assert gradient is not None
    assert bool(gradient[PADDING].any()) == tied


def test_a_table_is_cut_over_its_features() -> None:
    module, ids = Model(tied=False, padding=-1), ids_with_padding(ROWS - 1)
    plan = plan_for_two(module, [ids], {"mesh": {"a": 2}, "tensors": {"table.weight": {"a": "shard 1"}}})
    assert gap_of(plan, module, [ids]) < TOLERANCE


@pytest.mark.parametrize(
    "make",
    [
        Lookups,
        lambda: nn.Embedding(ROWS, 4, padding_idx=-3),
        lambda: nn.Embedding(ROWS, 4, padding_idx=PADDING, sparse=True),
        *(lambda m=mode: nn.EmbeddingBag(ROWS, 4, mode=m, padding_idx=PADDING) for mode in ("sum", "mean")),
    ],
)
def test_lookups_are_read_as_torch_trains_them(make: Callable[[], nn.Module]) -> None:
    ids = ids_with_padding()
    assert load_program(make(), (ids,)).opaque == ()
    assert "are the same" in said(make(), ids)


def test_a_frozen_table_has_no_padding() -> None:
    module = Model(tied=False)
    module.table.weight.requires_grad_(False)  # torch's name
    assert "padded_embedding" not in {node.op.name for node in load_program(module, ids_with_padding()).graph.nodes}


@pytest.mark.parametrize("route", ["ours", "torch's"])
def test_files_of_the_newer_exporter_say_which_row_it_is(route: str, tmp_path: Path) -> None:
    module, path = Model(tied=True).train(), tmp_path / "model.onnx"
    if route == "ours":
        export_onnx(module, (ids_with_padding(),), path)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # a module in training mode is meant to be
            torch.onnx.export(module, (ids_with_padding(),), path, dynamo=True, verbose=False)
    lookups = [node for node in load_program(path).graph.nodes if node.op.looks_up_rows]
    assert [node.attr("padding_idx") for node in lookups] == [PADDING]
