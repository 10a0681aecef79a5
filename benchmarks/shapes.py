"""Models at training shapes, without weights: parameters are allocated but never touched, so 8 B of them fit a laptop.

`program(name)` exports one and lowers it; only its shapes are ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdv.frontend import Program

LLAMA_3_8B: dict[str, Any] = {  # https://huggingface.co/meta-llama/Meta-Llama-3-8B, config.json
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama(batch: int, sequence: int, **changes: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Llama-3-8B (or with other sizes) in bfloat16, weights untouched; ids [batch, sequence] -> logits."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    class Llama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, use_cache=False).logits

    config = LlamaConfig.from_dict({**LLAMA_3_8B, **changes, "attn_implementation": "sdpa"})
    with torch.device("meta"):
        module = Llama(config).to(torch.bfloat16)
    module = module.to_empty(device="cpu")  # untouched pages take no memory
    module.model.rotary_emb = LlamaRotaryEmbedding(config)  # the one buffer whose values matter
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def gpt2(batch: int, sequence: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2 124M at a training sequence; ids [batch, sequence] -> logits."""
    import torch

    from benchmarks.models import build

    module, _ = build("gpt2", "full")
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def program(name: str, batch: int, sequence: int = 0) -> Program:
    """The canonical program of a model at a global batch (and, for language models, a sequence)."""
    from benchmarks.models import build
    from pdv.frontend import load_program

    match name:
        case "llama-3-8b":
            return load_program(*llama(batch, sequence))
        case "gpt2":
            return load_program(*gpt2(batch, sequence))
        case _:
            return load_program(*build(name, "full", batch=batch))
