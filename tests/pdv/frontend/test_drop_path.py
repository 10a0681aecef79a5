"""Stochastic depth: read as dropout of rows; layers that only look like it are left alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.torch.draws import say_drop_paths


class DropPath(nn.Module):
    """As transformers and timm write it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = (keep + torch.rand((x.shape[0], *(1,) * (x.dim() - 1)))).floor()
        return x.div(keep) * mask


class ScaledDropPath(DropPath):
    """Another function: what is kept is not scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 - self.drop_prob)


class Block(nn.Module):
    """One layer of paths, taken twice, as vision models do, and dropout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.path, self.drop = nn.Linear(4, 4), DropPath(0.25), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.path(self.inner(x))
        x = x + self.path(self.inner(x))
        return self.drop(x)  # type: ignore[no-any-return]


def test_rows_are_dropped_each_time_by_another_mask() -> None:
    module, inputs = Block(), (torch.randn(4, 3, 4),)
    program = load_program(module, inputs)
    drawn = [node for node in program.graph.nodes if node.op.draws]
    assert sorted(node.type.shape for node in drawn) == [(4, 1, 1), (4, 1, 1), (4, 3, 4)]
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)
    assert isinstance(module.path, DropPath)
    assert "forward" not in vars(module.path)


def test_what_is_said_is_what_it_does() -> None:
    own, said = DropPath(0.25), DropPath(0.25)
    say_drop_paths(said)
    assert "forward" in vars(said)
    for layer in (own, said):
        torch.manual_seed(0)
        rows = layer(torch.ones(4096, 2))
        assert set(rows.flatten().tolist()) <= {0.0, rows.max().item()}
        assert rows.mean().item() == torch.tensor(1.0).item() or abs(rows.mean().item() - 1) < 0.05
        assert bool((rows[:, 0] == rows[:, 1]).all())


def test_a_layer_that_does_something_else_is_left_alone() -> None:
    layer = ScaledDropPath(0.25)
    say_drop_paths(layer)
    assert "forward" not in vars(layer)
