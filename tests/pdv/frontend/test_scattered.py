"""What values place is cut: features scattered into a sequence (`masked_scatter`), and rows sorted by their expert."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # defines the operator that is called below
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.emit.templates.kernels import operators
from pdv.emit.templates.kernels.operators import grouped_linear, routed_linear
from pdv.frontend.load import load_program
from pdv.frontend.torch.opaque import call_torch
from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.distributed.observed import observe_step
from tests.pdv.worlds import cluster

RANKS, BATCH, LENGTH, WIDTH, EXPERTS, IMAGE = 2, 8, 16, 32, 4, 99


class Scattered(nn.Module):
    """ids [b, 16], features of images [b, 4, 12] -> [b, 16, 32]: rows where the id is that of an image, or elements."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.vision, self.out = nn.Embedding(100, WIDTH), nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rows = rows

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        x = self.words(ids)
        mask = (ids == IMAGE).unsqueeze(-1)
        if not self.rows:
            mask = mask & (torch.arange(WIDTH) % 3 > 0)
        return self.out(torch.tanh(x.masked_scatter(mask.expand_as(x), self.vision(features))))  # type: ignore[no-any-return]


class Sorted(nn.Module):
    """[b, 16, 32] -> the same: two experts for each row, whose rows are sorted to lie together, and put back."""

    def __init__(self, *, numbered: bool = False, sorts_twice: bool = False, bins: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * 8 * WIDTH, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8 * WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)
        self.numbered, self.sorts_twice, self.bins = numbered, sorts_twice, bins

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        rows, product = x.reshape(-1, WIDTH), torch.ops.transformers.grouped_mm_fallback
        shares, ids = self.router(rows).softmax(-1).topk(2, -1)
        ordered, order = torch.sort((ids if chosen is None else chosen).flatten())
        counts = torch.histc(ordered.float(), bins=self.bins, min=0, max=self.bins - 1)[:EXPERTS]
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        numbers = torch.arange(len(rows)).unsqueeze(1).expand(-1, 2).reshape(-1)
        own = rows[numbers[order] if self.numbered else order // 2]
        gate, up = product(own, self.up.transpose(1, 2), ends).chunk(2, -1)
        y = product(F.silu(gate) * up, self.down.transpose(1, 2), ends) + self.bias[ordered]
        y = y * shares.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        back = torch.argsort(order) if self.sorts_twice else back
        return y[back].view(-1, 2, WIDTH).sum(1).view(x.shape)  # type: ignore[no-any-return]


def observed(module: nn.Module, inputs: tuple[Tensor, ...], technique: str, folder: Path) -> str:
    """The program's text, whose results and gradients on two ranks are those of the module."""
    pins = {"mesh": {"a": RANKS}, "techniques": {"a": technique}}
    plan = pdv.optimize(module, inputs, cluster=cluster(RANKS), mesh={"a": RANKS}, pins=pins)
    plan.save(folder)
    y = module(*inputs)
    torch.autograd.backward(y.square().sum() / BATCH)
    for (index, count), found, gradients in run_ranks(observe_step, RANKS, folder, *inputs):
        torch.testing.assert_close(found, y.detach().chunk(count)[index], rtol=1e-5, atol=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    return (folder / "model.py").read_text(encoding="utf-8")


@pytest.mark.distributed
@pytest.mark.parametrize("rows", [True, False])
def test_scattered_features_leave_the_batch_to_be_cut(rows: bool, tmp_path: Path) -> None:
    ids = torch.randint(0, IMAGE, (BATCH, LENGTH))
    for row, places in enumerate(((1, 2, 3, 4), (0, 5), (), (7, 8, 9, 10, 11, 12), (15,), (), (2,), (3, 4))):
        ids[row, list(places)] = IMAGE  # as many as an image has, and more, and fewer
    text = observed(Scattered(rows=rows), (ids, torch.randn(BATCH, 4, 12)), "ddp", tmp_path / "scattered")
    assert "aten.masked_scatter" not in text
    assert "[b/a, 16, 32]" in text


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:no declaration of aten.histc")  # counts and places: whole on every rank
def test_experts_of_sorted_rows_are_cut(tmp_path: Path) -> None:
    chosen = torch.randint(0, EXPERTS, (BATCH, 2 * LENGTH))  # they might be negative: all rows are sorted, then
    text = observed(Sorted(), (torch.randn(BATCH, LENGTH, WIDTH), chosen), "tensor", tmp_path / "sorted")
    assert "grouped_linear(" in text
    assert "/a]" in text


@pytest.mark.distributed
@pytest.mark.filterwarnings("error:no declaration of")
@pytest.mark.parametrize("technique", ["ddp", "tensor"])
def test_rows_that_are_sorted_back_are_not_sorted(technique: str, tmp_path: Path) -> None:
    text = observed(Sorted(), (torch.randn(BATCH, LENGTH, WIDTH),), technique, tmp_path / "sorted")
    assert "routed_linear(" in text
    assert "aten.sort" not in text
    assert ("[b/a, 16, 32]" if technique == "ddp" else "/a]") in text
    module, x = Sorted(), torch.randn(3, LENGTH, WIDTH)  # of another batch than planned
    model = import_package(tmp_path / "sorted").build(device="cpu")
    torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "is_told"),
    [
        (Sorted(), True),
        (Sorted(numbered=True), True),
        (Sorted(sorts_twice=True), True),
        (Sorted(bins=EXPERTS + 1), False),  # not counted as the products count them
    ],
)
def test_which_sorts_are_left_out(module: Sorted, is_told: bool) -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    program = load_program(module, (x,))
    names = [node.op.name for node in program.graph.nodes]
    assert names.count("routed_linear") == 2 * is_told
    assert names.count("grouped_linear") == 2 * (not is_told)
    values = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    found = evaluate(program.graph, {"x": x.numpy(), **values}, field=FloatField(foreign=call_torch)).gather()
    (y,) = found.values()
    torch.testing.assert_close(torch.as_tensor(y).float(), module(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_multiplied_by_their_own_matrix(dtype: torch.dtype) -> None:
    """Of numbers that no row has, and numbers that no matrix has."""
    x, matrices = torch.randn(16, 8, dtype=dtype), torch.randn(5, 8, 16, dtype=dtype)
    numbers = torch.tensor([4, 0, 2, -1, 2, 0, 5, 4, 4, 3, 0, 2, 9, 0, 3, 4])
    wanted = torch.stack(
        [row @ matrices[i] if 0 <= i < 5 else row.new_zeros(16) for row, i in zip(x, numbers.tolist(), strict=True)]
    )
    torch.testing.assert_close(routed_linear(x, matrices, numbers), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_grouped_rows_are_the_whole(dtype: torch.dtype) -> None:
    """Empty groups, one that two blocks share, and rows behind all groups."""
    x, matrices = torch.randn(16, 8, dtype=dtype), torch.randn(5, 8, 16, dtype=dtype)
    ends = torch.tensor([0, 3, 3, 11, 14])
    wanted = torch.zeros(16, 16, dtype=dtype)
    for start, end, matrix in zip([0, *ends.tolist()], ends.tolist(), matrices, strict=False):
        wanted[start:end] = x[start:end] @ matrix
    blocks = [grouped_linear(part, matrices, ends, block) for block, part in enumerate(x.chunk(4))]
    torch.testing.assert_close(torch.cat(blocks), wanted)
    torch.testing.assert_close(grouped_linear(x, matrices, ends), wanted)


def test_products_in_groups_are_checked_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks see float64 under the name of each floating type, and a kernel takes bfloat16 alone."""
    seen = types.ModuleType("torch")
    seen.__dict__.update({**vars(torch), "bfloat16": torch.float64})
    monkeypatch.setattr(operators, "torch", seen)
    x, matrices = torch.randn(16, 8, dtype=torch.float64), torch.randn(2, 8, 16, dtype=torch.float64)
    wanted = torch.cat([x[:6] @ matrices[0], x[6:] @ matrices[1]])
    torch.testing.assert_close(grouped_linear(x, matrices, torch.tensor([6, 16])), wanted)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 1), (1, 3, 2), (1, 1, 1, 1), (2, 1, 3, 1), (3, 2, 1, 2, 1)])
@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 4, 1)])
def test_repeats_are_read(times: tuple[int, ...], shape: tuple[int, ...]) -> None:
    class Repeated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(*times) * 2

    x = torch.randn(shape)
    program = load_program(Repeated(), (x,))
    assert not any(node.op.is_foreign for node in program.graph.nodes)
    found = evaluate(program.graph, {"x": x.numpy()}, field=FloatField()).gather()
    (y,) = found.values()
    torch.testing.assert_close(torch.as_tensor(y).float(), x.repeat(*times) * 2)
