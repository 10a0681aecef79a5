"""The same model through ONNX and through torch.export gets the same plan; the same plan twice is the same bytes."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

import pdv
from benchmarks.models import MODELS, build
from pdv.frontend.onnx.export import export_onnx

# compute slow and links fast enough that even narrow models are worth cutting
CLUSTER = {
    "nodes": [
        {
            "devices": 4,
            "device": {
                "name": "slow",
                "memory": "1 GiB",
                "peak": {"float32": "1 GFLOP/s"},
                "memory_bandwidth": "20 GB/s",
                "launch_latency": "1 us",
                "efficiency": 1.0,
            },
            "link": {"name": "wire", "bandwidth": "10 GB/s", "latency": "1 us"},
        }
    ]
}


OFTEN = ("dlrm",)  # that the graphs of all are the same, frontend/test_models.py sees
EACH = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in sorted(MODELS)]


@pytest.mark.parametrize("name", EACH)
def test_both_frontends_give_the_same_plan(name: str, tmp_path: Path) -> None:
    module, inputs = build(name)
    path = tmp_path / "model.onnx"
    export_onnx(module, inputs, path)
    mesh = {"x": 2, "y": 2}
    from_onnx = pdv.optimize(path, cluster=CLUSTER, mesh=mesh)
    from_torch = pdv.optimize(module, inputs, cluster=CLUSTER, mesh=mesh)
    left, right = dict(from_onnx.document), dict(from_torch.document)
    assert left["source"]["hash"] == right["source"]["hash"]
    assert left["derivation"] == right["derivation"]
    assert left["pcg_hash"] == right["pcg_hash"]
    assert left["predicted"] == right["predicted"]
    assert any(left["techniques"].values()), "nothing was cut: the comparison says nothing"


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    module, inputs = build("dlrm")
    for run in ("one", "two"):
        pdv.optimize(module, inputs, cluster=CLUSTER, mesh={"x": 2, "y": 2}).save(tmp_path / run)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    equal, different, unread = filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False)
    assert (sorted(equal), different, unread) == (names, [], [])
