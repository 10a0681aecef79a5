"""Plans of one small model as a test wants them, and what a loop does with each: training on, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pdv
from pdv.plan.package import import_package
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

ROWS, LENGTH = 8, 8
TECHNIQUES = {"ddp": ("dp", "ddp"), "zero-3": ("dp", "zero-3"), "tensor": ("tp", "tensor")}


def package(how: str, folder: Path, devices: int = 2) -> Path:
    """Gpt, its embedding tied, planned as ``how`` says: one of ``TECHNIQUES``, or in two stages."""
    module, inputs = settled(Gpt(2)), (ids(ROWS, LENGTH),)
    if how == "pipeline":
        mesh = {"dp": devices // 2}
        plan = plan_pipeline(module, inputs, cluster(devices), stages=2, micro_batches=2, mesh=mesh)
    else:
        axis, technique = TECHNIQUES[how]
        pins = {"mesh": {axis: devices}, "techniques": {axis: technique}}
        plan = pdv.optimize(module, inputs, cluster=cluster(devices), pins=pins)
    return plan.save(folder / f"{how.replace('-', '')}_pdv")


def build(built: Path) -> Any:
    return import_package(built).build(device="cpu")


def adam(model: Any) -> torch.optim.AdamW:
    """Norms and biases without decay, as anybody has it; ``eps`` above the rounding of gradients that are zero."""
    parts = [[p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, and what follows; a few ids of each row count for nothing."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 48, (ROWS, LENGTH + 1), generator=generator)
    y = x[:, 1:].masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, -100)
    return x[:, :-1].contiguous(), y


def loss_fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """Their losses."""
    losses = []
    for number in numbers:
        losses.append(float(model.train_step(*batch(number), loss_fn)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
    return losses


# ---- GPT-2, as Hugging Face has it, on four processes ----

GPT2 = {"vocab_size": 48, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 4}
STEPS = 20


def gpt2_config() -> Any:
    from transformers import GPT2Config

    config = GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True)
    config.use_cache = False
    return config


def gpt2() -> Any:
    """The module that packages are made of, with weights that are the same every time."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(gpt2_config()).eval()


def gpt2_package(how: str, folder: Path) -> Path:
    """For four devices: ``hybrid`` is dp=2 x tp=2, ``pipeline`` two stages of two replicas."""
    inputs = {"input_ids": ids(ROWS, LENGTH)}
    if how == "pipeline":
        plan = plan_pipeline(gpt2(), inputs, cluster(4), stages=2, micro_batches=2, mesh={"dp": 2}, mode="train")
    else:
        pins = {"mesh": {"dp": 2, "tp": 2}, "techniques": {"dp": "zero-3" if how == "zero-3" else "ddp"}}
        if how == "hybrid":
            pins["techniques"]["tp"] = "tensor"
        plan = pdv.optimize(gpt2(), inputs, cluster=cluster(4), mode="train", pins=pins)
    return plan.save(folder / f"gpt2_{how.replace('-', '')}_pdv")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Ids, and the same as labels, of which some count for nothing."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, GPT2["vocab_size"], (count, LENGTH), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(count, LENGTH, generator=generator) < 0.2, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


RESUMED = [  # a plan, another one that goes on, and of how many batches a step is
    ("hybrid", "pipeline", 1),
    pytest.param("pipeline", "zero-3", 2, marks=pytest.mark.slow),
    pytest.param("zero-3", "hybrid", 2, marks=pytest.mark.slow),
]
