"""Models at training shapes, without weights: parameters are allocated but never touched, so 405 B fit a laptop.

`program(name)` exports one and lowers it; only its shapes are ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pdv.frontend import Program

# config.json of https://huggingface.co/meta-llama/Meta-Llama-3-8B, -3-70B and /Llama-3.1-405B
LLAMA_3_8B: dict[str, Any] = {
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
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_3_405B = LLAMA_3_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
LLAMAS = {"llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B, "llama-3-405b": LLAMA_3_405B}
BUFFERLESS = ("dlrm", "xdl", "candle-uno", "mlp", "nasrnn")  # big, and no buffer whose values matter
Made = tuple["torch.nn.Module", tuple["torch.Tensor", ...]]


def llama(batch: int, sequence: int, config: dict[str, Any] = LLAMA_3_8B, **changes: Any) -> Made:
    """A Llama-3 (or with other sizes) in bfloat16, weights untouched; ids [batch, sequence] -> logits."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    class Llama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, use_cache=False).logits

    sizes = LlamaConfig.from_dict({**config, **changes, "attn_implementation": "sdpa"})
    with torch.device("meta"):
        module: Any = Llama(sizes)  # Any: transformers wraps `to` in another signature
    module = module.to(torch.bfloat16).to_empty(device="cpu")  # untouched pages take no memory
    module.model.rotary_emb = LlamaRotaryEmbedding(sizes)  # the one buffer whose values matter
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def mixtral_8x7b(batch: int, sequence: int, **changes: Any) -> Made:
    """Mixtral-8x7B in bfloat16 with dense experts, weights untouched; ids [batch, sequence] -> logits."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    from benchmarks.models.language import MIXTRAL_8X7B
    from benchmarks.models.mixture import mixtral

    with torch.device("meta"):
        module: Any = mixtral({**MIXTRAL_8X7B, **changes})  # Any: as above
    module = module.to(torch.bfloat16).to_empty(device="cpu")
    module.model.rotary_emb = MixtralRotaryEmbedding(module.config)
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def gpt2(batch: int, sequence: int) -> Made:
    """GPT-2 124M at a training sequence; ids [batch, sequence] -> logits."""
    import torch

    from benchmarks.models import build

    module, _ = build("gpt2", "full")
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def gpt2_large(batch: int, sequence: int) -> Made:
    """GPT-2 774M (36 layers of 20 heads, huggingface.co/openai-community/gpt2-large), weights untouched."""
    import torch

    from benchmarks.models.language import gpt2_module

    with torch.device("meta"):
        module = gpt2_module({"n_embd": 1280, "n_layer": 36, "n_head": 20})
    module = module.to_empty(device="cpu")
    module.tie_weights()
    return module.train(), (torch.zeros(batch, sequence, dtype=torch.int64),)


def bert(name: str, batch: int, sequence: int) -> Made:
    """BERT-base or BERT-large at a training sequence; ids [batch, sequence] -> hidden."""
    import torch

    from benchmarks.models import build

    module, _ = build(name, "full")
    return module, (torch.zeros(batch, sequence, dtype=torch.int64),)


def untouched(name: str, batch: int) -> Made:
    """A model of the set whose buffers do not matter, at full size, weights untouched; inputs are zeros."""
    import torch

    from benchmarks.models import MODELS

    with torch.device("meta"):
        module, inputs = MODELS[name].make("full", batch)
    return module.train().to_empty(device="cpu"), tuple(torch.zeros(x.shape, dtype=x.dtype) for x in inputs)


def program(name: str, batch: int, sequence: int = 0) -> Program:
    """The canonical program of a model at a global batch (and, for language models, a sequence)."""
    from benchmarks.models import build
    from pdv.frontend import load_program

    if name in LLAMAS:
        return load_program(*llama(batch, sequence, LLAMAS[name]))
    if name == "mixtral-8x7b":
        return load_program(*mixtral_8x7b(batch, sequence))
    if name == "gpt2":
        return load_program(*gpt2(batch, sequence))
    if name == "gpt2-large":
        return load_program(*gpt2_large(batch, sequence))
    if name in ("bert", "bert-large") and sequence:
        return load_program(*bert(name, batch, sequence))
    if name in BUFFERLESS:
        return load_program(*untouched(name, batch))
    return load_program(*build(name, "full", batch=batch))
