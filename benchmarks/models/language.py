"""Language models from their transformers configurations: GPT-2, Llama, BERT, Mixtral.

Random weights, no dropout, no cache; ids [batch, sequence] in, one tensor out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.models.sizes import Built, Size, choose, token_ids

if TYPE_CHECKING:
    import torch

SDPA = {"attn_implementation": "sdpa"}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}  # the defaults lie outside a small vocabulary
SMALL_ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
NO_ENCODER_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_gpt2(size: Size, batch: int | None) -> Built:
    """GPT-2 124M with its language-model head, tied to the token embedding; ids [b, s] -> logits [b, s, vocab]."""
    small = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 8} | NO_SPECIAL_TOKENS
    module = gpt2_module(choose(size, small=small, full={}))
    return module, token_ids(module.config.vocab_size, batch or 8, 16 if size == "small" else 64)


def gpt2_module(config: dict[str, Any]) -> Any:  # Any: transformers' modules are untyped
    """GPT-2 with its head and without dropout, 124M but for what ``config`` changes."""
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    class Gpt2(GPT2LMHeadModel):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__, here and below
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, use_cache=False).logits

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Gpt2(GPT2Config.from_dict(config | no_dropout | SDPA))


def make_llama(size: Size, batch: int | None) -> Built:
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


def make_bert(size: Size, batch: int | None) -> Built:
    """BERT-base encoder, no pooler (it leaves the last hidden state unused); ids [b, s] -> hidden [b, s, d]."""
    return _bert(size, batch, {})


def _bert(size: Size, batch: int | None, full: dict[str, Any]) -> Built:
    """BERT's encoder; ``full`` is what the full size changes of BERT-base."""
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    class Bert(BertModel):  # type: ignore[no-untyped-call]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids).last_hidden_state

    small = {"vocab_size": 128, "max_position_embeddings": 32} | SMALL_ENCODER
    config = BertConfig.from_dict(choose(size, small=small, full=full) | NO_ENCODER_DROPOUT | SDPA)
    model = Bert(config, add_pooling_layer=False)
    return model, token_ids(config.vocab_size, batch or 8, 16 if size == "small" else 64)


def make_bert_large(size: Size, batch: int | None) -> Built:
    """BERT-large encoder (Devlin et al. 2019: 24 layers of width 1024); `small` is BERT-base's."""
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return _bert(size, batch, large)


def make_mixtral(size: Size, batch: int | None) -> Built:
    """Mixtral: grouped-query attention, and a mixture of experts in place of each feed-forward layer.

    Experts run dense (see `benchmarks.models.mixture`). `full` is Mixtral-8x7B (mistralai/Mixtral-8x7B-v0.1,
    config.json), 47 billion weights, cut to one layer; all 32 layers are in `benchmarks.models.shapes`.
    """
    from benchmarks.models.mixture import mixtral

    small = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "max_position_embeddings": 32,
    } | NO_SPECIAL_TOKENS
    module = mixtral(choose(size, small=small, full=MIXTRAL_8X7B | {"num_hidden_layers": 1}))
    return module, token_ids(module.config.vocab_size, batch or 8, 16 if size == "small" else 64)


MIXTRAL_8X7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
