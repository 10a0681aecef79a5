"""What a program returns, under plans drawn at random: whole, or the same rows of every output on each rank.

Several outputs, one of no dims, inputs, parameters and constants returned as they are, one value returned twice, one
that is read on, one whose dim 0 is not the batch; the forward pass, the loss and its gradients are the module's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.verify import check_returned, infer_shardings
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.pcg.derive import derive
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.search.oracle import Oracle, decided
from tests.pdv.worlds import problem

pytestmark = pytest.mark.distributed

BATCH, SEQUENCE, WIDTH = 8, 4, 8
Values = tuple[Tensor, ...]


class Returning(nn.Module):
    """Two linears and a norm over [b, s, d], and whatever ``what`` makes of them."""

    def __init__(self, what: Callable[[Returning, Tensor, Tensor, Tensor], Values | Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(SEQUENCE, WIDTH))
        self.register_buffer("angles", torch.randn(SEQUENCE, WIDTH))
        self._what = what

    def forward(self, x: Tensor) -> Values | Tensor:
        h = torch.tanh(self.first(x))
        return self._what(self, x, h, self.second(h + self.table))


RETURNED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Values | Tensor]] = {
    "two": lambda m, x, h, y: (torch.relu(y), y * y),
    "read on": lambda m, x, h, y: (h, y),
    "one, read on": lambda m, x, h, y: h + 0 * y.mean(),
    "no dims": lambda m, x, h, y: (y, torch.exp(y).mean()),
    "twice": lambda m, x, h, y: (y, h, y),
    "as given": lambda m, x, h, y: (y, x),
    "a parameter": lambda m, x, h, y: (y, m.table),
    "constants": lambda m, x, h, y: (y, m.angles, torch.arange(5)),
    "sequence first": lambda m, x, h, y: y.transpose(0, 1),
    "sequence first too": lambda m, x, h, y: (y, h.transpose(0, 1)),
    "flat rows": lambda m, x, h, y: (y.flatten(0, 1), h[:, 0]),
    "statistics": lambda m, x, h, y: (y, h.mean((0, 1))),
}

SLOW = {"two", "read on", "one, read on", "a parameter", "sequence first"}  # each is part of another one, too


class Norm(nn.Module):
    """Batch norm, whose statistics are overwritten; the normed batch is returned, and read on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Values:
        h = self.norm(x)
        return h, self.conv(h)


def terms(outputs: Values | Tensor, targets: Values | Tensor) -> list[tuple[Tensor, int]]:
    """Sum and number of the squared distances of each output: as ``train_step`` takes the loss."""
    pairs = zip(*[(each,) if isinstance(each, Tensor) else each for each in (outputs, targets)], strict=True)
    return [((y - t).square().sum(), y.numel()) for y, t in pairs if y.is_floating_point()]


def loss(outputs: Values | Tensor, targets: Values | Tensor) -> Tensor:
    """Of each output the mean of its squared distance, added up."""
    return torch.stack([total / number for total, number in terms(outputs, targets)]).sum()


Result = tuple[list[Tensor], float, dict[str, Tensor], tuple[int, int], dict[str, Tensor]]


def observe(packages: list[Path], x: Tensor, targets: list[Tensor]) -> list[Result]:
    """Of each package: outputs, the loss, gradients, (this rank's block, of how many), and buffers."""
    results = []
    for package in packages:
        model = import_package(package).build(device="cpu")
        count, index = 1, 0
        for axis in model.batch_axes:
            count, index = count * axis.size, index * axis.size + axis.rank
        total = model.train_step(x, targets if len(targets) > 1 else targets[0], terms).item()
        state = model.full_state_dict()
        outputs = model(x)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        results.append(([y.detach() for y in outputs], total, model.full_gradients(), (index, count), state))
    return results


def check(module: nn.Module, x: Tensor, folder: Path, plans: int = 4) -> None:
    """Plans of a module on two axes against the module itself."""
    program = load_program(module, (x,))
    of = problem(program.graph, Mesh.of(a=2, b=2))
    rng = np.random.default_rng(7)
    packages = []
    for number in range(plans):
        way = decided(of)[number % len(decided(of))]
        oracle = Oracle(way)
        chosen = oracle.legal(rng)
        assert chosen is not None
        pcg = derive(way, oracle.assignment(chosen), oracle.moves).pcg
        check_returned(pcg, infer_shardings(pcg, of.mesh))
        verify_equal(of.graph, pcg, of.mesh)
        packages.append(folder / f"plan{number}")
        packages[-1].mkdir()
        emit_package(pcg, of.mesh, {}, program.weights, packages[-1])
    outputs, targets, total, state = expected(module, x)
    for results in (observe(packages, x, targets), *run_ranks(observe, 4, packages, x, targets)):
        for found, found_loss, gradients, (index, count), found_state in results:
            assert len(found) == len(outputs)
            for y, whole in zip(found, outputs, strict=True):
                torch.testing.assert_close(y, whole.chunk(count)[index] if count > 1 else whole, rtol=1e-5, atol=1e-5)
            assert found_loss == pytest.approx(total, rel=1e-5)
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
            for name, buffer in state.items():
                torch.testing.assert_close(found_state[name], buffer, rtol=1e-4, atol=1e-5)


def expected(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor], float, dict[str, Tensor]]:
    """Outputs, targets, the loss, and the running statistics after one step; gradients are left in the module."""
    outputs = module(x)
    state = {name: value.clone() for name, value in module.named_buffers() if "running" in name}
    whole = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    targets = [torch.randn(y.shape) if y.is_floating_point() else y for y in whole]
    total = loss(outputs, targets if len(whole) > 1 else targets[0])
    torch.autograd.backward(total)
    return [y.detach() for y in whole], targets, total.item(), state


@pytest.mark.parametrize("what", mark_slow(RETURNED, SLOW))
def test_outputs_are_the_module_s(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Returning(RETURNED[what]), torch.randn(BATCH, SEQUENCE, WIDTH), tmp_path)


def test_statistics_are_overwritten_with_those_of_all_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Norm(), torch.randn(BATCH, 4, 3, 3), tmp_path)
