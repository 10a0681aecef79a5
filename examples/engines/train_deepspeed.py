"""Training under DeepSpeed: `torchrun train_deepspeed.py ds_config.json`; DS_ACCELERATOR=cpu where there is no GPU.

ZeRO, where each rank has its rows; AutoTP, where ranks that share the model have the same ones.
"""

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
config = json.loads(Path(sys.argv[1]).read_text())
tp = config.get("tensor_parallel", {}).get("autotp_size", 1)
engine, *_ = deepspeed.initialize(  # the optimizer is of what AutoTP has cut
    model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE), config=config
)
rank, world = dist.get_rank(), dist.get_world_size()
losses = []
for step in range(STEPS):
    ids = own_rows(step, rank // tp, world // tp)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    told = loss.detach().clone()
    dist.all_reduce(told)
    losses.append(told.item() / world)
if rank == 0:
    product = engine.module.model.layers[0].mlp.up_proj
    shape = tuple(product.weight.shape) if tp > 1 else ()
    cut = f"AutoTP, {shape} of a product on each of {world} ranks"
    report(losses, cut if tp > 1 else f"ZeRO stage {engine.zero_optimization_stage()} on {world} processes")
dist.destroy_process_group()
