"""A package whose query, key and value are one product: the same outputs, gradients and state as the source's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ir.builder import Builder
from ir.evaluation.interpret import evaluate
from ir.graph import Graph
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.emit.package import emit_package
from pdv.frontend.program import Weights
from pdv.plan.derivation import replay, to_steps
from pdv.plan.package import import_package
from pdv.rewrite.algebra import RULES
from pdv.search import refine
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution
from tests.pdv.emit.graphs import emitted
from tests.pdv.worlds import f32, problem

WIDTH, HEADS = 24, 4


def encoder(layers: int = 2, kv: int = WIDTH) -> Graph:
    """Attention layers whose query, key and value are products with biases of their own, as in BERT."""
    k = Builder()
    h = k.input("x", f32(2, 6, WIDTH))
    for i in range(layers):
        parts = []
        for name, size in (("query", WIDTH), ("key", kv), ("value", kv)):
            weight, bias = f"layer.{i}.{name}.weight", f"layer.{i}.{name}.bias"
            part = k.add(k.linear(h, k.param(weight, f32(size, WIDTH))), k.param(bias, f32(size)))
            part = k.reshape(part, shape=(2, 6, size * HEADS // WIDTH, WIDTH // HEADS))
            parts.append(k.permute(part, perm=(0, 2, 1, 3)))
        if kv < WIDTH:
            parts[1:] = [k.concat(part, part, dim=1) for part in parts[1:]]
        a = k.attention(*parts, scale=0.4)
        a = k.reshape(k.permute(a, perm=(0, 2, 1, 3)), shape=(2, 6, WIDTH))
        h = k.tanh(k.add(h, k.linear(a, k.param(f"layer.{i}.out.weight", f32(WIDTH, WIDTH)))))
    return k.graph({"y": h}, name="encoder")


def stored(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {p.attr("source"): rng.normal(size=p.type.shape, scale=0.3).astype(np.float32) for p in graph.params}


@pytest.mark.parametrize("kv", [WIDTH, WIDTH // 2])
def test_joined_parameters_run_train_and_are_saved_as_the_source_has_them(
    tmp_path: Path, kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refine, "REWRITE_GAIN", 0.0)  # of so small a model joining saves next to nothing
    of = problem(encoder(kv=kv), Mesh(()), rules=RULES)
    solution = ChainSolver(of).solve()
    pcg = realize_solution(solution).derived.pcg
    steps = to_steps(solution)
    assert {step["rule"] for step in steps} & {"fuse-three-biased-linears", "fuse-biased-linears"}
    assert replay(of, steps).digest == pcg.digest
    verify_equal(of.graph, pcg, of.mesh)
    values = stored(of.graph)
    weights = Weights({name: partial(values.__getitem__, name) for name in values})
    emit_package(pcg, of.mesh, {}, weights, tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert "join(0, " in text
    split = "q, k, v = h.chunk(3, dim=2)" if kv == WIDTH else "k, v = k.split(12, dim=2)"
    assert split in text
    model = import_package(tmp_path).build(device="cpu")
    x = np.random.default_rng(1).normal(size=(2, 6, WIDTH)).astype(np.float32)
    y = model(torch.from_numpy(x))
    y.square().sum().backward()
    reference = evaluate(of.graph, {**values, "x": x})
    expected = reference.gather()["y"]
    assert np.abs(y.detach().numpy() - expected).max() <= 1e-5 * np.abs(expected).max()
    gradients = reference.gather_gradients({"y": 2 * expected})
    found = model.full_gradients()
    assert set(found) == set(values)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())  # that of a key's bias is zero
    for name, gradient in gradients.items():
        assert np.abs(found[name].numpy() - gradient).max() <= 1e-5 * largest
    for name, tensor in model.full_state_dict().items():
        assert np.array_equal(tensor.numpy(), values[name])


@pytest.mark.parametrize("ranges", [((0, 4), (4, 10)), ((0, 4), (3, 10)), ((1, 4), (4, 10)), ((0, 4), (4, 9))])
def test_slices_are_taken_one_by_one_unless_they_are_all_of_a_value_once(
    ranges: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    k = Builder()
    h = k.tanh(k.input("x", f32(3, 10)))
    outputs = {f"y{start}": k.exp(k.slice(h, dim=1, start=start, stop=stop)) for start, stop in ranges}
    text = emitted(k.graph(outputs), Mesh(()), tmp_path)
    are_all = ranges == ((0, 4), (4, 10))
    assert ((".split((4, 6), dim=1)" in text), ("narrow(" in text)) == (are_all, not are_all)
