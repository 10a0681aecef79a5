"""Loops over experts, each of which takes the rows that chose it: values, gradients and steps as the module's."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.torch.tracing.hits import hits
from tests.pdv.as_modules import gap_of
from tests.pdv.frontend.mixtures import (
    CHOSEN,
    EXPERTS,
    LOOPS,
    WIDTH,
    Loop,
    Mixture,
    added_in_place,
    hit_by_signs,
    left_out,
    masked,
    one_hot,
    over_hit,
)
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.filterwarnings("ignore:no declaration of")
STEPS = 3
MORE = {
    "out, mask": ("out, mask", "out, mask"),  # none
    "how many experts were chosen": ("        out.index", "        out = out * 0.5\n        out.index"),
    "which expert was the last": ("return out", "return out + number"),
    "sums of signs": ("permute(2, 1, 0)", "permute(2, 1, 0) * w.T.sign()"),
    "the rows of another expert": ("mask[number]", "mask[number - 1]"),
    "sums over other dims": ("dim=(-1, -2)", "dim=(0, 1)"),
    "a mask that is written into": ("    for", "    mask[0] = 1\n    for"),
    "a mask that changes": ("        out.index", "        mask = mask.flip(0)\n        out.index"),
    "a number that changes": ("        n, b", "        if EXPERTS: number = number * 0\n        n, b"),
}


@pytest.mark.parametrize("what", MORE)
def test_loops_that_do_more_are_not_run_over_all_experts(what: str) -> None:
    text = inspect.getsource(over_hit).replace(*MORE[what])
    found = [ast.unparse(each) for each, unsaid in hits(ast.parse(text)) if not unsaid]
    assert found == ([] if what != "out, mask" else ["(mask.sum(dim=(-1, -2)) > 0).nonzero()"])


def test_loops_over_masks_of_other_numbers_are_refused() -> None:
    with pytest.raises(ModelError, match="what it runs depends on values of tensors"):
        load_program(Mixture(hit_by_signs), (torch.randn(4, 2, WIDTH),))


def _read(module: nn.Module, *inputs: Tensor) -> None:
    program = load_program(module, inputs)
    assert all("topk" in text for text in program.opaque)
    assert "the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_over_experts(loop: Loop) -> None:
    _read(Mixture(loop), torch.randn(4, 2, WIDTH))
    _read(Mixture(loop), torch.randn(1, 1, WIDTH))  # of which some expert has none


@pytest.mark.parametrize("loop", [added_in_place, one_hot, left_out])
def test_they_are_cut_and_trained_at_any_batch(loop: Loop) -> None:
    module, x = Mixture(loop), torch.randn(4, 2, WIDTH)
    plan = pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2})
    assert "was run on 2 simulated ranks" in plan.document["run"]["statement"]
    assert plan.document["proof"]["statement"].startswith("equal to its source")
    model = plan.build("cpu")
    steps = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, module)]
    for batch in range(1, STEPS + 1):
        given = torch.randn(batch, 2, WIDTH)
        found, wanted = model(given), module(given)
        assert torch.allclose(found, wanted, atol=1e-5)
        for step, result in zip(steps, (found, wanted), strict=True):
            step.zero_grad(set_to_none=False)
            result.square().sum().backward()
            step.step()
    assert gap_of(plan, Mixture(loop), [x]) < 1e-9


class Given(nn.Module):
    """x: [b, w], selected: [b, 2], in which a row may choose an expert twice."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.inner, self.expert, self.adds = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), adds

    def forward(self, x: Tensor, selected: Tensor) -> Tensor:
        h = self.inner(x)
        b, n = torch.where(selected == 1)
        found = self.expert(h[b]) * h[b, n, None]
        if self.adds:
            return h.index_add(0, b, found)
        out = h.clone()
        out[b] += found
        return out


def test_rows_that_choose_an_expert_twice_are_added_to_twice_or_refused() -> None:
    given = torch.randn(3, WIDTH), torch.tensor([[1, 1], [1, 0], [0, 2]])
    _read(Given(adds=True), *given)
    with pytest.raises(UnsupportedOperatorsError, match="may occur twice"):
        load_program(Given(adds=False), given)


class Centred(nn.Linear):
    """An expert that looks at all of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found - found.cumsum(0)


def test_experts_that_look_at_several_rows_are_refused() -> None:
    x = torch.randn(4, 2, WIDTH)
    with pytest.raises(UnsupportedOperatorsError, match="depends on values"):
        load_program(Mixture(added_in_place, lambda: Centred(WIDTH, WIDTH)), (x,))
    normed = Mixture(added_in_place, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with pytest.raises(ModelError, match="depends on values"):
        load_program(normed, (x,))


def counted(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """What is left out does something else."""
    out, met = torch.zeros_like(x), 0
    for i, expert in enumerate(experts):
        b, n = torch.where(selected == i)
        if b.shape[0] == 0:
            continue
        met = met + 1
        out.index_add_(0, b, expert(x[b]) * w[b, n, None])
    return out * met


def lost(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """Asked is whether places are other than zero: the first row has none of these."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        b, n = torch.where(selected == i)
        if b.any():
            out.index_add_(0, b, expert(x[b]) * w[b, n, None])
    return out


def last_found(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """What the last expert gave is used where the next one is not left out."""
    out, found = torch.zeros_like(x), x.sum()
    for i, expert in enumerate(experts):
        b, n = torch.where(selected == i)
        if b.numel() > 0:
            out.index_add_(0, b, expert(x[b]) * w[b, n, None] + found)
            found = x.mean()
    return out


def elsewhere(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """What is put is put into other rows."""
    out, others = torch.zeros_like(x), torch.arange(2)
    for i, expert in enumerate(experts):
        mask = (selected == i).any(-1)
        if mask.any():
            out[others] += expert(x[:2]) * w[:2, :1]
    return out


def capacity(experts: nn.ModuleList, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """Counts are asked for more than whether there are rows."""
    out, indices = torch.zeros_like(x), selected.view(-1, CHOSEN)
    counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
    for i, expert in enumerate(experts):
        if counts[i] == 0:
            continue
        b, n = torch.where(indices == i)
        out[b] += expert(x[b]) * w[b, n, None] / counts[i]
    return out


@pytest.mark.parametrize("loop", [capacity, counted, lost, last_found, elsewhere])
def test_parts_that_do_more_than_put_rows_are_not_taken_for_such(loop: Loop) -> None:
    with pytest.raises(ModelError, match="depends on values"):
        load_program(Mixture(loop), (torch.randn(4, 2, WIDTH),))


def test_a_plan_says_that_experts_left_out_have_gradients() -> None:
    (note,) = load_program(Mixture(left_out), (torch.randn(4, 2, WIDTH),)).notes
    assert "gradients of zero" in note


def test_places_are_no_output() -> None:
    class Where(Mixture):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            rows = self.inner(x)
            return rows, torch.where(rows > 0)[0]

    with pytest.raises(ModelError, match="as many rows as a mask chooses"):
        load_program(Where(masked), (torch.randn(4, 2, WIDTH),))
