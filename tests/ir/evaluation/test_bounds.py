"""Between which numbers ids lie, whatever they are computed of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.evaluation.bounds import bounds
from pdv.frontend import load_program

FREE = math.inf


class Ids(nn.Module):
    """What is computed of ``x`` [4, 6], floats or ids."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._of = of

    def forward(self, x: Tensor) -> Tensor:
        return self._of(x)


OF_FLOATS = {
    "clamp": (lambda x: (x * 16).long().clamp(0, 15), (0, 15)),
    "clamp of floats": (lambda x: (x * 16).clamp(0, 15.5).long(), (0, 15)),
    "one end": (lambda x: (x * 16).long().clamp(max=15), (-FREE, 15)),
    "both ends, apart": (lambda x: (x.abs() * 16).long().clamp(max=15), (0, 15)),
    "rest": (lambda x: (x * 1e4).long() % 64, (0, 63)),
    "bits": (lambda x: (x * 1e4).long() & 63, (0, 63)),
    "moved": (lambda x: (x * 9).long().clamp(-2, 3) * 2 + 4, (0, 10)),
    "less": (lambda x: 9 - (x * 9).long().clamp(0, 9), (0, 9)),
    "mask": (lambda x: (x > 0).long() * 3, (0, 3)),
    "floor": (lambda x: torch.floor(x.sigmoid() * 15.5).long(), (0, 15)),
    "bytes": (lambda x: (x * 9).to(torch.uint8).long(), (0, 255)),
    "padded": (lambda x: nn.functional.pad((x * 9).long().clamp(3, 5), (0, 2)), (0, 5)),
    "free": (lambda x: (x * 16).long(), (-FREE, FREE)),
}


@pytest.mark.parametrize("case", OF_FLOATS)
def test_what_is_computed_lies_between_its_bounds(case: str) -> None:
    compute, wanted = OF_FLOATS[case]
    x = 3 * torch.randn(4, 6)
    graph = load_program(Ids(compute), (x,)).graph
    low, high = bounds(graph.outputs[0][1])
    assert (low, high) == wanted
    found = compute(x)
    assert low <= found.min()
    assert found.max() <= high


def test_a_choice_that_is_never_taken_says_nothing() -> None:
    table = nn.Parameter(torch.randn(50))

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return self.table[(x * 50).long().clamp(0, 49)]  # with rows from the end on, had they been below zero

    graph = load_program(Looked(), (torch.rand(4, 6),)).graph
    (lookup,) = [node for node in graph.nodes if node.op.kind == "index"]
    assert bounds(lookup.operands[1]) == (0, 49)
