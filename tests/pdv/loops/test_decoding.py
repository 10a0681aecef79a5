"""Text told position by position, with what earlier ones gave kept, is that of whole passes, or those are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ShardingError
from ir.proof.exact import verify_equal
from pdv.loops import generate as text
from pdv.loops.decoding import decoder_of
from pdv.pcg.over_time import over_time
from pdv.plan.package import Plan, import_package
from tests.pdv.miniatures import D, Gpt, Llama, V, ids, settled
from tests.pdv.worlds import cluster

ROWS, LENGTH, NEW = 4, 8, 5
PROMPTS = [torch.tensor([5, 17]), torch.tensor([40]), torch.tensor([7, 7, 9])]


class Summed(nn.Module):
    """Each position has the sum of those before it, for which all must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.embed(x).cumsum(1)))


def plan(module: nn.Module, axis: str = "tp") -> Plan:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    inputs = (ids(ROWS, LENGTH),)
    return pdv.optimize(module.eval(), inputs, cluster=cluster(2), mode="infer", pins={"mesh": {axis: 2}})


def told(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, bool]:
    """Text, and whether it was told position by position to its end."""
    kept = []
    extend = text._extend

    def look(passes: Any, *given: Any) -> Tensor:
        ends: Tensor = extend(passes, *given)
        kept.append(passes._decoder is not None)
        return ends

    with monkeypatch.context() as patch:
        patch.setattr(text, "_extend", look)
        found = text.generate(model, PROMPTS, NEW)
    return found, kept[0]


@pytest.mark.parametrize(("make", "axis"), [(Gpt, "tp"), (Gpt, "dp"), (Llama, "tp")])
def test_text_is_that_of_whole_passes(make: Any, axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = import_package(plan(settled(make(1)), axis).save(tmp_path / "model_pdv")).build()
    found, kept = told(model, monkeypatch)
    assert kept
    assert torch.equal(found, text.generate(model, PROMPTS, NEW, cache=False))
    own = type(model).forward  # edited: by the plan it would be another's text
    monkeypatch.setattr(type(model), "forward", lambda self, x: -own(self, x))
    other, kept = told(model, monkeypatch)
    assert not kept
    assert torch.equal(other, text.generate(model, PROMPTS, NEW, cache=False))
    assert not torch.equal(other, found)


def test_a_pass_over_time_is_proved() -> None:
    for module in (Gpt(1), Llama(1)):
        found = plan(settled(module))
        graph, mesh = over_time(found.pcg, found.mesh, LENGTH)
        assert verify_equal(found.source, graph, mesh, gradients=False).error_bound < 1e-9


def test_what_needs_all_positions_is_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(Summed())
    with pytest.raises(ShardingError, match="position by position"):
        over_time(found.pcg, found.mesh, LENGTH)
    model = import_package(found.save(tmp_path / "model_pdv")).build()
    assert decoder_of(model) is None
    whole, kept = told(model, monkeypatch)
    assert not kept
    assert torch.equal(whole, text.generate(model, PROMPTS, NEW, cache=False))
