"""The fixed set of models that tests and benchmarks run on: GPT-2, Llama, BERT, ViT and ResNet-50.

Each is built from its transformers configuration with random weights (fixed seed), takes plain tensors and returns one
plain tensor, has no dropout and no cache, and exists in two sizes: `small` for tests (every dim divides by 8 where the
architecture lets it) and `full`, the published size. Entry point: `build(name, size)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch and transformers take seconds to import, so builders import them when called
    import torch

Size = Literal["small", "full"]
TensorTuple = tuple["torch.Tensor", ...]


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """A named model. `make(size, batch)` returns (module, example inputs), seeded by the caller."""

    name: str
    make: Callable[[Size, int | None], tuple[torch.nn.Module, TensorTuple]]


def build(
    name: str, size: Size = "small", *, batch: int | None = None, seed: int = 0
) -> tuple[torch.nn.Module, TensorTuple]:
    """The model and its example inputs (batch dim first); `batch` overrides the size's own batch. Leaves torch's
    generator alone.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = MODELS[name].make(size, batch)
    return module.train(), inputs


def token_ids(vocabulary: int, batch: int, sequence: int) -> TensorTuple:
    """Uniform random token ids: [batch, sequence] int64, without 0, whose embedding row torch may hold fixed
    (`padding_idx`).
    """
    import torch

    return (torch.randint(1, vocabulary, (batch, sequence)),)


def images(batch: int, side: int) -> TensorTuple:
    """Standard normal images: [batch, 3, side, side] float32."""
    import torch

    return (torch.randn(batch, 3, side, side),)


def make_gpt2(size: Size, batch: int | None) -> tuple[torch.nn.Module, TensorTuple]:
    """GPT-2 124M with its language-model head, tied to the token embedding; ids [b, s] -> logits [b, s, vocab]."""
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    class Gpt2(GPT2LMHeadModel):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__, here and below
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, use_cache=False).logits

    small = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 8} | NO_SPECIAL_TOKENS
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config.from_dict(choose(size, small=small, full={}) | no_dropout | SDPA)
    return Gpt2(config), token_ids(config.vocab_size, batch or 8, 16 if size == "small" else 64)


def make_llama(size: Size, batch: int | None) -> tuple[torch.nn.Module, TensorTuple]:
    """Llama with grouped-query attention, rotary embedding and SwiGLU; ids [b, s] -> logits [b, s, vocab].

    `full` is Llama-3.2-1B (https://huggingface.co/meta-llama/Llama-3.2-1B, config.json).
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    class Llama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, use_cache=False).logits

    small = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32,
    } | NO_SPECIAL_TOKENS
    full = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }
    config = LlamaConfig.from_dict(choose(size, small=small, full=full) | SDPA)
    return Llama(config), token_ids(config.vocab_size, batch or 8, 16 if size == "small" else 64)


def make_bert(size: Size, batch: int | None) -> tuple[torch.nn.Module, TensorTuple]:
    """BERT-base encoder, no pooler (it leaves the last hidden state unused); ids [b, s] -> hidden [b, s, d]."""
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    class Bert(BertModel):  # type: ignore[no-untyped-call]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids).last_hidden_state

    small = {"vocab_size": 128, "max_position_embeddings": 32} | SMALL_ENCODER
    config = BertConfig.from_dict(choose(size, small=small, full={}) | NO_ENCODER_DROPOUT | SDPA)
    model = Bert(config, add_pooling_layer=False)
    return model, token_ids(config.vocab_size, batch or 8, 16 if size == "small" else 64)


def make_vit(size: Size, batch: int | None) -> tuple[torch.nn.Module, TensorTuple]:
    """ViT-B/16 with its classification head; images [b, 3, h, w] -> logits [b, classes]."""
    from transformers.models.vit.configuration_vit import ViTConfig
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    class Vit(ViTForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values).logits

    small = {"image_size": 32, "patch_size": 8, "num_labels": 16} | SMALL_ENCODER
    full = {"image_size": 224, "num_labels": 1000}
    config = ViTConfig.from_dict(choose(size, small=small, full=full) | NO_ENCODER_DROPOUT | SDPA)
    return Vit(config), images(batch or 8, 32 if size == "small" else 224)


def make_resnet(size: Size, batch: int | None) -> tuple[torch.nn.Module, TensorTuple]:
    """ResNet-50 (bottlenecks, batch normalisation in training mode); images [b, 3, h, w] -> logits [b, classes]."""
    from transformers.models.resnet.configuration_resnet import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    class ResNet(ResNetForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values).logits

    small = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_labels": 16}
    config = ResNetConfig.from_dict(choose(size, small=small, full={"num_labels": 1000}))
    return ResNet(config), images(batch or 8, 32 if size == "small" else 224)


def choose(size: Size, *, small: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a size."""
    return small if size == "small" else full


SDPA = {"attn_implementation": "sdpa"}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}  # the defaults lie outside a small vocabulary
SMALL_ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
NO_ENCODER_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, BenchmarkModel] = {
    model.name: model
    for model in (
        BenchmarkModel("gpt2", make_gpt2),
        BenchmarkModel("llama", make_llama),
        BenchmarkModel("bert", make_bert),
        BenchmarkModel("vit", make_vit),
        BenchmarkModel("resnet50", make_resnet),
    )
}
