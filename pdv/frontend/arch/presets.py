"""Known models by name: kind, sizes as published, and where."""

from __future__ import annotations

from collections.abc import Mapping

Preset = tuple[str, Mapping[str, int], str]


def _gpt3(layers: int, hidden: int, heads: int, source: str = "Brown et al. 2020, table 2.1") -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 50257}
    return "gpt", sizes, source


def _megatron(layers: int, hidden: int, heads: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200}
    return "gpt", sizes, "Narayanan et al., SC'21, table 1"


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 1024, "vocab": 50257}
    return "gpt", sizes, "Radford et al. 2019, table 2; huggingface.co/openai-community config.json"


def _bert(layers: int, hidden: int, heads: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 512, "vocab": 30522}
    return "bert", sizes, "Devlin et al. 2019, section 3; huggingface.co/google-bert config.json"


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, *, kv: int, seq: int, vocab: int, source: str, tied: int = 0
) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "seq": seq, "vocab": vocab}
    return "llama", {**sizes, "kv_heads": kv, "tied": tied}, source


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, seq: int, vocab: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "seq": seq, "vocab": vocab}
    return "mixtral", {**sizes, "kv_heads": 8, "experts": 8, "topk": 2}, "huggingface.co/mistralai config.json"


LLAMA_2 = "Touvron et al. 2023 (Llama 2), table 1; huggingface.co/meta-llama config.json"
LLAMA_3 = "Grattafiori et al. 2024 (Llama 3), table 3; huggingface.co/meta-llama config.json"

PRESETS: Mapping[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40, "Brown et al. 2020, table 2.1 (5,140 there; 40 heads of 128 are 5,120)"),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "gpt-22b": ("gpt", _megatron(48, 6144, 64)[1], "Korthikanti et al., MLSys'23, table 3"),
    "gpt-145b": _megatron(80, 12288, 96),
    "gpt-310b": _megatron(96, 16384, 128),
    "gpt-530b": _megatron(105, 20480, 128),
    "gpt-1t": _megatron(128, 25600, 160),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "llama-2-7b": _llama(32, 4096, 32, 11008, kv=32, seq=4096, vocab=32000, source=LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 13824, kv=40, seq=4096, vocab=32000, source=LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 28672, kv=8, seq=4096, vocab=32000, source=LLAMA_2),
    "llama-3-8b": _llama(32, 4096, 32, 14336, kv=8, seq=8192, vocab=128256, source=LLAMA_3),
    "llama-3-70b": _llama(80, 8192, 64, 28672, kv=8, seq=8192, vocab=128256, source=LLAMA_3),
    "llama-3-405b": _llama(126, 16384, 128, 53248, kv=8, seq=8192, vocab=128256, source=LLAMA_3),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, kv=8, seq=8192, vocab=128256, source=LLAMA_3, tied=1),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 4096, 32000),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 4096, 32000),
}
ALIASES = {"gpt3": "gpt3-175b", "gpt2-124m": "gpt2", "llama-3.1-405b": "llama-3-405b", "mixtral-8x7": "mixtral-8x7b"}
