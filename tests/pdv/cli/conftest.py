"""A model of two products and a cluster of two devices, in the folder where the commands run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

CLUSTER = """
nodes:
  - devices: 2
    device: {name: slow, memory: 1 GiB, peak: {float32: 1 GFLOP/s}, memory_bandwidth: 20 GB/s, launch_latency: 1 us,
             efficiency: 1.0}
    link: {name: wire, bandwidth: 10 GB/s, latency: 1 us}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import onnx

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = [("up", (16, 8)), ("down", (8, 16))]
    tensors = [onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in weights]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "up"], ["h"], transB=1, name="first"),
        onnx.helper.make_node("Relu", ["h"], ["r"], name="relu"),
        onnx.helper.make_node("Gemm", ["r", "down"], ["y"], transB=1, name="second"),
    ]
    values = [onnx.helper.make_tensor_value_info(name, 1, [8, 8]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "two", values[:1], values[1:], tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), "two.onnx")
    Path("cluster.yaml").write_text(CLUSTER)
    Path("pins.yaml").write_text("mesh: {tp: 2}\ntechniques: {tp: tensor}\ntensors: {up: {tp: shard 0}}\n")
    return tmp_path
