"""Files as skl2onnx writes them: scaled columns, classes beside probabilities, maps, one opset told twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.views import trained_sources_of
from pdv.check.file.reading import check_file
from pdv.frontend.load import load_program

ML = "ai.onnx.ml"


def classifier(*opsets: tuple[str, int]) -> onnx.ModelProto:
    """As of ``make_pipeline(StandardScaler(), MLPClassifier())``: the class, and the shares of all."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Scaler", ["x"], ["h"], domain=ML, offset=[0.5] * 6, scale=[1.0, 2.0, 0.5, 1.0, 3.0, 1.0]),
        helper.make_node("MatMul", ["h", "coefficient"], ["m"]),
        helper.make_node("Add", ["m", "intercepts"], ["a"]),
        helper.make_node("Softmax", ["a"], ["shares"], axis=-1),
        helper.make_node("ArgMax", ["shares"], ["most"], axis=1),
        helper.make_node("ArrayFeatureExtractor", ["classes", "most"], ["row"], domain=ML),
        helper.make_node("Reshape", ["row", "flat"], ["label"]),
    ]
    stored = {
        "coefficient": random.normal(size=(6, 3)).astype(np.float32), "intercepts": np.ones(3, np.float32),
        "classes": np.array([4, 7, 9]), "flat": np.array([-1]),
    }  # fmt: skip
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 6])
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
        helper.make_tensor_value_info("shares", TensorProto.FLOAT, [None, 3]),
    ]
    graph = helper.make_graph(nodes, "MLPClassifier", [x], outputs, tensors)
    imports = [helper.make_opsetid(*each) for each in (("", 17), (ML, 1), *opsets)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="skl2onnx")


def test_a_pipeline_is_read_and_trained(tmp_path: Path) -> None:
    onnx.save(classifier(("", 17)), tmp_path / "m.onnx")
    program = load_program(tmp_path / "m.onnx", batch=4)
    assert set(trained_sources_of(program.graph)) == {"coefficient", "intercepts"}
    assert "outputs are the same" in check_file(program, tmp_path / "m.onnx")


def test_two_opsets_of_one_domain_are_refused(tmp_path: Path) -> None:
    onnx.save(classifier(("ai.onnx", 16)), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="opset of domain '' is there twice"):
        load_program(tmp_path / "m.onnx", batch=4)


def test_maps_are_named(tmp_path: Path) -> None:
    model = classifier()
    labels = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output[1].CopyFrom(helper.make_value_info("shares", helper.make_sequence_type_proto(labels)))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"'shares' is a sequence of maps. Tensors. Export it without maps"):
        load_program(tmp_path / "m.onnx", batch=4)
