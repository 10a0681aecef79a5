"""`pdv cluster show FILE`: what a cluster file describes, as a drawing and in SI units, and the meshes that will be
tried; `validate FILE`: all that is wrong or strange in it; `devices`: the presets; `detect`: the machine at hand, or
what other tools wrote about one, as a cluster file; `bench`: links, measured.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import ClusterError, UsageError
from pdv import config
from pdv.cli import bench
from pdv.cli.output import DebugOption, JsonOption, end, print_json, print_table, print_warning

if TYPE_CHECKING:
    from learned_cost.devices.device import DeviceRecord
    from pdv.cluster import Cluster

CPUS = ("cpu-core",)  # presets that a machine may be one of, other than by its driver's name

app = typer.Typer(help="Describe clusters.")
app.command()(bench.bench)


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
    from pdv.cluster.drawing import drawing

    for warning in cluster.warnings:
        print_warning(warning)
    print(drawing(cluster), end="\n\n")
    print_table(
        _rows(cluster)
        | {
            "meshes": ", ".join(
                " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) or "one device" for mesh in meshes
            )
        }
    )


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="The cluster's YAML file.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Tell all that is wrong (exit code 5) or strange in a cluster file."""
    from pdv.cluster.loader import problems

    errors, warnings = problems(file)
    found = {"valid": not errors, "errors": list(errors), "warnings": list(warnings)}
    for error in () if as_json else errors:
        print(f"error: {error}")
    for warning in () if as_json else warnings:
        print(f"warning: {warning}")
    if errors:
        message = f"{ClusterError.slug}: {errors[0]}" + (f" (and {len(errors) - 1} more)" if errors[1:] else "")
        end("cluster validate", ClusterError.slug, message, ClusterError.exit_code, as_json=as_json, **found)
    if as_json:
        print_json("cluster validate", **found)
    else:
        several = "s" if len(warnings) > 1 else ""
        print(f"{file} describes a cluster" + (f", with {len(warnings)} warning{several}" if warnings else ""))


@app.command()
def devices(
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """List the presets: devices, links, networks and nodes."""
    from pdv.cluster.listing import preset_tables, presets_as_dict

    if as_json:
        print_json("cluster devices", **presets_as_dict())
        return
    for title, rows in preset_tables():
        print(title)
        print_table({f"  {name}": text for name, text in rows.items()})


@app.command()
def detect(
    output: Annotated[Path, typer.Option("--output", "-o", help="The cluster file to write.")] = Path("cluster.yaml"),
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--from",
            help="Instead of this machine: output of `nvidia-smi topo -m`, NCCL's topology XML, Slurm's topology.yaml "
            "or topology.conf, a DeepSpeed hostfile. May be given several times.",
        ),
    ] = [],  # noqa: B006  # typer's way to a list
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda (default: cuda if there is one); or the preset that this machine is one of, cpu-core, "
            "whose speed here is measured; with --from any device preset."
        ),
    ] = "",
    network: Annotated[str, typer.Option(help="With --from: preset of the network between nodes.")] = "",
    count: Annotated[int, typer.Option(help="Devices: GPUs, or processes on a CPU (default: all).", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of a process on a CPU.", min=1)] = 1,
    name: Annotated[str, typer.Option(help="What to call the device (default: what the system calls it).")] = "",
    measured: Annotated[bool, typer.Option("--measured", help="Measure a GPU whose record is shipped, too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Describe this machine, or one that other tools described: a cluster file, and the device's record beside it."""
    if output.exists() and not overwrite:
        raise UsageError(f"-o: {str(output)!r} exists", mend="Choose another name, or add --overwrite")
    if inputs:
        _detect_from(inputs, output, device, network, as_json=as_json)
    elif device in CPUS:
        _detect_speed(device, count, output, as_json=as_json)
    elif device in {"", "cpu", "cuda"}:
        from learned_cost.profile.command import detect_record

        found, devices = detect_record(device, threads, count, name, measured=measured)
        _write_detected(found, devices, output, as_json=as_json)
    else:
        allowed = f"Allowed: cpu, cuda, {', '.join(CPUS)}; with --from a preset"
        raise UsageError(f"--device: {device!r} is not known", allowed)


def _write_detected(found: DeviceRecord, devices: int, output: Path, *, as_json: bool) -> None:
    """The record of a device, and a cluster file of so many."""
    from learned_cost.profile.command import cluster_of, keep
    from pdv.cluster.detect import write_cluster

    record_path = output.parent / "devices" / f"{found.name}.yaml"
    content = cluster_of(found, devices)
    if found.kind == "gpu":
        _join_by_nvidia_smi(content, found.name)
    head = f"This machine, as `pdv cluster detect` found it. The device's record: devices/{found.name}.yaml"
    write_cluster(content, (head,), output)
    keep(found, record_path)
    if as_json:
        files = {"cluster": str(output), "record": str(record_path)}
        print_json("cluster detect", files=files, record=found.model_dump(mode="json"), devices=devices)
        return
    rates = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in found.peak_flops.items())
    rows = {"device": f"{found.name}, {devices} of them", "peak": rates}
    rows["memory"] = f"{found.memory_bytes / 2**30:.3g} GiB at {found.memory_bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
    print_table(rows | {"source": found.source, "cluster": str(output), "record": str(record_path)})


def _detect_speed(preset: str, count: int, output: Path, *, as_json: bool) -> None:
    """The cores at hand as those of a preset, at the speed that they have with all processes at work."""
    from learned_cost.devices.device import record
    from learned_cost.profile.command import cluster_of
    from pdv.cluster.detect import write_cluster
    from pdv.cluster.presets import DEVICES
    from pdv.measure.speed import present_speed

    count = count or len(os.sched_getaffinity(0))
    speed = present_speed(DEVICES[preset], count)
    content = cluster_of(record(preset), count)
    (node,) = content["nodes"]
    shares = {key: value for key, value in node["device"].items() if key == "share"}
    node["device"] = {"preset": preset} | shares | {"speed": round(speed.factor, 3)}
    told = f"{speed.factor:.2f} of what is known of {preset}, give or take {speed.spread:.0%}"
    head = f"This machine with {count} processes at work, as `pdv cluster detect` found it: {told}."
    write_cluster(content, (head,), output)
    if as_json:
        print_json("cluster detect", files={"cluster": str(output)}, speed=asdict(speed), devices=count)
        return
    print_table({"device": f"{preset}, {count} of them", "speed": told, "cluster": str(output)})


def _join_by_nvidia_smi(content: dict[str, Any], device: str) -> None:  # Any: YAML
    """What joins the devices, as the driver says, in place of what their record makes likely."""
    from pdv.cluster.detect import facts_of
    from pdv.cluster.detect.joints import inside
    from pdv.cluster.detect.nvidia import run_nvidia_smi

    text, (node,) = run_nvidia_smi(), content["nodes"]
    told = facts_of(text, "nvidia-smi topo -m").node if text is not None else None
    if told is None or told.devices != node["devices"]:
        return
    joined = inside(told, device.casefold())
    node.pop("link", None)
    node |= dict(joined.node)
    if joined.links:
        content["links"] = [dict(link) for link in joined.links]


def _detect_from(inputs: list[Path], output: Path, device: str, network: str, *, as_json: bool) -> None:
    """A cluster file from what other tools wrote."""
    from ir.errors import did_you_mean
    from pdv.cluster.detect import combine_facts, read_facts, write_cluster
    from pdv.cluster.drawing import drawing
    from pdv.cluster.presets import DEVICES, LINKS

    for option, value, presets in (("--device", device, tuple(DEVICES)), ("--network", network, tuple(LINKS))):
        if value and value not in presets:
            hint = did_you_mean(value, presets) or "Write any, and describe your own in the file"
            raise UsageError(f"{option}: there is no preset {value!r}", "`pdv cluster devices` lists them", hint)
    facts = [read_facts(path) for path in inputs]
    content, notes = combine_facts(facts, device or None, network or None)
    told = [f"From {entry.kind} ({path.name})." for entry, path in zip(facts, inputs, strict=True)]
    cluster = write_cluster(content, (*told, *(f"Note: {note}." for note in notes)), output)
    if as_json:
        print_json(
            "cluster detect",
            files={"cluster": str(output)},
            cluster=cluster.as_dict(),
            notes=list(notes),
            warnings=list(cluster.warnings),
        )
        return
    for note in (*notes, *cluster.warnings):
        print_warning(note)
    print(drawing(cluster))
    print_table({"cluster": str(output)})


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
