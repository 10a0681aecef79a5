"""An operator that is declared here, in fifteen lines, is planned, proved, priced, measured, written and run as any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ir.ops
import pdv
from ir.errors import VerificationError
from ir.mesh import Mesh
from ir.operator import Operator, Split
from ir.proof.exact import verify_equal
from learned_cost.profile.programs.library import call_of
from pdv.frontend.torch.aten import HANDLERS
from tests.distributed.harness import run_ranks
from tests.distributed.observed import observe_step
from tests.pdv.worlds import cluster
from tests.property.programs import Example, parallel, serial


def _roll(t: Any, operands: Any, call: Any) -> Any:
    x, last, by = operands[0], len(call.loops.result) - 1, call.attrs["shifts"]
    return t.concat([t.slice(x, last, -by, call.loops.extents["d"]), t.slice(x, last, 0, -by)], last)


ROLL = Operator(
    "roll",
    "... d* -> ... d*",
    "move",
    emit="torch.roll({0}, {shifts}, -1)",
    attrs=("shifts",),
    linear=(frozenset({0}),),
    ties=lambda node, loops, ties: ties.atoms.at_least(loops["d"], node.attr("shifts") + 1),
    evaluate=_roll,
)
BATCH, WIDTH, RANKS = 8, 16, 2


class Rolled(nn.Module):
    """[b, 16] -> [b, 16]: two products, rows turned by three places behind each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).roll(3, -1)).roll(3, -1)  # type: ignore[no-any-return]


EXAMPLE = Example("roll", ((6, 4, 12),), {"shifts": 3}, operator=ROLL)
LOOPS = ROLL.solve("roll", EXAMPLE.types, EXAMPLE.attrs)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator among the others, and its line in a frontend."""
    monkeypatch.setitem(ir.ops._BY_NAME, ROLL.name, ROLL)
    line = {"aten.roll.default": lambda k, x, shifts, dims: k.apply("roll", x, shifts=shifts[0])}
    monkeypatch.setattr("pdv.frontend.torch.program.HANDLERS", {**HANDLERS, **line})


@pytest.mark.parametrize("split", ROLL.splits(LOOPS), ids=lambda split: split.label)
def test_every_split_is_proved(split: Split) -> None:
    mesh = Mesh.of(a=RANKS)
    whole, pcg = parallel(EXAMPLE, (split,), mesh)
    verify_equal(whole, pcg, mesh)


def test_a_wrong_declaration_is_refused() -> None:
    """Rows that may be cut, though what is turned leaves its block."""
    wrong = replace(EXAMPLE, operator=replace(ROLL, loops="... d -> ... d"))
    (split,) = (split for split in wrong.declared.splits(replace(LOOPS, whole=frozenset())) if split.loop == "d")
    mesh = Mesh.of(a=RANKS)
    with pytest.raises(VerificationError):
        verify_equal(*parallel(wrong, (split,), mesh), mesh)


def test_what_is_measured_is_what_torch_calls_it() -> None:
    x = torch.randn(6, 4, 12)
    assert torch.equal(call_of(serial(EXAMPLE).outputs[0][1])(x), x.roll(3, -1))


@pytest.mark.distributed
@pytest.mark.parametrize("technique", ["ddp", "tensor"])
def test_a_plan_runs(technique: str, tmp_path: Path) -> None:
    module, x = Rolled(), torch.randn(BATCH, WIDTH)
    pins = {"mesh": {"a": RANKS}, "techniques": {"a": technique}}
    plan = pdv.optimize(module, (x,), cluster=cluster(RANKS), mesh={"a": RANKS}, pins=pins)
    folder = plan.save(tmp_path / technique)
    assert "torch.roll(" in (folder / "model.py").read_text(encoding="utf-8")
    assert plan.document["predicted"]["step_time_s"]["mean"] > 0
    y = module(x)
    torch.autograd.backward(y.square().sum() / BATCH)
    for (index, count), found, gradients in run_ranks(observe_step, RANKS, folder, x):
        torch.testing.assert_close(found, y.detach().chunk(count)[index])
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
