"""More models of transformers, as `hub` has them: taken once the readers were written, and none of these looked at.

Entry point: ``FURTHER``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import rand, randint, randn

from benchmarks.coverage_runs.hub import (
    BART,
    CLASSES,
    CONV,
    DECODER,
    ENCODER,
    EXPORTED,
    IDS,
    LENGTH,
    ROWS,
    SAID,
    SPEECH,
    T5,
    VISION,
    WORDS,
    Built,
    answers,
    causal,
    classes,
    image,
    masked,
    of,
    pairs,
    text,
    waves,
)  # fmt: skip

_UNI = {
    **SPEECH, "num_ctc_classes": 32, "codevector_dim": 32, "num_codevectors_per_group": 8, "proj_codevector_dim": 32,
}  # fmt: skip


def boxes() -> dict[str, Any]:
    """Words with the places of their boxes, and a class each."""
    places = randint(0, 30, (ROWS, LENGTH, 4)).cumsum(-1).clamp(max=63)
    return {**text(), "bbox": places, "labels": randint(CLASSES, (ROWS, LENGTH))}


def pixels() -> dict[str, Any]:
    """Square images."""
    return {"pixel_values": randn(ROWS, 3, 32, 32)}


def film() -> dict[str, Any]:
    """Four images each, with a class."""
    return {"pixel_values": randn(ROWS, 4, 3, 32, 32), "labels": randint(CLASSES, (ROWS,))}


def depths() -> dict[str, Any]:
    """Square images with a distance at each point."""
    return {"pixel_values": randn(ROWS, 3, 64, 64), "labels": rand(ROWS, 64, 64) + 0.5}


def captions() -> dict[str, Any]:
    """Images and their captions, to be written."""
    return {**pixels(), **causal()}


def series() -> dict[str, Any]:
    """What was measured, and what will be."""
    return {"past_values": randn(ROWS, 32, 2), "future_values": randn(ROWS, 8, 2)}


FURTHER: Mapping[str, Callable[[], Built]] = {
    "funnel": of("FunnelForSequenceClassification", {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32,
        "n_head": 4, "d_head": 8, "d_inner": 64, "num_labels": CLASSES, "num_decoder_layers": 1, **SAID},
        classes),
    "canine": of("CanineForSequenceClassification", {**ENCODER, "downsampling_rate": 4,
        "local_transformer_stride": 8, "num_hash_buckets": 64, "num_hash_functions": 4,
        "upsampling_kernel_size": 4, **SAID}, classes),
    "perceiver": of("PerceiverForMaskedLM", {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "qk_channels": 32, "v_channels": 32, "vocab_size": WORDS, "max_position_embeddings": LENGTH}, masked),
    "data2vec-text": of("Data2VecTextForMaskedLM", {**ENCODER, **IDS}, masked),
    "data2vec-vision": of("Data2VecVisionForImageClassification", VISION, image()),
    "data2vec-audio": of("Data2VecAudioForSequenceClassification", {**SPEECH, "num_conv_pos_embeddings": 2,
        "conv_pos_kernel_size": 3}, waves),
    "sew": of("SEWForSequenceClassification", {**SPEECH, "squeeze_factor": 2}, waves),
    "wavlm": of("WavLMForSequenceClassification", SPEECH, waves),
    "unispeech": of("UniSpeechForSequenceClassification", _UNI, waves),
    "wav2vec2-conformer": of("Wav2Vec2ConformerForSequenceClassification", SPEECH, waves),
    "pvt": of("PvtForImageClassification", {"image_size": 64, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1,
        1, 1], "num_attention_heads": [1, 2, 2, 2], "num_labels": CLASSES}, image(64)),
    "pvt-v2": of("PvtV2ForImageClassification", {"image_size": 64, "hidden_sizes": [16, 32, 32, 32], "depths":
        [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2], "num_labels": CLASSES}, image(64)),
    "yolos": of("YolosModel", {**VISION, "image_size": [32, 32], "num_detection_tokens": 4}, pixels),
    "glpn": of("GLPNForDepthEstimation", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32],
        "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16}, depths),
    "focalnet": of("FocalNetForImageClassification", {"image_size": 32, "embed_dim": 16, "hidden_sizes": [16,
        32], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": CLASSES},
        image()),
    "rembert": of("RemBertForMaskedLM", {**ENCODER, "input_embedding_size": 16, "output_embedding_size": 32},
        masked),
    "xlnet": of("XLNetForSequenceClassification", {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head":
        4, "d_inner": 64, "num_labels": CLASSES, **SAID}, classes),
    "big-bird": of("BigBirdForMaskedLM", {**ENCODER, "attention_type": "original_full"}, masked),
    "convbert": of("ConvBertForMaskedLM", {**ENCODER, "embedding_size": 32, "conv_kernel_size": 3}, masked),
    "splinter": of("SplinterForQuestionAnswering", ENCODER, answers),
    "layoutlm": of("LayoutLMForTokenClassification", {**ENCODER, "max_2d_position_embeddings": 64}, boxes),
    "flaubert": of("FlaubertForSequenceClassification", {"vocab_size": WORDS, "emb_dim": 32, "n_layers": 2,
        "n_heads": 4, "num_labels": CLASSES, "max_position_embeddings": 64, "pad_index": 0, **SAID}, classes),
    "ctrl": of("CTRLLMHeadModel", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64,
        "n_positions": 64, **IDS}, causal, "CTRLConfig"),
    "openai-gpt": of("OpenAIGPTLMHeadModel", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64, **IDS}, causal),
    "megatron-bert": of("MegatronBertForMaskedLM", ENCODER, masked),
    "mobilebert": of("MobileBertForMaskedLM", {**ENCODER, "embedding_size": 32, "intra_bottleneck_size": 16},
        masked),
    "xmod": of("XmodForMaskedLM", {**ENCODER, "languages": ["en_XX"], "default_language": "en_XX", **IDS},
        masked),
    "nomic-bert": of("NomicBertForMaskedLM", ENCODER, masked),
    "plbart": of("PLBartForConditionalGeneration", BART, pairs),
    "longt5": of("LongT5ForConditionalGeneration", {**T5, "local_radius": 3}, pairs),
    "umt5": of("UMT5ForConditionalGeneration", T5, pairs),
    "pegasus-x": of("PegasusXForConditionalGeneration", {**BART, "block_size": 8, "num_global_tokens": 4},
        pairs),
    "mobilenet-v1": of("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 64,
        "num_labels": CLASSES}, image(64)),
    "mobilevit": of("MobileViTForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_attention_heads": 2, "num_labels": CLASSES},
        image(64)),
    "levit": of("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 32, 32],
        "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "drop_path_rate": 0,
        "num_labels": CLASSES}, image(64)),
    "bit": of("BitForImageClassification", {**CONV, "embedding_size": 16, "num_groups": 4, "layer_type":
        "bottleneck"}, image(64)),
    "swiftformer": of("SwiftFormerForImageClassification", {"image_size": 64, "embed_dims": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1], "num_labels": CLASSES}, image(64)),
    "hiera": of("HieraForImageClassification", {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 16,
        "depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2], "masked_unit_size": [4, 4],
        "num_query_pool": 1, "num_labels": CLASSES}, image()),
    "dinov3": of("DINOv3ViTModel", VISION, pixels),
    "ijepa": of("IJepaForImageClassification", VISION, image()),
    "vit-msn": of("ViTMSNForImageClassification", VISION, image()),
    "videomae": of("VideoMAEForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": 2}, film),
    "timesformer": of("TimesformerForVideoClassification", {**VISION, "num_frames": 4}, film),
    "blip": of("BlipForConditionalGeneration", {}, captions, "BlipConfig", text_config={**ENCODER, **IDS,
        "encoder_hidden_size": 32}, vision_config=VISION),
    "patchtst": of("PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 32, "patch_length": 8,
        "patch_stride": 8, "prediction_length": 8, "d_model": 32, "num_attention_heads": 4, "num_hidden_layers":
        2, "ffn_dim": 64}, series),
    "rwkv": of("RwkvForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2,
        "attention_hidden_size": 32, "intermediate_size": 64, "context_length": 64}, causal),
    "falcon-mamba": of("FalconMambaForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers":
        2, "state_size": 8, **IDS}, causal),
    "recurrent-gemma": of("RecurrentGemmaForCausalLM", {**DECODER, "lru_width": 32, "attention_window_size": 8,
        "head_dim": 8, "num_hidden_layers": 3}, causal),
    "deepseek-v3": of("DeepseekV3ForCausalLM", {**DECODER, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "kv_lora_rank":
        16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, **EXPORTED}, causal),
    "gpt-oss": of("GptOssForCausalLM", {**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok":
        2, "sliding_window": 8, **EXPORTED}, causal),
    "exaone4": of("Exaone4ForCausalLM", {**DECODER, "sliding_window": 8}, causal),
    "cohere2": of("Cohere2ForCausalLM", {**DECODER, "sliding_window": 8}, causal),
    "olmo3": of("Olmo3ForCausalLM", {**DECODER, "sliding_window": 8}, causal),
    "seed-oss": of("SeedOssForCausalLM", {**DECODER, "head_dim": 8}, causal),
    "diffllama": of("DiffLlamaForCausalLM", DECODER, causal),
    "helium": of("HeliumForCausalLM", {**DECODER, "head_dim": 8}, causal),
    "bitnet": of("BitNetForCausalLM", DECODER, causal),
    "qwen3-next": of("Qwen3NextForCausalLM", {**DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok":
        2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"], **EXPORTED}, causal),
    "lfm2": of("Lfm2ForCausalLM", {**DECODER, "layer_types": ["conv", "full_attention"], "block_multiple_of":
        8}, causal),
    "xlstm": of("xLSTMForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2,
        "num_heads": 2, "chunk_size": 8, **IDS}, causal),
}  # fmt: skip
