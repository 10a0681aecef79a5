"""Folders of measurements: what they hold is read as it is, and what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ir.errors import DataError
from learned_cost.data.dataset import read_folder, read_folders, read_parquet
from learned_cost.data.kernel import FUSED, Kernel, Subgraph
from learned_cost.devices.device import load_records
from learned_cost.devices.device_table import read_device_table
from tests.learned_cost.measurements import collective_columns, kernel_columns, write

OPEN_DATA = Path(__file__).parents[4] / "shared" / "data"
needs_open_data = pytest.mark.skipif(not OPEN_DATA.is_dir(), reason="the open data is not on this machine")


KERNEL = Kernel("add", "map", "fp32", {"m": 4, "n": 8}, (32, 1, 1, 1), 32.0, 384.0)
GRAPH = Subgraph((KERNEL, KERNEL), ((0, 1),), fused=True, bytes=512.0)


def changed(**columns: Any) -> dict[str, Any]:
    """Kernels with some columns replaced; None takes one out."""
    return {name: values for name, values in (kernel_columns() | columns).items() if values is not None}


def replaced(name: str, row: int, value: Any) -> dict[str, Any]:
    values = list(kernel_columns()[name])
    values[row] = value
    return changed(**{name: values})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    columns = kernel_columns()
    data = read_folder(write(tmp_path))
    table = data.kernels
    assert table is not None
    assert data.collectives is None
    assert len(table) == len(columns["gpu"])
    assert list(table.text("gpu")) == columns["gpu"]
    assert list(table.text("op")) == columns["op"]
    np.testing.assert_array_equal(table["k"], [-1 if size is None else size for size in columns["k"]])
    np.testing.assert_allclose(table.latency_s, columns["latency_us"] * 1e-6)
    assert set(table["seq_q"]) == {-1}
    assert table.vocab["backend"] == ()
    assert np.isnan(table["std_us"]).all()
    assert list(data.files) == [str(tmp_path / "kernels.parquet")]


def test_parts_and_folders_are_joined(tmp_path: Path) -> None:
    write(tmp_path / "a", "kernels-0001")
    write(tmp_path / "a", "kernels-0002", changed(op=["softmax"] * 60))
    write(tmp_path / "b", "collectives")
    data = read_folders([tmp_path / "a", tmp_path / "b"])
    assert data.kernels is not None
    assert data.collectives is not None
    assert len(data.kernels) == 120
    assert data.kernels.vocab["op"] == ("layernorm", "linear", "softmax")
    assert list(data.kernels.text("op")[60:]) == ["softmax"] * 60
    assert len(data.collectives) == 30
    assert len(data.files) == 3
    below = read_folder(tmp_path)  # the folders in it, where it has no files itself
    assert below.kernels is not None
    assert len(below.kernels) == 120


def test_pandas_whole_numbers_with_gaps_are_whole_numbers(tmp_path: Path) -> None:
    k = [np.nan if size is None else float(size) for size in kernel_columns()["k"]]
    table = read_folder(write(tmp_path, columns=changed(k=pa.array(k)))).kernels
    assert table is not None
    assert table["k"].dtype == np.int32
    np.testing.assert_array_equal(table["k"], [-1 if np.isnan(size) else size for size in k])


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nan": (replaced("latency_us", 7, float("nan")), ("latency_us", "1 row", "from 0: 7", "--skip-bad")),
    "negative": (replaced("latency_us", 3, -2.0), ("latency_us", "from 0: 3")),
    "zero": (replaced("latency_us", 3, 0.0), ("latency_us", "from 0: 3")),
    "infinite": (replaced("latency_us", 3, float("inf")), ("latency_us", "from 0: 3")),
    "none": (replaced("latency_us", 4, None), ("latency_us", "from 0: 4")),
    "many": (changed(latency_us=[-1.0] * 60), ("60 rows", "0, 1, 2, 3, 4, …")),
    "milliseconds": (
        changed(latency_us=kernel_columns()["latency_us"] / 1000),
        ("latency_us is less than the device can take", "At most 10 times", "check its unit"),
    ),
    "nanoseconds": (
        changed(latency_us=kernel_columns()["latency_us"] * 1000),
        ("latency_us is more than any kernel takes", "check its unit"),
    ),
    "direction": (changed(direction=["sideways"] + ["forward"] * 59), ("direction is none", "backward", "from 0: 0")),
    "size": (replaced("m", 9, -5), ("m is no such number", "from 0: 9")),
    "flops": (replaced("flops", 9, float("inf")), ("flops", "from 0: 9")),
    "device": (replaced("gpu", 2, "A100-SXM4-80GBB"), ("'A100-SXM4-80GBB'", "Did you mean 'A100-SXM4-80GB'?", ".yaml")),
    "operator-empty": (replaced("op", 2, None), ("op is empty", "from 0: 2")),
    "column-unknown": (changed(latencyus=[1.0] * 60), ("unknown columns latencyus", "Did you mean 'latency_us'?")),
    "column-missing": (changed(latency_us=None, dtype=None), ("lacks the columns dtype, latency_us",)),
    "type-text": (changed(latency_us=["3"] * 60), ("latency_us holds string", "numbers")),
    "type-number": (changed(gpu=[1] * 60), ("gpu holds int64", "text")),
    "type-fraction": (changed(m=[1.5] * 60), ("m holds fractions", "whole numbers")),
    "type-large": (changed(m=[2**40] * 60), ("m holds 1099511627776",)),
    "subgraph": (replaced("op", 5, FUSED), ("dims_json", "from 0: 5")),
    "sizes-list": (changed(dims_json=[None] * 8 + ["[1, 2]"] + [None] * 51), ("dims_json", "from 0: 8")),
    "sizes-nan": (changed(dims_json=[None] * 8 + ['{"d_state": NaN}'] + [None] * 51), ("dims_json", "from 0: 8")),
    "sizes-extents": (changed(dims_json=['{"extents": [1, 2]}'] + [None] * 59), ("dims_json", "from 0: 0")),
    "subgraph-size": (
        changed(op=[FUSED] + ["linear"] * 59, dims_json=[GRAPH.to_json().replace('"m": 4', '"what": 4')] + [None] * 59),
        ("no subgraph", "from 0: 0"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_by_name(name: str, tmp_path: Path) -> None:
    columns, told = WRONG[name]
    with pytest.raises(DataError) as caught:
        read_folder(write(tmp_path, columns=columns))
    for words in ("kernels.parquet", *told):
        assert words in str(caught.value)


def test_what_is_marked_as_suspect_is_read(tmp_path: Path) -> None:
    columns = changed(latency_us=kernel_columns()["latency_us"] / 1000, suspect=[True] * 60)
    assert read_folder(write(tmp_path, columns=columns)).kernels is not None


@pytest.mark.parametrize(
    "name", ["nan", "negative", "none", "device", "operator-empty", "subgraph", "size", "direction"]
)
def test_bad_rows_are_left_out_and_counted(name: str, tmp_path: Path) -> None:
    data = read_folder(write(tmp_path, columns=WRONG[name][0]), skip_bad=True)
    assert data.kernels is not None
    assert len(data.kernels) == 59
    assert list(data.skipped.values()) == [1]
    whole = read_folder(write(tmp_path / "whole")).kernels
    assert whole is not None
    bad = int(WRONG[name][1][-1].rsplit(" ")[-1]) if "from 0" in WRONG[name][1][-1] else {"nan": 7, "device": 2}[name]
    np.testing.assert_array_equal(data.kernels["latency_us"], np.delete(whole["latency_us"], bad))


def test_unknown_columns_are_left_out_and_counted(tmp_path: Path) -> None:
    data = read_folder(write(tmp_path, columns=changed(extra=[1] * 60)), skip_bad=True)
    assert data.skipped == {"unknown column extra": 60}
    assert data.kernels is not None
    assert "extra" not in data.kernels


@pytest.mark.parametrize("damage", ["csv", "truncated", "overwritten", "empty", "pickle"])
def test_foreign_and_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path) / "kernels.parquet"
    whole = path.read_bytes()
    middle = len(whole) // 3
    path.write_bytes({
        "csv": b"gpu,op,dtype,latency_us\nT4,linear,fp32,12.5\n", "truncated": whole[: len(whole) // 2], "empty": b"",
        "overwritten": whole[: middle - 400] + b"\xff" * 800 + whole[middle + 400 :], "pickle": b"\x80\x04\x95" * 99,
    }[damage])  # fmt: skip
    with pytest.raises(DataError, match=r"kernels\.parquet"):
        read_folder(tmp_path)


def test_folders_without_measurements_are_refused(tmp_path: Path) -> None:
    for folder, told in ((tmp_path, "holds no measurements"), (tmp_path / "absent", "no folder")):
        with pytest.raises(DataError, match=told):
            read_folder(folder)


def test_subgraphs_are_read(tmp_path: Path) -> None:
    columns = changed(
        op=[FUSED] * 60, dims_json=[GRAPH.to_json()] * 60, stack=["inductor"] * 60, direction=["forward"] * 60
    )
    table = read_folder(write(tmp_path, columns=columns)).kernels
    assert table is not None
    assert Subgraph.from_json(table.at("dims_json", 3) or "") == GRAPH
    assert table.vocab["stack"] == ("inductor",)


HEAD = "gpu,vendor,arch,sm,fp32_tflops,fp16_tflops,mem_gb,mem_bw_gbs,spec_source\n"


def test_a_device_may_come_with_the_measurements(tmp_path: Path) -> None:
    write(tmp_path, columns=changed(gpu=["X1"] * 60))
    (tmp_path / "gpus.csv").write_text(HEAD + "X1,acme,alpha,20,5.5,,8,192.5,sheet\nT4,acme,wrong,1,1,1,1,1,sheet\n")
    data = read_folder(tmp_path)
    x1 = data.devices["X1"]
    assert (x1.sm_count, x1.peak_flops, x1.memory_bytes) == (20, {"fp32": 5.5e12}, 8 * 2**30)
    assert x1.memory_bandwidth_bytes_per_s == 192.5e9
    assert data.devices["T4"] == load_records()["T4"]  # what is shipped is not replaced by a table
    (tmp_path / "gpus.csv").unlink()
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "X1.yaml").write_text(x1.to_yaml())
    assert read_folder(tmp_path).devices["X1"] == x1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu,vendor\nX1,acme\n", "lacks the columns arch"),
        (HEAD + "X1,acme,alpha,20,fast,,8,192.5,sheet\n", "line 2: fp32_tflops is 'fast'"),
        (HEAD + "X1,acme,alpha,20,-1,,8,192.5,sheet\n", "line 2: fp32_tflops is '-1'"),
        (HEAD + "X1,acme,alpha,,5,,8,192.5,sheet\n", "line 2: sm_count"),
        (HEAD + "X1,a,b,2,5,,8,192,s\nX1,a,b,2,5,,8,192,s\n", "line 3: X1 is there twice"),
    ],
)
def test_wrong_tables_of_devices_are_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(text)
    with pytest.raises(DataError, match=told):
        read_device_table(tmp_path / "gpus.csv")


def test_an_alias_is_the_device(tmp_path: Path) -> None:
    table = read_folder(write(tmp_path, "collectives", collective_columns() | {"gpu": ["a100-80gb-sxm"] * 30}))
    assert table.collectives is not None
    assert table.collectives.vocab["gpu"] == ("A100-SXM4-80GB",)


@needs_open_data
def test_the_open_tables_devices_are_the_shipped_records() -> None:
    listed, shipped = read_device_table(OPEN_DATA / "gpus.csv"), load_records()
    assert set(listed) <= set(shipped)
    for name, entry in listed.items():
        for dtype, rate in entry.peak_flops.items():
            assert shipped[name].peak_flops[dtype] == pytest.approx(rate, rel=0.01)
        assert shipped[name].memory_bandwidth_bytes_per_s == entry.memory_bandwidth_bytes_per_s


@needs_open_data
@pytest.mark.slow
def test_the_open_data_is_read() -> None:
    data = read_folder(OPEN_DATA)
    assert data.kernels is not None
    assert data.collectives is not None
    assert (len(data.kernels), len(data.collectives)) == (1_427_878, 58_142)
    assert int(data.kernels["suspect"].sum()) == 17_169
    assert sum(column.nbytes for column in data.kernels.columns.values()) < 0.5e9


def test_texts_that_are_no_text_are_a_damaged_file(tmp_path: Path) -> None:
    """As a flipped bit leaves them: Arrow decodes texts only when they are asked for."""
    ends, letters = pa.py_buffer(np.array([0, 3], np.int32)), pa.py_buffer(b"a\xb6c")
    column = pa.Array.from_buffers(pa.string(), 1, [None, ends, letters])
    pq.write_table(pa.table({"op": column}), tmp_path / "kernels.parquet")
    with pytest.raises(DataError, match="damaged one"):
        read_parquet(tmp_path / "kernels.parquet")
