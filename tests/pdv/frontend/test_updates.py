"""Buffers that a program overwrites: as running statistics are, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.frontend import load_program


class Overwriting(nn.Module):
    """Overwrites what it holds, as ``what`` says."""

    def __init__(self, what: Callable[[Overwriting, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._what = nn.Linear(3, 3), what
        for name in ("last", "other"):
            self.register_buffer(name, torch.zeros(4, 3))
        self.register_buffer("same", self.last)
        self.register_buffer("head", self.last[:1])
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self._what(self, x)


def running(m: Overwriting, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.last.copy_(0.9 * m.last + 0.1 * h.detach())
    return h


def as_given(m: Overwriting, x: Tensor) -> Tensor:
    y = m.linear(x) + m.last
    m.last.copy_(x)
    return y


def unread(m: Overwriting, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.last.copy_(h.detach())
    return h


def exchanged(m: Overwriting, x: Tensor) -> Tensor:
    before = m.last.clone()
    m.last.copy_(m.other + 1)
    m.other.copy_(before)
    return m.linear(x) + m.last


def counting(m: Overwriting, x: Tensor) -> Tensor:
    m.count += 1
    return m.linear(x) * m.count


def only_counting(m: Overwriting, x: Tensor) -> Tensor:
    m.count += 1
    return running(m, x)


def training_by_itself(m: Overwriting, x: Tensor) -> Tensor:
    y = m.linear(x)
    with torch.no_grad():
        m.linear.bias.mul_(0.5)
    return y


def through_a_view(m: Overwriting, x: Tensor) -> Tensor:
    return running(m, x) + m.head


def by_both_names(m: Overwriting, x: Tensor) -> Tensor:
    y = m.linear(x) + m.same
    m.last.copy_(0.9 * m.last + 0.1 * y.detach())
    return y


@pytest.mark.parametrize("what", [running, only_counting, by_both_names, unread])
def test_a_running_statistic_is_taken(what: Callable[[Overwriting, Tensor], Tensor]) -> None:
    graph = load_program(Overwriting(what), (torch.randn(4, 3),)).graph
    assert len(graph.updates) == 1
    assert graph.updates[0][0] in ("last", "same")
    assert "count" not in [node.attr("name") for node in graph.params]


def test_a_norm_registered_twice_moves_once_for_each_use() -> None:
    norm = nn.BatchNorm1d(3)
    graph = load_program(nn.Sequential(nn.Linear(3, 3), norm, nn.ReLU(), norm), (torch.randn(4, 3),)).graph
    assert len(graph.updates) == 2
    assert {node.type.shape for _, node in graph.updates} == {(3,)}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (as_given, "'same' is overwritten with 'x' as it is"),
        (exchanged, "'other' is overwritten"),
        (counting, "overwrites the buffer 'count' of torch.int64"),
        (training_by_itself, "overwrites the parameter 'linear.bias'"),
        (through_a_view, "share memory with no others; here these do: .*head"),
    ],
)
def test_others_are_refused_by_name(what: Callable[[Overwriting, Tensor], Tensor], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_program(Overwriting(what), (torch.randn(4, 3),))


def test_rows_are_not_made_of_floats() -> None:
    class Steering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.table[(2 * x).to(torch.int64)]

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 3))

    with pytest.raises(ModelError, match=r"numbers computed of floats, at test_updates\.py:\d+"):
        load_program(Steering(), (torch.randn(4, 3),))
