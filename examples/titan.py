"""Train a package by a configuration of torchtitan's sections, with checkpoints that every plan of the model reads.

torchrun --nproc-per-node=4 -m examples.titan gpt2_pdv examples/titan.toml --training.steps 40
"""

from __future__ import annotations

import math
import shutil
import sys
import tomllib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from examples.text import batches
from ir.errors import UsageError
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.loops.metrics import Metrics
from pdv.loops.pieces import is_first
from pdv.loops.rows import CausalLoss, check_rows
from pdv.plan.package import import_package

DEFAULTS: dict[str, dict[str, Any]] = {
    "training": {"steps": 20, "global_batch_size": 4, "seq_len": 64, "max_norm": 1.0},
    "data": {"vocabulary": 50257},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": {"warmup_steps": 2, "decay_ratio": 1.0, "decay_type": "linear", "min_lr_factor": 0.0},
    "checkpoint": {"enable": False, "folder": "checkpoint", "interval": 10, "keep_latest_k": 2},
    "metrics": {"log_freq": 1, "folder": ""},
    "compile": {"enable": False},
}
"""What is read, and what holds where nothing is said; of torchtitan's names but for ``data``."""
PLANNED = {
    "parallelism": "how the model is cut is the plan's: plan it again (pdv import prices a configuration)",
    "activation_checkpoint": "what is computed again is the plan's (--recompute)",
    "training.mixed_precision_param": "the package computes as it was planned (--precision mixed, --dtype bfloat16)",
    "training.local_batch_size": "ranks take the whole batch: say global_batch_size",
}
DECAYS = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}


def read_config(path: str, changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The file's sections with ``--section.name value`` in place of what they say.

    Raises:
        UsageError: naming what an emitted program cannot be told, or what is not known.
    """
    said = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    for flag, value in zip(changes[::2], changes[1::2], strict=True):
        section, _, name = flag.removeprefix("--").partition(".")
        known = DEFAULTS.get(section, {}).get(name)
        said.setdefault(section, {})[name] = value if known is None or isinstance(known, str) else eval_number(value)
    names = [f"{section}.{name}" for section, entries in said.items() for name in entries]
    for name in names:
        if why := PLANNED.get(name, PLANNED.get(name.partition(".")[0])):
            raise UsageError(f"{name} for an emitted program: {why}", "A file without it", "Leave it out")
    known_names = {f"{section}.{name}" for section, entries in DEFAULTS.items() for name in entries}
    if odd := [name for name in names if name not in known_names]:
        raise UsageError(f"{', '.join(odd)}", ", ".join(sorted(known_names)), "Leave it out")
    return {section: {**entries, **said.get(section, {})} for section, entries in DEFAULTS.items()}


def eval_number(text: str) -> Any:  # Any: as TOML has it
    """A number or truth value of the command line."""
    return tomllib.loads(f"x = {text}")["x"]


def schedule(optimizer: torch.optim.Optimizer, steps: int, said: dict[str, Any]) -> LambdaLR:
    """Linear warm-up, a stable stretch, and a decay over the last ``decay_ratio`` of all steps."""
    warm, decay = said["warmup_steps"], round(steps * said["decay_ratio"])
    stable, shape, least = max(steps - decay, warm), DECAYS[said["decay_type"]], said["min_lr_factor"]

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        progress = min(max(step + 1 - stable, 0) / (max(steps - stable, 1) + 1), 1.0)
        return float(least + (1 - least) * shape(progress))

    return LambdaLR(optimizer, factor)


def main(package: str, path: str, *changes: str) -> list[float]:
    """The losses of the steps that were left to do."""
    config = read_config(path, changes)
    training, saved, of_optimizer = config["training"], config["checkpoint"], dict(config["optimizer"])
    model = import_package(Path(package).resolve()).build()  # joins the processes that torchrun started
    check_rows(model, training["global_batch_size"])
    if config["compile"]["enable"]:
        model.compile()
    kind, betas = of_optimizer.pop("name"), (of_optimizer.pop("beta1"), of_optimizer.pop("beta2"))
    optimizer = getattr(torch.optim, kind)(model.parameters(), betas=betas, **of_optimizer)
    scheduler, folder, start = schedule(optimizer, training["steps"], config["lr_scheduler"]), Path(saved["folder"]), 0
    if saved["enable"] and (before := steps_in(folder)):
        loop = load_checkpoint(before[-1], model, optimizer)
        scheduler.load_state_dict(loop["scheduler"])
        start = loop["step"]
    losses, loss_fn = [], CausalLoss(shift=False)
    said = batches(training["steps"], training["global_batch_size"], training["seq_len"], config["data"]["vocabulary"])
    with Metrics(model, config["metrics"]["folder"] or folder / "metrics", every=config["metrics"]["log_freq"]) as told:
        for step, (x, y) in enumerate(islice(said, start, None), start + 1):
            loss = model.train_step(x, y, loss_fn)
            model.clip_grad_norm_(training["max_norm"])
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            told.after_step(loss, rows=x.size(0), tokens=x.numel())
            losses.append(float(loss))
            if saved["enable"] and (step % saved["interval"] == 0 or step == training["steps"]):
                loop = {"step": step, "scheduler": scheduler.state_dict()}
                save_checkpoint(folder / f"step-{step}", model, optimizer, loop=loop, overwrite=True)
                if is_first() and saved["keep_latest_k"]:
                    for old in steps_in(folder)[: -saved["keep_latest_k"]]:
                        shutil.rmtree(old)
    return losses


def steps_in(folder: Path) -> list[Path]:
    """Its checkpoints, in order."""
    return sorted(folder.glob("step-[0-9]*"), key=lambda path: int(path.name.partition("-")[2]))


if __name__ == "__main__":
    found = main(*sys.argv[1:])
    if is_first():
        print("losses:", ", ".join(f"{loss:.6f}" for loss in found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
