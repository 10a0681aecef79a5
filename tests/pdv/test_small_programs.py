"""Programs with little or nothing to cut: each is planned, proved, written and explained, and computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdv
from ir.builder import Builder
from ir.graph import Graph
from ir.mesh import Mesh
from pdv.config import Mode
from pdv.plan.certificate import certificate_document
from pdv.report.saved import explain
from pdv.rewrite.algebra import RULES
from pdv.search.meshes import search_meshes
from pdv.search.timed import NEAR
from pdv.verification import verify
from tests.pdv.test_compile import cluster
from tests.pdv.worlds import f32, problem

MESHES = (Mesh(()), Mesh.of(a=2), Mesh.of(a=2, b=4), Mesh.of(a=3, b=2))
Forward = Callable[..., Any]  # Any: what a module returns


def _ones() -> Any:  # Any: a tensor
    import torch

    return torch.ones(3, 4)


FORWARDS: dict[str, Forward] = {
    "its input": lambda x, w: x,
    "a parameter": lambda x, w: w,
    "a constant": lambda x, w: _ones(),
    "a permute": lambda x, w: x.permute(1, 0),
    "no parameter": lambda x, w: x.relu(),
    "no input": lambda x, w: w * 2,
    "a scalar": lambda x, w: (x @ w).sum(),
    "input and product": lambda x, w: (x, x @ w),
    "constant and product": lambda x, w: (_ones(), x @ w),
}


UNTRAINED = ("its input", "a constant", "a permute", "no parameter")
NOTHING_TO_DO = ("a parameter",)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_program_with_little_to_cut_is_planned(name: str, tmp_path: Path) -> None:
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> Any:  # Any: one tensor or several
            return FORWARDS[name](x, self.w)

    mode: Mode = "infer" if name in UNTRAINED else "train"
    given: dict[str, Any] = {"cluster": cluster(4), "mode": mode}  # Any: what optimize takes
    plan = pdv.optimize(Module(), (torch.randn(8, 8),), **given)
    priced = pdv.optimize(Module(), (torch.randn(8, 8),), **given, pipelines="never", check=False)
    for one, most in ((plan, 0.5), (priced, NEAR - 1.0)):  # of a step, where hosts take the longest, and of a price
        gap = one.document["search"]["gap"]
        known = name not in NOTHING_TO_DO
        assert 0.0 <= gap < most if known else gap is None, "what nobody reads is not priced"
    saved = plan.save_plan(tmp_path / "saved")
    assert verify(saved)["proof"]["error_bound"] < 1e-6
    assert "certificate: " in explain(saved)


@pytest.mark.parametrize("name", ["its input", "a parameter", "a constant"])
def test_a_step_that_runs_nothing_takes_a_call_on_cpus_too(name: str) -> None:
    """Figures by the second of a step without any would be none."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> Any:  # Any: one tensor
            return FORWARDS[name](x, self.w)

    cores = {"nodes": [{"devices": 2, "device": "cpu-core", "link": "loopback-gloo"}]}
    plan = pdv.optimize(Module(), (torch.randn(8, 8),), cluster=cores, mode="infer")
    assert plan.document["simulated"]["step_s"] > 0


def test_a_plan_alone_of_tied_and_unread_parameters_is_verified(tmp_path: Path) -> None:
    import torch

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.unread = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(3))
            self.other = torch.nn.Linear(8, 8)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))  # type: ignore[no-any-return]

    plan = pdv.optimize(Tied(), (torch.randn(8, 8),), cluster=cluster(4))
    assert {"names", "unread"} <= plan.document["state"].keys()
    assert verify(plan.save_plan(tmp_path / "saved"))["proof"]["error_bound"] < 1e-6


def nothing_costs() -> Graph:
    """Blocks that take no time, and that rules rewrite."""
    k = Builder()
    x = k.permute(k.relu(k.input("x", f32(8, 4, 6, 6))), perm=(0, 2, 3, 1))
    y = k.linear(x, k.param("w", f32(12, 4)))
    return k.graph({"y": k.permute(y, perm=(0, 3, 1, 2))})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_blocks_that_cost_nothing_are_searched(mesh: Mesh) -> None:
    problems = [problem(nothing_costs(), mesh, rules=RULES)]
    found = search_meshes(problems)
    assert certificate_document(found, problems)["gap"] == pytest.approx(0.0, abs=1e-9)
