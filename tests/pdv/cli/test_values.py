"""Option values and the names of packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.errors import UsageError
from pdv.cli.values import NOT_PACKAGES, axis_sizes, check_file, dtype, memory_bytes, output_directory, package_name


@pytest.mark.parametrize(
    ("model", "package"),
    [
        ("gpt2.onnx", "gpt2_pdv"),
        ("models/GPT-2 (small).onnx", "GPT_2_small_pdv"),
        ("7b.v2.pt2", "model_7b_v2_pdv"),
        ("….onnx", "model__pdv"),
        ("class.onnx", "class_pdv"),
    ],
)
def test_package_names(model: str, package: str) -> None:
    assert package_name(Path(model)) == package


@given(
    st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=40).filter(
        lambda name: name not in (".", "..")
    )
)
def test_every_file_name_gives_a_package_name(name: str) -> None:
    package = package_name(Path(name))
    assert package.isidentifier()
    assert package.isascii()
    assert package not in NOT_PACKAGES


def test_output_directory(tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert output_directory(target, Path("m.onnx"), overwrite=False) == target
    target.mkdir()
    assert output_directory(target, Path("m.onnx"), overwrite=False) == target
    (target / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        output_directory(target, Path("m.onnx"), overwrite=False)
    assert output_directory(target, Path("m.onnx"), overwrite=True) == target
    with pytest.raises(UsageError, match="is a file"):
        output_directory(target / "file", Path("m.onnx"), overwrite=True)


def test_values() -> None:
    assert axis_sizes("x=2, y=4") == {"x": 2, "y": 4}
    assert memory_bytes("70 GiB") == 70 * 2**30
    assert memory_bytes("2 MiB") == 2**21
    assert dtype("bf16") == "bfloat16"
    assert [read(None) for read in (axis_sizes, memory_bytes, dtype)] == [None] * 3


@pytest.mark.parametrize("text", ["", "x", "x=0", "x=-1", "X=2", "x=2,", "x=2;y=2", "class=2", "x=2,x=2", "x=1.5"])
def test_wrong_axes(text: str) -> None:
    with pytest.raises(UsageError):
        axis_sizes(text)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/x", "file' is a file, not a folder"),
        ("file/x/y", "file' is a file, not a folder"),
        ("absent/x", "absent' does not exist"),
        ("folder", "folder' is a folder"),
    ],
)
def test_where_no_file_can_go(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=said):
        check_file(tmp_path / place)
    check_file(tmp_path / "folder" / "x")
