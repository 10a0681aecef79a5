"""What other tools wrote, as cluster files; and each kind of damage as one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ir.errors import ClusterError, UsageError
from pdv.cli import app as cli
from pdv.cluster import load_cluster
from pdv.cluster.detect import combine_facts, facts_of, read_facts
from pdv.cluster.detect.hosts import expand
from pdv.cluster.detect.nvidia import run_nvidia_smi
from pdv.cluster.routing.route import find_route

INPUTS = Path(__file__).parent.parent / "inputs"
CASES: dict[str, tuple[tuple[str, ...], str, str | None, dict[str, Any]]] = {  # Any: YAML
    "dgx": (("dgx-a100.topo",), "a100-80gb-sxm", None, {"devices": 8, "link": "nvlink3"}),
    "pcie": (
        ("pcie-8-l40s.topo",), "l40s", None,
        {
            "devices": 8, "link": {"preset": "socket", "ports": 1},
            "parts": [{"name": "socket", "devices": 4, "link": "pcie4"}],
        },
    ),
    "pairs": (
        ("pairs-4-a40.topo",), "a40", None,
        {
            "devices": 4, "link": {"preset": "socket", "ports": 1},
            "parts": [{"name": "socket", "devices": 2, "link": "nvlink3-bridge"}],
        },
    ),
    "nccl": (("h100.xml",), "h100-80gb-sxm", None, {"devices": 8, "link": "nvlink4"}),
    "cube": (("dgx-1v.topo",), "v100-16gb-sxm", None, {"devices": 8}),
}  # fmt: skip


def content(*names: str, device: str | None = "a100-80gb-sxm", network: str | None = None) -> dict[str, Any]:
    return combine_facts([read_facts(INPUTS / name) for name in names], device, network)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_inside_of_a_node(name: str) -> None:
    inputs, device, network, wanted = CASES[name]
    found = content(*inputs, device=device, network=network)
    (node,) = found["nodes"]
    assert node == {"count": 1, "device": device} | wanted
    cluster = load_cluster(found)
    assert cluster.num_devices == wanted["devices"]
    assert cluster.warnings == ()


def test_a_cube_of_nvlinks_is_told_link_by_link() -> None:
    found = load_cluster(content("dgx-1v.topo", device="v100-16gb-sxm"))
    assert len(found.wires) == 16
    assert find_route(found, range(8)).link.bandwidth_bytes_per_s == pytest.approx(6 * 20e9)
    assert find_route(found, (0, 3)).link.bandwidth_bytes_per_s == pytest.approx(40e9)


def test_switches_of_slurm_over_the_hosts_of_a_hostfile() -> None:
    every = content("dgx-a100.topo", "topology.yaml", network="ib-hdr")
    assert every["nodes"][0]["count"] == 16
    assert every["network"] == {"preset": "ib-hdr", "ports_per_node": 8, "switches": [{"nodes": 4}]}
    some = content("hostfile", "topology.yaml", "dgx-a100.topo", network="ib-hdr")
    assert some["nodes"][0]["count"] == 4
    assert some["network"]["switches"] == [{"nodes": 2}]
    conf = content("pairs.xml", "topology.conf", device="rtx-a6000")
    assert conf["network"]["switches"] == [{"nodes": 2}, {"nodes": 4}]
    assert conf["network"]["bandwidth"] == "100 Gb/s"
    assert [level.name for level in load_cluster(conf).levels] == ["spine", "leaf", "node", "socket", "gpu"]


def test_ports_and_their_rate_are_from_nccl() -> None:
    found = content("h100.xml", "hostfile", device="h100-80gb-sxm")
    assert found["network"] == {"preset": "ib-ndr", "ports_per_node": 8}


def test_hosts_of_unequal_slots_are_kinds_of_nodes() -> None:
    facts = facts_of("a slots=8\nb slots=8\nc slots=4\n", "hostfile")
    found, notes = combine_facts([facts], "t4", "ethernet-25g")
    assert [(node["count"], node["devices"], node["link"]) for node in found["nodes"]] == [
        (2, 8, "pcie3"),
        (1, 4, "pcie3"),
    ]
    assert len(notes) == 2
    assert load_cluster(found).num_devices == 20


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ("a",)),
        ("a[1-3,07],b", ("a1", "a2", "a3", "a07", "b")),
        ("r[1-2]n[08-09]", ("r1n08", "r1n09", "r2n08", "r2n09")),
    ],
)
def test_lists_of_hosts(text: str, hosts: tuple[str, ...]) -> None:
    assert expand(text, "x") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "none of the known inputs"),
        ("a slots=8\na slots=8\n", "given twice"),
        ("a slots=8\nb slots=x\n", "is no host"),
        ("SwitchName=a Nodes=n[3-1]\n", "is no range"),
        ("SwitchName=a Nodes=n[1-99999999]\n", "more than 65536 hosts"),
        ("SwitchName=a Nodes=n[1-2\n", "is no list of hosts"),
        ("SwitchName=a Switches=a\n", "below itself"),
        ("SwitchName=a Switches=b\n", "there is no switch 'b'"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\nSwitchName=c Switches=a,b\n", "below two switches"),
        ("- topology: x\n  flat: true\n", "no switches in it"),
        ("- topology: x\n  tree:\n    switches:\n      - {children: b}\n", "switch is missing"),
        ("<system>", "not valid XML"),
        ("<!DOCTYPE x [<!ENTITY a 'b'>]><system/>", "not allowed in the XML"),
        ("<system/>", "no GPU in the XML"),
        ("GPU0\t X \tNV4\n", "no line of column names"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV4\n", "no row GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tQQ\n", "'QQ' is no kind of connection"),
        ("\tGPU0\tGPU1\nGPU0\t X\n", "cut short"),
    ],
)
def test_damage_is_one_error(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        facts_of(text, "input")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_what_no_input_tells_is_asked_for() -> None:
    with pytest.raises(UsageError, match="--device PRESET"):
        content("dgx-a100.topo", device=None)
    with pytest.raises(UsageError, match="--network PRESET"):
        content("dgx-a100.topo", "hostfile")
    with pytest.raises(UsageError, match="how many devices"):
        content("topology.yaml", network="ib-hdr")
    with pytest.raises(UsageError, match="tell the same thing"):
        content("dgx-a100.topo", "h100.xml")


def test_the_command_writes_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cluster.yaml"
    words = ["cluster", "detect", "--from", str(INPUTS / "dgx-a100.topo"), "-o", str(output)]
    assert cli.run([*words, "--device", "a100-80gb-sxm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] == load_cluster(output).as_dict()
    assert list(tmp_path.iterdir()) == [output]
    assert cli.run([*words, "--device", "a100"]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.run([*words, "--device", "a100", "--overwrite"]) == 2
    assert "there is no preset 'a100'" in capsys.readouterr().err


def test_a_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_text("hello")
    words = ["cluster", "detect", "--from", str(tmp_path / "bad"), "--device", "t4", "-o", str(tmp_path / "out.yaml")]
    assert cli.run(words) == 5
    assert "none of the known inputs" in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {INPUTS / 'pairs-4-a40.topo'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = run_nvidia_smi()
    assert text is not None
    node = facts_of(text, "nvidia-smi").node
    assert node is not None
    assert (node.devices, len(node.nvlinks)) == (4, 2)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert run_nvidia_smi() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert run_nvidia_smi() is None
