"""Names of devices and nodes as people, vendors and clouds write them, and power limits."""

from __future__ import annotations

from typing import Any

import pytest

from ir.errors import ClusterError
from learned_cost.devices.device import cut_part, find, limit_power, load_records, record
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.names import DEVICE_WORDS, NODE_ALIASES, device_in, preset_of
from pdv.cluster.nodes import NODES
from pdv.cluster.presets import DEVICES
from pdv.prices import cost_model


def of_device(device: object) -> Cluster:
    return load_cluster({"nodes": [{"devices": 8, "device": device, "link": "nvlink4"}]})


def test_every_alias_means_a_preset() -> None:
    assert set(NODE_ALIASES.values()) <= set(NODES)
    assert {preset for _, preset in DEVICE_WORDS} <= set(DEVICES)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("H100-SXM5-80GB", "h100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("RTX4090", "rtx-4090"),
        ("A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA GB300", "gb300"),
        ("h100", None),
        ("a100-80gb", None),
    ],
)
def test_a_device_is_known_by_any_spelling_of_its_whole_name(name: str, preset: str | None) -> None:
    assert preset_of(name, DEVICES) == preset


@pytest.mark.parametrize(
    "name", ["Standard_ND96isr_H100_v5", "dgx-GB200", "p3.8xlarge", "g4dn.12xlarge", "a3-highgpu-8g"]
)
def test_a_node_is_known_by_what_clouds_and_vendors_call_it(name: str) -> None:
    found = load_cluster({"nodes": [{"preset": name, "count": 2}]})
    assert found.num_devices == 2 * NODES[preset_of(name, NODES) or ""].devices
    assert len(found.levels) == 2


def test_a_name_that_could_be_several_is_refused_with_all_of_them() -> None:
    with pytest.raises(ClusterError, match="'h100-80gb-sxm' or 'h100-94gb-nvl'"):
        of_device("h100")


def test_free_text_may_say_a_power_limit() -> None:
    assert device_in("H100-96G(HBM2e,500W)") == {"preset": "h100-96gb-sxm", "power": "500 W"}
    assert device_in("H100-MIG-3g.40gb") == {"preset": "h100-80gb-sxm", "mig": "3g.40gb"}
    assert device_in("V100") == "v100-16gb-sxm"
    assert device_in("an abacus") is None


def test_a_power_limit_slows_clocks_and_not_memory_and_keeps_the_record() -> None:
    whole = of_device("h100-80gb-sxm").classes[0].device
    limited = of_device({"preset": "h100-80gb-sxm", "power": "350 W"}).classes[0].device
    assert limited.name == "h100-80gb-sxm-350w"
    assert limited.peak("bfloat16") == pytest.approx(whole.peak("bfloat16") * 0.5 ** (1 / 3))
    assert limited.memory_bandwidth_bytes_per_s == whole.memory_bandwidth_bytes_per_s
    model: Any = cost_model("learned", [limited])
    (place,) = model.places
    assert place.known
    assert place.record == limit_power(record("H100-SXM-80GB"), 350.0)
    assert place.record.peak("fp8") == pytest.approx(1978e12 * 0.5 ** (1 / 3))


def test_more_power_than_it_takes_changes_nothing() -> None:
    assert limit_power(record("gb200"), 5000.0).peak_flops == record("gb200").peak_flops


def test_a_locked_clock_slows_all_rates_alike() -> None:
    limited = of_device({"preset": "h100-80gb-sxm", "clock": "990 MHz"}).classes[0].device
    assert limited.name == "h100-80gb-sxm-990mhz"
    assert limited.peak("bfloat16") == pytest.approx(989e12 / 2)
    found = record("h100-80gb-sxm-350w-500mhz")
    assert found.tdp_w == 350.0
    assert found.peak("bf16") == pytest.approx(989e12 * 500 / 1980)


@pytest.mark.parametrize(
    "device",
    [
        {"preset": "h100-80gb-sxm", "mig": "3g.40gb"},
        "h100-80gb-sxm-mig-3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        {"preset": "H100-SXM-80GB MIG 3g.40gb+me"},
    ],
)
def test_a_mig_part_has_its_units_and_slices_of_memory_however_it_is_named(device: object) -> None:
    cluster = load_cluster({"nodes": [{"devices": 2, "device": device, "link": "pcie5"}]})
    part = cluster.classes[0].device
    assert part.name == "h100-80gb-sxm-mig-3g.40gb"
    assert part.memory_bytes == 40 * 2**30
    assert part.memory_bandwidth_bytes_per_s == 3350e9 / 2
    assert part.peak("bfloat16") == pytest.approx(989e12 * 60 / 132)
    model: Any = cost_model("learned", [part])
    assert model.places[0].record.sm_count == 60
    assert model.places[0].record.l2_bytes == 25 * 2**20


@pytest.mark.parametrize("name", [name for name, entry in load_records().items() if entry.mig])
def test_parts_are_slices_of_their_device(name: str) -> None:
    entry = record(name)
    for profile, units in entry.mig.items():
        slices, size = int(profile[0]), int(profile[3:-2])
        part = cut_part(entry, profile)
        assert find(f"{entry.name} MIG {profile}", [entry]) == part
        assert part.memory_bytes / 2**30 == pytest.approx(size, rel=0.07)
        assert part.memory_bytes in {entry.memory_bytes // share for share in (1, 2, 4, 8)}
        assert 0 < units / entry.sm_count <= min(1.0, 1.4 * slices / 7) or max(entry.mig.values()) == entry.sm_count
        assert (part.peak("bf16") or 0.0) / units == pytest.approx((entry.peak("bf16") or 0.0) / entry.sm_count)
        assert part.link is None
    whole = max(entry.mig.values())
    assert 0.9 * entry.sm_count <= whole <= entry.sm_count


def test_a_power_limit_and_a_part_go_together() -> None:
    limited = {"preset": "h100-80gb-sxm", "power": "350 W", "mig": "1g.10gb"}
    part = load_cluster({"nodes": [{"devices": 1, "device": limited}]}).classes[0].device
    assert part.name == "h100-80gb-sxm-350w-mig-1g.10gb"
    assert part.peak("bfloat16") == pytest.approx(989e12 * 16 / 132 * 0.5 ** (1 / 3))
    assert record(part.name).memory_bytes == 10 * 2**30


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ({"preset": "h100-80gb-sxm", "mig": "3g.41gb"}, "has no MIG part '3g.41gb'. Allowed: 1g.10gb, .*'3g.40gb'"),
        ({"preset": "t4", "mig": "1g.4gb"}, "t4 has no MIG part '1g.4gb'. It has none"),
        ({"preset": "h100-80gb-sxm", "clock": "1200"}, "is not a clock with its unit"),
        ({"preset": "h100-80gb-sxm", "clock": "12 GHz"}, "is no plausible clock"),
        ({"preset": "h100-80gb-sxm-mig-3g.40gb", "mig": "1g.10gb"}, "MIG parts"),
        ({"name": "own", "memory": "80 GiB", "power": "500 W"}, "`power` limits a preset"),
        ({"name": "own", "memory": "80 GiB", "mig": "3g.40gb"}, "`mig` limits a preset"),
        ("H100-MIG-3g.40gb", "'h100-80gb-sxm' or 'h100-94gb-nvl'"),
        ("h100-80gb-sxm-mig-3g.40gb", "MIG parts .3g.40gb. have no NVLink"),
    ],
)
def test_limits_and_parts_that_cannot_be_are_refused(device: object, told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        of_device(device)
