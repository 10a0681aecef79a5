"""What one plan saved goes on under another as if nothing had been: weights, moments, averages, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ir.errors import WeightsError
from pdv.cli.app import run
from pdv.loops.averages import Average
from pdv.loops.checkpoint import NOTE, as_note, load_checkpoint, save_checkpoint
from pdv.loops.files import write
from tests.distributed.harness import run_ranks
from tests.distributed.loops.plans import adam, build, package, steps

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
HOW = ("ddp", "tensor", "zero-3", "pipeline")
Answer = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def train(built: Path, numbers: range, load: Path | None, save: Path | None) -> Answer:
    """Losses, weights and averages of a run that goes on from a checkpoint, or leaves one."""
    model = build(built)
    optimizer, average = adam(model), Average(model, 0.9)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        said = load_checkpoint(load, model, optimizer, average=average)
        assert said == {"step": numbers.start, "text": "weiß"}
    losses = []
    for number in numbers:
        losses += steps(model, optimizer, range(number, number + 1))
        average.update()
    if save is not None:
        loop = {"step": numbers.stop, "text": "weiß"}
        save_checkpoint(save, model, optimizer, average=average, loop=loop)
    weights = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
    with average.applied():
        return losses, weights, model.full_state_dict()


class Packages(dict[str, Path]):
    """By how they are planned, once one is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, how: str) -> Path:
        self[how] = package(how, self.folder)
        return self[how]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def undisturbed(packages: Packages) -> Any:
    """Four steps on one process."""
    return run_ranks(train, 1, packages["tensor"], range(4), None, None)[0]


def compare(found: Answer, wanted: Answer) -> None:
    assert found[0] == pytest.approx(wanted[0][-len(found[0]) :], abs=1e-5)
    for mine, other in zip(found[1:], wanted[1:], strict=True):
        assert set(mine) == set(other)
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], atol=1e-5, rtol=1e-4)


@SLOW
@pytest.mark.parametrize("first", HOW)
def test_any_plan_goes_on_from_any_other(first: str, packages: Packages, undisturbed: Answer, tmp_path: Path) -> None:
    run_ranks(train, 2, packages[first], range(2), None, tmp_path / "saved")
    for second in HOW:
        if second != first:
            for found in run_ranks(train, 2, packages[second], range(2, 4), tmp_path / "saved", None):
                compare(found, undisturbed)
    compare(run_ranks(train, 1, packages[first], range(2, 4), tmp_path / "saved", None)[0], undisturbed)


def load_what_is_wrong(built: Path, folder: Path) -> list[str]:
    """What all ranks are told of checkpoints of other models; the model stays as it was."""
    model = build(built)
    optimizer = adam(model)
    before = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
    told = []
    for name in ("other", "weights", "torch"):
        with pytest.raises(WeightsError) as caught:
            load_checkpoint(folder / name, model, optimizer)
        told.append(str(caught.value))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.full_state_dict().items())
    assert not optimizer.state
    return told


def save_what_is_wrong(built: Path, folder: Path) -> None:
    """A smaller model's, one without the optimizer, and one by the plan's names."""
    model = build(built)
    optimizer = adam(model)
    steps(model, optimizer, range(1))
    save_checkpoint(folder / "weights", model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "torch")
    note = as_note({"version": 1, "loop": {}, "optimizer": {"numbers": {}, "groups": [], "group_of": {}}})
    write(folder / "other", {NOTE: note, "model.wpe.weight": torch.zeros(3, 3)})


def test_what_does_not_fit_is_one_error_on_all_ranks(packages: Packages, tmp_path: Path) -> None:
    run_ranks(save_what_is_wrong, 2, packages["tensor"], tmp_path)
    for other, weights, plans in run_ranks(load_what_is_wrong, 2, packages["pipeline"], tmp_path):
        assert "tensors are not in" in other
        assert "saved without an optimizer" in weights
        assert "`pdv reshard`" in plans


def save_as_torch_does(built: Path, folder: Path) -> None:
    """Two steps, and what they leave by the names of the plan."""
    model = build(built)
    optimizer = adam(model)
    steps(model, optimizer, range(2))
    dcp.save({"app": {**torch_state(model, optimizer), "step": 2}}, checkpoint_id=folder)


def torch_state(model: Any, optimizer: Any) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}


def load_as_torch_does(built: Path, folder: Path) -> tuple[list[float], Any]:
    model = build(built)
    optimizer = adam(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: Any = {"app": {**torch_state(model, optimizer), "step": 0}}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["app"]["model"])
    set_optimizer_state_dict(model, optimizer, state["app"]["optim"], options=options)
    return steps(model, optimizer, range(state["app"]["step"], 4)), model.full_state_dict()


def load_by_source(built: Path, folder: Path) -> tuple[list[float], Any]:
    model = build(built)
    optimizer = adam(model)
    load_checkpoint(folder, model, optimizer)
    return steps(model, optimizer, range(2, 4)), model.full_state_dict()


@pytest.mark.parametrize(("first", "second"), [("tensor", "pipeline"), pytest.param("pipeline", "zero-3", marks=SLOW)])
def test_what_torch_saved_of_a_plan_is_resharded(
    first: str, second: str, packages: Packages, undisturbed: Answer, tmp_path: Path
) -> None:
    run_ranks(save_as_torch_does, 2, packages[first], tmp_path / "saved")
    command = ["reshard", str(tmp_path / "saved"), "--from", str(packages[first])]
    assert run([*command, "--to", str(packages[second]), "-o", str(tmp_path / "other")]) == 0
    assert run([*command, "-o", str(tmp_path / "source")]) == 0
    assert run(["reshard", str(tmp_path / "source"), "--to", str(packages[second]), "-o", str(tmp_path / "again")]) == 0
    for losses, weights in (
        *run_ranks(load_as_torch_does, 2, packages[second], tmp_path / "other"),
        *run_ranks(load_by_source, 2, packages[second], tmp_path / "source"),
    ):
        compare((losses, weights, {}), (undisturbed[0], undisturbed[1], {}))
