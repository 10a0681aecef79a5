"""What a model looks at in its calls: gradients of inputs, buffers in evaluation, heads behind its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn, optim
from torch.nn.functional import batch_norm, cross_entropy, linear
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from pdv.emit.templates.kernels.operators import overwrite
from pdv.emit.templates.parallel import partition, reduce
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, join, local, make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
ROWS, WIDTH, CLASSES = 4, 6, 3


class Tracked(ParallelModule):
    """x [b, k] -> [b, n], cut by rows over dp and by k over tp; keeps the mean of what it saw."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",))
        self.dp, self.tp = mesh["dp"], mesh["tp"]
        self.weight = mesh.parameter(weights["weight"], {"tp": 1})
        self.seen = mesh.buffer(weights["seen"])

    def forward(self, x: Tensor) -> Tensor:
        x = partition(x, 0, self.dp)
        overwrite(self.seen, self.seen * 0.9 + 0.1 * reduce(x.mean(0) / self.dp.size, self.dp))
        x = x.unflatten(1, (self.tp.size, -1))[:, self.tp.rank]
        return reduce(linear(x, local(self.weight, self.dp)), self.tp)


class Normed(ParallelModule):
    """x [b, k] -> [b, k], by the statistics of the batch."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",))
        self.mean = mesh.buffer(weights["norm.running_mean"])

    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(x, self.mean, torch.ones_like(self.mean), training=True)


def tracked(path: Path, **sizes: int) -> Tracked:
    return Tracked(make_mesh({"dp": 1, "tp": 1, **sizes}, "cpu"), Weights(path))


def batch(*, ignored: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.full((ROWS,), -100) if ignored else torch.arange(ROWS) % CLASSES


def evaluations(model: Tracked) -> None:
    before = model.seen.clone()
    model.eval()
    for _ in range(2):
        with (
            pytest.raises(
                RuntimeError, match=r"moved-buffers: .* moved seen: this program was read of a module that trains"
            ),
            torch.no_grad(),
        ):
            model(batch()[0])
        assert torch.equal(model.seen, before)
    model.self_check(*batch(), nn.CrossEntropyLoss())
    assert torch.equal(model.seen, before)
    model.train().train_step(*batch(), nn.CrossEntropyLoss())
    assert not torch.equal(model.seen, before)
    model.zero_grad()


def normed(path: Path) -> None:
    """In evaluation, statistics of a batch that a program takes whatever the mode."""
    model = Normed(make_mesh({"dp": 1, "tp": 1}, "cpu"), Weights(path)).eval()
    with pytest.raises(RuntimeError, match=r"batch-statistics: .* moved mean: .* in its batch norms"):
        model(batch()[0])


def ignored(model: Tracked) -> None:
    """Where no label counts the loss is not a number, and gradients are zero, as torch has both."""
    for count in (1, 2):
        assert model.train_step(*batch(ignored=True), nn.CrossEntropyLoss(), micro_batches=count).isnan()
        assert not model.full_gradients()["weight"].any()
    model.zero_grad()


def heads(model: Tracked) -> Tensor:
    """One in an optimizer of its own, behind rows of each rank."""
    torch.manual_seed(1)
    head, model.own_loss = nn.Linear(CLASSES, CLASSES).double(), "mean"
    optimizer, (x, y) = optim.SGD(head.parameters(), 0.1), batch()

    def step() -> None:
        cross_entropy(head(model(x)), model.shard_batch(y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if model.dp.size > 1:
        step()
        with pytest.raises(RuntimeError, match=r"own-parameters-apart: a parameter .3, 3. .* along dp"):
            step()
        return torch.zeros(0)
    step()
    step()
    return head.weight.detach()


def summed(model: Tracked) -> Tensor:
    """The same, said to be summed."""
    torch.manual_seed(1)
    head, model.own_loss = nn.Linear(CLASSES, CLASSES).double(), "mean"
    model.sum_over_data(head.parameters())
    optimizer, (x, y) = optim.SGD(head.parameters(), 0.1), batch()
    for _ in range(3):
        cross_entropy(head(model(x)), model.shard_batch(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.weight.detach()


def averaged(model: Tracked) -> Tensor:
    """Running averages of torch's, of buffers too."""
    averages = [
        AveragedModel(model, multi_avg_fn=way, use_buffers=True)
        for way in (get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn())
    ]
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model.train_step(*batch(), nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(model)
    found = [average.module.full_state_dict() for average in averages]
    return torch.cat([state[name].flatten() for state in found for name in ("weight", "seen")])


def asked(model: Tracked) -> Tensor:
    """The gradient of an input: whole where rows are cut, refused where each rank has a part."""
    x, y = batch()
    x.requires_grad_()
    if model.tp.size > 1:
        with pytest.raises(RuntimeError, match=r"input-gradients-apart: .* along tp"):
            model.train_step(x, y, nn.CrossEntropyLoss())
        return torch.zeros(0)
    model.train_step(x, y, nn.CrossEntropyLoss())
    assert x.grad is not None
    return x.grad


def penalized(model: Tracked) -> Tensor:
    """Input gradients of outputs, a penalty of them beside a mean of rows, and what both train."""
    x, y = batch()
    x.requires_grad_()
    model.own_loss = "mean"
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    loss = cross_entropy(output, model.shard_batch(y)) + (slope.norm(2, 1) - 1).square().mean()
    loss.backward()
    assert x.grad is not None
    return torch.cat([slope.detach(), x.grad, model.full_gradients()["weight"]])


class Lamb(optim.SGD):
    """Of a library, or of one's own: told by its name."""


def matrices(path: Path) -> None:
    """Those that a program keeps otherwise than its source."""
    mesh, weights = make_mesh({"dp": 1, "tp": 1}, "cpu"), Weights(path)
    kept = [weights["weight"], weights["weight"].permute(1, 0), weights["weight"].narrow(0, 1, 2)]
    whole, turned, part = (mesh.parameter(each) for each in kept)
    for parameter in (whole, turned, part):
        parameter.grad = torch.ones_like(parameter)
    optim.Muon([whole]).step()
    optim.Muon([turned], adjust_lr_fn="match_rms_adamw").step()
    optim.Adafactor([whole, turned]).step()
    Lamb([whole, turned], 0.1).step()
    joined = mesh.parameter(join(0, weights["seen"], weights["seen"]))
    joined.grad = torch.ones_like(joined)
    for optimizer in (optim.Muon([turned]), optim.Muon([part]), optim.Adafactor([part]), Lamb([part]), Lamb([joined])):
        with pytest.raises(RuntimeError, match=r"whole-parameters-wanted: .* a parameter .(2, 6|6, 3|12)."):
            optimizer.step()


def run_all(path: Path) -> list[Tensor]:
    for sizes in ({"dp": 2}, {"tp": 2}):
        evaluations(tracked(path, **sizes))
        ignored(tracked(path, **sizes))
    asked(tracked(path, tp=2))
    heads(tracked(path, dp=2))
    same = averaged(tracked(path, tp=2))
    return [
        asked(tracked(path, dp=2)),
        penalized(tracked(path, dp=2)),
        summed(tracked(path, dp=2)),
        averaged(tracked(path, dp=2)),
        same,
    ]


def test_calls_are_those_of_one_process_or_refused(tmp_path: Path) -> None:
    weight = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    save_file({"weight": weight, "seen": zero, "norm.running_mean": zero.clone()}, path := tmp_path / "weights")
    normed(path)
    evaluations(tracked(path))
    ignored(tracked(path))
    heads(tracked(path))
    matrices(path)
    average = averaged(tracked(path))
    wanted = [asked(tracked(path)), penalized(tracked(path)), summed(tracked(path)), average, average]
    for found in run_ranks(run_all, 2, path):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
