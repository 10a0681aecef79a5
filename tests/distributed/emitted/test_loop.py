"""What a training loop uses: micro-batches, shards of a batch, clipping, ranks in sync, a check against one device."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from pdv.emit.templates.losses import batch_loss
from pdv.emit.templates.parallel import all_gather, partition, reduce, replicate
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, local, make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
ROWS, WIDTH, CLASSES = 8, 6, 4
MESH = {"dp": 2, "tp": 2}
Pair = namedtuple("Pair", "x y")  # as a loader's batch may be


class Classifier(ParallelModule):
    """Data parallel over dp, tensor parallel over tp; one weight rests cut over dp; it counts its rows."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",))
        self.dp, self.tp = mesh["dp"], mesh["tp"]
        self.up = mesh.parameter(weights["up"], {"tp": 0})
        self.down = mesh.parameter(weights["down"], {"tp": 1})
        self.cut = mesh.parameter(weights["cut"], {"dp": 0})
        self.bias = mesh.parameter(weights["bias"])
        self.rows = mesh.buffer(weights["rows"])

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows.add_(x.size(0))
        x = partition(x, 0, self.dp) @ all_gather(local(self.cut), 0, self.dp)
        x = torch.tanh(F.linear(replicate(x, self.tp), local(self.up, self.dp)))
        return reduce(F.linear(x, local(self.down, self.dp)), self.tp) + local(self.bias, self.dp)


def classifier(path: Path, sizes: dict[str, int]) -> Classifier:
    return Classifier(make_mesh(sizes, "cpu"), Weights(path))


def write_weights(path: Path) -> None:
    """Of a classifier."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (8, WIDTH), "down": (CLASSES, 8), "cut": (WIDTH, WIDTH), "bias": (CLASSES,)}
    values = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    save_file({**values, "rows": torch.zeros((), dtype=torch.int64)}, path)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows, and their classes; -100 is none, in other numbers in each part."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    return x, y.where(torch.arange(ROWS) != 1, -100).where(torch.arange(ROWS) != 6, -100)


def pair(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, y, reduction="sum"), (y != -100).sum()


def same(model: Classifier, wanted: dict[str, Tensor]) -> None:
    found = model.full_gradients()
    model.zero_grad()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def micro_batches(model: Classifier) -> None:
    x, y = batch()
    own_x, own_y = (model.shard_batch(each) for each in (x, y))
    for loss_fn in (pair, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        whole = model.train_step(x, y, loss_fn).item()
        wanted = model.full_gradients()
        model.zero_grad()
        for count in (2, 4):
            assert model.train_step(x, y, loss_fn, micro_batches=count).item() == pytest.approx(whole, rel=1e-12)
            same(model, wanted)
        # added to what is there, which is not scaled again
        model.train_step(x, y, loss_fn)
        model.train_step(x, y, loss_fn, micro_batches=2)
        same(model, {name: 2 * gradient for name, gradient in wanted.items()})
        own = model.train_step(own_x, own_y, loss_fn, rows="local", micro_batches=2).item()
        assert own == pytest.approx(whole, rel=1e-12)
        same(model, wanted)
    total = model.train_step(x, y, pair, reduction="sum").item()
    assert model.train_step(x, y, pair, reduction="sum", micro_batches=2).item() == pytest.approx(total, rel=1e-12)
    model.zero_grad()
    with pytest.raises(ValueError, match="several-means"):
        model.train_step(x, y, lambda output, y: [pair(output, y), pair(output, y)], micro_batches=2)
    assert not model.mesh.sums.is_waiting
    with pytest.raises(ValueError, match="uneven-micro-batches: 8 rows in 3 micro-batches"):
        model.train_step(x, y, pair, micro_batches=3)
    with pytest.raises(ValueError, match="unknown-row-weights"):
        model.train_step(x, y, lambda output, y: F.cross_entropy(output, y).sqrt(), micro_batches=2)
    with model.no_sync(), pytest.raises(RuntimeError, match="unsummed-gradients"):
        model.train_step(x, y, pair, micro_batches=2)
    model.zero_grad()


def failed(model: Classifier) -> None:
    """A step that fails between micro-batches leaves the gradients of earlier ones, and nothing of its own."""
    model.train_step(*batch(), pair)
    before = model.full_gradients()
    called = 0

    def failing(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal called
        called += 1
        if called == 2:
            raise KeyboardInterrupt
        return pair(output, y)

    with pytest.raises(KeyboardInterrupt):
        model.train_step(*batch(), failing, micro_batches=2)
    model.train_step(*batch(), pair, micro_batches=2)
    same(model, {name: 2 * gradient for name, gradient in before.items()})


def left_out(model: Classifier) -> None:
    """An output that no rank's loss reads gives no gradient; one that some do gives the others zeros."""
    axes = [axis for axis in model.batch_axes if axis.size > 1]
    for readers in ((0,), (0, 1), ()):
        read, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        count = 2 if model.data_rank in readers else 1
        summed = partial(_sum_of_first, count)
        torch.autograd.backward(batch_loss(summed, (read * 1, other * 1), read, axes, "mean")[0])
        assert (other.grad is None) == (not readers)
        assert read.grad is not None


def _sum_of_first(count: int, outputs: tuple[Tensor, ...], _: Tensor) -> tuple[Tensor, int]:
    return torch.stack([x.sum() for x in outputs[:count]]).sum(), 2


def shards(model: Classifier) -> None:
    x, y = batch()
    rows = slice(model.data_rank * ROWS // model.data_world, (model.data_rank + 1) * ROWS // model.data_world)
    found = model.shard_batch({"a": x, "b": [y, "text"], "c": Pair(x, y)})
    assert torch.equal(found["a"], x[rows])
    assert torch.equal(found["b"][0], y[rows])
    assert found["b"][1] == "text"
    assert isinstance(found["c"], Pair)
    assert torch.equal(found["c"].y, y[rows])
    assert (model.data_world, model.data_rank) == (model.dp.size, model.dp.rank)


def clipping(model: Classifier) -> list[float]:
    """The norms, and the gradients once clipped."""
    found = []
    for kind in (2.0, 1.0, float("inf")):
        model.train_step(*batch(), pair)
        torch_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind)
        clipped = model.full_gradients()
        model.zero_grad()
        model.train_step(*batch(), pair)
        norm = model.clip_grad_norm_(0.1, kind).item()
        wanted = torch_norm.full_tensor() if isinstance(torch_norm, DTensor) else torch_norm
        assert norm == pytest.approx(wanted.item(), rel=1e-10)
        same(model, clipped)
        found.append(norm)
    return found


def checks(model: Classifier) -> None:
    x, y = batch()
    rows = model.rows.item()
    found = model.self_check(x, y, pair, tolerance=1e-10)
    assert set(found) == {"loss", "gradient_norm", "gradient"}
    assert all(p.grad is None for p in model.parameters())
    assert model.rows.item() == rows
    model.train_step(x, y, pair)
    with pytest.raises(RuntimeError, match="gradients-present"):
        model.self_check(x, y, pair)
    model.zero_grad()
    model.check_in_sync()
    if model.dp.size == 1:
        return
    with torch.no_grad():
        local(model.bias)[0] += 1e-12 * model.dp.rank
    with pytest.raises(RuntimeError, match="ranks-differ: bias should be the same on several ranks"):
        model.check_in_sync()
    with pytest.raises(RuntimeError, match="self-check-failed"):
        model.self_check(x, y, pair, tolerance=1e-15)
    model.zero_grad()
    model.check_every = 2
    for _ in range(2 - model._steps % 2 - 1):
        model.train_step(x, y, pair)
    with pytest.raises(RuntimeError, match="ranks-differ"):
        model.train_step(x, y, pair)


def run_all(path: Path, sizes: dict[str, int]) -> tuple[float, list[float]]:
    """A loss of micro-batches, and norms."""
    model = classifier(path, sizes)
    micro_batches(model)
    failed(model)
    left_out(model)
    shards(model)
    norms = clipping(model)
    loss = model.train_step(*batch(), pair, micro_batches=2).item()
    model.zero_grad()
    checks(model)
    return loss, norms


def test_a_loop_on_four_processes_is_that_on_one(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    loss, norms = run_all(tmp_path / "weights", {"dp": 1, "tp": 1})
    for found_loss, found_norms in run_ranks(run_all, 4, tmp_path / "weights", MESH):
        assert found_loss == pytest.approx(loss, rel=1e-10)
        assert found_norms == pytest.approx(norms, rel=1e-10)
