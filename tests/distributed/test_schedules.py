"""Schedules with several stages on each rank, and with backward in halves, train as the module does on one process.

So do clipping, a schedule of learning rates, and a run that goes on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.measured.parity import compare, load_package, observe_package, reference
from benchmarks.models import build
from benchmarks.models.techniques import Technique
from pdv.problem.workload import Order
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
FORWARD, GRADIENT, LOSS = 1e-5, 1e-4, 1e-4  # relative, float32
STEPS = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter: ranks of a pipeline have others

ALONE = Technique("alone", (("wire", 1),))
ZERO = Technique("zero", (("dp", 2),), zero=True)


@dataclass(frozen=True)
class Case:
    """A model on two ranks of a pipeline, and how it is run."""

    model: str
    technique: Technique
    order: Order
    virtual: int
    micro_batches: int = 4
    sizes: Sequence[int] | None = None


CASES = {
    "zbv, pp2 x zero": Case("gpt2", ZERO, "zbv", 2, sizes=(1, 1, 1, 1)),
    "dualpipev, pp2 x zero": Case("gpt2", ZERO, "dualpipev", 2, sizes=(1, 1, 1, 1)),
    "zero bubble, pp2 x zero": Case("gpt2", ZERO, "zero-bubble", 1),
    "interleaved, pp2 x zero": Case("gpt2", ZERO, "interleaved", 2, sizes=(1, 1, 1, 1)),
    "zero bubble": Case("gpt2", ALONE, "zero-bubble", 1),
    "zero bubble, two stages on each": Case("gpt2", ALONE, "zero-bubble", 2, sizes=(1, 1, 1, 1)),
    "dualpipev": Case("gpt2", ALONE, "dualpipev", 2, sizes=(1, 1, 1, 1)),
}

expected_of = lru_cache(reference)


LONG = {  # each is in another test, too
    "zero bubble", "zero bubble, two stages on each", "zero bubble, pp2 x zero", "interleaved, pp2 x zero",
    "dualpipev, pp2 x zero",
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow(CASES, LONG))
def test_a_schedule_trains_as_the_module_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = expected_of(case.model, steps=STEPS)
    module, inputs = build(case.model, "small")
    processes = 2 * case.technique.mesh.num_devices
    plan = plan_pipeline(
        module, inputs, cluster(processes), pins=case.technique.pins, stages=2, micro_batches=case.micro_batches,
        mesh=dict(case.technique.sizes), order=case.order, sizes=case.sizes, virtual=case.virtual,
    )  # fmt: skip
    folder = plan.save(tmp_path / "package")
    batches = expected.batches, expected.targets
    for observed in run_ranks(observe_package, processes, folder, *batches, timeout_s=240):
        difference = compare(expected.observed, observed)
        assert difference.forward <= FORWARD, difference
        assert difference.gradient <= GRADIENT, difference
        assert difference.loss <= LOSS, difference


def data() -> tuple[list[Tensor], list[Tensor]]:
    """Batches of four steps, and what they should give."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(8, 4, 16, generator=generator) for _ in range(8)]
    return found[:4], found[4:]


class Training:
    """AdamW, gradients clipped, a learning rate that falls from step to step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.rates = LambdaLR(self.optimizer, lambda step: 0.5**step)

    def steps(self, numbers: range) -> list[float]:
        """The losses of some steps."""
        batches, targets = data()
        losses = []
        for number in numbers:
            if hasattr(self.model, "train_step"):
                loss = self.model.train_step(batches[number], targets[number], mse_loss)
                self.model.clip_grad_norm_(0.1)
            else:
                loss = mse_loss(self.model(batches[number]), targets[number])
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def train_and_resume(package: Path, checkpoint: Path) -> tuple[list[float], list[float]]:
    """Losses of four steps, and of the last two from a checkpoint, in a model of its own."""
    first = Training(load_package(package).build(device="cpu"))
    losses = first.steps(range(2))
    model_state, optimizer_state = get_state_dict(first.model, first.optimizer, options=FLAT)
    save_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    rates = first.rates.state_dict()
    losses += first.steps(range(2, 4))
    again = Training(load_package(package).build(device="cpu"))
    model_state, optimizer_state = get_state_dict(again.model, again.optimizer, options=FLAT)
    load_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(
        again.model, again.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=FLAT
    )
    again.rates.load_state_dict(rates)
    return losses, again.steps(range(2, 4))


@pytest.mark.parametrize(
    ("order", "virtual"),
    [
        pytest.param("interleaved", 2, marks=pytest.mark.slow), ("zbv", 2),
        pytest.param("dualpipev", 2, marks=pytest.mark.slow), pytest.param("zero-bubble", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_clipping_rates_and_checkpoints(order: Order, virtual: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Blocks()
    plan = plan_pipeline(
        module, (data()[0][0],), cluster(2), stages=2, micro_batches=4, mesh={"wire": 1}, order=order,
        sizes=(1,) * 4 if virtual == 2 else None, virtual=virtual,
    )  # fmt: skip
    folder = plan.save(tmp_path / "package")
    expected = Training(module).steps(range(4))
    for losses, resumed in run_ranks(train_and_resume, 2, folder, tmp_path / "checkpoint", timeout_s=120):
        assert losses == pytest.approx(expected, rel=LOSS)
        assert resumed == pytest.approx(losses[2:], rel=1e-12)
