"""A model behind another, as a generator and its judge: steps of both are those of one process, or a warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.nn import functional as F  # noqa: N812

from tests.distributed.emitted.test_loop import MESH, ROWS, WIDTH, Classifier, batch, classifier, write_weights
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


def of_all(rows: Tensor, model: Classifier) -> Tensor:
    """As docs/loops.md has it: rows of all ranks, with gradients of this rank's."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts = parts[:: dist.get_world_size() // model.data_world]
    parts[model.data_rank] = rows
    return torch.cat(parts)


def made(generator: Classifier, x: Tensor) -> Tensor:
    """[rows, width]: what the judge takes of the generator's outputs."""
    y = generator(x)
    return F.pad(y if generator.data_world == 1 else of_all(y, generator), (0, WIDTH - y.size(1)))


def penalty(judge: Classifier, x: Tensor) -> Tensor:
    """Of the norms of gradients by inputs, of all rows."""
    x = x.detach().requires_grad_()
    grads: tuple[Tensor, ...] = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
    wide: Tensor = (grads[0].norm(dim=1) - 1).square().mean()
    return wide


def train(path: Path, sizes: dict[str, int], way: Literal["mean", "sum"]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights of both behind a few steps, and what was warned of."""
    generator, judge = (classifier(path, sizes) for _ in range(2))
    generator.own_loss, judge.own_loss = way, "mean"
    optimizers = [optim.AdamW(model.parameters(), 1e-2, eps=1e-3) for model in (generator, judge)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            noise, real = batch(step)[0], batch(10 + step)[0]
            with torch.no_grad():
                drawn = made(generator, noise)
            with judge.parameters_in_graph():
                wide = penalty(judge, 0.3 * real + 0.7 * drawn)
            (judge(drawn).exp().mean() - judge(real).mean() + wide).backward()
            optimizers[1].step()
            judge.zero_grad()
            (-judge(made(generator, noise)).mean()).backward()
            generator.clip_grad_norm_(0.1)
            optimizers[0].step()
            for model in (generator, judge):
                model.zero_grad()
            with torch.inference_mode():
                assert judge.eval()(made(generator.eval(), noise)).size(0) == ROWS // judge.data_world
            generator.train(), judge.train()
    found = {
        f"{number}.{name}": weight
        for number, model in enumerate((generator, judge))
        for name, weight in model.full_state_dict().items()
        if name != "rows"
    }
    return found, [str(each.message) for each in told]


def train_both(path: Path) -> list[tuple[dict[str, Tensor], list[str]]]:
    return [train(path, MESH, way) for way in ("sum", "mean")]


def test_a_model_behind_another_trains_as_on_one_process(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights")
    wanted, _ = train(tmp_path / "weights", {"dp": 1, "tp": 1}, "sum")
    for (found, told), (_, told_of_mean) in run_ranks(train_both, 4, tmp_path / "weights"):
        assert told == []
        assert [text.split(":")[0] for text in told_of_mean] == ["mean-of-parts"] * 4
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-8, msg=name)
