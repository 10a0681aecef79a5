"""Pipelines on real processes train as one process does: losses, gradients, weights after steps of AdamW."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from ir.sharding import Shard
from pdv.plan.package import import_package
from pdv.problem import Pins
from tests.distributed.harness import mark_slow, run_ranks
from tests.distributed.loops import plans
from tests.pdv.emit.test_dropout import Deep
from tests.pdv.miniatures import D, Gpt, Llama, S, V, attend
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
ROWS, STEPS = 8, 3


class Crossing(nn.Module):
    """An encoder whose result all of a decoder's layers read, and a mask that every layer makes anew from an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.encoder = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(4))
        self.q, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.encoder:
            x = x + torch.tanh(layer(x) * keep.unsqueeze(-1))
        memory, y = attend(self.q(x), x, x, causal=False), x
        for layer in self.decoder:
            y = y + torch.tanh(layer(torch.cat([y, memory], -1)) * keep.unsqueeze(-1))
        logits: Tensor = self.head(y)
        return logits


class Tagger(nn.Module):
    """Recurrent layers, whose states begin as zeros of as many rows as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(2 * D, V)
        self.rnn = nn.LSTM(D, D, 2, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embed(ids))[0])
        return logits


@dataclass(frozen=True)
class Case:
    """A model of so many layers, and how it is run."""

    model: str
    stages: int
    micro_batches: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    order: str = "1f1b"
    recompute: str = "none"
    sums: bool = False
    """Whether parameters are whole on devices of different data."""
    by_torch: bool = False
    """Whether torch's schedules run it, as on GPUs."""

    @property
    def processes(self) -> int:
        """In all."""
        size = self.stages
        for ways in self.mesh.values():
            size *= ways
        return size


CASES = {
    "stages of data parallel devices, tied weights": Case("gpt", 2, 4, {"dp": 2}, sums=True),
    "a device a stage, row by row": Case("llama", 4, 8),
    "gpipe, with values that skip stages": Case("crossing", 3, 2, order="gpipe"),
    "eager, with values that skip stages": Case("crossing", 3, 4, order="eager-1f1b"),
    "eager, by torch's runtime": Case("gpt", 3, 4, order="eager-1f1b", by_torch=True),
    "the whole batch at once, in fewer micro-batches than stages": Case("llama", 2, 1),
    "three axes, layers run again in backward": Case("gpt", 2, 2, {"dp": 2, "tp": 2}, recompute="full", sums=True),
    "recurrent layers": Case("tagger", 2, 4),
    "micro-batches alone": Case("gpt", 1, 4, {"wire": 2}),
}

SLOW = {"micro-batches alone", "stages of data parallel devices, tied weights"}  # each is part of another one, too


def model_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and a batch of inputs."""
    torch.manual_seed(3)
    ids = torch.randint(0, V, (ROWS, S))
    if name == "crossing":
        return Crossing(), (ids, torch.rand(ROWS, S))
    if name == "tagger":
        return Tagger(), (ids,)
    return (Gpt(4) if name == "gpt" else Llama(4)), (ids,)


def loss_fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the tokens that are not padding, which rows have different numbers of."""
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return total, (target != 0).sum()


def note_sums(model: Any) -> list[bool]:
    """At the end of each step of a pipeline, whether gradients are being summed by then."""
    flush, found = model.flush, list[bool]()

    def flush_and_note() -> None:
        if model.mesh.stage.size > 1:
            found.append(bool(model.mesh.sums.buckets._running))
        flush()

    model.flush = flush_and_note
    return found


def train(
    folder: Path, name: str, sums: bool, by_torch: bool
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and norms, gradients of the last step once clipped, and weights behind it."""
    package = import_package(folder)
    model = package.build("cpu", torch.float64)
    if by_torch:
        sys.modules[f"{package.__name__}.pipeline"].HERE = ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, inputs = model_of(name)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    losses = []
    summed = note_sums(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        target = torch.randint(0, V, (ROWS, S), generator=torch.Generator().manual_seed(step))
        target = target * (torch.arange(S) <= torch.arange(ROWS)[:, None])  # rows of different lengths
        losses.append(float(model.train_step(list(inputs), target, loss_fn)))
        losses.append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
    gradients = {key: value.clone() for key, value in model.full_gradients().items()}
    assert summed == [sums] * STEPS * (model.mesh.stage.size > 1)
    model.zero_grad()
    model.self_check(list(inputs), target, loss_fn, tolerance=1e-8)
    model.check_in_sync()
    with torch.no_grad():
        rows = ROWS if model.micro_batches < ROWS else 1  # planned for one row, it takes one at a time
        model(*(x[:rows] for x in inputs))  # stages pass on what they give, without gradients
    return losses, gradients, model.full_state_dict()


@pytest.mark.parametrize("name", mark_slow(CASES, SLOW))
def test_pipelines_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, inputs = model_of(case.model)
    options: dict[str, Any] = {"order": case.order, "recompute": case.recompute}
    options |= {"pins": Pins(storage=lambda param, axis, state: not isinstance(state, Shard))} if case.sums else {}
    plan = plan_pipeline(
        model, inputs, cluster(case.processes),
        stages=case.stages, micro_batches=case.micro_batches, mesh=case.mesh, **options,
    )  # fmt: skip
    folder = plan.save(tmp_path / "package")
    (alone,) = run_ranks(train, 1, folder, case.model, case.sums, case.by_torch)
    for losses, gradients, weights in run_ranks(train, case.processes, folder, case.model, case.sums, case.by_torch):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        for key, value in alone[1].items():
            torch.testing.assert_close(gradients[key], value, rtol=1e-7, atol=1e-10, msg=key)
        for key, value in alone[2].items():
            torch.testing.assert_close(weights[key], value, rtol=1e-6, atol=1e-8, msg=key)


def train_dropping(folder: Path) -> tuple[set[int], list[float]]:
    """Which parts this rank drew masks for, and losses."""
    package = import_package(folder)
    model, drawn, module = package.build("cpu", torch.float64), set(), sys.modules[f"{package.__name__}.model"]
    dropout = vars(module)["dropout"]

    def noted(x: Tensor, p: float, training: bool, block: int) -> Tensor:
        drawn.add(block)
        return dropout(x, p, training, block)

    vars(module)["dropout"] = noted
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, losses = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)).double(), []
    for _ in range(STEPS):
        losses.append(float(model.train_step(x, x.roll(1, 0), F.mse_loss)))
        optimizer.step()
        optimizer.zero_grad()
    return drawn, losses


def test_masks_of_dropout_are_of_stages_and_parts_and_drawn_again_in_backward(tmp_path: Path) -> None:
    source, found = Deep(), {}
    for recompute in ("none", "full"):
        plan = plan_pipeline(
            source, (torch.randn(8, 6, 16),), cluster(4),
            stages=2, micro_batches=2, mesh={"dp": 2}, recompute=recompute,
        )  # fmt: skip
        found[recompute] = run_ranks(train_dropping, 4, plan.save(tmp_path / recompute))
    assert found["none"] == found["full"]
    drawn, losses = zip(*found["none"], strict=True)
    assert [len(blocks) for blocks in drawn] == [1] * 4
    assert len(set().union(*drawn)) == 4
    assert all(other == losses[0] for other in losses)
    assert len(set(losses[0])) == STEPS


def hold(folder: Path) -> int:
    """How many of the values that a rank sent it has at most, of those that it holds for nothing else."""
    model, x = import_package(folder).build("cpu"), torch.ones(24, 16)
    send, held, most = dist.isend, list[weakref.ref[Tensor]](), 0

    def noted(value: Tensor, *args: Any) -> Any:
        nonlocal most
        held.append(weakref.ref(value))
        most = max(most, sum(one() is not None for one in held))
        return send(value, *args)

    with patch("torch.distributed.isend", noted):
        model.train_step(x, x, F.mse_loss)
    return most


@pytest.mark.parametrize(("order", "most"), [("1f1b", [3, 3, 2]), ("eager-1f1b", [5, 5, 3])])
def test_what_was_sent_is_let_go_of_once_it_is_there(order: Any, most: list[int], tmp_path: Path) -> None:
    """Of 12 micro-batches: values of forward passes ahead, and what the stage before took while more were under way."""
    plan = plan_pipeline(
        Blocks(), (torch.ones(24, 16),), cluster(3), stages=3, micro_batches=12, mesh={}, order=order
    )  # fmt: skip
    assert all(
        held <= limit for held, limit in zip(run_ranks(hold, 3, plan.save(tmp_path / "plan")), most, strict=True)
    )


def train_in_types(folder: Path) -> tuple[list[float], list[float]]:
    """Losses of steps of one model in several types, and those in autocast at the same weights."""
    model, found, rounded = import_package(folder).build(device="cpu"), list[float](), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            rounded.append(float(model.train_step(x, x, F.mse_loss)))
        optimizer.zero_grad()
        found.append(float(model.train_step(x, x, F.mse_loss)))
        optimizer.step()
        optimizer.zero_grad()
    return found, rounded


@pytest.mark.parametrize("order", ["1f1b", "interleaved"])
def test_a_pipeline_trains_in_another_type_than_before(order: Any, tmp_path: Path) -> None:
    plan = plan_pipeline(
        Blocks(), (torch.ones(4, 16),), cluster(4),
        stages=2, micro_batches=2, mesh={"dp": 2}, order=order, virtual=2 if order == "interleaved" else 1,
    )  # fmt: skip
    folder = plan.save(tmp_path / "plan")
    (alone,) = run_ranks(train_in_types, 1, folder)
    for found, rounded in run_ranks(train_in_types, 4, folder):
        assert found == pytest.approx(alone[0], rel=1e-5)
        assert rounded == pytest.approx(alone[0], rel=2**-7)


def cast_under_way(folder: Path) -> list[str]:
    """What casts are told before a step, behind it, and when nothing is under way any more."""
    model, x, told = import_package(folder).build(device="cpu"), torch.ones(4, 16), list[str]()

    def cast() -> None:
        try:
            told.append(str(model.double().to(torch.float32) is model))
        except RuntimeError as error:
            told.append(str(error))

    cast()
    model.train_step(x, x, F.mse_loss)
    cast()
    model.drain()
    cast()
    model.double()
    model.train_step(x, x, F.mse_loss)
    return [*told, str(model.drain().isfinite().item())]


def test_no_cast_while_a_batch_reads_older_weights(tmp_path: Path) -> None:
    plan = plan_pipeline(Blocks(), (torch.ones(4, 16),), cluster(2), stages=2, micro_batches=2, mesh={}, order="2bw")
    for before, under_way, *behind in run_ranks(cast_under_way, 2, plan.save(tmp_path / "plan")):
        assert under_way.startswith("batch-under-way: the model is moved, or cast")
        assert [before, *behind] == ["True"] * 3


def train_scaled(folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, scales and weights as docs/loops.md has a GradScaler; the first stage meets an infinity once."""
    model = import_package(folder).build("cpu", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaler, losses, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10), list[float](), list[float]()
    scaler.scale(torch.zeros(()))

    def loss_fn(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return scaler.scale((output - y).square().sum()), y.numel()

    for step in range(4):
        losses.append(float(model.train_step(x, x.roll(1, 0), loss_fn)) / scaler.get_scale())
        (parameter,) = model.parameters_of("layers.0.1.bias") if model.mesh.stage.rank == 0 else (None,)
        if step == 1 and parameter is not None:
            parameter.grad.fill_(torch.inf)
        model.clip_grad_norm_(torch.inf)
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return losses, scales, model.full_state_dict()


def test_gradients_are_scaled_alike_on_all_stages(tmp_path: Path) -> None:
    plan = plan_pipeline(Blocks(), (torch.ones(4, 16),), cluster(4), stages=2, micro_batches=2, mesh={"dp": 2})
    folder = plan.save(tmp_path / "plan")
    (alone,) = run_ranks(train_scaled, 1, folder)
    assert alone[0][1] == pytest.approx(alone[0][2], rel=1e-12)  # of a step that was left out
    assert alone[0][3] < alone[0][2] < alone[0][0]
    for losses, scales, weights in run_ranks(train_scaled, 4, folder):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        assert scales == alone[1] == [2.0**10, *[2.0**9] * 3]
        for name, value in alone[2].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-9, msg=name)


def part_tied(folder: Path) -> list[Tensor]:
    """A table that two stages hold, after noise that each draws for itself, and after a step of one alone."""
    model = plans.build(folder)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (table,), here = model.parameters_of("wte.weight"), model.mesh.stage.rank
    torch.manual_seed(here)
    for _ in range(2):  # before the second pass, weights are compared
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.train_step(*plans.batch(0), plans.loss_fn)
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad))
        optimizer.step()
        model.zero_grad()
    assert ["ranks-differ: " in str(each.message) for each in told] == [True]
    with pytest.warns(UserWarning, match=r"ranks-differ: \w+ should be the same on several stages"):
        found = [model.full_state_dict()["wte.weight"], table.full_tensor().detach().clone()]
    model.check_in_sync()
    with pytest.raises(RuntimeError, match="nothing-applied"):
        model.apply(lambda module: None)
    with torch.no_grad():
        table.add_(here)
    with pytest.raises(RuntimeError, match=r"ranks-differ: .* Load a checkpoint"):
        model.check_in_sync()
    return found


def test_stages_that_hold_one_table_learn_that_it_differs(tmp_path: Path) -> None:
    found = run_ranks(part_tied, 2, plans.package("pipeline", tmp_path))
    for each in (held for handed_out in found for held in handed_out):
        assert torch.equal(each, found[0][0])
