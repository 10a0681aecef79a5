"""Models of transformers that were in neither list, as `further` has them. Entry point: ``LATEST``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import randint, randn

from benchmarks.coverage_runs.further import captions, depths, series
from benchmarks.coverage_runs.hub import (
    CLASSES,
    DECODER,
    ENCODER,
    EXPORTED,
    IDS,
    LENGTH,
    ROWS,
    T5,
    VISION,
    WORDS,
    Built,
    causal,
    classes,
    image,
    masked,
    of,
    pairs,
)  # fmt: skip

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, **EXPORTED}


def spectra() -> dict[str, Any]:
    """Sound by frequencies, and what is said."""
    return {"input_features": randn(ROWS, 32, 16), "labels": randint(3, WORDS, (ROWS, 8))}


def pictures() -> dict[str, Any]:
    """Images as rows of colours, and the same as labels."""
    ids = randint(0, WORDS - 1, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


LATEST: Mapping[str, Callable[[], Built]] = {
    "qwen3-moe": of("Qwen3MoeForCausalLM", {**DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, **EXPORTED}, causal),
    "deepseek-v2": of("DeepseekV2ForCausalLM", {**DECODER, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, **EXPORTED}, causal),
    "glm4": of("Glm4ForCausalLM", {**DECODER, "head_dim": 8}, causal),
    "granitemoe": of("GraniteMoeForCausalLM", {**DECODER, **_EXPERTS}, causal),
    "phimoe": of("PhimoeForCausalLM", {**DECODER, **_EXPERTS}, causal),
    "ernie4-5": of("Ernie4_5ForCausalLM", {**DECODER, "head_dim": 8}, causal),
    "arcee": of("ArceeForCausalLM", {**DECODER, "head_dim": 8}, causal),
    "modernbert-decoder": of("ModernBertDecoderForCausalLM", {**ENCODER, **IDS, "cls_token_id": 1, "sep_token_id": 2},
        causal),
    "switch-transformers": of("SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 4,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, **EXPORTED}, pairs),
    "dinov2-registers": of("Dinov2WithRegistersForImageClassification", VISION, image()),
    "dinov3-convnext": of("DINOv3ConvNextModel", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
        lambda: {"pixel_values": randn(ROWS, 3, 32, 32)}),
    "efficientnet": of("EfficientNetForImageClassification", {"width_coefficient": 0.25, "depth_coefficient": 0.25,
        "hidden_dim": 64, "image_size": 64, "num_labels": CLASSES}, image(64)),
    "dpt": of("DPTForDepthEstimation", {**VISION, "image_size": 64, "neck_hidden_sizes": [16, 16, 32, 32],
        "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 16,
        "reassemble_factors": [2, 1, 1, 0.5]}, lambda: {"pixel_values": depths()["pixel_values"]}),
    "speech-to-text": of("Speech2TextForConditionalGeneration", {"vocab_size": WORDS, "d_model": 32,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "input_feat_per_channel": 16, "conv_channels": 32,
        "max_source_positions": 64, "max_target_positions": 64, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
        "decoder_start_token_id": 2, **IDS}, spectra),
    "imagegpt": of("ImageGPTForCausalImageModeling", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64}, pictures),
    "patchtsmixer": of("PatchTSMixerForPrediction", {"context_length": 32, "patch_length": 8, "patch_stride": 8,
        "num_input_channels": 2, "d_model": 16, "num_layers": 2, "prediction_length": 8}, series),
    "nystromformer": of("NystromformerForMaskedLM", {**ENCODER, "num_landmarks": 4, "segment_means_seq_len": LENGTH,
        "conv_kernel_size": 3}, masked),
    "roberta-prelayernorm": of("RobertaPreLayerNormForSequenceClassification", {**ENCODER, **IDS}, classes),
    "git": of("GitForCausalLM", {**ENCODER, **IDS, "vision_config": VISION}, captions),
}  # fmt: skip
