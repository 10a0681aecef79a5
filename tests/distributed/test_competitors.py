"""What pdv's programs are measured against computes what one process computes; and stages are cut where they should."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.cluster_runs.clusters import CLUSTERS
from benchmarks.cluster_runs.measure import GRADIENT_TOLERANCE, LOSS_TOLERANCE, check, mesh_of, reference
from benchmarks.cluster_runs.models import TASKS
from benchmarks.cluster_runs.networks import PERIOD_US, lay_out, missing
from benchmarks.cluster_runs.pipelines import cut
from benchmarks.cluster_runs.strategies import STRATEGIES, strategies_for
from benchmarks.cluster_runs.trainers import Place
from pdv.cluster import load_cluster
from tests.distributed.harness import run_ranks


def compare_all(task: str) -> dict[str, tuple[float, float]]:
    """Loss and gradients of each competitor against one process's, at other settings than it starts from."""
    place = Place(TASKS[task], (1.0,) * dist.get_world_size(), mesh_of)
    expected = reference(place.task)
    found = {}
    for strategy in strategies_for(task, CLUSTERS["fast-pairs"]):
        settings = strategy.start() | {
            name: choices[1] for name, choices in strategy.tuned.items() if name not in ("micro", "schedule")
        }
        settings |= {"micro": 2, "schedule": "gpipe"} if "stages" in settings else {"micro": 2}
        found[strategy.name] = check(strategy.make(place, settings), expected)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("task", ["tiny", "recommender"])
def test_competitors_compute_what_one_process_computes(task: str) -> None:
    (found, *_) = run_ranks(compare_all, 4, task, timeout_s=120)
    assert set(found) == {one.name for one in STRATEGIES if not one.only or task in one.only}
    for name, (loss, gradient) in found.items():
        assert loss <= LOSS_TOLERANCE, name
        assert gradient <= GRADIENT_TOLERANCE, name


def test_stages_are_cut_where_the_slowest_is_fastest() -> None:
    loads = [1.0, 8, 8, 8, 8, 16]
    assert cut(loads, [1, 1], "balanced") == (0, 4, 6)
    assert cut(loads, [1, 3], "balanced") == (0, 2, 6)
    assert cut(loads, [1, 1, 1], "equal") == (0, 2, 4, 6)


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_described_with_all_their_devices(name: str) -> None:
    cluster = CLUSTERS[name]
    found = load_cluster(cluster.describe())
    assert found.num_devices == cluster.size == 4
    if cluster.pairs:
        return
    slowest = min(rate or 1e9 for rate in cluster.rates) * 1e6 / 8
    if len(cluster.processes) > 1:  # what a device has of its host's port
        shared = slowest / max(cluster.processes)
        assert 0.9 * shared < found.levels[0].link.bandwidth_bytes_per_s < shared


def test_hosts_are_laid_out_and_removed() -> None:
    cluster = CLUSTERS["unequal"]
    if lacking := missing(cluster):
        assert "root" in lacking or "no " in lacking
        return
    with lay_out(cluster) as machine:
        told = subprocess.run(
            machine.command(3, ["sh", "-c", "tc qdisc show dev eth0; ip -4 -o addr show eth0; cat /proc/self/cgroup"]),
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        quota = int((machine.groups[3] / "cpu.cfs_quota_us").read_text())
    assert "tbf" in told
    assert "rate 1Gbit" in told
    assert "10.77.0.2/24" in told
    assert machine.groups[3].name in told
    assert quota == int(0.3 * PERIOD_US)
    assert not any(group.exists() for group in machine.groups)
    assert not any(Path("/run/netns", name).exists() for name in machine.namespaces)


def test_tuning_leaves_out_the_order_of_ranks_that_are_alike() -> None:
    star = strategies_for("tiny", CLUSTERS["star"])
    assert not any({"order", "path"} & set(one.tuned) for one in star)
    unequal = strategies_for("tiny", replace(CLUSTERS["star"], shares=(0.7, 0.3, 0.7, 0.3)))
    assert any({"order", "path"} & set(one.tuned) for one in unequal)
