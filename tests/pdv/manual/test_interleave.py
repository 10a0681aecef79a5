"""Products read with heads outermost compute the same, and can be cut by columns."""

from __future__ import annotations

import numpy as np

from ir.evaluation.interpret import evaluate
from ir.types import DType
from ir.verify import infer_shardings
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.manual.configuration import configuration, workload
from pdv.manual.interleave import heads_outermost

from .test_configuration import LAYERS, cluster, moves

GPT = arch("gpt:layers=3,hidden=64,heads=8,seq=16,vocab=128")


def test_the_function_is_the_same() -> None:
    made = graph(GPT, 2, layout="exported")
    turned = heads_outermost(made)
    assert turned.digest != made.digest
    rng = np.random.default_rng(0)
    shapes = {node.attr("source"): node.type.shape for node in made.params}
    weights = {name: rng.standard_normal(shape) * 0.1 for name, shape in shapes.items()}
    values = {**weights, "input_ids": rng.integers(0, 128, (2, 16))}
    one, other = (np.asarray(evaluate(entry, values).gather()["logits"]) for entry in (made, turned))
    np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)


def test_an_exported_model_runs_megatrons_plan() -> None:
    work = workload(
        lambda batch: graph(GPT, batch, DType.BF16, layout="exported"),
        configuration("tp=2"),
        cluster(2),
        lambda device: ComputeModel((device,)),
        stage_links,
    )
    infer_shardings(work.pcg, work.problem.mesh)
    # the position embedding is looked up on every rank alike
    assert moves(work) == {("reduce", "tp"): 2 * LAYERS + 1, ("replicate", "tp"): 2 * LAYERS + 1}


def test_nothing_to_do() -> None:
    made = graph(GPT, 2)
    assert heads_outermost(made) is made
