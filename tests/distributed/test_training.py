"""A hand-sharded model trains as on one device: losses, gradients, clipping, AdamW, checkpoints across meshes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from pdv.emit.templates.gathers import regathering
from pdv.emit.templates.parallel import Axis, all_gather, combine, replicate
from pdv.emit.templates.runtime import Weights, local, make_mesh, train_step
from tests.distributed import two_layer
from tests.distributed.harness import run_ranks
from tests.distributed.two_layer import TwoLayer, batch, cross_entropy, cross_entropy_sum, write_weights

pytestmark = pytest.mark.distributed
Result = tuple[list[float], dict[str, Tensor]]  # losses, and the final parameters or gradients
MESHES = [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "weights.safetensors"
    write_weights(path)
    return path


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def make_model(path: Path, sizes: dict[str, int], *, regather: bool = True) -> TwoLayer:
    return TwoLayer(make_mesh(sizes, "cpu"), Weights(path), regather=regather)


def take_steps(model: TwoLayer, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(train_step(model, *batch(step), cross_entropy, [model.dp]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(path: Path, sizes: dict[str, int], regather: bool) -> Result:
    model = make_model(path, sizes, regather=regather)
    losses = take_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(5))
    return losses, {name: whole(p).detach() for name, p in model.named_parameters()}


def gradients(path: Path, sizes: dict[str, int], rows: str, reduction: str) -> Result:
    model = make_model(path, sizes)
    x, y = batch(0)
    loss_fn: Any = cross_entropy_sum if reduction == "sum" else cross_entropy
    if rows == "local":
        x, y = x.chunk(model.dp.size)[model.dp.rank], y.chunk(model.dp.size)[model.dp.rank]
    loss = train_step(model, x, y, loss_fn, [model.dp], reduction=reduction, rows=rows)  # type: ignore[arg-type]
    return [loss.item()], {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def check(results: list[Result], expected: Result) -> None:
    for losses, tensors in results:
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert sorted(tensors) == sorted(expected[1])
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[1][name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_five_steps_of_clipped_adamw_equal_one_device(weights: Path, sizes: dict[str, int]) -> None:
    serial = train(weights, {"dp": 1, "tp": 1}, True)
    check(run_ranks(train, sizes["dp"] * sizes["tp"], weights, sizes, True), serial)


@pytest.mark.parametrize(("rows", "reduction"), [("local", "mean"), ("global", "sum"), ("local", "sum")])
def test_gradients_whichever_way_the_batch_comes(weights: Path, rows: str, reduction: str) -> None:
    sizes = {"dp": 2, "tp": 2}
    serial = gradients(weights, {"dp": 1, "tp": 1}, "global", reduction)
    check(run_ranks(gradients, 4, weights, sizes, rows, reduction), serial)


def uneven_batch(path: Path) -> str:
    model = make_model(path, {"dp": 2, "tp": 1})
    x, y = batch(0)
    with pytest.raises(ValueError, match="uneven-cut") as error:
        train_step(model, x[:7], y[:7], cross_entropy, [model.dp])
    return str(error.value)


def test_a_batch_that_does_not_divide_is_refused(weights: Path) -> None:
    assert "7 rows in dp 2. Their number must be a multiple of 2" in run_ranks(uneven_batch, 2, weights)[0]


# ---- Memory: with regather, gathered weights do not live from forward to backward ----


def gathered_after_forward(path: Path, regather: bool) -> tuple[int, int, dict[str, Tensor]]:
    """How many weights were gathered, how many of them still occupy memory after forward, and the gradients."""
    gathered: list[StorageWeakRef] = []

    def recording(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gather(x: Tensor, dim: int, axis: Axis, **options: bool) -> Tensor:
            y = operator(x, dim, axis, **options)
            if "regather" in options:
                gathered.append(StorageWeakRef(y.untyped_storage()))  # type: ignore[no-untyped-call]
            return y

        return gather

    for operator in (all_gather, combine):
        setattr(two_layer, operator.__name__, recording(operator))
    model = make_model(path, {"dp": 2, "tp": 2}, regather=regather)
    model.own_loss = "sum"
    x, y = batch(0)
    output = model(x)
    for group in (None, model.dp.group, model.tp.group) * 2:
        dist.barrier(group)  # gloo's two threads of a group let go of a collective's tensors when they take up the next
    alive = sum(not storage.expired() for storage in gathered)  # type: ignore[no-untyped-call]
    torch.autograd.backward(cross_entropy_sum(output, y.chunk(2)[model.dp.rank]) / y.numel())
    return len(gathered), alive, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_regathered_weights_are_released_between_forward_and_backward(weights: Path) -> None:
    _, expected = gradients(weights, {"dp": 1, "tp": 1}, "global", "mean")
    for regather, left in ((False, 3), (True, 0)):
        for count, alive, grads in run_ranks(gathered_after_forward, 4, weights, regather):
            assert (count, alive) == (4, left)  # the head is gathered twice; its first half is never saved
            check([([], grads)], ([], expected))


def views_after_forward() -> list[bool]:
    """Whether the memory of gathered weights that were used through views lives on after forward."""
    mesh = make_mesh({"dp": 2, "tp": 2}, "cpu")
    shard = torch.randn(4, 8, requires_grad=True)
    x = torch.randn(3, 8, requires_grad=True)
    memory: list[StorageWeakRef] = []

    def gathered() -> Tensor:
        whole = all_gather(shard, 0, mesh["dp"], regather=True)
        memory.append(StorageWeakRef(whole.untyped_storage()))  # type: ignore[no-untyped-call]
        return whole

    with regathering():
        uses = [torch.matmul(x, gathered().T), torch.matmul(x, replicate(gathered(), mesh["tp"]).view(8, 8).T)]
    dist.barrier()
    until = time.monotonic() + 10  # gloo's own threads may hold the last tensors a moment longer than the call takes
    while any(alive := [not storage.expired() for storage in memory]):  # type: ignore[no-untyped-call]
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    torch.autograd.backward(torch.stack(uses).sum())
    return alive


def test_weights_used_through_views_are_released_too() -> None:
    assert run_ranks(views_after_forward, 4) == [[False, False]] * 4


def step_before_backward(path: Path) -> None:
    model = make_model(path, {"dp": 2, "tp": 1})
    model.own_loss = "sum"
    output = model(batch(0)[0])
    with torch.no_grad():
        local(model.up).mul_(2)
    with pytest.raises(RuntimeError, match="stale-weight"):
        output.sum().backward()


def test_a_weight_changed_before_backward_is_refused(weights: Path) -> None:
    run_ranks(step_before_backward, 2, weights)


# ---- Checkpoints: saved on one mesh, loaded on another ----


def save(path: Path, folder: Path, sizes: dict[str, int]) -> list[float]:
    """Losses of steps 3 and 4, after a checkpoint at step 3."""
    model = make_model(path, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_steps(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return take_steps(model, optimizer, range(3, 5))


def resume(path: Path, folder: Path, sizes: dict[str, int]) -> list[float]:
    model = make_model(path, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return take_steps(model, optimizer, range(3, 5))


def test_a_checkpoint_of_four_ranks_resumes_on_two_and_on_one(weights: Path, tmp_path: Path) -> None:
    losses = run_ranks(save, 4, weights, tmp_path, {"dp": 2, "tp": 2})[0]
    for sizes in ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}):
        for resumed in run_ranks(resume, sizes["dp"] * sizes["tp"], weights, tmp_path, sizes):
            assert resumed == pytest.approx(losses, rel=1e-12)
