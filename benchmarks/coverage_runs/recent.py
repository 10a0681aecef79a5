"""The most different of the model types of transformers that were in none of the lists. Entry point: ``RECENT``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import randint, randn

from benchmarks.coverage_runs.further import pixels
from benchmarks.coverage_runs.hub import (
    BART,
    CLASSES,
    DECODER,
    ENCODER,
    EXPORTED,
    ROWS,
    SPEECH,
    Built,
    causal,
    masked,
    of,
    pairs,
)  # fmt: skip

_EVERY_LAYER = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def frequencies() -> dict[str, Any]:
    """Sound by frequencies, with a class each."""
    return {"input_features": randn(ROWS, 64, 16), "labels": randint(CLASSES, (ROWS,))}


def detector() -> Built:
    """Boxes in images, of a residual network and an encoder with a decoder, without the loss."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    stages = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    sizes = {key: value for key, value in BART.items() if key.startswith(("d_", "encoder_", "decoder_"))}
    config = DetrConfig(
        **{**sizes, **_EVERY_LAYER, "num_queries": 8, "use_timm_backbone": False, "backbone": None},
        backbone_config=ResNetConfig(**stages, out_features=["stage4"]),
    )
    return DetrForObjectDetection(config), pixels()


RECENT: Mapping[str, Callable[[], Built]] = {
    "gemma4": of("Gemma4ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 8, "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 32, "layer_types": ["sliding_attention", "full_attention"]}, causal,
        "Gemma4TextConfig"),
    "qwen3-5": of("Qwen3_5ForCausalLM", {**DECODER, "head_dim": 8, **_LINEAR}, causal, "Qwen3_5TextConfig"),
    "olmo-hybrid": of("OlmoHybridForCausalLM", {**DECODER, **_LINEAR}, causal),
    "minimax": of("MiniMaxForCausalLM", {**DECODER, "num_local_experts": 4, "layer_types": ["full_attention",
        "linear_attention"], **EXPORTED}, causal),
    "falcon-h1": of("FalconH1ForCausalLM", {**DECODER, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64,
        "mamba_d_state": 8, "mamba_chunk_size": 8}, causal),
    "jamba": of("JambaForCausalLM", {**DECODER, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, **EXPORTED}, causal),
    "nllb-moe": of("NllbMoeForConditionalGeneration", {**BART, **_EVERY_LAYER, "num_experts": 4, **EXPORTED}, pairs),
    "tapas": of("TapasForMaskedLM", ENCODER, masked),
    "wav2vec2-bert": of("Wav2Vec2BertForSequenceClassification", {**SPEECH, "feature_projection_input_dim": 16,
        "output_hidden_size": 32, "max_source_positions": 64, "conv_depthwise_kernel_size": 3}, frequencies),
    "detr": detector,
}  # fmt: skip
