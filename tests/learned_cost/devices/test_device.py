"""Device records: the shipped ones are whole, what is wrong is refused by file and field, presets agree with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir.errors import DeviceError
from learned_cost.devices.device import FOLDER, DeviceRecord, find, load_records, read_record, record
from pdv.cluster.presets import DEVICES

RECORDS = load_records()


@pytest.mark.parametrize("entry", RECORDS.values(), ids=list(RECORDS))
def test_shipped_records_are_whole(entry: DeviceRecord) -> None:
    assert entry.peak("fp32")
    assert entry.boost_hz
    assert entry.fp32_cores
    assert entry.l2_bytes
    assert set(entry.sources) <= set(DeviceRecord.model_fields)
    if entry.kind == "gpu":  # vector units do two operations a cycle and lane; RDNA-like dual issue counts four
        nominal = 2.0 * entry.fp32_cores * entry.boost_hz
        assert 0.9 * nominal < entry.peak_flops["fp32"] < 2.1 * nominal
        assert entry.compute_capability or entry.vendor == "intel"


def test_names_and_aliases_are_each_of_one_record() -> None:
    names = [name.casefold() for entry in RECORDS.values() for name in {entry.name, *entry.aliases}]
    assert len(names) == len(set(names))


def test_presets_have_the_numbers_of_their_records() -> None:
    for name, device in DEVICES.items():
        known = record(name)
        assert device.memory_bytes == known.memory_bytes
        assert device.peak_flops["float32"] == known.peak("fp32")
        assert device.peak_flops.get("bfloat16") == known.peak("bf16")


def test_missing_rates_are_none() -> None:
    assert record("T4").peak("bf16") is None
    assert record("t4").name == "T4"
    assert record("NVIDIA H100 80GB HBM3").name == "H100-SXM-80GB"
    assert find("nvidia", RECORDS.values()) is None


def test_a_name_may_say_another_size_of_memory() -> None:
    whole, found = record("A100-SXM4-80GB"), find("a100-80gb-sxm-70gib", RECORDS.values())
    assert found == whole.model_copy(update={"memory_bytes": 70 * 2**30})
    part = find("a100-80gb-sxm-mig-3g.40gb-38000mib", RECORDS.values())
    assert part is not None
    assert (part.name, part.memory_bytes) == ("A100-SXM4-80GB-mig-3g.40gb", 38000 * 2**20)
    assert find("nothing-70gib", RECORDS.values()) is None


def test_a_record_is_a_file(tmp_path: Path) -> None:
    own = RECORDS["T4"].model_copy(update={"name": "mine", "tdp_w": None})
    (tmp_path / "mine.yaml").write_text(own.to_yaml())
    assert load_records(tmp_path)["mine"] == own
    assert record("mine", tmp_path) == own
    assert len(load_records(tmp_path)) == len(RECORDS) + 1


def test_records_of_a_folder_replace_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "t4.yaml").write_text(RECORDS["T4"].model_copy(update={"tdp_w": 50.0}).to_yaml())
    assert load_records(tmp_path)["T4"].tdp_w == 50.0
    assert record("T4").tdp_w == 70.0


WRONG = {
    "l2_byte: 5": "there is no field 'l2_byte'. Fields: ",
    "l2_bytes: 0": "field 'l2_bytes' is 0",
    "tdp_w: .nan": "field 'tdp_w' is nan",
    "tdp_w: true": "is True: is a truth value",
    "peak_flops: {fp31: 1.0}": "field 'peak_flops.fp31",
    "kind: tpu": "field 'kind' is 'tpu'",
    "sm_count: many": "field 'sm_count' is 'many'",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_fields_are_named(line: str, tmp_path: Path) -> None:
    lines = [old for old in (FOLDER / "T4.yaml").read_text().splitlines() if not old.startswith(line.partition(":")[0])]
    if line.startswith("peak_flops"):
        lines = [old for old in lines if not old.startswith("  ")]
    path = tmp_path / "wrong.yaml"
    path.write_text("\n".join([*[old for old in lines if "sources" not in old and '"' not in old], line]))
    with pytest.raises(DeviceError, match=r"wrong\.yaml") as caught:
        read_record(path)
    assert WRONG[line] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no record"),
        ("[1", "not valid YAML"),
        ("name: x", "is missing"),
        ("a: !!python/none x", "tags .* are not allowed"),
    ],
)
def test_what_is_no_record_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(DeviceError, match=told):
        read_record(tmp_path / "x.yaml")


def test_unknown_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Did you mean 'A100-SXM4-80GB'"):
        record("A100-SXM-80GB")
    with pytest.raises(DeviceError, match="is no folder"):
        load_records(tmp_path / "none")
    with pytest.raises(DeviceError, match="does not exist"):
        read_record(tmp_path / "none.yaml")
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(RECORDS["T4"].to_yaml())
    with pytest.raises(DeviceError, match="is taken by"):
        load_records(tmp_path)
