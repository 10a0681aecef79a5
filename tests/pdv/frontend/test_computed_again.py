"""Parts that are computed again in backward (``torch.utils.checkpoint``) are read as what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdv
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from tests.pdv.worlds import cluster

# torch says so of calls without gradients, of which the comparison with the module has one
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Checkpoint = Callable[..., Any]  # Any: what the part gives


class Checkpointed(nn.Module):
    """x: [5, 3]. The second layer is computed again in backward."""

    def __init__(self, again: Checkpoint, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again, self.reentrant = again, reentrant
        self.first, self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        run = checkpoint if self.reentrant else _at_once
        return self.last(self.again(self, run, x))  # type: ignore[no-any-return]


def _at_once(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:  # Any: as above
    """The same part without ``checkpoint``, for comparison."""
    del use_reentrant
    return function(*args)


def of_trained(self: Checkpointed, run: Checkpoint, x: Tensor) -> Any:  # Any: a tensor
    return run(lambda h: self.inner(h).tanh(), self.first(x), use_reentrant=True)


def of_several(self: Checkpointed, run: Checkpoint, x: Tensor) -> Any:  # Any: as above
    h, _ = run(lambda h, pair, word: (self.inner(h + pair[0]), word), self.first(x), (x, x), "word", use_reentrant=True)
    return h.sigmoid()


def twice(self: Checkpointed, run: Checkpoint, x: Tensor) -> Any:  # Any: as above
    return run(lambda h: of_trained(self, run, h), self.first(x), use_reentrant=True)


PARTS = [of_trained, of_several, twice]


@pytest.mark.parametrize("part", PARTS)
def test_their_gradients_are_the_modules(part: Checkpoint) -> None:
    module, x = Checkpointed(part, reentrant=True), torch.randn(5, 3)
    program = load_program(module, x)
    source = copy_of(module, x, train=True)
    assert "gradients and state are the same" in check_reading(program.graph, source, train=True)
    assert program.graph.digest == load_program(Checkpointed(part, reentrant=False), x).graph.digest


def test_our_export_trains_them(tmp_path: Path) -> None:
    module, x = Checkpointed(of_trained, reentrant=True), torch.randn(5, 3)
    export_onnx(module, x, tmp_path / "model.onnx")
    found = load_program(tmp_path / "model.onnx").graph
    assert "gradients and state are the same" in check_reading(found, copy_of(module, x, train=True), train=True)


def test_what_torch_does_not_train_is_not_trained() -> None:
    """Where no argument of the part is trained, ``use_reentrant=True`` gives no gradients to what the part holds."""
    module = Checkpointed(lambda self, run, x: run(self.inner, x, use_reentrant=True), reentrant=True)
    x = torch.randn(5, 3)
    program = load_program(module, x)
    source = copy_of(module, x, train=True)
    assert "gradients and state are the same" in check_reading(program.graph, source, train=True)
    pdv.optimize(module, x, cluster=cluster(2))
