"""Files that are broken, or that point out of their folder."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError, PdvError
from pdv.frontend import load_program


def model_with_external(path: Path, location: str, *, length: int | str = 64, offset: int | str = 0) -> Path:
    """x + w, with w [4, 4] float32 stored at `location`."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10).SerializeToString()
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, with weights both inside and outside of it."""
    (tmp_path / "outside.bin").write_bytes(bytes(64))
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "w.bin").write_bytes(np.arange(16, dtype="f").tobytes())
    (inside / "link.bin").symlink_to(tmp_path / "outside.bin")
    return inside


def test_external_data_is_read_lazily(folder: Path) -> None:
    program = load_program(model_with_external(folder / "m.onnx", "w.bin"))
    assert np.array_equal(program.weights.load("w").reshape(-1), np.arange(16))


@pytest.mark.parametrize("location", ["../outside.bin", "link.bin", "missing.bin", "C:\\w.bin", "..\\outside.bin", ""])
@pytest.mark.parametrize("bare", [False, True])
def test_external_data_outside_the_folder_is_refused(
    folder: Path, location: str, bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_with_external(folder / "m.onnx", location)
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match="tensor 'w' is stored at"):
        load_program("m.onnx" if bare else path)


def test_absolute_external_data_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_with_external(folder / "m.onnx", str(folder.parent / "outside.bin"))
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match="is stored at"):
        load_program("m.onnx")


@pytest.mark.parametrize(("offset", "length"), [(4, 64), (0, 128), (0, 32), (1 << 40, 64)])
def test_external_data_of_the_wrong_length_is_refused(folder: Path, offset: int, length: int) -> None:
    with pytest.raises(ModelError, match=r"tensor 'w' takes bytes"):
        load_program(model_with_external(folder / "m.onnx", "w.bin", offset=offset, length=length))


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["-64", "x", "", "4.0", "1e2", "0x40", "6_4", "\0", " 64", "٣", "9" * 5000])
def test_external_data_at_what_is_no_number_of_bytes_is_refused(folder: Path, key: str, value: str) -> None:
    path = model_with_external(folder / "m.onnx", "w.bin", **{key: value})
    with pytest.raises(ModelError) as caught:
        load_program(path)
    assert f"tensor 'w' has the {key} {value[:40]!r} in its file. A number of bytes, 0 or more" in str(caught.value)


@pytest.mark.parametrize("kind", [TensorProto.UNDEFINED, TensorProto.STRING, 99])
def test_external_data_of_a_type_without_numbers_is_refused(folder: Path, kind: int) -> None:
    path = model_with_external(folder / "m.onnx", "w.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].data_type = kind
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"tensor 'w', stored in a file of its own, has elements of type {kind}"):
        load_program(path)


def test_external_data_without_a_location_is_refused(folder: Path) -> None:
    path = model_with_external(folder / "m.onnx", "w.bin")
    model = onnx.load(path, load_external_data=False)
    del model.graph.initializer[0].external_data[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="tensor 'w' is stored at ''"):
        load_program(path)


@pytest.mark.parametrize("keep", [0, 1, 10, 100, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 64]) for name in "xy")
    w = numpy_helper.from_array(np.ones((64, 64), "f"), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10).SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_program(path)


def test_inline_data_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    w = numpy_helper.from_array(np.ones((4, 4), "f"), "w")
    w.raw_data = w.raw_data[:-4]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"'w'.*60 bytes"):
        load_program(tmp_path / "m.onnx")


def test_mutated_files_give_a_graph_or_one_error(tmp_path: Path) -> None:
    image, row = [2, 4, 8, 8], [2, 8, 8]
    x, y = helper.make_tensor_value_info("x", TensorProto.FLOAT, image), helper.make_tensor_value_info("y", 1, row)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("LayerNormalization", ["r", "v", "v"], ["n"], axis=-1),
        helper.make_node("Split", ["n"], ["a", "b"], axis=2, num_outputs=2),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=2),
    ]
    stored = {"w": np.ones((8, 4, 3, 3), "f"), "shape": np.array([2, 8, -1]), "v": np.ones(16, "f")}
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, name) for name, v in stored.items()])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10).SerializeToString()
    path = tmp_path / "m.onnx"
    rng = random.Random(0)
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            load_program(path)
            outcomes.add("graph")
        except PdvError as error:
            outcomes.add(error.slug)
    assert outcomes == {"graph", "bad-model", "unsupported-operators"}


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_program(tmp_path / "no.onnx")
    (tmp_path / "d.onnx").mkdir()
    with pytest.raises(ModelError, match="is a folder"):
        load_program(tmp_path / "d.onnx")
