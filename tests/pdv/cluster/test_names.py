"""Names of devices and nodes as people, vendors and clouds write them, and power limits."""

from __future__ import annotations

from typing import Any

import pytest

from ir.errors import ClusterError
from learned_cost.devices.device import limit_power, record
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
    assert device_in("H100-96G(HBM2e,500W)") == ("h100-96gb-sxm", 500.0)
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


def test_only_what_has_a_known_power_can_be_limited() -> None:
    with pytest.raises(ClusterError, match="full power is known"):
        of_device({"name": "own", "memory": "80 GiB", "power": "500 W"})
