"""Two processes, each with half of a table's rows, train all of these but the row of padding, as torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.pdv.as_modules import plan_for_two
from tests.pdv.frontend.test_padding import Model, ids_with_padding

pytestmark = pytest.mark.distributed
STEPS = 3


def loss_of(y: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), ids.flatten())


def train(folder: Path) -> dict[str, Tensor]:
    model = import_package(folder).build(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        model.train_step(ids_with_padding(), ids_with_padding(), loss_of, reduction="mean")
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("tied", [False, True])
def test_two_halves_of_a_table_train_as_a_whole_one(tied: bool, tmp_path: Path) -> None:
    module, ids = Model(tied=tied), ids_with_padding()
    plan_for_two(module, [ids], {"mesh": {"a": 2}, "techniques": {"a": "megatron"}}).save(tmp_path / "rows_pdv")
    assert "padding_idx=9" in (tmp_path / "rows_pdv" / "model.py").read_text(encoding="utf-8")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward([loss_of(module(ids), ids)])
        optimizer.step()
    for found in run_ranks(train, 2, tmp_path / "rows_pdv"):
        for name, wanted in module.state_dict().items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
