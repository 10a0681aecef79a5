"""Train a package that `pdv optimize` wrote from a language model: on four processes, or unsharded on one.

torchrun --nproc-per-node=4 examples/train.py gpt2_pdv
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from text import PADDING, batches
from torch import Tensor
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("package", type=Path)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4, help="rows of the global batch")
parser.add_argument("--sequence", type=int, default=64, help="tokens of a row")
parser.add_argument("--vocabulary", type=int, default=50257)
parser.add_argument("--losses", type=Path, help="write the losses, and the median seconds of a step, to this file")
options = parser.parse_args()


def loss_fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of this rank's rows: the sum over tokens, and how many tokens count."""
    loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (target != PADDING).sum()


sys.path.insert(0, str(options.package.resolve().parent))
model = import_module(options.package.name).build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
losses, seconds = [], []
for x, y in batches(options.steps, options.batch, options.sequence, options.vocabulary):
    started = time.perf_counter()
    loss = model.train_step(x, y, loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - started)

if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    print("losses:", ", ".join(f"{loss:.6f}" for loss in losses))
    if options.losses:
        options.losses.write_text(json.dumps({"losses": losses, "step_s": statistics.median(seconds)}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
