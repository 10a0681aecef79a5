"""A plan whose query, key and value are one parameter, on two processes: as on one, and saved as the source has it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ir.mesh import Mesh
from ir.sharding import Invariant, Shard
from pdv.emit.package import emit_package
from pdv.frontend.program import Weights
from pdv.plan.package import import_package
from pdv.problem import Pins
from pdv.rewrite.algebra import RULES
from pdv.search.chain import ChainSolver
from pdv.search.meshes import realize_solution
from tests.distributed.harness import run_ranks
from tests.pdv.emit.test_joined import WIDTH, encoder, stored
from tests.pdv.worlds import problem

pytestmark = pytest.mark.distributed
Result = tuple[float, dict[str, Tensor], dict[str, Tensor]]


def step(package: Path) -> Result:
    """One step from the stored weights: the loss, gradients and weights, whole and by their stored names."""
    model = import_package(package).build(device="cpu")
    rng = np.random.default_rng(1)
    x, y = (torch.from_numpy(rng.normal(size=(2, 6, WIDTH)).astype(np.float32)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model.train_step(x, y, mse_loss).item()
    gradients = model.full_gradients()
    optimizer.step()
    return loss, gradients, model.full_state_dict()


@pytest.mark.parametrize("storage", ["whole", "cut"])
def test_a_joined_parameter_on_two_processes(tmp_path: Path, storage: str) -> None:
    state = {"whole": Invariant(), "cut": Shard(0)}[storage]
    pins = Pins(
        split=lambda node, axis, split: split.loop is None or split.result == Shard(0),
        storage=lambda param, axis, rests: rests == state,
    )
    of = problem(encoder(), Mesh.of(a=2), rules=RULES, pins=pins)
    pcg = realize_solution(ChainSolver(of).solve()).derived.pcg
    values = stored(of.graph)
    weights = Weights({name: partial(values.__getitem__, name) for name in values})
    emit_package(pcg, of.mesh, {}, weights, tmp_path)
    assert "join(0, " in (tmp_path / "model.py").read_text()
    expected = step(tmp_path)
    assert set(expected[1]) == set(values)
    for result in run_ranks(step, 2, tmp_path):
        assert result[0] == pytest.approx(expected[0], rel=1e-6)
        largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
        for name in values:
            assert float((result[1][name] - expected[1][name]).abs().max()) <= 1e-5 * largest
            assert result[2][name].shape == values[name].shape
