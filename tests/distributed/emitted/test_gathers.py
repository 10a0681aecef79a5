"""Weights gathered a block at a time have the gradients of those gathered one by one, in every order of passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from pdv.emit.templates import gathers
from pdv.emit.templates.gathers import gather, gather_together, regathering
from pdv.emit.templates.parallel import partition, reduce
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
WIDTH, ROWS, BLOCKS, RANKS = 12, 6, 3, 3


class Block(nn.Module):
    """[b/dp, w] -> [b/dp, w]; one of its weights is frozen, and one is used sometimes."""

    def __init__(self, mesh: Mesh, weights: Weights, *, kept: bool) -> None:
        super().__init__()
        self.dp = mesh["dp"]
        self.w, self.v = mesh.parameter(weights["w"], {"dp": 0}), mesh.parameter(weights["v"], {"dp": 1})
        self.bias = mesh.parameter(weights["bias"], {"dp": 0})
        self.frozen, self.sometimes = (mesh.parameter(weights["v"], {"dp": 0}) for _ in range(2))
        self.frozen.requires_grad_(False)  # torch's name
        self.use_sometimes = False
        gather_together(self.dp, *self.parameters(), once=kept)

    def forward(self, x: Tensor) -> Tensor:
        dp = self.dp
        h = torch.tanh(F.linear(x, gather(self.w, 0, dp), gather(self.bias, 0, dp)))
        h = torch.tanh(h @ gather(self.v, 1, dp).T @ gather(self.frozen, 0, dp))
        h = h @ gather(self.sometimes, 0, dp) if self.use_sometimes else h
        return x + h @ gather(self.w, 0, dp)


class Model(ParallelModule):
    """[b, w] -> [b/dp, w], over blocks that are read twice in one pass."""

    def __init__(self, path: Path, *, kept: bool = False) -> None:
        mesh = make_mesh({"dp": RANKS}, "cpu", own_sums=("dp",))
        super().__init__(mesh, ("dp",))
        self.own_loss = "sum"
        self.dp = mesh["dp"]
        weights = Weights(path)
        self.table = mesh.parameter(weights["w"], {"dp": 0})
        gather_together(self.dp, self.table, once=kept)
        self.blocks = nn.ModuleList(Block(mesh, weights, kept=kept) for _ in range(BLOCKS))
        self.checkpointed: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        with regathering():
            x = partition(x, 0, self.dp) @ gather(self.table, 0, self.dp)
            for block in self.blocks:
                x = block(x) if self.checkpointed is None else self._again(block, x)
            return x

    def _again(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=self.checkpointed)
        return y

    def use(self, seed: int) -> None:
        """Of odd seeds, all weights."""
        for block in self.blocks:
            block.use_sometimes = bool(seed % 2)


def loss_of(model: Model, seed: int) -> Tensor:
    model.use(seed)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return reduce(model(x).square().sum(), model.dp)


def backward(model: Model, *seeds: int) -> None:
    for seed in seeds:
        torch.autograd.backward(loss_of(model, seed))


def gradients(model: Model) -> dict[str, Tensor]:
    """Whole, and taken away."""
    found = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    model.zero_grad()
    return found


def check(model: Model, *seeds: int) -> None:
    """The gradients that there are, against those of weights gathered one by one."""
    found = gradients(model)
    with model.parameters_in_graph():
        backward(model, *seeds)
    wanted = gradients(model)
    assert {name for name in wanted if "frozen" not in name} >= {"table", "blocks.0.w", "blocks.2.v", "blocks.1.bias"}
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12, msg=name)
    assert set(found) == set(wanted)


def once(model: Model) -> None:
    for seed in (0, 1, 2):
        backward(model, seed)
        check(model, seed)


def several(model: Model) -> None:
    loss = loss_of(model, 0)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    first, second = loss_of(model, 2), loss_of(model, 4)  # two passes forward, then two backward
    torch.autograd.backward(first)
    torch.autograd.backward(second)
    check(model, 0, 0, 2, 4)


def held_back(model: Model) -> None:
    with model.no_sync():
        backward(model, 0, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 3)
    check(model, 0, 1, 3)
    with model.no_sync():
        backward(model, 1)
    model.zero_grad()
    backward(model, 2)
    check(model, 2)


def checkpointed(model: Model) -> None:
    for reentrant in (False, True):
        model.checkpointed = reentrant
        backward(model, 1)
        model.checkpointed = None
        check(model, 1)


def trained_between(model: Model) -> None:
    """Weights that an optimizer changed are gathered anew, also those that were on their way."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for seed in (0, 2):
        with torch.no_grad():
            before = loss_of(model, seed)
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert float(loss_of(model, seed)) < float(before)
        backward(model, seed)
        check(model, seed)


def thawed(model: Model) -> None:
    """What was frozen in a step is trained in the next, though nothing changed it."""
    trained = [parameter for parameter in model.blocks.parameters() if parameter.requires_grad]
    for is_trained in (False, True):
        for parameter in trained:
            parameter.requires_grad_(is_trained)
        for parameter in model.parameters():
            parameter.grad = None
        backward(model, 0)
    check(model, 0)


def of_others(model: Model) -> None:
    """Hooks of a parameter see its gradient; what is exchanged for a parameter is gathered, too."""
    wrong: Tensor = model.blocks[1].w  # type: ignore[assignment,union-attr]
    handle = wrong.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
    backward(model, 0)
    doubled = wrong.grad.full_tensor() / 2  # type: ignore[union-attr]
    handle.remove()
    model.zero_grad()
    backward(model, 0)
    torch.testing.assert_close(doubled, wrong.grad.full_tensor(), rtol=1e-12, atol=0)  # type: ignore[union-attr]
    check(model, 0)
    others = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.autograd.backward(reduce(functional_call(model, others, (x,)).square().sum(), model.dp))
    for name, parameter in model.named_parameters():
        parameter.grad = others[name].grad if parameter.requires_grad else None
    check(model, 0)


def stale(model: Model) -> None:
    loss = loss_of(model, 0)
    with torch.no_grad():
        model.blocks[0].w.to_local().mul_(1.0)  # type: ignore[operator,union-attr]
    with pytest.raises(RuntimeError, match="stale-weight"):
        torch.autograd.backward(loss)
    model.zero_grad()
    backward(model, 0)
    check(model, 0)


def record(run: Callable[[], None]) -> tuple[list[str], int]:
    """Names of the collectives that a run starts, and how many of them run at once."""
    called: list[str] = []
    running: list[int] = [0]
    most = 0

    class Running:
        def __init__(self, work: dist.Work) -> None:
            running[0] += 1
            self.work = work

        def wait(self) -> None:
            running[0] -= 1
            self.work.wait()

    def recording(name: str) -> Callable[..., object]:
        operator = getattr(gathers, name)

        def call(*tensors: Tensor, **options: object) -> object:
            nonlocal most
            called.append(name)
            found = Running(operator(*tensors, **options))
            most = max(most, running[0])
            return found

        setattr(gathers, name, call)
        return operator

    before = {name: recording(name) for name in ("gather_single", "scatter_single")}
    run()
    for name, operator in before.items():
        setattr(gathers, name, operator)
    return called, most


def collectives(model: Model) -> None:
    """One for each block and pass, but the last block's, which is still here; what is next is on its way."""
    called, most = record(lambda: backward(model, 0))
    forward, again = 1 + BLOCKS, BLOCKS - 1  # nobody asks for the gradient of x, so the table is not needed again
    assert called.count("gather_single") == forward + again
    assert called.count("scatter_single") == 1 + BLOCKS
    assert most >= 2, "gathers run ahead"
    check(model, 0)


def once_a_step(model: Model) -> None:
    """One gather and one scatter for each block, however many passes there are, also with an evaluation in between."""

    def step() -> None:
        with model.no_sync():
            backward(model, 0, 2)
        with torch.no_grad():
            assert loss_of(model, 4).isfinite()
        with model.no_sync():
            backward(model, 4)
        assert model.mesh.sums.is_waiting
        backward(model, 6)

    model.zero_grad()
    called, most = record(step)
    assert called.count("gather_single") <= 2 * (1 + BLOCKS), "of training, and of evaluation"
    assert called.count("scatter_single") == 1 + BLOCKS
    assert most >= 2, "gathers run ahead"
    check(model, 0, 2, 4, 6)


CASES: tuple[Callable[[Model], None], ...] = (
    once, several, held_back, checkpointed, trained_between, thawed, of_others, stale, collectives,
)  # fmt: skip
KEPT = (once, several, held_back, checkpointed, trained_between, thawed, of_others, once_a_step)


def run_cases(path: Path) -> None:
    model = Model(path)
    for case in CASES:
        case(model)
    gathers.LARGEST_BYTES = 2 * 8 * WIDTH * WIDTH
    once(Model(path))  # a block is several units


def run_kept(path: Path) -> None:
    model = Model(path, kept=True)
    for case in KEPT:
        case(model)
    gathers.LARGEST_BYTES = 2 * 8 * WIDTH * WIDTH
    held_back(Model(path, kept=True))


@pytest.mark.parametrize("run", [run_cases, run_kept])
def test_gradients_of_blocks_that_are_gathered_at_once(run: Callable[[Path], None], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 8 for name in "wv"}
    save_file({**values, "bias": torch.randn(WIDTH, generator=generator, dtype=torch.float64)}, tmp_path / "weights")
    run_ranks(run, RANKS, tmp_path / "weights")
