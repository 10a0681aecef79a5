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
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **_IDS,
}  # fmt: skip
_ENCODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "num_labels": CLASSES, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, **_IDS,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_SPEECH = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": CLASSES,
    "apply_spec_augment": False, "layerdrop": 0.0,  # a layer that is run or not, by chance, is no one program
}  # fmt: skip
_ALL_LAYERS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_EXPORTED = {"experts_implementation": "batched_mm"}  # the others sort tokens by values, which no export can follow
_SAID = {"problem_type": "single_label_classification"}  # else the kind of labels is found by their values
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, **_EXPORTED}


def _mask() -> torch.Tensor:
    """Rows of several lengths, padded behind."""
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 6, LENGTH - 1])
    return (torch.arange(LENGTH)[None] < lengths[:, None]).long()


def _ids(words: int = WORDS) -> torch.Tensor:
    return torch.randint(3, words, (ROWS, LENGTH)) * _mask()


def _text() -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": _mask()}


def causal() -> dict[str, Any]:
    """Padded rows; labels are the ids, -100 where they are padding."""
    text = _text()
    return {**text, "labels": text["input_ids"].masked_fill(_mask() == 0, -100)}


def masked() -> dict[str, Any]:
    """Padded rows; most labels are -100."""
    text = _text()
    return {**text, "labels": text["input_ids"].masked_fill(torch.rand(ROWS, LENGTH) < 0.7, -100)}


def classes() -> dict[str, Any]:
    """Padded rows, one label each."""
    return {**_text(), "labels": torch.randint(CLASSES, (ROWS,))}


def pairs() -> dict[str, Any]:
    """Padded rows, and labels of another length."""
    return {**_text(), "labels": torch.randint(3, WORDS, (ROWS, 8))}


def answers() -> dict[str, Any]:
    """Padded rows, and where an answer begins and ends."""
    return {**_text(), "start_positions": torch.randint(8, (ROWS,)), "end_positions": torch.randint(8, (ROWS,))}


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
    return {**_text(), "pixel_values": torch.randn(ROWS, 3, 32, 32), "return_loss": True}


def _of(
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
    module, _ = _of(
        "WhisperForConditionalGeneration",
        _BART,
        pairs,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    )()
    return module, {"input_features": torch.randn(ROWS, 8, 32), "labels": torch.randint(3, WORDS, (ROWS, 8))}


def _two_towers(name: str, configuration: str) -> Callable[[], Built]:
    text = {**_ENCODER, "projection_dim": 32, **_IDS}
    return _of(name, {}, contrast, configuration, text_config=text, vision_config=_VISION, projection_dim=32)


def _no_projection(name: str, configuration: str) -> Callable[[], Built]:
    text = {**_ENCODER, "max_position_embeddings": LENGTH, "projection_size": 32, **_IDS}
    return _of(name, {}, contrast, configuration, text_config=text, vision_config=_VISION)


_ROPE_OF_PART = {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
_STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
_CONV = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}

HUB: Mapping[str, Callable[[], Built]] = {
    # text, decoders
    "gpt2": _of(
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_IDS},
        causal,
    ),
    "llama": _of("LlamaForCausalLM", _DECODER, causal),
    "mistral": _of("MistralForCausalLM", _DECODER, causal, sliding_window=8),
    "qwen2": _of("Qwen2ForCausalLM", _DECODER, causal),
    "qwen3": _of("Qwen3ForCausalLM", _DECODER, causal, head_dim=8),
    "gemma": _of("GemmaForCausalLM", _DECODER, causal, head_dim=8),
    "gemma2": _of("Gemma2ForCausalLM", _DECODER, causal, head_dim=8, sliding_window=8),
    "gemma3": _of("Gemma3ForCausalLM", _DECODER, causal, "Gemma3TextConfig", head_dim=8, sliding_window=8),
    "phi": _of("PhiForCausalLM", _DECODER, causal),
    "phi3": _of("Phi3ForCausalLM", _DECODER, causal),
    "olmo": _of("OlmoForCausalLM", _DECODER, causal),
    "olmo2": _of("Olmo2ForCausalLM", _DECODER, causal),
    "cohere": _of("CohereForCausalLM", _DECODER, causal),
    "granite": _of("GraniteForCausalLM", _DECODER, causal),
    "stablelm": _of("StableLmForCausalLM", _DECODER, causal),
    "starcoder2": _of("Starcoder2ForCausalLM", _DECODER, causal),
    "smollm3": _of("SmolLM3ForCausalLM", _DECODER, causal),
    "glm": _of("GlmForCausalLM", _DECODER, causal, head_dim=8),
    "nemotron": _of("NemotronForCausalLM", _DECODER, causal, head_dim=8),
    "persimmon": _of("PersimmonForCausalLM", _DECODER, causal),
    "gpt-neox": _of("GPTNeoXForCausalLM", _DECODER, causal),
    "gpt-neo": _of(
        "GPTNeoForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            **_IDS,
        },
        causal,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "gpt-j": _of("GPTJForCausalLM", {**_ROPE_OF_PART, **_IDS}, causal),
    "codegen": _of("CodeGenForCausalLM", {**_ROPE_OF_PART, **_IDS}, causal),
    "gpt-bigcode": _of(
        "GPTBigCodeForCausalLM",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_IDS},
        causal,
    ),
    "opt": _of("OPTForCausalLM", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, causal),
    "bloom": _of(
        "BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_IDS}, causal
    ),
    "falcon": _of("FalconForCausalLM", _DECODER, causal),
    "mpt": _of(
        "MptForCausalLM",
        {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **_IDS},
        causal,
    ),
    "biogpt": _of("BioGptForCausalLM", _DECODER, causal),
    "xglm": _of(
        "XGLMForCausalLM",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            **_IDS,
        },
        causal,
    ),
    "mixtral": _of("MixtralForCausalLM", _DECODER, causal, **_MIXTURE),
    "qwen2-moe": _of(
        "Qwen2MoeForCausalLM",
        _DECODER,
        causal,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **_EXPORTED,
    ),
    "olmoe": _of("OlmoeForCausalLM", _DECODER, causal, num_experts=4, num_experts_per_tok=2, **_EXPORTED),
    "mamba": _of(
        "MambaForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **_IDS},
        causal,
    ),
    "mamba2": _of(
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
            **_IDS,
        },
        causal,
    ),
    # text, encoders
    "bert": _of("BertForMaskedLM", _ENCODER, masked),
    "bert-classes": _of("BertForSequenceClassification", _ENCODER, classes),
    "bert-answers": _of("BertForQuestionAnswering", {**_ENCODER, "num_labels": 2}, answers),
    "bert-tokens": _of(
        "BertForTokenClassification", _ENCODER, lambda: {**_text(), "labels": torch.randint(CLASSES, (ROWS, LENGTH))}
    ),
    "roberta": _of("RobertaForMaskedLM", _ENCODER, masked),
    "xlm-roberta": _of("XLMRobertaForSequenceClassification", _ENCODER, classes),
    "distilbert": _of(
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
    "albert": _of("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, masked),
    "electra": _of(
        "ElectraForPreTraining",
        {**_ENCODER, "embedding_size": 16},
        lambda: {**_text(), "labels": torch.randint(2, (ROWS, LENGTH))},
    ),
    "deberta": _of(
        "DebertaForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], **_SAID},
        classes,
    ),
    "deberta-v2": _of(
        "DebertaV2ForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], **_SAID, "position_buckets": 8},
        classes,
    ),
    "mpnet": _of("MPNetForMaskedLM", _ENCODER, masked),
    "modernbert": _of("ModernBertForMaskedLM", {**_ENCODER, **_IDS, "cls_token_id": 1, "sep_token_id": 2}, masked),
    "roformer": _of("RoFormerForMaskedLM", {**_ENCODER, "embedding_size": 32}, masked),
    "squeezebert": _of("SqueezeBertForSequenceClassification", {**_ENCODER, "embedding_size": 32}, classes),
    "fnet": _of(
        "FNetForMaskedLM", _ENCODER, lambda: {key: x for key, x in masked().items() if key != "attention_mask"}
    ),
    "esm": _of("EsmForMaskedLM", {**_ENCODER, "mask_token_id": 3}, masked),
    # encoders with decoders
    "t5": _of("T5ForConditionalGeneration", _T5, pairs),
    "mt5": _of("MT5ForConditionalGeneration", _T5, pairs),
    "bart": _of("BartForConditionalGeneration", _BART, pairs),
    "mbart": _of("MBartForConditionalGeneration", _BART, pairs),
    "pegasus": _of("PegasusForConditionalGeneration", _BART, pairs),
    "marian": _of("MarianMTModel", _BART, pairs, "MarianConfig"),
    "m2m-100": _of("M2M100ForConditionalGeneration", {**_BART, **_ALL_LAYERS}, pairs),
    "blenderbot": _of("BlenderbotForConditionalGeneration", _BART, pairs),
    # vision
    "vit": _of("ViTForImageClassification", _VISION, image()),
    "deit": _of("DeiTForImageClassification", _VISION, image()),
    "beit": _of("BeitForImageClassification", _VISION, image()),
    "dinov2": _of("Dinov2ForImageClassification", _VISION, image()),
    "vit-mae": _of(
        "ViTMAEForPreTraining",
        {
            **_VISION,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
        lambda: {"pixel_values": torch.randn(ROWS, 3, 32, 32), "noise": torch.rand(ROWS, 16)},
    ),
    "simmim": _of("ViTForMaskedImageModeling", {**_VISION, "encoder_stride": 8}, masked_image),
    "swin": _of("SwinForImageClassification", {**_STAGES, "num_labels": CLASSES}, image()),
    "swinv2": _of("Swinv2ForImageClassification", {**_STAGES, "num_labels": CLASSES}, image()),
    "convnext": _of("ConvNextForImageClassification", {**_CONV, "num_stages": 2}, image()),
    "convnextv2": _of("ConvNextV2ForImageClassification", {**_CONV, "num_stages": 2}, image()),
    "resnet": _of("ResNetForImageClassification", {**_CONV, "embedding_size": 16, "layer_type": "basic"}, image()),
    "regnet": _of("RegNetForImageClassification", {**_CONV, "embedding_size": 16, "groups_width": 8}, image(64)),
    "mobilenet-v2": _of(
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "num_labels": CLASSES, "image_size": 64},
        image(64),
    ),
    "segformer": _of(
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
    "poolformer": _of(
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
    "wav2vec2": _of("Wav2Vec2ForSequenceClassification", _SPEECH, waves),
    "hubert": _of("HubertForSequenceClassification", _SPEECH, waves),
    "whisper": _speech_to_text,
    "ast": _of(
        "ASTForAudioClassification",
        {**_VISION, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(ROWS, 32, 16), "labels": torch.randint(CLASSES, (ROWS,))},
    ),
    # images and text
    "clip": _two_towers("CLIPModel", "CLIPConfig"),
    "siglip": _no_projection("SiglipModel", "SiglipConfig"),
}
