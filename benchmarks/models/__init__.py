"""The fixed set of models that tests and benchmarks run on.

Each has random weights (fixed seed), takes plain tensors and returns one plain tensor, has no dropout and no cache, and
exists in two sizes: `small` for tests (every dim divides by 8 where the architecture lets it) and `full`, the
published size. Entry point: `build(name, size)`; models of which only shapes are read are in `shapes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.models.language import make_bert, make_bert_large, make_gpt2, make_llama, make_mixtral
from benchmarks.models.sizes import Built, Size, TensorTuple, images, token_ids
from benchmarks.models.tabular import make_candle_uno, make_dlrm, make_mlp, make_nasrnn, make_xdl
from benchmarks.models.vision import make_inception, make_resnet, make_resnext, make_squeezenet, make_vit

if TYPE_CHECKING:  # torch and transformers take seconds to import, so builders import them when called
    import torch

__all__ = ["MODELS", "BenchmarkModel", "Size", "TensorTuple", "build", "images", "token_ids"]


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """A named model. `make(size, batch)` returns (module, example inputs), seeded by the caller."""

    name: str
    make: Callable[[Size, int | None], Built]


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


MODELS: dict[str, BenchmarkModel] = {
    model.name: model
    for model in (
        BenchmarkModel("gpt2", make_gpt2),
        BenchmarkModel("llama", make_llama),
        BenchmarkModel("bert", make_bert),
        BenchmarkModel("vit", make_vit),
        BenchmarkModel("resnet50", make_resnet),
        BenchmarkModel("bert-large", make_bert_large),
        BenchmarkModel("mixtral", make_mixtral),
        BenchmarkModel("inception-v3", make_inception),
        BenchmarkModel("resnext50", make_resnext),
        BenchmarkModel("squeezenet", make_squeezenet),
        BenchmarkModel("dlrm", make_dlrm),
        BenchmarkModel("xdl", make_xdl),
        BenchmarkModel("candle-uno", make_candle_uno),
        BenchmarkModel("mlp", make_mlp),
        BenchmarkModel("nasrnn", make_nasrnn),
    )
}
