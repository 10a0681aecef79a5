"""Training under DeepSpeed: `torchrun train_deepspeed.py ds_config.json`; DS_ACCELERATOR=cpu where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tiny import RATE, STEPS, make_model, own_rows, report

deepspeed.init_distributed(dist_backend="gloo", verbose=False)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=json.loads(Path(sys.argv[1]).read_text()))
rank, world = dist.get_rank(), dist.get_world_size()
losses = []
for step in range(STEPS):
    ids = own_rows(step, rank, world)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    told = loss.detach().clone()
    dist.all_reduce(told)
    losses.append(told.item() / world)
if rank == 0:
    report(losses, f"ZeRO stage {engine.zero_optimization_stage()} on {world} processes")
dist.destroy_process_group()
