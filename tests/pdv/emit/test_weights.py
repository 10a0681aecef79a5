"""weights.safetensors, written by hand, is what the library reads; equal tensors give equal bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ir.types import DType
from pdv.emit.templates.stored import Weights as StoredWeights
from pdv.emit.weights import Array, Loader, digest_of, head, write_weights

ARRAYS: dict[str, Array] = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.array(3.5, dtype=np.float32),
    "ids": np.arange(3, dtype=np.int64),
    "mask": np.array([True, False]),
    "empty": np.zeros((0, 4), dtype=np.float32),
    'na"me\n{é}': np.ones(2, dtype=np.float32),
}


def tensors() -> dict[str, tuple[DType, Loader]]:
    return {name: (DType.from_name(array.dtype.name), lambda array=array: array) for name, array in ARRAYS.items()}  # type: ignore[misc]


def test_every_tensor_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    stored = write_weights(path, tensors())
    assert path.read_bytes().startswith(head(stored))
    loaded = load_file(path)
    assert sorted(loaded) == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        assert stored[name].shape == array.shape
        assert stored[name].sha256 == digest_of(array, DType.from_name(array.dtype.name))
        np.testing.assert_array_equal(loaded[name].numpy(), array)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    write_weights(tmp_path / "a", tensors())
    write_weights(tmp_path / "b", dict(reversed(tensors().items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F64])
def test_floats_are_written_in_the_type_of_the_program(tmp_path: Path, dtype: DType) -> None:
    values = np.linspace(-2, 2, 7, dtype=np.float32)
    write_weights(tmp_path / "w", {"x": (dtype, lambda: values), "n": (DType.I64, lambda: np.arange(3))})
    with safe_open(str(tmp_path / "w"), framework="pt") as file:
        found = file.get_slice("x")[2:5]
    expected = torch.from_numpy(values).to(getattr(torch, dtype.torch_name))[2:5]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("truncated", lambda whole: whole[:-5]),
        ("no header", lambda whole: whole[:4]),
        ("header of another length", lambda whole: b"\xff" * 8 + whole[8:]),
        ("empty", lambda whole: b""),
        ("absent", None),
        ("index", lambda whole: b'{"weight_map": {"matrix": '),
        ("index of nothing", lambda whole: b"[]"),
        ("index of a file that is absent", lambda whole: b'{"weight_map": {"matrix": "other.safetensors"}}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, tensors())
    damaged = path.with_name(f"{path.name}.index.json") if "index" in name else path
    if damage is None:
        path.unlink()
    else:
        damaged.write_bytes(damage(path.read_bytes()))
    wrong = re.escape(str(tmp_path / "other.safetensors" if name.endswith("is absent") else damaged))
    with pytest.raises(RuntimeError, match=rf"bad-weights: {wrong} \((\d+ bytes|no file)\) cannot be read: .*copy it"):
        StoredWeights(path)


@pytest.mark.parametrize("read", [lambda weights: weights["matrix_2"], lambda weights: weights.file.get_tensor("bias")])
def test_a_tensor_that_a_file_does_not_have_is_named(tmp_path: Path, read: Callable[[StoredWeights], object]) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, tensors())
    message = rf"bad-weights: {re.escape(str(path))} \(\d+ bytes\) cannot be read: .*it has no tensor (matrix_2|bias)"
    with pytest.raises(RuntimeError, match=message):
        read(StoredWeights(path))
