"""What moves elements by known numbers leaves the batch alone, and resizes count as ONNX Runtime counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import pdv
from ir.evaluation.floats import FloatField
from ir.evaluation.interpret import evaluate
from pdv.frontend.load import load_program
from pdv.frontend.lowering import Lowering
from pdv.frontend.onnx.readers.selections import selected
from tests.pdv.worlds import cluster, f32

I64, F32 = np.int64, np.float32
RANDOM = np.random.default_rng(0)
ALL = "op, shape, operands, attributes"


def of_any_batch(op: str, shape: tuple[int, ...], operands: list[Any], attributes: dict[str, Any]) -> onnx.ModelProto:
    """One node over x, whose batch is open; None is an operand that is left out."""
    names = ["x", *(f"w{i}" if array is not None else "" for i, array in enumerate(operands))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(operands) if array is not None],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)


@pytest.mark.parametrize(
    ALL,
    [
        ("Pad", (3, 5), [np.array([0, 2, 1, 0, 1, 2], I64)], {"mode": "reflect"}),
        ("Pad", (3, 5), [np.array([0, 2, 1, 0, 1, 2], I64)], {"mode": "edge"}),
        ("Pad", (3, 5), [np.array([0, 2, 1, 0, 1, 2], I64)], {"mode": "wrap"}),
        ("Tile", (3, 1, 2), [np.array([1, 2, 3, 2], I64)], {}),
        ("Trilu", (3, 4), [np.array(-1, I64)], {"upper": 0}),
        ("Trilu", (2, 3, 4), [], {}),
        ("DepthToSpace", (8, 2, 3), [], {"blocksize": 2}),
        ("DepthToSpace", (8, 2, 3), [], {"blocksize": 2, "mode": "CRD"}),
        ("SpaceToDepth", (3, 4, 6), [], {"blocksize": 2}),
        ("Compress", (5, 2), [np.array([True, False, True])], {"axis": 1}),
        ("CenterCropPad", (4, 5), [np.array([3, 8], I64)], {"axes": [1, 2]}),
        ("Resize", (2, 4, 5), [None, np.array([1, 1, 2, 2], F32)], {}),
        ("Resize", (2, 4, 5), [None, None, np.array([7, 3], I64)], {"axes": [2, -1]}),
    ],
)
def test_the_batch_stays_open(
    op: str, shape: tuple[int, ...], operands: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    made = of_any_batch(op, shape, operands, attributes)
    onnx.save(made, path := tmp_path / "m.onnx")
    model = pdv.optimize(path, cluster=cluster(2), mode="infer", batch=4).build("cpu")
    session = onnxruntime.InferenceSession(made.SerializeToString())
    for batch in (4, 6):
        x = RANDOM.normal(size=(batch, *shape)).astype(F32)
        np.testing.assert_array_equal(model(torch.from_numpy(x)).numpy(), session.run(None, {"x": x})[0])


@pytest.mark.parametrize("how", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize("whole", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_the_nearest_element_is_that_of_onnx_runtime(how: str, whole: str, tmp_path: Path) -> None:
    attributes = {"coordinate_transformation_mode": how, "nearest_mode": whole}
    for scales in ([1.0, 1.0, 0.6, 1.3], [1.0, 1.0, 1.7, 0.7], [1.0, 1.0, 0.5, 2.3]):
        made = of_any_batch("Resize", (2, 10, 10), [None, np.array(scales, F32)], attributes)
        assert_reads_as_run(made, tmp_path)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_both_dims_are_stretched_alike(policy: str, tmp_path: Path) -> None:
    attributes = {"axes": [2, 3], "keep_aspect_ratio_policy": policy}
    assert_reads_as_run(of_any_batch("Resize", (2, 6, 10), [None, None, np.array([9, 7], I64)], attributes), tmp_path)


@pytest.mark.parametrize("scale", [0.7, 1.3, 2.3])
def test_averages_are_as_many_as_onnx_runtime_makes(scale: float, tmp_path: Path) -> None:
    scales = np.array([1, 1, scale, 2], F32)
    assert_reads_as_run(of_any_batch("Resize", (2, 10, 4), [None, scales], {"mode": "linear"}), tmp_path)


def assert_reads_as_run(made: onnx.ModelProto, folder: Path) -> None:
    onnx.save(made, path := folder / "m.onnx")
    shape = [dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim][1:]
    x = RANDOM.uniform(1, 2, size=(4, *shape)).astype(F32)  # ONNX Runtime has coordinates in float32: nothing cancels
    (wanted,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    model = pdv.optimize(path, cluster=cluster(1), mode="infer", batch=4).build("cpu")
    np.testing.assert_allclose(model(torch.from_numpy(x)).numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_large_images_are_enlarged(tmp_path: Path) -> None:
    made = of_any_batch("Resize", (16, 300, 300), [None, np.array([1, 1, 2, 2], F32)], {})
    onnx.save(made, path := tmp_path / "m.onnx")
    assert load_program(path, batch=4).graph.outputs[0][1].type.shape == (4, 16, 600, 600)


@pytest.mark.parametrize("seed", range(20))
def test_any_selection_is_what_its_numbers_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    k = Lowering()
    lead, tail = (tuple(int(n) for n in random.integers(1, 4, size=random.integers(0, 3))) for _ in range(2))
    sizes = [int(n) for n in random.integers(1, 4, size=random.integers(1, 3))]
    shapes = [(*lead, size, *tail) for size in sizes]
    arrays = [random.normal(size=shape).astype(F32) for shape in shapes]
    columns = np.concatenate([a.reshape(*lead, -1, *tail) for a in arrays], len(lead))
    starts = np.cumsum([0, *(a.size for a in arrays)])
    numbers = [np.arange(a.size).reshape(a.shape) + start for a, start in zip(arrays, starts, strict=False)]
    ids = random.integers(-1, sum(sizes), size=int(random.integers(1, 6)))
    index = (slice(None),) * len(lead) + (np.maximum(ids, 0),)
    there = (ids >= 0).reshape(-1, *(1 for _ in tail))
    places = np.where(there, np.concatenate(numbers, len(lead))[index], -1)
    if seed % 2:  # no dim stays as it is
        places = random.permutation(places.reshape(-1)).reshape(places.shape)
    wanted = np.append(np.concatenate([a.reshape(-1) for a in arrays]), F32(7))[places]
    if not seed % 2:
        np.testing.assert_array_equal(wanted, np.where(there, columns[index], F32(7)))
    xs = [k.builder.input(f"x{i}", f32(*shape)) for i, shape in enumerate(shapes)]
    found = selected(k, xs, places, np.array(7))
    graph = k.builder.graph({"y": found})
    values = evaluate(graph, {f"x{i}": a for i, a in enumerate(arrays)}, field=FloatField()).gather()
    np.testing.assert_array_equal(values["y"], wanted)
