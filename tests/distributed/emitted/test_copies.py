"""``copy.deepcopy`` of an emitted model, on one process and on several; what cannot be copied says so."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pdv.emit.templates.gathers import gather, gather_together
from pdv.emit.templates.parallel import partition
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, local, make_mesh
from pdv.emit.templates.stored import local_piece
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


class Gathered(ParallelModule):
    """Data parallel, its weight cut at rest and gathered for each use; it counts its rows."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",))
        self.dp = mesh["dp"]
        self.w = mesh.parameter(weights["w"], {"dp": 0})
        self.bias = mesh.parameter(weights["bias"])
        self.rows = mesh.buffer(weights["rows"])
        gather_together(self.dp, self.w)

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(x.size(0))
        return torch.tanh(partition(x, 0, self.dp) @ gather(self.w, 0, self.dp) + local(self.bias, self.dp))


def _loss(y: Tensor, _: object) -> tuple[Tensor, int]:
    return (y - 1).square().sum(), y.numel()


def trained(model: Gathered, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(model.train_step(x, [], _loss, micro_batches=2).item())
        optimizer.step()
    return found


def copies(path: Path) -> str:
    model = Gathered(make_mesh({"dp": int(torch.distributed.is_initialized()) + 1}, "cpu"), Weights(path))
    trained(model, 1)  # with gradients, and state of the optimizer
    before = [local_piece(x.detach()).clone() for x in (*model.parameters(), *model.buffers())]
    copied = copy.deepcopy(model)
    assert all(x.grad is None for x in copied.parameters())
    assert all(x.grad is not None for x in model.parameters())
    losses = trained(copied, 3)
    after = [local_piece(x.detach()) for x in (*model.parameters(), *model.buffers())]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert trained(model, 3) == pytest.approx(losses, rel=1e-6)
    mine, theirs = model.full_state_dict(), copied.full_state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(ValueError, match=r"^other-names: .*load_full_state_dict"):
        model.load_state_dict({"source.w": mine["w"]}, strict=False)
    try:
        pickle.dumps(model)
    except TypeError as error:
        with pytest.raises(TypeError, match=r"^cannot-share: "):
            model.share_memory()
        return str(error)
    assert all(x.is_shared() for x in model.share_memory().parameters())
    return ""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.randn(4, 4), "bias": torch.zeros(4), "rows": torch.zeros(())}, path)
    return path


def test_a_copy_is_a_model_of_its_own_on_the_same_ranks(weights: Path) -> None:
    for said in run_ranks(copies, 2, weights):
        assert said.startswith("cannot-pickle: ")


def test_on_one_process_a_model_can_be_pickled(weights: Path) -> None:
    assert copies(weights) == ""
