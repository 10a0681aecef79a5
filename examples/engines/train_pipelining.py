"""A pipeline by PyTorch's own schedules, with torchtitan's flags: `torchrun train_pipelining.py torchtitan.sh`.

They are the schedules that torchtitan takes; `train_torchtitan.py` runs its own Trainer, where it is installed.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import RATE, ROWS, STEPS, make_batch, make_model, report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

P = "--parallelism.pipeline_parallel_"
words = shlex.split(Path(sys.argv[1]).read_text().partition("torchrun")[2])
said = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}


class Part(nn.Module):
    """Layers of a Llama; the first part takes ids, the last gives logits."""

    def __init__(self, place: int, parts: int) -> None:
        super().__init__()
        model = make_model()
        layers = list(model.model.layers)
        each = len(layers) // parts
        self.embed = model.model.embed_tokens if place == 0 else None
        self.layers = nn.ModuleList(layers[place * each : (place + 1) * each])
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if place == parts - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """x: ids [b, s], or what the part before gives [b, s, d]."""
        h = x if self.embed is None else self.embed(x)
        position = torch.arange(h.shape[1])[None]
        angles = self.rotary(h, position)
        for layer in self.layers:
            h = layer(h, position_ids=position, position_embeddings=angles)
        return h if self.head is None else self.head(h)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """As transformers computes it."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


dist.init_process_group("gloo")
rank, degree = dist.get_rank(), int(said[P + "degree"])
assert dist.get_world_size() == degree, "one rank for each stage"
part = Part(rank, degree)
stage = PipelineStage(part, rank, degree, torch.device("cpu"))
name, count = said[P + "schedule"], ROWS // int(said[P + "microbatch_size"])
schedule = get_schedule_class(name)(stage, n_microbatches=count, loss_fn=next_token_loss)
optimizer = torch.optim.AdamW(part.parameters(), lr=RATE)
found = []
for step in range(STEPS):
    ids = make_batch(step)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=ids, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    found.append(sum(loss.item() for loss in losses) / count)
if rank == degree - 1:
    report(found, f"{name} of {count} micro-batches on {degree} stages")
dist.destroy_process_group()
