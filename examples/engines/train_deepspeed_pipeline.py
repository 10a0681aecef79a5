"""A pipeline under DeepSpeed: `torchrun train_deepspeed_pipeline.py ds_config.json`, whose stages are the file's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from tiny import RATE, STEPS, make_batch, make_model, report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Layer(nn.Module):
    """A layer of a Llama with its positions: [b, s, d] -> [b, s, d]."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, h: Tensor) -> Tensor:
        """h: what the layer before gives."""
        position = torch.arange(h.shape[1])[None]
        return self.layer(h, position_ids=position, position_embeddings=self.rotary(h, position))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """As transformers computes it."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
config = json.loads(Path(sys.argv[1]).read_text())
stages, micro = config["pipeline"]["stages"], config["train_micro_batch_size_per_gpu"]
llama = make_model()
inner = llama.model
layers = [inner.embed_tokens, *(Layer(each, inner.rotary_emb) for each in inner.layers), inner.norm, llama.lm_head]
interval = config["pipeline"]["activation_checkpoint_interval"]
model = PipelineModule(layers, num_stages=stages, loss_fn=next_token_loss, activation_checkpoint_interval=interval)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE), config=config
)
losses = []
for step in range(STEPS):
    parts = make_batch(step).split(micro)
    losses.append(engine.train_batch(data_iter=iter([(part, part) for part in parts])).item())
if dist.get_rank() == 0:
    report(losses, f"PipelineModule of {stages} stages, {engine.micro_batches} micro-batches")
dist.destroy_process_group()
