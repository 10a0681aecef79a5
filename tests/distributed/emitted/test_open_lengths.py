"""Transformers whose length is open, planned at one length on several axes, and trained at others: as the module."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.export import Dim

from benchmarks.measured.parity import load_package
from benchmarks.models.techniques import CONTEXT, TP_SP, ZERO_TP_8, Technique, forced_plan
from ir.mesh import Mesh
from pdv.check.imports import Texts
from pdv.check.ranks import World
from pdv.emit.package import emit_package
from pdv.frontend import load_program
from pdv.frontend.onnx.export import export_onnx
from pdv.frontend.program import Program
from pdv.planning.sizes import sizes_document
from tests.distributed.harness import mark_slow, run_ranks

pytestmark = pytest.mark.distributed
B, S, LONGEST, VOCABULARY = 4, 8, 32, 48
WIDE = Technique("dp+context-4", (("dp", 2), ("tp", 4)), context=True)
Step = tuple[Tensor, float, dict[str, Tensor]]
"""What a rank returns, the loss, gradients by stored name."""


class First(nn.Module):
    """Of what a model of transformers returns, the tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids).last_hidden_state
        return found


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=32, n_layer=2, n_head=4, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LONGEST, pad_token_id=None,
        ),
        add_pooling_layer=False,
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


@lru_cache(maxsize=1)
def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return First(MODELS[name]()).eval()


@lru_cache(maxsize=2)
def program_of(name: str, frontend: str, folder: Path) -> Program:
    module, ids = module_of(name), torch.zeros(B, S, dtype=torch.int64)
    shapes = {"ids": {0: Dim("batch"), 1: Dim("sequence", max=None if name == "llama" else LONGEST)}}
    if frontend == "export":
        return load_program(module, (ids,), dynamic_shapes=shapes)
    file = folder / f"{name}.onnx"
    export_onnx(module, (ids,), file, dynamic_shapes=shapes)
    return load_program(file, batch=B, dims={"sequence": S})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def emitted(name: str, frontend: str, technique: Technique, models: Path, folder: Path) -> Path:
    program = program_of(name, frontend, models)
    sizes = sizes_document(program)
    assert not any(entry["fixed_by"] for entry in sizes.values()), sizes
    package = folder / "length_pdv"
    package.mkdir()
    pcg = forced_plan(program.graph, technique)
    emit_package(pcg, technique.mesh, {"mode": "train", "sizes": sizes}, program.weights, package)
    return package


def data_of(module: nn.Module, rows: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(length)
    ids = torch.randint(VOCABULARY, (rows, length))
    return ids, torch.randn_like(module(ids))


def step_of_module(module: nn.Module, ids: Tensor, target: Tensor) -> Step:
    module.zero_grad()
    output = module(ids)
    loss = (output - target).square().sum() / len(ids)
    loss.backward()
    return output.detach(), loss.item(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def step_of_package(model: Any, ids: Tensor, target: Tensor) -> Step:
    kept: list[Tensor] = []

    def loss_fn(output: Tensor, wanted: Tensor) -> tuple[Tensor, int]:
        kept.append(output.detach())
        return (output - wanted.to(output.dtype)).square().sum(), len(output)

    model.zero_grad()
    loss = model.train_step(ids, target, loss_fn).item()
    return kept[0], loss, model.full_gradients()


def check(wanted: Step, found: Step, batch_axes: int, rank: int, tolerance: float) -> None:
    rows = wanted[0].chunk(batch_axes)[rank]
    torch.testing.assert_close(found[0].to(rows.dtype), rows, rtol=tolerance, atol=tolerance)
    assert abs(found[1] - wanted[1]) <= tolerance * wanted[1]
    largest = max(float(g.abs().max()) for g in wanted[2].values())
    assert {name for name, g in wanted[2].items() if g.abs().max() > 1e-6 * largest} <= found[2].keys()
    for name, gradient in found[2].items():
        want = wanted[2].get(name, torch.zeros(()))
        assert float((gradient - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-3 * largest), name


def on_simulated_ranks(package: Path, mesh: Mesh, ids: Tensor, target: Tensor) -> list[Step]:
    """A step on every rank of the mesh, in float64, in this process."""
    texts = Texts({path.name: path.read_text(encoding="utf-8") for path in package.glob("*.py")}, package)
    stored = {
        name: value.astype(np.float64) if value.dtype.kind == "f" else value
        for name, value in load_file(package / "weights.safetensors").items()
    }
    world: World[Step] = World(mesh.num_devices)

    def worker(rank: int) -> Step:
        with texts.import_model(world, rank, stored) as module:
            return step_of_package(module.build("cpu"), ids, target.double())

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return world.run(worker)
    finally:
        torch.set_default_dtype(before)


CASES = [
    ("gpt2", "export", CONTEXT), ("gpt2", "onnx", WIDE), ("llama", "export", WIDE), ("llama", "onnx", TP_SP),
    ("bert", "export", CONTEXT), ("bert", "onnx", ZERO_TP_8),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "frontend", "technique"),
    mark_slow(CASES, [CASES[0], *CASES[2:]]),
    ids=[f"{n}-{f}-{t.name}" for n, f, t in CASES],
)
def test_other_lengths_on_simulated_ranks(
    name: str, frontend: str, technique: Technique, folder: Path, tmp_path: Path
) -> None:
    package, module = emitted(name, frontend, technique, folder, tmp_path), module_of(name)
    cut = dict(technique.sizes).get("tp", 1)
    for rows, length in ((B, S), (2 * B, 2 * S), (B, S // 2), (B, 3 * cut)):
        ids, target = data_of(module, rows, length)
        wanted = step_of_module(module, ids, target)
        axes = dict(technique.sizes).get("dp", 1)
        for rank, found in enumerate(on_simulated_ranks(package, technique.mesh, ids, target)):
            check(wanted, found, axes, rank // cut, 1e-5)
    alone = load_package(package).build(device="cpu")
    for rows, length in ((3, S + 1), (1, 1), (B, LONGEST - 1)):
        ids, target = data_of(module, rows, length)
        check(step_of_module(module, ids, target), step_of_package(alone, ids, target), 1, 0, 1e-4)


def on_this_rank(package: Path, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Step], int, str]:
    torch.manual_seed(0)
    model = load_package(package).build(device="cpu")
    steps = [step_of_package(model, ids, target) for ids, target in batches]
    with pytest.raises(ValueError, match="wrong-size: sequence = 7 in the shapes") as error:
        model(torch.zeros(B, 7, dtype=torch.int64))
    return steps, model.mesh["dp"].rank, str(error.value)


def test_other_lengths_on_processes(folder: Path, tmp_path: Path) -> None:
    package, module = emitted("llama", "export", CONTEXT, folder, tmp_path), module_of("llama")
    batches = [data_of(module, rows, length) for rows, length in ((B, S), (2, 2 * S), (B, 6))]
    for steps, rank, error in run_ranks(on_this_rank, 4, package, batches):
        for (ids, target), found in zip(batches, steps, strict=True):
            check(step_of_module(module, ids, target), found, 2, rank, 1e-4)
        assert "This program takes sequence in multiples of 2: it is cut." in error
