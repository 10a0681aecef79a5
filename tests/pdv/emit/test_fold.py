"""In inference norms are folded into convolutions, and what depends on weights alone is computed when written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import pdv
from ir.builder import Builder
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.config import Mode
from pdv.emit.analysis.fold import fold, value_of
from pdv.emit.package import emit_package
from pdv.frontend.program import Weights
from pdv.plan.derivation import replay, to_steps
from pdv.plan.package import import_package
from pdv.rewrite.algebra import RULES
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution
from tests.pdv.worlds import cluster, f32, problem


def branches(widths: tuple[int, ...] = (4, 6)) -> Graph:
    """relu(norm(conv x)) in branches of one input, joined, and one more such layer."""
    k = Builder()

    def layer(name: str, x: Node, to: int, kernel: int) -> Node:
        weight = k.param(f"{name}.conv.weight", f32(to, x.type.shape[1], kernel, kernel))
        y = k.conv2d(x, weight, padding=(kernel // 2,) * 2)
        mean, variance = (k.param(f"{name}.norm.{part}", f32(to), trainable=False) for part in ("mean", "var"))
        affine = (k.param(f"{name}.norm.{part}", f32(to)) for part in ("weight", "bias"))
        return k.relu(k.batch_norm(y, mean, variance, *affine, eps=1e-3))

    x = k.input("x", f32(2, 3, 5, 5))
    parts = [layer(f"branch{i}", x, width, 1) for i, width in enumerate(widths)]
    return k.graph({"y": layer("last", k.concat(*parts, dim=1), 8, 3)}, name="branches")


def stored(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {p.attr("source"): rng.uniform(0.2, 1.0, size=p.type.shape).astype(np.float32) for p in graph.params}


@pytest.mark.parametrize("widths", [(4, 6), (4, 4, 4)])
def test_norms_are_folded_and_branches_fused(tmp_path: Path, widths: tuple[int, ...]) -> None:
    of = problem(branches(widths), Mesh(()), mode="infer", rules=RULES)
    solution = ChainSolver(of).solve()
    pcg = realize_solution(solution).derived.pcg
    steps = to_steps(solution)
    assert replay(of, steps).digest == pcg.digest
    verify_equal(of.graph, pcg, of.mesh, gradients=False)
    assert sum(node.op.name == "batch_norm" for node in pcg.nodes) == 0
    assert sum(node.op.name == "conv2d" for node in pcg.nodes) == 2
    values = stored(of.graph)
    weights = Weights({name: partial(values.__getitem__, name) for name in values})
    emit_package(pcg, of.mesh, {"mode": "infer"}, weights, tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert "rsqrt" not in text
    assert "torch.cat" not in text
    model = import_package(tmp_path).build(device="cpu")
    x = np.random.default_rng(1).normal(size=(2, 3, 5, 5)).astype(np.float32)
    y = model(torch.from_numpy(x)).detach().numpy()
    expected = evaluate(of.graph, {**values, "x": x}).gather()["y"]
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_the_caller_passes_is_not_folded() -> None:
    k = Builder()
    y = k.linear(k.input("x", f32(4, 6)), k.mul(k.param("w", f32(8, 6)), k.param("s", f32(8, 1))))
    graph = k.graph({"y": k.add(y, k.param("b", f32(8)))})
    values = stored(graph)
    small, computed = fold(graph, Mesh(()))
    weights = Weights({name: partial(values.__getitem__, name) for name in values})
    assert [node.op.name for node in small.nodes if not node.is_leaf] == ["linear", "add"]
    assert sorted(node.attr("source") for node in small.params) == ["b", "w.folded"]
    assert np.allclose(value_of(computed["w.folded"], weights), values["w"] * values["s"])


def test_a_parameter_may_be_called_like_what_is_computed() -> None:
    k = Builder()
    y = k.linear(k.input("x", f32(4, 6)), k.mul(k.param("w", f32(8, 6)), k.param("s", f32(8, 1))))
    graph = k.graph({"y": k.add(y, k.param("w.folded", f32(8)))})
    small, computed = fold(graph, Mesh(()))
    assert sorted(node.attr("source") for node in small.params) == ["w.folded", "w.folded_2"]
    assert sorted(computed) == ["w.folded_2"]


def test_a_buffer_that_moves_is_not_folded() -> None:
    k = Builder()
    x, buffer = k.input("x", f32(4, 8)), k.param("running", f32(8), trainable=False)
    moved = k.add(k.scale(buffer, factor=0.9), k.scale(k.reduce_mean(x, dims=(0,), keepdim=False), factor=0.1))
    graph = k.graph({"y": k.mul(x, k.scale(buffer, factor=2.0))}, {"running": moved})
    small, _ = fold(graph, Mesh(()))
    assert [node.attr("source") for node in small.params] == ["running"]


class Queries(torch.nn.Module):
    """Learned queries, copied for each row and seen by a layer before they meet the input (DETR, Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = torch.nn.Parameter(torch.randn(5, 1, 4))
        self.among, self.keys, self.out = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.repeat(1, x.shape[0], 1).transpose(0, 1)
        queries = queries + torch.tanh(self.among(queries))
        state = torch.tanh(self.among(torch.zeros(x.shape[0], 4))).unsqueeze(1)
        found = torch.softmax(queries @ self.keys(x).transpose(1, 2), -1) @ x + state
        return self.out(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_copies_for_each_row_are_not_folded(mode: Mode) -> None:
    torch.manual_seed(0)
    module = Queries()
    plan = pdv.optimize(module, (torch.randn(4, 6, 4),), cluster=cluster(2), mode=mode)
    assert plan.document["sizes"]["b"]["fixed_by"] == ""
    program = plan.build("cpu")
    for rows in (4, 7):
        x = torch.randn(rows, 6, 4)
        torch.testing.assert_close(program(x), module(x))
