"""``as_strided``, ``fill_diagonal_``: elements by places in the module's memory, whatever lies in the program's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from tests.pdv.worlds import cluster

Layout = tuple[str, tuple[int, ...], tuple[int, ...]]
LAYOUTS: dict[str, Layout] = {
    "windows that overlap": ("plain", (4, 5, 4, 3), (36, 6, 3, 1)),
    "of rows that lie inside": ("turned", (12, 5, 4), (1, 24, 12)),
    "of all rows as one": ("plain", (6, 12), (24, 1)),
    "elements several times": ("plain", (4, 3, 3), (36, 0, 7)),
    "every other": ("turned", (3, 2, 12), (24, 72, 1)),
}


class Strided(nn.Module):
    """x: [4, 6, 6], which lies in order, as [4, 12, 3], or ``turned``, as [12, 12]."""

    def __init__(self, layout: Layout, *, more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.layout, self.more = nn.Linear(6, 6), layout, more

    def forward(self, x: Tensor) -> Tensor:
        how, size, stride = self.layout
        h = self.layer(x).transpose(1, 2).contiguous()
        h = h.view(4, 12, 3) if how == "plain" else h.view(12, 12).t()
        return torch.as_strided(h[:, 1:] if self.more else h, size, stride).square()


@pytest.mark.parametrize("name", LAYOUTS)
def test_elements_are_those_of_the_module(name: str) -> None:
    module, x = Strided(LAYOUTS[name]), torch.randn(4, 6, 6)
    source = copy_of(module, (x,), train=True)
    program = load_program(module, (x,))
    assert not program.opaque
    assert check_reading(program.graph, source, train=True).endswith("are the same")


def test_rows_that_stay_are_cut() -> None:
    module = Strided(LAYOUTS["windows that overlap"])
    plan = pdv.optimize(module, (torch.randn(4, 6, 6),), cluster=cluster(2), mesh={"x": 2})
    assert plan.document["techniques"] == {"x": ["data parallel"]}
    assert "within 1e-09" in plan.document["run"]["statement"]


def test_what_lies_in_memory_of_others_is_refused() -> None:
    module = Strided(("plain", (4, 5, 4, 3), (36, 6, 3, 1)), more=True)
    with pytest.raises(UnsupportedOperatorsError, match="it reads memory as it lies"):
        load_program(module, (torch.randn(4, 6, 6),))


class Filled(nn.Module):
    """x: [n, 6]; a diagonal of what is made of it is overwritten."""

    def __init__(self, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.fill = nn.Linear(6, 4), fill

    def forward(self, x: Tensor) -> Tensor:
        return self.fill(self.layer(x)).square()


def of_a_part(h: Tensor) -> Tensor:
    whole = h.new_zeros(h.size(0), 8)
    whole[:, 2:6] = h
    whole[1:5, 2:6].fill_diagonal_(2.0)
    return whole


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "of pairs of rows": lambda h: (h @ h.T).fill_diagonal_(-5.0),
    "of more rows than columns": lambda h: (2 * h).fill_diagonal_(3.0),
    "that goes on below": lambda h: (2 * h).fill_diagonal_(3.0, wrap=True),
    "turned": lambda h: (h @ h.T)[:4].T.fill_diagonal_(0.5) * 2,
    "of a part": of_a_part,
    "of three dims": lambda h: torch.einsum("ia,ja,ka->ijk", h, h, h).fill_diagonal_(0.0),
    "of a mask": lambda h: (h @ h.T).masked_fill(torch.ones(11, 11, dtype=torch.bool).fill_diagonal_(False), -1.0),
}


@pytest.mark.parametrize("name", FILLS)
def test_diagonals_are_filled_as_the_modules(name: str) -> None:
    module, x = Filled(FILLS[name]), torch.randn(11, 6)
    program = load_program(module, (x,))
    assert not program.opaque
    assert check_reading(program.graph, copy_of(module, (x,), train=True), train=True).endswith("are the same")


def test_a_diagonal_that_goes_on_in_other_memory_is_refused() -> None:
    module = Filled(lambda h: (h.T @ torch.ones(11, 9)).T.fill_diagonal_(0.0, wrap=True))
    with pytest.raises(ModelError, match=r"fill_diagonal_\(wrap=True\) of a tensor that is not contiguous"):
        load_program(module, (torch.randn(11, 6),))
