"""Modules that build an inverse row by row where they are exported, and solve elsewhere, are read as they run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program

X = torch.arange(96.0).reshape(4, 6, 4).sin()


def is_exported() -> bool:  # as a library asks
    return torch.compiler.is_exporting()


class Delta(nn.Module):
    def __init__(self, *, directly: bool) -> None:
        super().__init__()
        self.layer, self.directly = nn.Linear(4, 4), directly

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        system = torch.eye(6) + (x @ x.transpose(1, 2)).tril(-1) / 8
        if not (torch.compiler.is_exporting() if self.directly else is_exported()):
            return torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
        rows = [x[:, 0]]
        for at in range(1, 6):
            rows.append(x[:, at] - (system[:, at, :at, None] * torch.stack(rows, 1)).sum(1))
        return torch.stack(rows, 1)


class Told(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if is_exported() else x.sin()


def test_what_is_solved_is_solved() -> None:
    for directly in (True, False):
        module = Delta(directly=directly)
        source = copy_of(module, X, train=True)
        program = load_program(module, X)
        assert [node.op.name for node in program.graph.nodes].count("opaque") == 1
        assert check_reading(program.graph, source, train=True).endswith("are the same")


def test_other_code_is_told_that_it_is_exported() -> None:
    assert [node.op.name for node in load_program(Told(), X).graph.nodes if node.operands] == ["exp"]
