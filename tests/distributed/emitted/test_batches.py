"""What a model is given: the same on all ranks, by place or by name, with targets of any form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from pdv.emit.templates.parallel import partition, reduce, replicate
from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, local, make_mesh
from tests.distributed.harness import run_ranks
from tests.distributed.loops import plans

pytestmark = pytest.mark.distributed
ROWS, WIDTH, CLASSES = 4, 6, 3
Found = dict[str, Tensor]


class Scaled(ParallelModule):
    """x [b, k], scale [b, 1] -> [b, n], cut by rows over dp and by k over tp."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ("dp",), {"x": ("b", WIDTH), "scale": ("b", 1)})
        self.dp, self.tp = mesh["dp"], mesh["tp"]
        self.weight = mesh.parameter(weights["weight"], {"tp": 1})

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x, scale = (partition(each, 0, self.dp) for each in (x, scale))
        x = x.unflatten(1, (self.tp.size, -1))[:, self.tp.rank]  # whose gradient nobody adds up
        return reduce(linear(x, local(self.weight, self.dp)), self.tp) * replicate(scale, self.tp)


def scaled(path: Path, **sizes: int) -> Scaled:
    return Scaled(make_mesh({"dp": 1, "tp": 1, **sizes}, "cpu"), Weights(path))


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, scale, y = (torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for size in (WIDTH, 1, CLASSES))
    return x, scale, y


def distance(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return (output - y).square().sum(), len(y)


def refusals(path: Path, **sizes: int) -> None:
    """Other inputs on each rank by place and by name, in training and in evaluation; other targets."""
    (x, scale, y), other = batch(), batch(dist.get_rank())

    def refuse(act: Callable[[Scaled], object]) -> None:
        model = scaled(path, **sizes)
        with pytest.raises(RuntimeError, match=r"other-rows: ranks were given different"):
            act(model)
        assert model.own_loss is None

    refuse(lambda model: model(other[0], scale))
    refuse(lambda model: model(x, scale=other[1]))
    refuse(lambda model: model.eval()(x, other[1]))
    refuse(torch.no_grad()(lambda model: model.eval()(x=other[0], scale=scale)))
    refuse(torch.no_grad()(lambda model: model(x=x, scale=other[1])))
    refuse(lambda model: model.train_step([x, scale], other[2], distance))
    refuse(lambda model: model.train_step([x, scale], other[2], distance, micro_batches=2))
    named = {"y": y, "more": other[2]}
    refuse(lambda model: model.train_step([x, scale], named, lambda output, of: distance(output, of["y"])))
    if sizes.get("tp", 1) > 1:
        refuse(lambda model: model.train_step([x, scale], other[2], distance, rows="local"))
        with pytest.raises(RuntimeError, match=r"input-gradients-apart: .* along tp"):
            scaled(path, **sizes)(x=x.clone().requires_grad_(), scale=scale).sum().backward()
    model = scaled(path, **sizes).eval()
    with torch.no_grad():
        for given in (*[scale] * 8, other[1], *[scale] * 6):  # nobody looks at those between the eighth and the 16th
            assert len(model(x, given)) == ROWS // model.data_world
        with pytest.raises(RuntimeError, match="other-rows: ranks were given different"):
            model(x, scale=other[1])


def wrong(path: Path, **sizes: int) -> None:
    """What is no batch of this model, and options that there are not, are told alike on all ranks."""
    x, scale, y = batch()
    whole, model = {"scale": scale, "x": x}, scaled(path, **sizes)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([x], {}, "other-inputs: 1 of them. This program takes x, scale"),
        ([x, scale, y], {"micro_batches": 2}, "other-inputs: 3 of them"),
        ([x.numpy(), scale], {}, "other-inputs: x is a ndarray"),
        ({"x": x, "scale": [1.0]}, {"micro_batches": 2}, "other-inputs: scale is a list"),
        (whole, {"rows": "own"}, "bad-rows: 'own'"), (whole, {"micro_batches": 0}, "bad-micro-batches: 0"),
    ]  # fmt: skip
    for given, options, said in cases:
        with pytest.raises(ValueError, match=said):
            model.train_step(given, y, distance, **options)


def named(path: Path, **sizes: int) -> list[Found]:
    """Losses and gradients of steps whose inputs and targets are given otherwise."""
    x, scale, y = batch()
    found: list[Found] = []

    def step(inputs: Any, target: Any, loss_fn: Any, **options: Any) -> None:
        model = scaled(path, **sizes)
        loss = model.train_step(inputs, target, loss_fn, **options)
        found.append({"loss": loss, **model.full_gradients()})

    def of_named(output: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, int]:
        assert sorted(target) == ["mask", "y"]
        return (output - target["y"]).mul(target["mask"]).square().sum(), len(output)

    def of_none(output: Tensor, target: None) -> tuple[Tensor, int]:
        assert target is None
        return output.square().sum(), len(output)

    def of_one(output: Tensor, target: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, int]:
        forms.append(type(target))
        return distance(output, target[0])

    forms: list[type] = []
    whole = {"scale": scale, "x": x}
    target = {"y": y, "mask": (y > 0).double()}
    shards = scaled(path, **sizes).shard_batch((whole, target))
    ways: list[dict[str, Any]] = [{}, {"micro_batches": 2}]
    for options in ways:
        step([x, scale], y, distance, **options)
        step(whole, y, distance, **options)
        step(whole, target, of_named, **options)
        step(whole, None, of_none, **options)
        step(whole, [y], of_one, **options)
        step(whole, (y,), of_one, **options)
        step(whole, (y, torch.tensor(1.0)), of_one, **options)  # a number is that of all rows
        step(shards[0], shards[1], of_named, rows="local", **options)
    assert forms == [list, tuple, tuple, *[list] * 2, *[tuple] * 4]  # of each micro-batch
    model = scaled(path, **sizes)
    model.self_check(whole, target, of_named)
    model.self_check(whole, None, of_none)
    for inputs in ({"x": x}, {"x": x, "scales": scale}, {**whole, "more": y}):
        with pytest.raises(ValueError, match=r"other-inputs: a mapping of .*x.* This program takes x, scale\."):
            model.train_step(inputs, y, distance)
    return found


def run_all(path: Path) -> list[list[Found]]:
    refusals(path, dp=2)
    refusals(path, tp=2)
    wrong(path, dp=2)
    wrong(path, tp=2)
    return [named(path, dp=2), named(path, tp=2)]


def test_batches_are_the_same_on_all_ranks_and_of_any_form(tmp_path: Path) -> None:
    weight = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    save_file({"weight": weight}, path := tmp_path / "weights")
    wanted = named(path)
    half = len(wanted) // 2
    for one, other in ((0, 1), (2, half - 1), (0, 4), (0, 5), *((each, each + half) for each in range(half))):
        torch.testing.assert_close(wanted[one], wanted[other], rtol=1e-10, atol=1e-12)
    for each in run_ranks(run_all, 2, path):
        torch.testing.assert_close(each, [wanted, wanted], rtol=1e-10, atol=1e-12)


def odd_one(path: Path) -> None:
    """One rank's rows are others, those of all others are the same."""
    (x, scale, y), odd = batch(), batch(int(dist.get_rank() == dist.get_world_size() - 1))
    for given, target, options in (
        ((odd[0], scale), y, {}),
        ((x, scale), odd[2], {}),
        ((x, scale), odd[2], {"rows": "local"}),
    ):
        with pytest.raises(RuntimeError, match="other-rows: ranks were given different"):
            scaled(path, dp=2, tp=2).train_step(given, target, distance, **options)


def test_other_rows_are_refused_on_all_ranks_of_several_axes(tmp_path: Path) -> None:
    """Those that have what a rank beside them has not, too: a rank that goes on would wait for one that has ended."""
    save_file({"weight": torch.ones(CLASSES, WIDTH, dtype=torch.float64)}, path := tmp_path / "weights")
    run_ranks(odd_one, 4, path)


def of_label(output: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return plans.loss_fn(output, target["label"])


def of_one_label(output: Tensor, target: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    assert isinstance(target, tuple)
    return plans.loss_fn(output, target[0])


def of_outputs(output: Tensor, target: None) -> tuple[Tensor, int]:
    assert target is None
    return output.square().sum(), len(output)


def pipeline(folder: Path) -> list[float]:
    """Losses of steps of a pipeline; targets are the last stage's, and compared on all."""
    model, (x, y) = plans.build(folder), plans.batch(0)
    inputs = dict(zip(model.takes, [x], strict=True))
    found = [float(model.train_step(x, y, plans.loss_fn)), float(model.train_step(inputs, {"label": y}, of_label))]
    found.append(float(model.train_step(x, None, of_outputs)))
    found.append(float(model.train_step(x, (y,), of_one_label)))
    model.zero_grad()
    model.self_check(inputs, {"label": y}, of_label)
    if model.mesh.stage.size == 1:
        return found
    others = plans.batch(dist.get_rank())
    for given in ((others[0], y), (x, others[1])):
        with pytest.raises(RuntimeError, match="other-rows: ranks were given different"):
            plans.build(folder).train_step(*given, plans.loss_fn)
    with torch.no_grad(), pytest.raises(RuntimeError, match="other-rows: ranks were given different"):
        plans.build(folder).eval()(others[0])
    return found


def test_batches_of_a_pipeline(tmp_path: Path) -> None:
    wanted = pipeline(folder := plans.package("pipeline", tmp_path))
    assert wanted[0] == wanted[1]
    for found in run_ranks(pipeline, 2, folder):
        assert found == pytest.approx(wanted, rel=1e-5)
