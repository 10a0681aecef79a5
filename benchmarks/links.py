"""Collectives across nodes as published, against what routes make of the described cluster.

    python benchmarks/links.py [FOLDER] [--smoke] [--json OUT]

FOLDER has collectives.parquet (busbw_gbs, bytes, n_devices, devices_per_node, n_nodes of each). A system is described
by its own measured all-reduce over one whole node, and by its ports' line rate, or where nobody states it by what one
GPU in each node reaches (a row that is not counted). Predicted are all-reduces over several nodes, of 32 MiB and more.
For comparison, the rule that routes replaced: one device's share of the ports, whatever the group. Without FOLDER, or
with --smoke, only predictions are printed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Record, arguments, table
from pdv.cluster import Cluster, load_cluster
from pdv.cluster.routing.route import find_route

LARGE = 2**25  # bytes from which bandwidth decides
COLUMNS = ["system", "collective", "n_nodes", "devices_per_node", "n_devices", "bytes", "busbw_gbs"]


@dataclass(frozen=True)
class System:
    """A measured system: bytes/s of an all-reduce inside a node (0: from the rows), and the ports of a node."""

    name: str
    devices: int
    port_gbit_per_s: float
    ports: int
    source: str


SYSTEMS = (
    # DeepBench, README of the results: eight GPUs on PCIe a node, one FDR InfiniBand port
    System("NV_M40", 8, 56, 1, "FDR"),
    System("NV_TitanX", 8, 56, 1, "FDR"),
    System("NV_TitanX_Pascal", 8, 56, 1, "FDR"),
    System("NV_1080Ti", 8, 56, 1, "FDR"),
    System("NV_P100", 8, 56, 1, "FDR"),
    # Vidur's A100 nodes: the fabric is not named; a port carries what one GPU in each of two nodes reaches (5.9 GB/s)
    System("a100_dgx", 8, 5.9 * 8, 8, "measured with one GPU a node"),
)


def described(system: System, inside: float, nodes: int) -> Cluster:
    """The cluster of so many nodes of a system."""
    link = {"name": "inside", "bandwidth": f"{inside:.6g} GB/s", "latency": "4 us"}
    node = {"count": nodes, "devices": system.devices, "device": "a100-80gb-sxm", "link": link}
    port = {"name": "port", "bandwidth": f"{system.port_gbit_per_s:.6g} Gb/s", "latency": "10 us"}
    return load_cluster({"nodes": [node], "network": port | {"ports_per_node": system.ports}})


def predicted(cluster: Cluster, members: int) -> tuple[float, float]:
    """GB/s of a ring with so many members in each node, by its route; and one device's share of the ports."""
    per_node = cluster.nodes[0].devices
    ranks = [node * per_node + place for node in range(cluster.num_nodes) for place in range(members)]
    inside = cluster.levels[-1].link.bandwidth_bytes_per_s
    share = min(inside, cluster.levels[0].link.bandwidth_bytes_per_s)
    return find_route(cluster, ranks).link.bandwidth_bytes_per_s / 1e9, share / 1e9


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The measured all-reduces of the systems, large ones."""
    import pyarrow.parquet as pq

    names = {system.name for system in SYSTEMS}
    rows: list[dict[str, Any]] = pq.read_table(folder / "collectives.parquet", columns=COLUMNS).to_pylist()
    return [
        row for row in rows
        if row["system"] in names and row["collective"] == "all_reduce" and row["bytes"] >= LARGE
    ]  # fmt: skip


def reached(rows: list[dict[str, Any]], system: str, nodes: int, members: int) -> float | None:
    """Median GB/s of a shape."""
    found = [
        row["busbw_gbs"] for row in rows
        if (row["system"], row["n_nodes"], row["devices_per_node"]) == (system, nodes, members)
        and row["n_devices"] == nodes * members
    ]  # fmt: skip
    return statistics.median(found) if found else None


def main() -> None:
    """Compare, and print."""
    parser = arguments("All-reduces across nodes, measured and predicted.")
    parser.add_argument("folder", type=Path, nargs="?", help="with collectives.parquet")
    options = parser.parse_args()
    if options.smoke or options.folder is None:
        for members in (1, 2, 4, 8):
            new, old = predicted(described(SYSTEMS[0], 6.2, 2), members)
            print(f"{members} in each of 2 nodes: {new:.3g} GB/s by the route, {old:.3g} GB/s one device's share")
        return
    rows, record = rows_of(options.folder), Record()
    told: list[tuple[str, ...]] = []
    for system in SYSTEMS:
        inside = reached(rows, system.name, 1, system.devices)
        assert inside is not None, f"no all-reduce inside a node of {system.name}"
        shapes = sorted({(row["n_nodes"], row["devices_per_node"]) for row in rows if row["system"] == system.name})
        for nodes, members in shapes:
            measured = reached(rows, system.name, nodes, members)
            if nodes == 1 or measured is None or (members == 1 and system.source != "FDR"):
                continue
            new, old = predicted(described(system, inside, nodes), members)
            record.rows.append(
                {"system": system.name, "nodes": nodes, "members": members, "measured_gb_per_s": round(measured, 3),
                 "route_gb_per_s": round(new, 3), "share_gb_per_s": round(old, 3), "inside_gb_per_s": round(inside, 3)}
            )  # fmt: skip
            told.append((system.name, f"{nodes} x {members}", f"{measured:.2f}", f"{new:.2f}", f"{old:.2f}"))
    table(("system", "nodes x members", "measured GB/s", "by route", "one share"), told)
    for name, key in (("by route", "route_gb_per_s"), ("one device's share", "share_gb_per_s")):
        ratios = [max(row[key] / row["measured_gb_per_s"], row["measured_gb_per_s"] / row[key]) for row in record.rows]
        record.claim(f"factor to measured, {name}", statistics.median(ratios), "x", f"worst {max(ratios):.2f}")
    record.print_summary()
    record.write(options.json)


if __name__ == "__main__":
    main()
