"""Models that torch's plain export of small sizes harms, as large as its optimizer leaves most parameters alone.

Two layers of 256 channels, rows of 128 tokens, images of 64 points; each parameter that is trained moved by noise, as
none is one number throughout once it was trained. Entry point: ``LARGER``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.coverage_runs.hub import (
    BART,
    CLASSES,
    DECODER,
    ENCODER,
    LENGTH,
    ROWS,
    SAID,
    SPEECH,
    T5,
    VISION,
    Built,
    causal,
    classes,
    image,
    masked,
    of,
    pairs,
    waves,
)

_WIDE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024, "max_position_embeddings": 512}
_DECODER, _ENCODER = DECODER | _WIDE, ENCODER | _WIDE
_BART = BART | {
    "vocab_size": 1024, "d_model": 256, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
    "max_position_embeddings": 512,
}  # fmt: skip
_T5 = T5 | {"vocab_size": 1024, "d_model": 256, "d_kv": 64, "d_ff": 1024}
_VISION = VISION | {"hidden_size": 256, "intermediate_size": 1024, "image_size": 64}
_SPEECH = SPEECH | {"hidden_size": 256, "intermediate_size": 1024, "conv_dim": (256, 256)}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], **SAID}
_STAGES = {"embed_dim": 64, "depths": [1, 1], "num_heads": [2, 4], "window_size": 8, "image_size": 64, "patch_size": 4}
_CONV = {"num_channels": 3, "hidden_sizes": [128, 256], "depths": [1, 1], "embedding_size": 64, "num_labels": CLASSES}


def _long(given: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Eight times as many tokens in each row."""
    return lambda: {name: x.repeat(1, 8) if x.shape[-1:] == (LENGTH,) else x for name, x in given().items()}


def _trained(build: Callable[[], Built]) -> Callable[[], Built]:
    """The model as after some training."""

    def moved() -> Built:
        module, inputs = build()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        return module, inputs

    return moved


def _whisper() -> Built:
    sizes = {"num_mel_bins": 80, "max_source_positions": 64, "max_target_positions": 64}
    module, _ = of("WhisperForConditionalGeneration", _BART, pairs, **sizes)()
    return module, {"input_features": torch.randn(ROWS, 80, 128), "labels": torch.randint(3, 96, (ROWS, 8))}


_BUILT: Mapping[str, Callable[[], Built]] = {
    "nemotron": of("NemotronForCausalLM", _DECODER, _long(causal), head_dim=64),
    "gpt-neox": of("GPTNeoXForCausalLM", _DECODER, _long(causal)),
    "deberta": of("DebertaForSequenceClassification", _ENCODER | _RELATIVE, _long(classes)),
    "deberta-v2": of("DebertaV2ForSequenceClassification", _ENCODER | _RELATIVE, _long(classes), position_buckets=64),
    "mpnet": of("MPNetForMaskedLM", _ENCODER, _long(masked)),
    "roformer": of("RoFormerForMaskedLM", _ENCODER, _long(masked), embedding_size=256),
    "t5": of("T5ForConditionalGeneration", _T5, _long(pairs)),
    "mt5": of("MT5ForConditionalGeneration", _T5, _long(pairs)),
    "pegasus": of("PegasusForConditionalGeneration", _BART, _long(pairs)),
    "marian": of("MarianMTModel", _BART, _long(pairs), "MarianConfig"),
    "deit": of("DeiTForImageClassification", _VISION, image(64)),
    "beit": of("BeitForImageClassification", _VISION, image(64)),
    "vit-mae": of(
        "ViTMAEForPreTraining",
        _VISION,
        lambda: {"pixel_values": torch.randn(ROWS, 3, 64, 64), "noise": torch.rand(ROWS, 64)},
        decoder_hidden_size=256,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=1024,
    ),
    "simmim": of(
        "ViTForMaskedImageModeling",
        _VISION,
        lambda: {"pixel_values": torch.randn(ROWS, 3, 64, 64), "bool_masked_pos": torch.rand(ROWS, 64) < 0.5},
        encoder_stride=8,
    ),
    "swin": of("SwinForImageClassification", _STAGES, image(64), num_labels=CLASSES),
    "swinv2": of("Swinv2ForImageClassification", _STAGES, image(64), num_labels=CLASSES),
    "resnet": of("ResNetForImageClassification", _CONV, image(64), layer_type="basic"),
    "regnet": of("RegNetForImageClassification", _CONV, image(64), groups_width=64),
    "mobilenet-v2": of("MobileNetV2ForImageClassification", {"num_labels": CLASSES, "image_size": 64}, image(64)),
    "segformer": of(
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [128, 256]},
        lambda: {
            "pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(CLASSES, (ROWS, 64, 64))
        },
        num_attention_heads=[2, 4],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[4, 4],
        decoder_hidden_size=256,
        num_labels=CLASSES,
    ),
    "wav2vec2": of("Wav2Vec2ForSequenceClassification", _SPEECH, waves),
    "hubert": of("HubertForSequenceClassification", _SPEECH, waves),
    "whisper": _whisper,
    "ast": of(
        "ASTForAudioClassification",
        _VISION,
        lambda: {"input_values": torch.randn(ROWS, 128, 64), "labels": torch.randint(CLASSES, (ROWS,))},
        max_length=128,
        num_mel_bins=64,
        frequency_stride=8,
        time_stride=8,
    ),
}  # fmt: skip

LARGER = {name: _trained(build) for name, build in _BUILT.items()}
