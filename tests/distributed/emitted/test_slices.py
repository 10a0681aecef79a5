"""A pipeline whose micro-batches pass in slices of time trains as one process does (TeraPipe)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from benchmarks.models.techniques import Technique
from pdv.plan.package import import_package
from tests.distributed.harness import mark_slow, run_ranks
from tests.pdv.miniatures import Gpt, Llama, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
STEPS = 8
PARITY = 1e-4  # relative, float32
NONE: tuple[tuple[str, int], ...] = ()


class Early(Gpt):
    """Gives what its embedding and its first layer make, too: an output of an earlier stage than the last."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # gives more
        x = first = self.h[0](self.wte(ids) + self.wpe.weight)
        for layer in self.h[1:]:
            x = layer(x)
        return self.head(self.ln_f(x)), first.square().sum(-1)


class Scaled(Gpt):
    """Scales by what it computes of parameters alone, on two stages, and adds such positions."""

    def forward(self, ids: Tensor) -> Tensor:
        scale = torch.sigmoid(self.ln_f.weight)
        x = self.wte(ids) * scale + torch.tanh(self.wpe.weight)
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x * scale))


WAYS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[str, int], ...], dict[str, Any]]] = {
    "gpt, pp2, 2 slices": (lambda: Gpt(2), NONE, {"stages": 2, "micro_batches": 2, "moments": 2}),
    "llama, pp2 x tp2, 4 slices": (lambda: Llama(2), (("tp", 2),), {"stages": 2, "micro_batches": 2, "moments": 4}),
    "outputs of two stages, pp2, 4 slices": (lambda: Early(2), NONE, {"stages": 2, "micro_batches": 2, "moments": 4}),
    "gpt, pp4, 2 slices": (lambda: Gpt(4), NONE, {"stages": 4, "micro_batches": 4, "moments": 2}),
    "gpt, pp4, positions one by one": (lambda: Gpt(4), NONE, {"stages": 4, "micro_batches": 1, "moments": 8}),
    "llama, pp2 x fsdp2, 2 slices": (lambda: Llama(4), (("fsdp", 2),), {"stages": 2, "micro_batches": 2, "moments": 2}),
    "llama, pp2 x dp2, 2 slices": (lambda: Llama(2), (("dp", 2),), {"stages": 2, "micro_batches": 3, "moments": 2}),
}
QUICK = {"gpt, pp2, 2 slices", "llama, pp2 x tp2, 4 slices", "outputs of two stages, pp2, 4 slices"}


def loss_of(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token the next one, which may lie in another slice: their sum, and how many; the last has none."""
    if isinstance(output, tuple):
        logits, early = output
        found, count = loss_of(logits, labels)
        return found + 0.1 * early.sum(), count
    logits = output
    found = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    return found, (labels[:, 1:] != -100).sum()


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of which each has other padding."""
    x = ids(rows, 8).roll((step % 3, step), (0, 1))
    return x, x.masked_fill(torch.arange(8) > 3 + torch.arange(rows)[:, None] % 5, -100)


def train(folder: Path, rows: int) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms of gradients, the first gradients, and weights."""
    model = import_package(folder).build(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, first = [], [], dict[str, Tensor]()
    for step in range(STEPS):
        losses.append(model.train_step(*batch(step, rows), loss_of).item())
        first = first or {name: grad.clone() for name, grad in model.full_gradients().items()}
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    model.check_in_sync()
    return losses, norms, first, model.full_state_dict()


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Relative, of all tensors."""
    assert ours.keys() == theirs.keys()
    return sum(float((ours[name] - x).square().sum()) for name, x in theirs.items()) ** 0.5 / (
        sum(float(x.square().sum()) for x in theirs.values()) ** 0.5
    )


def check_trained_alike(plan: pdv.Plan, folder: Path, rows: int, processes: int) -> str:
    """That several processes train as one does; the program."""
    folder = plan.save(folder / "model_pdv")
    exact = train(folder, rows)
    assert exact[0][-1] < exact[0][0]
    for found in run_ranks(train, processes, folder, rows):
        for ours, theirs in zip(found[:2], exact[:2], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=PARITY, atol=0)
        assert max(distance(*pair) for pair in zip(found[2:], exact[2:], strict=True)) <= PARITY
    return (folder / "model.py").read_text()


@pytest.mark.parametrize("way", mark_slow(WAYS, set(WAYS) - QUICK))
def test_slices_train_as_one_process(way: str, tmp_path: Path) -> None:
    make, mesh, how = WAYS[way]
    technique = Technique(way, mesh)
    rows, processes = 4 * how["micro_batches"], how["stages"] * technique.mesh.num_devices
    pins = technique.pins if mesh else None
    plan = plan_pipeline(settled(make()), (ids(rows, 8),), cluster(processes), mesh=dict(mesh), pins=pins, **how)
    assert f"slices={how['moments']}" in check_trained_alike(plan, tmp_path, rows, processes)


INSIDE: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "weights gathered for each use": (lambda: Gpt(2), "dp", "zero-3"),
    "weights gathered once": (lambda: Llama(2), "dp", "zero-2"),
    "positions as they rest": (lambda: Gpt(2), "cp", "context"),
    "angles of positions": (lambda: Llama(2), "cp", "context"),
    "positions between products": (lambda: Gpt(2), "tp", "tensor+sequence"),
    "values of parameters alone": (lambda: Scaled(2), "dp", "zero-3"),
}


@pytest.mark.parametrize("way", mark_slow(INSIDE, {"weights gathered once", "positions between products"}))
def test_slices_of_what_other_axes_cut(way: str, tmp_path: Path) -> None:
    make, axis, technique = INSIDE[way]
    pins = {"mesh": {axis: 2}, "techniques": {axis: technique}}
    plan = pdv.optimize(
        settled(make()),
        (ids(8, 8),),
        cluster=cluster(4),
        stages=2,
        micro_batches=2,
        slices=2,
        schedule="1f1b",
        pins=pins,
    )
    text = check_trained_alike(plan, tmp_path, 8, 4)
    assert ("regathering" in text) == (technique == "zero-3")
    assert "8/time/" in text or axis == "dp"
