"""Training a model that transformers' `DistributedConfig` spreads: `torchrun train_transformers.py tp_plan.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import RATE, STEPS, make_model, own_rows, report
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
said = json.loads(Path(sys.argv[1]).read_text())
parts = said["fsdp_size"] * said["dp_replicate_size"]  # ranks of one tensor-parallel group have the same rows

folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
if rank == 0:
    make_model().save_pretrained(folder[0])
dist.barrier()
model = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=DistributedConfig.from_dict(said))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
losses = []
for step in range(STEPS):
    ids = own_rows(step, rank * parts // world, parts)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told = loss.detach()
    told = (told.full_tensor() if isinstance(told, DTensor) else told).clone()
    dist.all_reduce(told)
    losses.append(told.item() / world)
if rank == 0:
    weight = model.model.layers[0].self_attn.q_proj.weight
    held = tuple(weight.to_local().shape) if isinstance(weight, DTensor) else tuple(weight.shape)
    report(losses, f"{type(weight).__name__} of {tuple(weight.shape)}, {held} on each of {world} ranks")
dist.destroy_process_group()
