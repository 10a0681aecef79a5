"""Text of emitted decoders is that of transformers' own ``generate``, of weights that a training package saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdv
from ir.errors import UsageError
from pdv.loops.decoding import decoder_of
from pdv.loops.generate import generate
from pdv.loops.pretrained import load_pretrained
from tests.distributed.harness import mark_slow, run_ranks
from tests.distributed.loops.plans import build
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
POSITIONS, NEW = 12, 7
PROMPTS = torch.tensor([[5, 17, 3], [40, 2, 11], [7, 7, 7]])
SMALL: dict[str, Any] = {"vocab_size": 48, "tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": 0}
LAYERS = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 4},
    "llama": LAYERS,
    "qwen3": {**LAYERS, "head_dim": 4},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
WAYS: tuple[dict[str, Any], ...] = (
    {"sample": False},
    {"sample": True},
    {"sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8},
)


def source(kind: str) -> Any:
    """With weights that tell tokens apart; what is tied is tied."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **CONFIGS[kind])
    config.use_cache = False
    made: Any = (AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM).from_config(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def package(kind: str, mode: str, folder: Path) -> Path:
    """Two tensor parallel devices."""
    rows = torch.arange(4 * POSITIONS).reshape(4, POSITIONS) % 48
    inputs = {"input_ids": rows, **({"decoder_input_ids": rows} if kind == "t5" else {})}
    pins = {"mesh": {"tp": 2}, "techniques": {"tp": "tensor"}}
    return pdv.optimize(source(kind), inputs, cluster=cluster(2), mode=mode, pins=pins).save(folder / f"{mode}_pdv")


def train(built: Path, hugging_face: Path, out: Path) -> None:
    """A step from Hugging Face's own file; all weights are saved."""
    model = build(built)
    load_pretrained(hugging_face, model)
    rows = torch.arange(4 * POSITIONS).reshape(4, POSITIONS) % 48
    model.train_step(rows, rows, lambda logits, y: torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_safetensors(out)


def answers(built: Path, weights: Path, eos: int) -> list[Tensor]:
    """Text of each way, of one seed; the last ends at ``eos``."""
    model = build(built)
    load_pretrained(weights, model)
    assert decoder_of(model) is not None, "keys and values are kept"
    found = []
    for way in (*WAYS, {"eos": eos}):
        torch.manual_seed(3)
        found.append(generate(model, PROMPTS, NEW, **way))
    return found


def save_again(built: Path, weights: Path, out: Path) -> str:
    """Weights that went through a package for inference; why not, where it does not keep them."""
    model = build(built)
    load_pretrained(weights, model)
    try:
        model.save_safetensors(out, overwrite=True)
    except ValueError as error:
        return str(error)
    return ""


def own_answers(reference: Any, eos: int) -> list[Tensor]:
    """The same of transformers."""
    found = []
    for way in (*WAYS, {"eos": eos}):
        torch.manual_seed(3)
        warped = {key: way.get(key, value) for key, value in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))}
        named = {"do_sample": True, **warped} if way.get("sample") else {"do_sample": False}
        named |= {"attention_mask": torch.ones_like(PROMPTS), "max_new_tokens": NEW, "use_cache": True}
        found.append(reference.generate(PROMPTS, eos_token_id=way.get("eos"), pad_token_id=way.get("eos", 0), **named))
    return found


@pytest.mark.parametrize("kind", mark_slow(("gpt2", "llama", "qwen3"), slow={"llama", "qwen3"}))
def test_text_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    made, weights = source(kind), tmp_path / "trained"
    made.save_pretrained(tmp_path / "hugging_face")
    run_ranks(train, 2, package(kind, "train", tmp_path), tmp_path / "hugging_face", weights)
    made.config.save_pretrained(weights)
    reference = type(made).from_pretrained(weights).eval()
    eos = int(own_answers(reference, -1)[0][0, PROMPTS.size(1) + 2])
    wanted, built = own_answers(reference, eos), package(kind, "infer", tmp_path)
    assert len({tuple(text.flatten().tolist()) for text in wanted}) >= len(WAYS)
    for world in (1, 2):
        for found in run_ranks(answers, world, built, weights, eos):
            for text, own in zip(found, wanted, strict=True):
                assert torch.equal(text, own)
    refused = run_ranks(save_again, 2, built, weights, tmp_path / "again")
    if kind == "gpt2":  # rows of its table of positions were computed
        assert all("wpe.weight.folded was computed" in said for said in refused)
        assert not (tmp_path / "again").exists()
    else:
        made.config.save_pretrained(tmp_path / "again")
        again = type(made).from_pretrained(tmp_path / "again").state_dict()
        assert refused == ["", ""]
        assert all(torch.equal(again[name], tensor) for name, tensor in reference.state_dict().items())
    greedy = run_ranks(answers, 1, built, tmp_path / "hugging_face", eos)[0][0]  # Hugging Face's own file
    assert torch.equal(greedy, own_answers(made, eos)[0])


@pytest.mark.slow
def test_text_of_an_encoder_and_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="decoder_input_ids"):
        generate(build(package("t5", "infer", tmp_path)), PROMPTS, NEW)
