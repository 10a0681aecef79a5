"""`pdv cluster bench` on two processes of this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
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


def test_processes_that_measure_end_with_what_started_them() -> None:
    words = [sys.executable, "-m", "pdv", "cluster", "bench", "--nproc", "2", "--device", "cpu", "--budget", "60s"]
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as started:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        while len(found := children.read_text().split()) < 3:  # two, and what tracks their resources
            assert started.poll() is None
            time.sleep(0.1)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) != 0
    deadline = time.monotonic() + 2  # of what tracks resources; by themselves they would measure on for some seconds
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.1)
