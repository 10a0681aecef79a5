"""`pdv cluster bench` on two processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdv.cli import app as cli
from pdv.cluster import load_cluster

pytestmark = pytest.mark.distributed


def test_links_of_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cluster.yaml"
    words = ["cluster", "bench", "--nproc", "2", "--device", "cpu", "--budget", "4s", "-o", str(output), "--json"]
    assert cli.run(words) == 0
    told = json.loads(capsys.readouterr().out)
    (link,) = told["links"].values()
    assert set(link["errors"]) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    found = load_cluster(output)
    (level,) = found.levels
    assert found.num_devices == 2
    assert level.link.bandwidth_bytes_per_s == pytest.approx(link["bandwidth_bytes_per_s"], rel=1e-3)
    assert level.link.latency_s == pytest.approx(link["latency_s"], rel=1e-3)
    assert list(tmp_path.iterdir()) == [output]
