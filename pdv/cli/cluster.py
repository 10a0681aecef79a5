"""`pdv cluster show FILE`: what a cluster file describes, in SI units, and the meshes that will be tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdv import config
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table, print_warning

if TYPE_CHECKING:
    from pdv.cluster import Cluster

app = typer.Typer(help="Describe clusters.")


@app.callback()
def _group() -> None:
    """Describe clusters."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="The cluster's YAML file.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Show what a cluster file describes, with every preset's numbers."""
    from pdv.cluster import candidate_meshes, load_cluster

    cluster = load_cluster(file)
    meshes = [candidate.mesh for candidate in candidate_meshes(cluster, config.MAX_MESH_AXES)]
    if as_json:
        axes = [{axis.name: axis.size for axis in mesh.axes} for mesh in meshes]
        print_json("cluster show", cluster=cluster.as_dict(), meshes=axes, warnings=list(cluster.warnings))
        return
    for warning in cluster.warnings:
        print_warning(warning)
    print_table(
        _rows(cluster)
        | {
            "meshes": ", ".join(
                " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) or "one device" for mesh in meshes
            )
        }
    )


def _rows(cluster: Cluster) -> dict[str, str]:
    from pdv.cluster.units import COMPUTE, LINK_BANDWIDTH, MEMORY, MEMORY_BANDWIDTH, TIME

    rows = {"cluster": f"{cluster.name}, {cluster.num_devices} devices"}
    for level in cluster.levels:
        rate, latency = LINK_BANDWIDTH.format(level.link.bandwidth_bytes_per_s), TIME.format(level.link.latency_s)
        rows[f"level {level.name}"] = (
            f"{level.size} over {level.link.name}, {rate} a device and direction, {latency} a step"
        )
    for entry in cluster.classes:
        device = entry.device
        peaks = ", ".join(f"{dtype} {COMPUTE.format(rate)}" for dtype, rate in device.peak_flops.items())
        rows[device.name] = (
            f"{entry.count} of them, {MEMORY.format(device.memory_bytes)} at "
            f"{MEMORY_BANDWIDTH.format(device.memory_bandwidth_bytes_per_s)}, {peaks}, "
            f"{device.efficiency:.0%} of it reached, {TIME.format(device.launch_latency_s)} a launch"
        )
    return rows
