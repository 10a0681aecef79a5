"""A Llama of two layers, its batches, and its losses on one process: what every engine has to match."""

from __future__ import annotations

import json

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, STEPS, RATE = 8, 32, 5, 1e-2
ARCH = f"llama:layers=2,hidden=64,heads=4,seq={LENGTH},vocab=128,ffn=128"  # the same, as `pdv optimize --arch` takes it
CLUSTER = """
nodes:
  - devices: 2
    device: {name: core, kind: cpu, memory: 4 GiB, peak: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s,
             launch_latency: 5 us, efficiency: 0.6}
    link: {name: loopback, bandwidth: 2 GB/s, latency: 100 us}
"""


def make_model() -> LlamaForCausalLM:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(sizes)


def make_batch(step: int) -> Tensor:
    """ids: [ROWS, LENGTH], the same on every rank."""
    return torch.randint(0, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(100 + step))


def own_rows(step: int, place: int, parts: int) -> Tensor:
    """A rank's rows of a batch: [ROWS / parts, LENGTH]."""
    return make_batch(step).chunk(parts)[place]


def report(losses: list[float], how: str) -> None:
    """One line of JSON, which the launcher reads."""
    print(json.dumps({"losses": losses, "how": how}), flush=True)


def train_alone() -> tuple[LlamaForCausalLM, list[float]]:
    """The model after all steps on one process, and their losses."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        ids = make_batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    report(train_alone()[1], "one process")
