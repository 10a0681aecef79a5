"""Operators that ONNX Runtime's optimizers write in place of several, held to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import UnsupportedOperatorsError
from pdv.check.file.reading import check_file
from pdv.frontend.load import load_program

B, S, H, N = 2, 6, 16, 4  # rows, positions, width, heads
FLOAT, IDS = TensorProto.FLOAT, {"ids": TensorProto.INT32, "places": TensorProto.INT64}
RANDOM = np.random.default_rng(0)


def _array(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(np.float32) * 0.5


def saved(
    path: Path,
    op: str,
    operands: dict[str, Any],
    *,
    results: int = 1,
    read: tuple[int, ...] = (0,),
    domain: str = "com.microsoft",
    **attrs: Any,  # Any: as ``helper.make_node`` takes them
) -> Path:
    """A file of one node: arrays are stored, shapes are inputs of floats or, of ids, of integers; None is left out."""
    inputs, stored = [], []
    for name, each in operands.items():
        if isinstance(each, np.ndarray):
            stored.append(numpy_helper.from_array(each, name))
        elif each is not None:
            inputs.append(helper.make_tensor_value_info(name, IDS.get(name, FLOAT), each))
    names = ["" if each is None else name for name, each in operands.items()]
    made = [f"y{i}" if i in read else "" for i in range(results)]
    node = helper.make_node(op, names, made, domain=domain, **attrs)
    outputs = [helper.make_tensor_value_info(f"y{i}", FLOAT, None) for i in read]
    opsets = [helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "fused", inputs, outputs, stored)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


X, BASE = (B, S, H), {"x": (B, S, H), "skip": (B, S, H), "scale": _array(H)}
QKV = {"x": X, "w": _array(H, 3 * H), "b": _array(3 * H)}
APART = {"q": X, "key": (B, 5, H), "v": (B, 5, H)}
LENGTHS, ROWS = np.array([6, 3], np.int32), (np.arange(S) < np.array([[6], [4]])).astype(np.int32)
IMAGE = {"x": (B, 3, 8, 8), "w": _array(4, 3, 3, 3), "b": _array(4)}
WORDS = {"ids": (B, S), "segments": ROWS, "words": _array(9, H), "at": _array(S + 2, H), "kinds": _array(2, H),
         "scale": _array(H), "shift": _array(H)}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FusedMatMul", {"x": (B, H, S), "w": _array(5, H)}, {"alpha": 0.5, "transA": 1, "transB": 1, "transBatchA": 0}),
    ("Gelu", {"x": X}, {}),
    ("BiasGelu", {"x": X, "b": _array(H)}, {}),
    ("FastGelu", {"x": X}, {}),
    ("FastGelu", {"x": X, "b": _array(H)}, {}),
    ("QuickGelu", {"x": X}, {"alpha": 1.0}),
    ("QuickGelu", {"x": X}, {}),
    ("SkipLayerNormalization", BASE | {"shift": _array(H)}, {"epsilon": 1e-5}),
    ("SkipLayerNormalization", BASE | {"shift": _array(H), "b": _array(H)}, {"results": 4, "read": (0, 3)}),
    ("SkipSimplifiedLayerNormalization", BASE | {"b": _array(H)}, {"results": 4, "read": (0, 3), "epsilon": 1e-6}),
    ("SimplifiedLayerNormalization", {"x": X, "scale": _array(H)}, {"domain": "", "axis": -1, "epsilon": 1e-6}),
    ("LayerNormalization", {"x": X, "scale": _array(H), "shift": _array(H)}, {"domain": "", "axis": -1}),
    ("EmbedLayerNormalization", WORDS | {"mask": ROWS}, {"results": 2}),
    ("EmbedLayerNormalization", WORDS | {"segments": None, "kinds": None}, {"results": 2, "epsilon": 1e-5}),
    ("Attention", QKV, {"num_heads": N}),
    ("Attention", QKV, {"num_heads": N, "unidirectional": 1, "scale": 0.3}),
    ("Attention", QKV | {"mask": LENGTHS}, {"num_heads": N}),
    ("Attention", QKV | {"mask": ROWS}, {"num_heads": N, "mask_filter_value": -50.0}),
    ("Attention", QKV | {"mask": ROWS}, {"num_heads": N, "unidirectional": 1}),
    ("Attention", QKV | {"mask": None, "past": None, "added": _array(1, N, S, S)}, {"num_heads": N}),
    ("MultiHeadAttention", APART, {"num_heads": N}),
    ("MultiHeadAttention", APART | {"b": _array(3 * H)}, {"num_heads": N, "scale": 0.2}),
    ("MultiHeadAttention", APART | {"b": None, "mask": ROWS[:, :5].copy()}, {"num_heads": N}),
    ("RotaryEmbedding", {"x": X, "places": (B, S), "cos": _array(8, 2), "sin": _array(8, 2)}, {}),
    ("RotaryEmbedding", {"x": (B, N, S, 4), "at": np.array([0]), "cos": _array(8, 2), "sin": _array(8, 2)}, {}),
    ("FusedConv", IMAGE, {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    ("FusedConv", IMAGE, {"activation": "LeakyRelu", "activation_params": [0.2]}),
    ("FusedConv", IMAGE, {"activation": "Clip", "activation_params": [0.0, 0.5]}),
    ("FusedConv", IMAGE | {"more": (B, 4, 6, 6)}, {"activation": "Relu"}),
    ("FusedGemm", {"x": (B, H), "w": _array(5, H), "b": _array(5)}, {"transB": 1, "activation": "Relu"}),
    ("FusedGemm", {"x": (B, H), "w": _array(H, 5)}, {"activation": "LeakyRelu", "activation_alpha": 0.1}),
]


@pytest.mark.parametrize(("op", "operands", "attrs"), CASES, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(CASES)])
def test_a_fused_operator_is_what_the_runtime_computes(
    op: str, operands: dict[str, Any], attrs: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(tmp_path / "m.onnx", op, operands, **attrs)
    assert "outputs are the same" in check_file(load_program(path), path)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Attention", QKV, {"num_heads": N, "do_rotary": 1}, "turned queries"),
    ("FusedConv", IMAGE, {"activation": "Mish"}, "with Mish behind it"),
    ("Gelu", {"x": X}, {"sharp": 2}, "attribute sharp = 2"),
    ("GroupQueryAttention", APART, {"num_heads": N, "kv_num_heads": N}, "register_operator"),
]


@pytest.mark.parametrize(("op", "operands", "attrs", "why"), REFUSED, ids=[op for op, *_ in REFUSED])
def test_what_is_not_read_is_named(
    op: str, operands: dict[str, Any], attrs: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedOperatorsError, match=why):
        load_program(saved(tmp_path / "m.onnx", op, operands, **attrs))


def test_angles_are_no_parameters(tmp_path: Path) -> None:
    operands = {"x": X, "places": (B, S), "cos": _array(8, 2), "sin": _array(8, 2)}
    program = load_program(saved(tmp_path / "m.onnx", "RotaryEmbedding", operands))
    assert not program.graph.params
