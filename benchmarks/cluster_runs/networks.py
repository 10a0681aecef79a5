"""A cluster on this machine: a network namespace a host, a switch among them, shaped links, CPU quotas.

``with lay_out(cluster) as machine`` makes them and removes them whatever happens; ``machine.command(rank, words)`` is
what runs a rank's process on its host. Both directions of a port are shaped (token buckets), so what many send to one
queues as in a real switch. Root is needed; ``missing()`` says what else is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster_runs.clusters import Cluster

CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000  # short against a step, so that a quota acts as a slower core and not as pauses
PREFIX = "pdvc"


@dataclass(frozen=True)
class Machine:
    """Where the ranks of a cluster run: their namespaces (None: this one) and their groups of the cpu controller."""

    cluster: Cluster
    namespaces: tuple[str, ...] = ()
    groups: tuple[Path, ...] = ()

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """``words`` as run on the rank's host, within its quota."""
        command = list(words)
        if self.namespaces:
            command = ["ip", "netns", "exec", self.namespaces[self.cluster.host_of(rank)], *command]
        if self.groups:
            join = f'echo $$ > {self.groups[rank] / "tasks"} && exec "$@"'
            command = ["sh", "-c", join, "sh", *command]
        return command

    @property
    def interface(self) -> str:
        """What gloo uses."""
        return "eth0" if len(self.namespaces) > 1 else "lo"


def missing(cluster: Cluster, *, quotas: bool = False) -> str | None:
    """What this machine lacks for a cluster, or None."""
    quotas = quotas or bool(cluster.shares)
    if len(cluster.processes) == 1 and not quotas:
        return None
    if os.geteuid() != 0:
        return "namespaces and quotas need root"
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(absent)}"
    if quotas and not CGROUP.is_dir():
        return f"no cpu controller of cgroup v1 at {CGROUP}"
    tried = subprocess.run(["ip", "netns", "add", f"{PREFIX}-try-{os.getpid()}"], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try-{os.getpid()}"], check=False, capture_output=True)
    return "no network namespaces" if tried.returncode else None


@contextlib.contextmanager
def lay_out(cluster: Cluster, *, quotas: bool = False) -> Iterator[Machine]:
    """The cluster's hosts; with ``quotas`` each process has its share of a core and not what others leave."""
    _remove_left_over()
    tag = f"{PREFIX}-{os.getpid()}"
    try:
        namespaces = _make_hosts(cluster, tag) if len(cluster.processes) > 1 else ()
        groups = _make_groups(cluster, tag) if cluster.shares or quotas else ()
        yield Machine(cluster, namespaces, groups)
    finally:
        _remove(tag)


def _make_hosts(cluster: Cluster, tag: str) -> tuple[str, ...]:
    switch = f"{tag}-s"
    names = tuple(f"{tag}-{host}" for host in range(len(cluster.processes)))
    for name in (switch, *names):
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for host, name in enumerate(names):
        port = f"p{host}"
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", port, "master", "br0")
        _ip("-n", switch, "link", "set", port, "up")
        _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        if rate := cluster.rates[host]:
            for namespace, device in ((name, "eth0"), (switch, port)):
                _tc(namespace, "qdisc", "add", "dev", device, "root", "tbf", *_bucket(rate), "latency", "400ms")
        if cluster.pairs:
            _shape_pairs(cluster, host, name)
    return names


def _shape_pairs(cluster: Cluster, host: int, namespace: str) -> None:
    """A class for each peer, so that each pair has a link of its own."""
    _tc(namespace, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "99")
    for peer in range(len(cluster.processes)):
        if peer == host:
            continue
        rate = cluster.pairs[min(host, peer), max(host, peer)]
        words = ["class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{peer + 1}", "htb"]
        _tc(namespace, *words, *_bucket(rate))
        match = ["u32", "match", "ip", "dst", f"{_address(peer)}/32", "flowid", f"1:{peer + 1}"]
        _tc(namespace, "filter", "add", "dev", "eth0", "protocol", "ip", "parent", "1:", *match)


def _bucket(mbit: float) -> list[str]:
    """A rate, and a bucket that holds what passes in a tick of the kernel's clock and one packet of the largest."""
    return ["rate", f"{mbit:g}mbit", "burst", str(max(int(mbit * 1e6 / 8 / 250), 66_000))]


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _make_groups(cluster: Cluster, tag: str) -> tuple[Path, ...]:
    groups = []
    for rank in range(cluster.size):
        group = CGROUP / f"{tag}-{rank}"
        group.mkdir()
        share = cluster.share_of(cluster.host_of(rank))
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
        groups.append(group)
    return tuple(groups)


def _remove(tag: str) -> None:
    """All namespaces and groups of a tag; processes in them have ended."""
    for name in _namespaces():
        if name.startswith(f"{tag}-"):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    for group in CGROUP.glob(f"{tag}-*"):
        for _ in range(50):  # a group is busy until its last process is gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _remove_left_over() -> None:
    """What a process that was killed left behind."""
    names = [*_namespaces(), *(group.name for group in CGROUP.glob(f"{PREFIX}-*"))]
    owners = {name.split("-")[1] for name in names if name.startswith(f"{PREFIX}-")}
    for owner in owners:
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(f"{PREFIX}-{owner}")


def _namespaces() -> list[str]:
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _tc(namespace: str, *words: str) -> None:
    _run("tc", "-n", namespace, *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
