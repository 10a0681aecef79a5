"""What is possible but sold nowhere is warned about, and what is usual is not."""

from __future__ import annotations

from typing import Any

import pytest

from pdv.cluster import load_cluster

NODE: dict[str, Any] = {"count": 2, "devices": 8, "device": "a100-80gb-sxm", "link": "nvlink3"}  # Any: YAML


def warnings(network: Any = "ib-hdr", **node: Any) -> tuple[str, ...]:
    return load_cluster({"nodes": [NODE | node], "network": network}).warnings


def test_the_usual_is_not_warned_about() -> None:
    assert warnings() == ()
    assert warnings({"preset": "ib-ndr", "latency": "5 us"}, link={"preset": "nvlink3", "bandwidth": "230 GB/s"}) == ()


@pytest.mark.parametrize(
    ("network", "node", "message"),
    [
        ("ib-hdr", {"link": {"preset": "nvlink3", "bandwidth": "400 Gb/s"}}, "sold in bytes"),
        ("ib-hdr", {"link": {"preset": "pcie4", "bandwidth": "400 GB/s"}}, "far from the 20 GB/s of pcie4"),
        ({"name": "x", "bandwidth": "200 GB/s", "latency": "5 us"}, {}, "sold in bits"),
        ("ib-hdr", {"device": {"preset": "a100-80gb-sxm", "memory": "80 GB"}}, "sold in GiB"),
        ("ib-hdr", {"device": {"preset": "a100-80gb-sxm", "memory": "8 GiB"}}, "memory is 0.1 times"),
        ("ib-hdr", {"device": {"preset": "a100-80gb-sxm", "peak": {"bfloat16": "31.2 TFLOP/s"}}}, "peak bfloat16"),
        ("ib-hdr", {"device": {"preset": "a100-80gb-sxm", "efficiency": 0.08}}, "efficiency of 8%"),
        ("ib-hdr", {"link": {"preset": "pcie3"}}, "faster than the link inside a node"),
        ({"preset": "ib-hdr", "latency": "3 ms"}, {}, "long distance"),
        ({"preset": "ib-hdr", "ports_per_node": 64, "bandwidth": "25 Gb/s"}, {}, "64 network ports"),
        ({"preset": "ib-hdr", "switches": [{"nodes": 1, "oversubscription": 2}]}, {}, None),
        ({"preset": "ib-hdr", "ports_per_node": 1, "rails": True}, {}, "rails"),
    ],
)
def test_slips_are_warned_about(network: Any, node: dict[str, Any], message: str | None) -> None:
    if message is None:
        with pytest.raises(Exception, match="switches of 1 nodes"):
            warnings(network, **node)
        return
    found = warnings(network, **node)
    assert any(message in warning for warning in found), found


def test_bits_and_bytes_are_both_understood() -> None:
    network = {"name": "x", "latency": "5 us", "ports_per_node": 8}
    rates = [
        load_cluster({"nodes": [NODE], "network": network | {"bandwidth": text}}).levels[0].link.bandwidth_bytes_per_s
        for text in ("400 Gb/s", "50 GB/s", "400 Gbit/s", "0.4 Tb/s")
    ]
    assert rates == [50e9] * 4
