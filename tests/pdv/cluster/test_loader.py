"""Cluster files: the examples, and each mistake as one error with file, line and mend (golden)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ir.errors import ClusterError
from pdv.cluster import load_cluster
from pdv.prices import cost_model
from tests.conftest import Golden

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
NODE = "nodes:\n  - {count: 2, devices: 8, device: a100-80gb-sxm, link: nvlink3}\n"
CUSTOM = """\
nodes:
  - devices: 2
    device:
      name: mine
      memory: 16 GiB
      peak: {float32: 10 TFLOP/s}
      memory_bandwidth: 500 GB/s
      launch_latency: 5 us
      efficiency: 0.7
    link: {name: wire, bandwidth: 10 GB/s, latency: 3 us}
"""

# name -> the file's text; the message is tests/golden/errors/cluster-<name>.txt
BAD = {
    "empty": "",
    "comment-only": "# nothing\n",
    "list": "- a\n- b\n",
    "text": "hello\n",
    "syntax": "nodes:\n  - {count: 2, devices: 8\n",
    "tab": "nodes:\n\t- devices: 8\n",
    "control-character": "nodes: \x00\n",
    "two-documents": NODE + "---\n" + NODE,
    "unknown-key": NODE + "network: ib-hdr\nmesch: {x: 16}\n",
    "unknown-key-inside": NODE.replace("link", "lnk") + "network: ib-hdr\n",
    "no-nodes": "network: ib-hdr\n",
    "nodes-empty": "nodes: []\n",
    "nodes-a-mapping": "nodes: {count: 2}\n",
    "duplicate-key": NODE + "network: ib-hdr\nnetwork: ib-ndr\n",
    "duplicate-key-inside": NODE.replace("count: 2", "count: 2, count: 3") + "network: ib-hdr\n",
    "tag": "nodes: !!python/object/apply:os.system ['true']\n",
    "standard-tag": NODE.replace("count: 2", "count: !!int 2"),
    "alias": "nodes:\n  - &n {devices: 8, device: t4, link: pcie3}\n  - *n\n",
    "deep": "nodes: " + "[" * 1000 + "]" * 1000 + "\n",
    "key-not-text": "? [a]\n: b\n",
    "date": NODE.replace("count: 2", "count: 2024-01-01"),
    "sexagesimal": NODE.replace("count: 2", "count: 1:30"),
    "truth-by-word": NODE + "network: {preset: ib-hdr, rails: yes}\n",
    "huge-number": NODE.replace("count: 2", "count: " + "9" * 6000),
    "zero-count": NODE.replace("count: 2", "count: 0"),
    "negative-devices": NODE.replace("devices: 8", "devices: -8"),
    "count-nan": NODE.replace("count: 2", "count: .nan"),
    "count-text": NODE.replace("count: 2", "count: '2'"),
    "count-true": NODE.replace("count: 2", "count: true"),
    "count-fraction": NODE.replace("count: 2", "count: 2.5"),
    "count-huge": NODE.replace("count: 2", "count: 1000000"),
    "unknown-device": NODE.replace("a100-80gb-sxm", "a100-80gb-smx") + "network: ib-hdr\n",
    "unknown-link": NODE.replace("nvlink3", "nvlink9") + "network: ib-hdr\n",
    "device-a-number": NODE.replace("a100-80gb-sxm", "100"),
    "no-network": NODE,
    "no-link": "nodes:\n  - {devices: 8, device: t4}\n",
    "device-incomplete": CUSTOM.replace("      memory: 16 GiB\n", ""),
    "no-float32": CUSTOM.replace("float32", "bfloat16"),
    "unknown-dtype": CUSTOM.replace("float32", "float31"),
    "efficiency-nan": CUSTOM.replace("0.7", ".nan"),
    "efficiency-percent": CUSTOM.replace("0.7", "70"),
    "share-tiny": CUSTOM.replace("efficiency: 0.7", "efficiency: 0.7\n      share: 1.0e-308"),
    "speed-zero": CUSTOM.replace("efficiency: 0.7", "efficiency: 0.7\n      speed: 0.0"),
    "share-percent": CUSTOM.replace("efficiency: 0.7", "efficiency: 0.7\n      share: 50"),
    "efficiency-text": CUSTOM.replace("0.7", "high"),
    "no-unit": CUSTOM.replace("500 GB/s", "500"),
    "unit-case": CUSTOM.replace("10 GB/s", "10 gb/s"),
    "unit-bits-of-memory": CUSTOM.replace("16 GiB", "16 Gb"),
    "implausible-memory": CUSTOM.replace("16 GiB", "16 MiB"),
    "implausible-latency": CUSTOM.replace("latency: 3 us", "latency: 30 s"),
    "link-faster-than-memory": CUSTOM.replace("10 GB/s", "1000 GB/s"),
    "network-in-bytes": NODE + "network: {name: net, bandwidth: 400 GB/s, latency: 5 us, ports_per_node: 8}\n",
    "oversubscription": NODE + "network: {preset: ib-hdr, switches: [{nodes: 2, oversubscription: 0.5}]}\n",
    "switch-nodes": NODE + "network: {preset: ib-hdr, switches: [{nodes: 70000}]}\n",
    "mesh-does-not-fit": NODE + "network: ib-hdr\nmesh: {x: 2, y: 4}\n",
    "mesh-axis-name": NODE + "network: ib-hdr\nmesh: {class: 16}\n",
    "mesh-axis-hostile": NODE + "network: ib-hdr\nmesh: {\"x'); import os #\": 16}\n",
    "mesh-zero": NODE + "network: ib-hdr\nmesh: {x: 0}\n",
    "hostile-name": "name: \"a\\nb\\e[31m\"\n" + NODE + "network: ib-hdr\n",
    "three-problems": NODE.replace("8", "0").replace("nvlink3", "nvlink9") + "netwrk: ib-hdr\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(BAD[name])
    with pytest.raises(ClusterError) as caught:
        load_cluster("cluster.yaml")
    message = str(caught.value)
    assert caught.value.exit_code == 5
    assert "cluster.yaml" in message
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 600
    golden(f"errors/cluster-{name}.txt", message + "\n")


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.yaml", tmp_path / "a\nb"):
        with pytest.raises(ClusterError, match=r"folder|does not exist"):
            load_cluster(path)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="UTF-8"):
        load_cluster(path)
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ClusterError, match="1 MiB"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("name", "devices", "gib"),
    [
        ("laptop-4", 4, 4),
        ("2x8-a100", 16, 80),
        ("8x8-h100", 64, 80),
        ("mixed-a100-v100", 16, 32),
        ("2x8-a40-pairs", 16, 48),
        ("32-dgx-a100", 256, 80),
    ],
)
def test_examples(name: str, devices: int, gib: int) -> None:
    cluster = load_cluster(EXAMPLES / f"{name}.yaml")
    assert (cluster.name, cluster.num_devices, cluster.memory_bytes) == (name, devices, gib * 2**30)
    assert cluster.warnings == ()
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(cluster) == hash(load_cluster(EXAMPLES / f"{name}.yaml"))


def test_a_description_without_presets(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CUSTOM)
    cluster = load_cluster(path)
    (level,), (entry,) = cluster.levels, cluster.classes
    assert (level.link.bandwidth_bytes_per_s, level.link.latency_s) == (10e9, 3e-6)
    assert entry.device.peak("bfloat16") == entry.device.peak("float32") == 10e12
    assert cluster.as_dict()["num_devices"] == 2


def test_a_preset_with_changes_keeps_the_rest() -> None:
    device: dict[str, object] = {"preset": "a100-80gb-sxm", "memory": "70 GiB"}
    cluster = load_cluster({"nodes": [{"devices": 1, "device": device}]})
    assert cluster.levels == ()
    found = cluster.classes[0].device
    assert (found.name, found.memory_bytes) == ("a100-80gb-sxm-70gib", 70 * 2**30)
    assert found.peak("bfloat16") == 312e12


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"memory": "80 GiB", "memory_bandwidth": "2039 GB/s", "peak": {"bfloat16": "312 TFLOP/s"}}, "a100-80gb-sxm"),
        ({"memory": "70.5 GiB"}, "a100-80gb-sxm-72192mib"),
        ({"memory": "70 GiB", "power": "300 W"}, "a100-80gb-sxm-300w-70gib"),
        ({"memory": "70 GiB", "memory_bandwidth": "1500 GB/s"}, "a100-80gb-sxm-changed"),
        ({"efficiency": 0.5}, "a100-80gb-sxm-changed"),
    ],
)
def test_only_other_rates_make_of_a_preset_a_device_of_which_nothing_was_measured(
    changes: dict[str, object], name: str
) -> None:
    cluster = load_cluster({"nodes": [{"devices": 1, "device": {"preset": "a100-80gb-sxm", **changes}}]})
    assert cluster.classes[0].device.name == name
    assert (cost_model("auto", [cluster.classes[0].device]).provenance()["name"] == "auto") == ("changed" not in name)


def test_ports_are_shared_by_the_devices_of_a_node() -> None:
    node = {"count": 2, "devices": 8, "device": "t4", "link": "pcie3"}
    rates = [
        load_cluster({"nodes": [node], "network": network}).levels[0].link.bandwidth_bytes_per_s
        for network in ("ib-hdr", {"preset": "ib-hdr", "ports_per_node": 1}, "ethernet-100g")
    ]
    assert rates == [25e9, 25e9 / 8, 12.5e9 / 8]


def test_a_network_faster_than_the_node_is_warned_about() -> None:
    node = {"count": 2, "devices": 8, "device": "t4", "link": "pcie3"}
    cluster = load_cluster({"nodes": [node], "network": "ib-ndr"})
    assert len(cluster.warnings) == 1
    assert "50 GB/s" in cluster.warnings[0]


def test_equal_devices_of_two_groups_are_one_class() -> None:
    nodes = [{"devices": 2, "device": "t4", "link": link} for link in ("pcie3", "pcie4")]
    cluster = load_cluster({"nodes": nodes, "network": "ib-hdr"})
    assert [(entry.device.name, entry.count) for entry in cluster.classes] == [("t4", 4)]
    assert cluster.levels[1].link.bandwidth_bytes_per_s == 12.2e9


def test_a_share_and_a_speed_keep_the_presets_name() -> None:
    shared = {"preset": "cpu-core", "share": 0.5, "speed": 0.8}
    (entry,) = load_cluster({"nodes": [{"devices": 4, "device": shared, "link": "loopback-gloo"}]}).classes
    assert (entry.device.name, entry.device.share, entry.device.speed) == ("cpu-core", 0.5, 0.8)
    assert entry.device.pace == pytest.approx(0.4)
    assert pickle.loads(pickle.dumps(entry.device)) == entry.device


def test_a_list_that_is_too_short_says_how_many() -> None:
    node = {"devices": 2, "device": "t4", "link": "pcie3"}
    with pytest.raises(ClusterError, match=r"between: a list of 1\. Allowed: at least 2"):
        load_cluster({"nodes": [node], "links": [{"between": ["n0.g0"], "link": "pcie3"}]})
