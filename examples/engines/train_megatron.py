"""Tensor parallelism by Megatron-Core on CPUs: `torchrun train_megatron.py megatron.sh`.

`pretrain_gpt.py` is no part of its package: the exported degrees are given to its `TransformerConfig` here. What its
0.16 asks of CUDA and a CPU has not (a device's number, a state of random numbers) is answered.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny import LENGTH, RATE, STEPS, make_batch, make_model, report
from torch import Tensor
from torch.nn.functional import silu

from pdv.engines.flags import read_flags, take_flag

torch.cuda.current_device = lambda: "cpu"  # its angles go there
tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # nothing is dropped
tp = take_flag(read_flags(Path(sys.argv[1]).read_text(), "megatron")[0], "tensor_model_parallel_size")
dist.init_process_group("gloo")
assert dist.get_world_size() == tp, "one rank for each part"
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
rank = dist.get_rank()


def part(weight: Tensor, dim: int) -> Tensor:
    """A rank's part of a weight."""
    return weight.chunk(tp, dim)[rank]


def own_weights(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's weights as Megatron-Core holds them on a rank: heads' q, k, v together, gate over up."""
    found = {
        "embedding.word_embeddings.weight": part(given["model.embed_tokens.weight"], 0),
        "output_layer.weight": part(given["lm_head.weight"], 0),
        "decoder.final_layernorm.weight": given["model.norm.weight"],
    }
    for layer in range(2):
        own, its = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        heads = [given[f"{its}self_attn.{name}_proj.weight"].view(4, 1, 16, 64) for name in "qkv"]
        gate_up = [part(given[f"{its}mlp.{name}_proj.weight"], 0) for name in ("gate", "up")]
        found |= {
            f"{own}self_attention.linear_qkv.weight": part(torch.cat(heads, 1).reshape(-1, 64), 0),
            f"{own}self_attention.linear_proj.weight": part(given[f"{its}self_attn.o_proj.weight"], 1),
            f"{own}mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{own}mlp.linear_fc2.weight": part(given[f"{its}mlp.down_proj.weight"], 1),
            f"{own}input_layernorm.weight": given[f"{its}input_layernorm.weight"],
            f"{own}pre_mlp_layernorm.weight": given[f"{its}post_attention_layernorm.weight"],
        }
    return found


config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, tensor_model_parallel_size=tp,
    use_cpu_initialization=True, gated_linear_unit=True, activation_func=silu, add_bias_linear=False,
    normalization="RMSNorm", layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
    bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    bias_activation_fusion=False, apply_rope_fusion=False,
)  # fmt: skip
model = GPTModel(
    config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=128, max_sequence_length=LENGTH,
    position_embedding_type="rope", share_embeddings_and_output_weights=False,
)  # fmt: skip
missing, others = model.load_state_dict(own_weights(make_model().state_dict()), strict=False)
assert not others, others
assert all(name.endswith("_extra_state") for name in missing), missing
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
position = torch.arange(LENGTH)[None]
hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
losses = []
for step in range(STEPS):
    ids = make_batch(step)
    by_token = model(ids, position.expand_as(ids), hidden, labels=ids.roll(-1, 1))
    loss = by_token[:, :-1].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if rank == 0:
    shape = tuple(model.decoder.layers[0].mlp.linear_fc2.weight.shape)
    report(losses, f"GPTModel, {shape} of (64, 128) on each of {tp} ranks")
dist.destroy_process_group()
