"""What stages compute of values without gradient: masks of their own values, and what is drawn at random once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import UsageError
from ir.sharding import Sharding
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.staged import staged_outlines
from pdv.emit.emission import shapes_in
from pdv.plan.package import Plan, import_package
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster, mlp


class Gates(nn.Module):
    """Layers that pass where a value of theirs is positive, and at the end where one of before the first is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = before = self.first(x)
        for layer in self.layers:
            h = layer(x)
            x = x + h * (h.sum(-1, keepdim=True) > 0).to(x.dtype)
        return x * (before.sum(-1, keepdim=True) > 0).to(x.dtype)


class Drawn(nn.Module):
    """Rows, some of them dropped, minus themselves again behind layers that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = kept = F.dropout(x, 0.5, self.training) * 2
        for layer in self.layers:
            x = x + layer(x)
        return x - kept


class Routed(nn.Module):
    """Layers of two experts and a gate, which rewriting joins to one product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)
        self.gates = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for gate, (one, other) in zip(self.gates, self.experts, strict=True):  # type: ignore[misc]
            share = gate(x).softmax(-1)
            x = x + torch.tanh(one(x) * share[..., :1] + other(x) * share[..., 1:])
        return self.last(x)  # type: ignore[no-any-return]


def planned(model: nn.Module, stages: int) -> Plan:
    return plan_pipeline(model, torch.randn(4, 8), cluster(stages), stages=stages, micro_batches=2, mesh={})


def test_a_mask_stands_behind_the_values_that_it_is_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, x, y = Gates(), torch.randn(4, 8).double(), torch.randn(4, 8).double()
    model = import_package(planned(source, 2).save(tmp_path / "gates")).build("cpu", torch.float64)
    loss = F.mse_loss(source.double()(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model.train_step(x, y, F.mse_loss), loss.detach())
    found = model.full_gradients()
    for name, parameter in source.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_what_is_drawn_of_an_input_is_drawn_by_one_stage_and_given_to_others(tmp_path: Path) -> None:
    plan = planned(Drawn(), 3)
    assert plan.emission.body(shapes_in(plan.weights)).count("dropout(") == 1
    model, x = import_package(plan.save(tmp_path / "drawn")).build("cpu"), torch.randn(4, 8)
    assert float(model.train_step(x, torch.zeros_like(x), F.mse_loss)) == 0.0


def test_layers_that_rewriting_joins_are_cut_where_the_whole_program_has_pieces() -> None:
    plan = pdv.optimize(
        Routed(), torch.randn(4, 6, 8), cluster=cluster(2), stages=2, micro_batches=2, mesh={}, schedule="1f1b",
        check=False,
    )  # fmt: skip
    assert "class Stage1" in plan.emission.body(shapes_in(plan.weights))


def test_a_stage_that_has_nothing_to_compute_is_refused() -> None:
    graph = mlp(layers=2)
    whole = {node: Sharding(()) for node in graph.nodes}
    stage_of = {node: 2 for node in graph.nodes if node.needs_grad}
    with pytest.raises(UsageError, match=r"3 stages: stage 0 has nothing to compute .* fewer"):
        staged_outlines(Reading(graph), whole, stage_of)
