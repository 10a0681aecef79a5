"""Training under `accelerate launch --config_file accelerate.yaml`: the file says how."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from tiny import RATE, STEPS, make_model, own_rows, report

accelerator = Accelerator()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for step in range(STEPS):
    ids = own_rows(step, accelerator.process_index, accelerator.num_processes)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
if accelerator.is_main_process:
    kind = accelerator.distributed_type.value
    report(losses, f"{kind} on {accelerator.num_processes} processes, {type(model).__name__}")
accelerator.end_training()
