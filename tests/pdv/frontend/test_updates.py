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


def test_a_running_statistic_is_taken() -> None:
    graph = load_program(Overwriting(running), (torch.randn(4, 3),)).graph
    assert [name for name, _ in graph.updates] == ["last"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (as_given, "'last' is overwritten with 'x' as it is"),
        (unread, "never read"),
        (exchanged, "'other' is overwritten"),
    ],
)
def test_others_are_refused_by_name(what: Callable[[Overwriting, Tensor], Tensor], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_program(Overwriting(what), (torch.randn(4, 3),))
