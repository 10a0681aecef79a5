"""Elements chosen, or overwritten, by several tensors with a dim between them: ``x[i, :, j]``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from tests.pdv.worlds import cluster

ROWS, LAST = torch.arange(4), torch.tensor([0, 3, 1, -1])
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Apart(nn.Module):
    """x: [4, 6], made [4, 2, 3, 4], of which ``what`` makes something."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.what = nn.Linear(6, 24), what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.layer(x).view(4, 2, 3, 4)).square()


def overwritten(h: Tensor) -> Tensor:
    h = h.clone()
    h[ROWS, :, 1, LAST] = h[:, :, 0, 0] + 1
    return h


def added_to(h: Tensor) -> Tensor:
    h = h.clone()
    h[torch.tensor([[0], [2]]), ..., torch.tensor([[1, -1]])] += h[0, :, :, 0]
    return h


def overwritten_where_it_is_largest(h: Tensor) -> Tensor:
    h = h[:, 0].clone()
    h[ROWS, :, h[:, 0].argmax(-1)] = 0.5
    return h


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "of each row": lambda h: h[ROWS, ..., LAST],
    "of each row, by values": lambda h: h[ROWS, :, 2, h[:, 0, 0].argmax(-1)],
    "first by values": lambda h: h[h[:, 0, 0, :3].argmax(-1), :, :, LAST],
    "broadcast": lambda h: h[:, torch.tensor([1, 0]), :, torch.tensor([[0], [3]])],
    "three": lambda h: h[ROWS[:2], :, torch.tensor([2, 0]), LAST[1:3]],
    "overwritten": overwritten,
    "added to": added_to,
    "overwritten, by values": overwritten_where_it_is_largest,
}


@pytest.mark.parametrize("name", PLACES)
def test_elements_are_those_of_the_module(name: str) -> None:
    module = Apart(PLACES[name])
    program = load_program(module, X)
    assert {name.split(" ")[0] for name in program.opaque} <= {"aten.argmax.default"}
    assert "are the same" in check_reading(program.graph, copy_of(module, X, train=True), train=True)


def test_places_of_rows_are_cut_by_rows() -> None:
    plan = pdv.optimize(Apart(PLACES["of each row, by values"]), X, cluster=cluster(2), mesh={"x": 2})
    assert plan.document["techniques"] == {"x": ["data parallel"]}
