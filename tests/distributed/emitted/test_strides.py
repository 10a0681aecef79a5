"""Every parallel operator takes tensors and gradients of any strides: a tensor's layout is not part of its value.

Convolutions hand on channels-last tensors, attention permuted ones, a sum's gradient is an expanded scalar, a slice
starts in the middle of its memory, and a tensor of no elements has no memory at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Shard, Sharding
from ir.verify import infer_shardings
from pdv.emit.package import emit_package
from pdv.emit.templates.runtime import make_mesh
from pdv.frontend import load_program
from pdv.plan.package import import_package
from pdv.problem import Pins
from pdv.search.meshes import search_mesh
from tests.distributed.emitted.test_operators import Case, dual, value
from tests.distributed.harness import run_ranks
from tests.pdv.worlds import problem

pytestmark = pytest.mark.distributed

SHAPE = (2, 4, 6, 8)
DIMS = range(len(SHAPE))
CASES = [
    Case("replicate", (), "I", "R"),
    Case("reduce", (), "P", "I"),
    *(Case("partition", (d,), "I", f"S{d}") for d in DIMS),
    *(Case("combine", (d,), f"S{d}", "I") for d in DIMS),
    *(Case("all_gather", (d,), f"S{d}", "R") for d in DIMS),
    *(Case("reduce_scatter", (d,), "P", f"S{d}") for d in DIMS),
    *(Case("all_to_all", (i, j), f"S{i}", f"S{j}") for i in DIMS for j in DIMS if i != j),
]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda x: x.contiguous(),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "swapped": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "narrowed": lambda x: torch.cat([x, x], 2).narrow(2, x.size(2) // 2, x.size(2)),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, x.size(1), -1, -1),
    "one value": lambda x: x.flatten()[:1].view(1, 1, 1, 1).expand_as(x),
    "empty": lambda x: x[:, :, :0],
    "empty rows": lambda x: x.contiguous(memory_format=torch.channels_last)[:0],
}


def pieces(state: str, size: int, seed: int, layout: str) -> list[Tensor]:
    """What ``size`` ranks hold of a random tensor; its blocks are laid out, not the whole."""
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randint(-8, 9, SHAPE, generator=generator).double() for _ in range(size)]
    held = list(terms[0].chunk(size, int(state[1:]))) if state[0] == "S" else terms if state == "P" else terms[:1] * 2
    return [LAYOUTS[layout](piece) for piece in held]


def run_layouts() -> dict[tuple[str, str, Case], tuple[Tensor, Tensor]]:
    """Results and gradients, by the layouts of operand and gradient."""
    (axis,) = make_mesh({"tp": 2}, "cpu").axes
    results = {}
    for given in LAYOUTS:
        for back in LAYOUTS if given == "row-major" else (given, "row-major"):
            if ("empty" in given or "empty" in back) and given != back:
                continue  # a gradient has its value's shape
            for seed, case in enumerate(CASES):
                x = pieces(case.before, 2, seed, given)[axis.rank].requires_grad_()
                y = case(x, axis)
                y.backward(pieces(dual(case.after), 2, seed + 100, back)[axis.rank])
                assert x.grad is not None
                results[given, back, case] = y.detach(), x.grad
    return results


def test_operators_keep_value_and_gradient_in_any_layout() -> None:
    ranks = run_ranks(run_layouts, 2)
    assert len(ranks[0]) > 20 * len(CASES)
    for given, back, case in ranks[0]:
        results, gradients = zip(*[rank[given, back, case] for rank in ranks], strict=True)
        seed = CASES.index(case)
        x, grad = pieces(case.before, 2, seed, given), pieces(dual(case.after), 2, seed + 100, back)
        where = f"{case} of {given}, gradient {back}"
        assert torch.equal(value(case.after, list(results)), value(case.before, x)), where
        expected = value(dual(case.after), grad)
        assert torch.equal(value(dual(case.before), list(gradients)), expected), where


class Convnext(nn.Module):
    """A ConvNeXt block: depthwise convolution, a norm over channels moved last, two linears, and back."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


# how each operator is cut, so that what a convolution or a permute leaves is moved in every way there is
CUTS: dict[str, dict[str, str]] = {
    "all-to-all": {"conv2d": "S1", "layer_norm": "S2", "gelu": "S1"},
    "gather, scatter": {"conv2d": "S1", "layer_norm": "I", "gelu": "S3", "mul": "S2"},
    "rows": {"conv2d": "S0", "layer_norm": "S1", "gelu": "S3", "mul": "S0"},
}


def step(package: Path, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients, whole, of the emitted program on a channels-last batch."""
    model = import_package(package).build(device="cpu")
    x = x.contiguous(memory_format=torch.channels_last)
    output = model(x).detach()
    model.train_step(x, y, nn.functional.mse_loss)
    return output, model.full_gradients()


@pytest.mark.parametrize("cuts", CUTS)
def test_a_convnext_block_on_channels_last_images(cuts: str, tmp_path: Path) -> None:
    def allowed(node: Node, axis: str, split: Split) -> bool:
        return str(split.result) == CUTS[cuts].get(node.op.name, str(split.result))

    torch.manual_seed(0)
    module, x, y = Convnext(), torch.randn(4, 8, 8, 8), torch.randn(4, 8, 8, 8)
    program = load_program(module, (x,))
    of = problem(program.graph, Mesh.of(a=2), pins=Pins(split=allowed))
    pcg = search_mesh(of).pcg
    emit_package(pcg, of.mesh, {}, program.weights, tmp_path)
    expected = module(x)
    torch.autograd.backward(nn.functional.mse_loss(expected, y))
    for rank, (output, gradients) in enumerate(run_ranks(step, 2, tmp_path, x, y)):
        rows = expected.chunk(2)[rank] if Shard(0) in leaving(pcg, of.mesh) else expected
        torch.testing.assert_close(output, rows.detach(), rtol=1e-5, atol=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def leaving(pcg: Graph, mesh: Mesh) -> Sharding:
    """How the program's one output leaves it."""
    return infer_shardings(pcg, mesh)[pcg.outputs[0][1]]
