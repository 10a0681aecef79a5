"""The published models of transformers as they are, in full size and in a small one; random weights.

Entry point: ``MODELS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.models.sizes import Size, TensorTuple, choose, images, token_ids

if TYPE_CHECKING:
    import torch

BATCH, LENGTH = 8, 64
_SMALL_TEXT = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
_SMALL_IMAGES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8, "num_labels": 16,
}  # fmt: skip
_LLAMA = {  # TinyLlama's widths of heads, groups and MLP, 12 layers and 8,000 words: 150 million weights
    "vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN3 = {  # https://huggingface.co/Qwen/Qwen3-0.6B, config.json
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}  # the defaults lie outside a small vocabulary
_NO_DROPPED_SCORES = {  # torch 2.13 writes attention with a mask and dropout as the sum of floats and truth values
    "GPT2LMHeadModel": {"attn_pdrop": 0.0},
    "BertForMaskedLM": {"attention_probs_dropout_prob": 0.0},
}
Make = Callable[[Size], "tuple[torch.nn.Module, TensorTuple]"]


def make(name: str, size: Size) -> tuple[torch.nn.Module, TensorTuple]:
    """A model in training mode with the dropout of its configuration, and example inputs."""
    import torch

    torch.manual_seed(0)
    module, inputs = MODELS[name](size)
    return module.train(), inputs


def _of(kind: str, config: dict[str, Any]) -> Any:  # Any: transformers' modules are untyped
    """A model of transformers by its class, without a cache of keys and values, which training has none of."""
    import transformers

    owner = getattr(transformers, kind)
    return owner(owner.config_class(**config, **_NO_DROPPED_SCORES.get(kind, {})))


def _text(kind: str, full: dict[str, Any], small: dict[str, Any]) -> Make:
    def build(size: Size) -> tuple[torch.nn.Module, TensorTuple]:
        module = _of(kind, choose(size, small=small, full=full))
        module.config.use_cache = False
        length = LENGTH if size == "full" else 16
        return module, token_ids(module.config.vocab_size, BATCH, length)

    return build


def _images(kind: str, full: dict[str, Any], small: dict[str, Any]) -> Make:
    return lambda size: (
        _of(kind, choose(size, small=small, full=full)), images(BATCH, 224 if size == "full" else 32)
    )  # fmt: skip


MODELS: dict[str, Make] = {
    "gpt2": _text(
        "GPT2LMHeadModel",
        {},
        {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 8} | _NO_TOKENS,
    ),
    "bert": _text("BertForMaskedLM", {}, _SMALL_TEXT),
    "resnet50": _images(
        "ResNetForImageClassification",
        {"num_labels": 1000},
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_labels": 16},
    ),
    "llama": _text("LlamaForCausalLM", _LLAMA, _SMALL_TEXT | {"num_key_value_heads": 4} | _NO_TOKENS),
    "qwen3": _text(
        "Qwen3ForCausalLM",
        _QWEN3,
        _SMALL_TEXT | {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "vit": _images("ViTForImageClassification", {"num_labels": 1000}, _SMALL_IMAGES),
}
"""Name -> builder of (module, example inputs)."""
