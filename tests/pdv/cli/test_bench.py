"""What `pdv cluster bench` asks for, and how measured links go into a cluster file; the measuring itself is in
tests/distributed/test_links.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ir.errors import UsageError
from learned_cost.profile.links import SIZES, LevelAsked, LinkRow, Measured
from pdv.cli import app as cli
from pdv.cli import bench
from pdv.cluster import load_cluster

PARTS: dict[str, Any] = {  # Any: YAML
    "nodes": [{"count": 2, "preset": "g5.48xlarge"}],
}


def measured(levels: list[LevelAsked]) -> Measured:
    """As if a level's link had a bandwidth of 1, 2, 3 ... GB/s and a latency of 10 us."""
    rows = [
        LinkRow(level.name, "send_recv", level.span // level.stride, size, 1e-5 + size / (place + 1) / 1e9)
        for place, level in enumerate(levels)
        for size in SIZES
    ]
    return Measured(tuple(rows), ((0, 1, 4e9), (0, 2, 1e9)), "gloo")


def test_levels_of_a_torchrun() -> None:
    assert bench.levels_asked_for(None, 8, 4, "cuda") == [LevelAsked("node", 4, 8), LevelAsked("gpu", 1, 4)]
    assert bench.levels_asked_for(None, 4, 4, "cpu") == [LevelAsked("core", 1, 4)]
    cluster = load_cluster(PARTS)
    assert bench.levels_asked_for(cluster, 16, 8, "cuda") == [
        LevelAsked("node", 8, 16), LevelAsked("socket", 4, 8), LevelAsked("gpu", 1, 4)
    ]  # fmt: skip
    for world, message in ((1, "nobody to talk to"), (8, "8 processes for the 16 devices")):
        with pytest.raises(UsageError, match=message):
            bench.levels_asked_for(cluster, world, world, "cuda")


def test_measured_links_take_the_place_of_those_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "in.yaml", tmp_path / "out.yaml"
    file.write_text(yaml.safe_dump(PARTS))
    cluster = load_cluster(file)
    levels = bench.levels_asked_for(cluster, 16, 8, "cuda")
    bench._tell(measured(levels), levels, file, cluster, output, "cuda", as_json=False)
    found = load_cluster(output)
    rates = [(level.name, level.link.bandwidth_bytes_per_s, level.link.latency_s) for level in found.levels]
    for (name, rate, latency_s), wanted in zip(rates, (("node", 1e9), ("socket", 2e9), ("gpu", 3e9)), strict=True):
        assert name == wanted[0]
        assert rate == pytest.approx(wanted[1])
        assert latency_s == pytest.approx(1e-5)
    assert found.classes == cluster.classes
    told = capsys.readouterr()
    assert "4.0 times as fast" in told.err
    assert "pair 0 - 2" in told.out


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.yaml").write_text("kept")
    assert cli.run(["cluster", "bench", "-o", str(tmp_path / "out.yaml")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "out.yaml").read_text() == "kept"
