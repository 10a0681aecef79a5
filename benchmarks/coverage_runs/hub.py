"""Models of transformers, small, from their configurations, with the arguments that their users train them with.

Random weights, dropout as the configuration has it. Entry point: ``HUB``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

Built = tuple[torch.nn.Module, dict[str, Any]]
"""A module, and its keyword arguments in training."""

ROWS, LENGTH, WORDS, CLASSES = 4, 16, 96, 4
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **IDS,
}  # fmt: skip
ENCODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "num_labels": CLASSES, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, **IDS,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SPEECH = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": CLASSES,
    "apply_spec_augment": False, "layerdrop": 0.0,  # a layer that is run or not, by chance, is no one program
}  # fmt: skip
_ALL_LAYERS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
EXPORTED = {"experts_implementation": "batched_mm"}  # the others sort tokens by values, which no export can follow
SAID = {"problem_type": "single_label_classification"}  # else the kind of labels is found by their values
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, **EXPORTED}


def _mask() -> torch.Tensor:
    """Rows of several lengths, padded behind."""
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 6, LENGTH - 1])
    return (torch.arange(LENGTH)[None] < lengths[:, None]).long()


def _ids(words: int = WORDS) -> torch.Tensor:
    return torch.randint(3, words, (ROWS, LENGTH)) * _mask()


def text() -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": _mask()}


def causal() -> dict[str, Any]:
    """Padded rows; labels are the ids, -100 where they are padding."""
    given = text()
    return {**given, "labels": given["input_ids"].masked_fill(_mask() == 0, -100)}


def masked() -> dict[str, Any]:
    """Padded rows; most labels are -100."""
    given = text()
    return {**given, "labels": given["input_ids"].masked_fill(torch.rand(ROWS, LENGTH) < 0.7, -100)}


def classes() -> dict[str, Any]:
    """Padded rows, one label each."""
    return {**text(), "labels": torch.randint(CLASSES, (ROWS,))}


def pairs() -> dict[str, Any]:
    """Padded rows, and labels of another length."""
    return {**text(), "labels": torch.randint(3, WORDS, (ROWS, 8))}


def answers() -> dict[str, Any]:
    """Padded rows, and where an answer begins and ends."""
    return {**text(), "start_positions": torch.randint(8, (ROWS,)), "end_positions": torch.randint(8, (ROWS,))}


def image(size: int = 32) -> Callable[[], dict[str, Any]]:
    """Square images with a class each."""
    return lambda: {
        "pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(CLASSES, (ROWS,))
    }  # fmt: skip


def masked_image() -> dict[str, Any]:
    """Square images of which patches are hidden."""
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "bool_masked_pos": torch.rand(ROWS, 16) < 0.5}


def segments() -> dict[str, Any]:
    """Square images with a class at each point."""
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(CLASSES, (ROWS, 64, 64))}


def waves() -> dict[str, Any]:
    """Sound with a class each."""
    return {"input_values": torch.randn(ROWS, 800), "labels": torch.randint(CLASSES, (ROWS,))}


def contrast() -> dict[str, Any]:
    """Images and their captions."""
    return {**text(), "pixel_values": torch.randn(ROWS, 3, 32, 32), "return_loss": True}


def of(
    name: str, config: Mapping[str, Any], inputs: Callable[[], dict[str, Any]], configuration: str = "", **more: Any
) -> Callable[[], Built]:
    """A model by the names of its class and configuration: by default the class's name up to ``For``, or ``Model``."""

    def build() -> Built:
        import transformers

        owner = (
            configuration or re.split("For(?=[A-Z])", name)[0].removesuffix("Model").removesuffix("LMHead") + "Config"
        )
        made = getattr(transformers, owner)(**{**config, **more})
        return getattr(transformers, name)(made), inputs()

    return build


def _speech_to_text() -> Built:
    module, _ = of(
        "WhisperForConditionalGeneration",
        BART,
        pairs,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    )()
    return module, {"input_features": torch.randn(ROWS, 8, 32), "labels": torch.randint(3, WORDS, (ROWS, 8))}


def _two_towers(name: str, configuration: str) -> Callable[[], Built]:
    text = {**ENCODER, "projection_dim": 32, **IDS}
    return of(name, {}, contrast, configuration, text_config=text, vision_config=VISION, projection_dim=32)


def _no_projection(name: str, configuration: str) -> Callable[[], Built]:
    text = {**ENCODER, "max_position_embeddings": LENGTH, "projection_size": 32, **IDS}
    return of(name, {}, contrast, configuration, text_config=text, vision_config=VISION)


_ROPE_OF_PART = {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
_STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
CONV = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}

HUB: Mapping[str, Callable[[], Built]] = {
    # text, decoders
    "gpt2": of(
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS},
        causal,
    ),
    "llama": of("LlamaForCausalLM", DECODER, causal),
    "mistral": of("MistralForCausalLM", DECODER, causal, sliding_window=8),
    "qwen2": of("Qwen2ForCausalLM", DECODER, causal),
    "qwen3": of("Qwen3ForCausalLM", DECODER, causal, head_dim=8),
    "gemma": of("GemmaForCausalLM", DECODER, causal, head_dim=8),
    "gemma2": of("Gemma2ForCausalLM", DECODER, causal, head_dim=8, sliding_window=8),
    "gemma3": of("Gemma3ForCausalLM", DECODER, causal, "Gemma3TextConfig", head_dim=8, sliding_window=8),
    "phi": of("PhiForCausalLM", DECODER, causal),
    "phi3": of("Phi3ForCausalLM", DECODER, causal),
    "olmo": of("OlmoForCausalLM", DECODER, causal),
    "olmo2": of("Olmo2ForCausalLM", DECODER, causal),
    "cohere": of("CohereForCausalLM", DECODER, causal),
    "granite": of("GraniteForCausalLM", DECODER, causal),
    "stablelm": of("StableLmForCausalLM", DECODER, causal),
    "starcoder2": of("Starcoder2ForCausalLM", DECODER, causal),
    "smollm3": of("SmolLM3ForCausalLM", DECODER, causal),
    "glm": of("GlmForCausalLM", DECODER, causal, head_dim=8),
    "nemotron": of("NemotronForCausalLM", DECODER, causal, head_dim=8),
    "persimmon": of("PersimmonForCausalLM", DECODER, causal),
    "gpt-neox": of("GPTNeoXForCausalLM", DECODER, causal),
    "gpt-neo": of(
        "GPTNeoForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            **IDS,
        },
        causal,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "gpt-j": of("GPTJForCausalLM", {**_ROPE_OF_PART, **IDS}, causal),
    "codegen": of("CodeGenForCausalLM", {**_ROPE_OF_PART, **IDS}, causal),
    "gpt-bigcode": of(
        "GPTBigCodeForCausalLM",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS},
        causal,
    ),
    "opt": of("OPTForCausalLM", {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, causal),
    "bloom": of("BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, **IDS}, causal),
    "falcon": of("FalconForCausalLM", DECODER, causal),
    "mpt": of(
        "MptForCausalLM",
        {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **IDS},
        causal,
    ),
    "biogpt": of("BioGptForCausalLM", DECODER, causal),
    "xglm": of(
        "XGLMForCausalLM",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            **IDS,
        },
        causal,
    ),
    "mixtral": of("MixtralForCausalLM", DECODER, causal, **_MIXTURE),
    "qwen2-moe": of(
        "Qwen2MoeForCausalLM",
        DECODER,
        causal,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **EXPORTED,
    ),
    "olmoe": of("OlmoeForCausalLM", DECODER, causal, num_experts=4, num_experts_per_tok=2, **EXPORTED),
    "mamba": of(
        "MambaForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **IDS},
        causal,
    ),
    "mamba2": of(
        "Mamba2ForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            **IDS,
        },
        causal,
    ),
    # text, encoders
    "bert": of("BertForMaskedLM", ENCODER, masked),
    "bert-classes": of("BertForSequenceClassification", ENCODER, classes),
    "bert-answers": of("BertForQuestionAnswering", {**ENCODER, "num_labels": 2}, answers),
    "bert-tokens": of(
        "BertForTokenClassification", ENCODER, lambda: {**text(), "labels": torch.randint(CLASSES, (ROWS, LENGTH))}
    ),
    "roberta": of("RobertaForMaskedLM", ENCODER, masked),
    "xlm-roberta": of("XLMRobertaForSequenceClassification", ENCODER, classes),
    "distilbert": of(
        "DistilBertForSequenceClassification",
        {
            "vocab_size": WORDS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
        classes,
    ),
    "albert": of("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}, masked),
    "electra": of(
        "ElectraForPreTraining",
        {**ENCODER, "embedding_size": 16},
        lambda: {**text(), "labels": torch.randint(2, (ROWS, LENGTH))},
    ),
    "deberta": of(
        "DebertaForSequenceClassification",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], **SAID},
        classes,
    ),
    "deberta-v2": of(
        "DebertaV2ForSequenceClassification",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], **SAID, "position_buckets": 8},
        classes,
    ),
    "mpnet": of("MPNetForMaskedLM", ENCODER, masked),
    "modernbert": of("ModernBertForMaskedLM", {**ENCODER, **IDS, "cls_token_id": 1, "sep_token_id": 2}, masked),
    "roformer": of("RoFormerForMaskedLM", {**ENCODER, "embedding_size": 32}, masked),
    "squeezebert": of("SqueezeBertForSequenceClassification", {**ENCODER, "embedding_size": 32}, classes),
    "fnet": of("FNetForMaskedLM", ENCODER, lambda: {key: x for key, x in masked().items() if key != "attention_mask"}),
    "esm": of("EsmForMaskedLM", {**ENCODER, "mask_token_id": 3}, masked),
    # encoders with decoders
    "t5": of("T5ForConditionalGeneration", T5, pairs),
    "mt5": of("MT5ForConditionalGeneration", T5, pairs),
    "bart": of("BartForConditionalGeneration", BART, pairs),
    "mbart": of("MBartForConditionalGeneration", BART, pairs),
    "pegasus": of("PegasusForConditionalGeneration", BART, pairs),
    "marian": of("MarianMTModel", BART, pairs, "MarianConfig"),
    "m2m-100": of("M2M100ForConditionalGeneration", {**BART, **_ALL_LAYERS}, pairs),
    "blenderbot": of("BlenderbotForConditionalGeneration", BART, pairs),
    # vision
    "vit": of("ViTForImageClassification", VISION, image()),
    "deit": of("DeiTForImageClassification", VISION, image()),
    "beit": of("BeitForImageClassification", VISION, image()),
    "dinov2": of("Dinov2ForImageClassification", VISION, image()),
    "vit-mae": of(
        "ViTMAEForPreTraining",
        {
            **VISION,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
        lambda: {"pixel_values": torch.randn(ROWS, 3, 32, 32), "noise": torch.rand(ROWS, 16)},
    ),
    "simmim": of("ViTForMaskedImageModeling", {**VISION, "encoder_stride": 8}, masked_image),
    "swin": of("SwinForImageClassification", {**_STAGES, "num_labels": CLASSES}, image()),
    "swinv2": of("Swinv2ForImageClassification", {**_STAGES, "num_labels": CLASSES}, image()),
    "convnext": of("ConvNextForImageClassification", {**CONV, "num_stages": 2}, image()),
    "convnextv2": of("ConvNextV2ForImageClassification", {**CONV, "num_stages": 2}, image()),
    "resnet": of("ResNetForImageClassification", {**CONV, "embedding_size": 16, "layer_type": "basic"}, image()),
    "regnet": of("RegNetForImageClassification", {**CONV, "embedding_size": 16, "groups_width": 8}, image(64)),
    "mobilenet-v2": of(
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "num_labels": CLASSES, "image_size": 64},
        image(64),
    ),
    "segformer": of(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
            "num_labels": CLASSES,
        },
        segments,
    ),
    "poolformer": of(
        "PoolFormerForImageClassification",
        {
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "num_labels": CLASSES,
        },
        image(),
    ),
    # speech
    "wav2vec2": of("Wav2Vec2ForSequenceClassification", SPEECH, waves),
    "hubert": of("HubertForSequenceClassification", SPEECH, waves),
    "whisper": _speech_to_text,
    "ast": of(
        "ASTForAudioClassification",
        {**VISION, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(ROWS, 32, 16), "labels": torch.randint(CLASSES, (ROWS,))},
    ),
    # images and text
    "clip": _two_towers("CLIPModel", "CLIPConfig"),
    "siglip": _no_projection("SiglipModel", "SiglipConfig"),
}
