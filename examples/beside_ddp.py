"""Steps of an emitted GPT-2 and of the module under DistributedDataParallel, on the same processes, in turns.

torchrun --nproc-per-node=4 -m examples.beside_ddp gpt2_pdv --times seconds.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import build
from examples.text import PADDING, batches

Step = Callable[[Tensor, Tensor], object]


def loss_fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens, and how many tokens count."""
    loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (target != PADDING).sum()


def emitted(package: Path) -> Step:
    """A step of the program in a folder; every rank is given the whole batch."""
    sys.path.insert(0, str(package.resolve().parent))
    model = import_module(package.name).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        model.train_step(x, y, loss_fn)
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_parallel(size: str, batch: int) -> Step:
    """A step of the module that the program was planned from, each rank on its rows of the batch."""
    module, _ = build("gpt2", size, batch=batch)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        own, target = (whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in (x, y))
        total, weight = loss_fn(model(own), target)
        counted = weight.clone()
        dist.all_reduce(counted)
        (total * dist.get_world_size() / counted).backward()  # DDP takes the mean over ranks
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Both in turns; the medians go to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--size", default="full", help="of the module: full or small")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, behind one that warms up")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--times", type=Path, required=True, help="where the median seconds of a step are written")
    options = parser.parse_args()
    steps = {"plan": emitted(options.package), "ddp": data_parallel(options.size, options.batch)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for x, y in batches(1 + options.rounds, options.batch, options.sequence, options.vocabulary):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step(x, y)
            dist.barrier()  # a step is over where the last rank's is
            seconds[name].append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        options.times.write_text(json.dumps({name: statistics.median(of[1:]) for name, of in seconds.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
