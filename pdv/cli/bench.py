"""`pdv cluster bench`: links of this machine, or of all nodes of a torchrun, measured and written to a cluster file."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import UsageError
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table, print_warning

if TYPE_CHECKING:
    from learned_cost.profile.links import LevelAsked, Measured
    from pdv.cluster import Cluster
    from pdv.cost.fit import Fit

UNEVEN = 1.5  # how much faster the best pair is than the worst, before that is told
BUDGET_S = 60.0


def bench(
    file: Annotated[
        Path | None, typer.Argument(help="The cluster file whose links to measure (default: this machine).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file with the measured links.")] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start here (default: one a device).", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = "",
    budget: Annotated[str, typer.Option(help="Time to measure for, as 30s or 2m.")] = "1m",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Measure links and fit their latency and bandwidth; with torchrun on several nodes, those between nodes too."""
    from pdv.cli import values
    from pdv.cluster import load_cluster

    if device not in {"", "cpu", "cuda"}:
        raise UsageError(f"--device: {device!r} is not known", "Allowed: cpu, cuda")
    if output is not None and output.exists() and not overwrite:
        raise UsageError(f"-o: {str(output)!r} exists", mend="Choose another name, or add --overwrite")
    try:
        from learned_cost.profile.links import devices_here, measure_here, measure_links
    except ImportError as error:
        raise UsageError(f"measuring needs {error.name}", mend="pip install 'pipedejavu[learned]'") from None
    kind, here = devices_here(device)
    cluster = None if file is None else load_cluster(file)
    under_torchrun = "WORLD_SIZE" in os.environ
    default = cluster.num_devices if cluster is not None else max(here, 2)
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun else nproc or default
    levels = levels_asked_for(cluster, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), kind)
    seconds = values.seconds(budget, "--budget")
    if under_torchrun:
        found = measure_links(levels, kind, seconds)
        if os.environ.get("RANK") != "0":
            return
    else:
        found = measure_here(levels, kind, seconds, world)
    _tell(found, levels, file, cluster, output, kind, as_json=as_json)


def levels_asked_for(cluster: Cluster | None, world: int, per_node: int, kind: str) -> list[LevelAsked]:
    """The levels to measure: a cluster's own, or nodes and what is in them.

    Raises:
        UsageError: one process, or not as many as the cluster has devices, or single links.
    """
    from learned_cost.profile.links import LevelAsked

    if world < 2:
        raise UsageError("one process has nobody to talk to", mend="Add --nproc 4, or start it with torchrun")
    if cluster is None:
        inner = "core" if kind == "cpu" else "gpu"
        levels = [LevelAsked("node", per_node, world)] if per_node < world else []
        return levels + ([LevelAsked(inner, 1, per_node)] if per_node > 1 else [])
    if cluster.num_devices != world:
        raise UsageError(
            f"{world} processes for the {cluster.num_devices} devices of {cluster.name}",
            mend="Start one for each device",
        )
    if cluster.wires:
        raise UsageError("single links are not measured one by one", mend="Describe the nodes by `link` and `parts`")
    levels, span = [], world
    for level in cluster.levels:
        levels.append(LevelAsked(level.name, span // level.size, span))
        span //= level.size
    return levels


def _tell(
    found: Measured,
    levels: Sequence[LevelAsked],
    file: Path | None,
    cluster: Cluster | None,
    output: Path | None,
    kind: str,
    *,
    as_json: bool,
) -> None:
    """Fit, write, print."""
    from pdv.cost.fit import Sample, fit_each, fit_link

    fits: dict[str, Fit] = {}
    each: dict[str, dict[str, Fit]] = {}
    for level in levels:
        rows = [row for row in found.rows if row.level == level.name]
        samples = [Sample(row.collective, row.size, row.num_bytes, row.seconds) for row in rows]
        fits[level.name], each[level.name] = fit_link(samples), fit_each(samples)
    warnings = _uneven(found)
    if output is not None:
        _write(fits, levels, file, cluster, output, kind, found.backend)
    if as_json:
        print_json(
            "cluster bench",
            backend=found.backend,
            pairs=[list(pair) for pair in found.pairs],
            warnings=warnings,
            links={
                name: _as_dict(fit) | {"alone": {one: _as_dict(own) for one, own in each[name].items()}}
                for name, fit in fits.items()
            },
            file=None if output is None else str(output),
        )
        return
    for warning in warnings:
        print_warning(warning)
    print_table(_rows(fits, each, levels, found) | ({} if output is None else {"cluster": str(output)}))


def _as_dict(fit: Fit) -> dict[str, object]:
    return {
        "latency_s": fit.latency_s,
        "bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s,
        "errors": dict(fit.errors),
        "rows": fit.rows,
    }


def _rows(
    fits: dict[str, Fit], each: dict[str, dict[str, Fit]], levels: Sequence[LevelAsked], found: Measured
) -> dict[str, str]:
    """Of each level the link, the median errors it leaves, and what each collective would have by itself."""
    from pdv.cluster.units import LINK_BANDWIDTH, TIME

    rows = {"backend": found.backend}
    for level in levels:
        fit = fits[level.name]
        rows[f"level {level.name}"] = (
            f"{level.span // level.stride} members, {LINK_BANDWIDTH.format(fit.bandwidth_bytes_per_s)} a device and "
            f"direction, {TIME.format(fit.latency_s)} a step, from {fit.rows} measurements"
        )
        for name, error in fit.errors.items():
            own = each[level.name][name]
            rows[f"  {level.name}, {name}"] = (
                f"median error {error:.0%}; alone {LINK_BANDWIDTH.format(own.bandwidth_bytes_per_s)}, "
                f"{TIME.format(own.latency_s)}, error {own.errors[name]:.0%}"
            )
    for first, second, rate in found.pairs:
        rows[f"pair {first} - {second}"] = LINK_BANDWIDTH.format(rate)
    return rows


def _uneven(found: Measured) -> list[str]:
    rates = [rate for *_, rate in found.pairs]
    if not rates or max(rates) < UNEVEN * min(rates):
        return []
    return [
        f"the fastest pair is {max(rates) / min(rates):.1f} times as fast as the slowest: describe `parts` or `links`"
    ]


def _write(
    fits: dict[str, Fit],
    levels: Sequence[LevelAsked],
    file: Path | None,
    cluster: Cluster | None,
    output: Path,
    kind: str,
    backend: str,
) -> None:
    """The cluster file with the measured links in place of those it named; without one, this machine's."""
    from pdv.cluster.detect import write_cluster
    from pdv.cluster.source import read_yaml

    if file is not None:
        content: Any = copy.deepcopy(read_yaml(file).data)  # Any: YAML, known to be a cluster
    else:
        content = _machine(levels, kind)
    links = {name: _link(fit, f"measured-{backend}") for name, fit in fits.items()}
    inside = [name for name in links if not _between_nodes(name, cluster)]
    content["nodes"] = [_expand(node) for node in content["nodes"]]
    for node in content["nodes"]:
        for holder, name in zip((node, *node.get("parts", ())), inside, strict=False):
            holder["link"] = links[name]
    if "node" in links:
        per_node = levels[[level.name for level in levels].index("node")].stride
        content["network"] = links["node"] | {"ports_per_node": per_node} | _switches(content.get("network"))
    heads = [f"Links measured by `pdv cluster bench` over {backend}."]
    heads += [f"{name}: median error {max(fit.errors.values()):.0%} at worst" for name, fit in fits.items()]
    write_cluster(content, heads, output)


def _expand(node: Any) -> dict[str, Any]:  # Any: YAML
    """A node with its preset, if any, written out."""
    from pdv.cluster.nodes import NODES

    plain = {"preset": node} if isinstance(node, str) else dict(node)
    preset = NODES.get(str(plain.pop("preset", "")))
    if preset is None:
        return plain
    known: dict[str, Any] = {"devices": preset.devices, "device": preset.device}
    if preset.parts and not {"devices", "link"} & set(plain):
        known["parts"] = [dict(part) for part in preset.parts]
    return known | plain


def _between_nodes(level: str, cluster: Cluster | None) -> bool:
    """Whether a level is one of the network's."""
    if cluster is None:
        return level == "node"
    outer = len(cluster.levels) - max(len(group.inside) for group in cluster.nodes)
    return level in {entry.name for entry in cluster.levels[:outer]}


def _switches(network: Any) -> dict[str, Any]:  # Any: YAML
    return {key: network[key] for key in ("switches", "rails") if isinstance(network, dict) and key in network}


def _link(fit: Fit, name: str) -> dict[str, str]:
    """As a cluster file has it, with four digits."""
    rate, latency_s = fit.bandwidth_bytes_per_s, max(fit.latency_s, 1e-8)
    digits = 4 - 1 - math.floor(math.log10(rate / 1e6))
    return {
        "name": name,
        "bandwidth": f"{round(rate / 1e6, max(digits, 0)):g} MB/s",
        "latency": f"{latency_s * 1e6:.4g} us",
    }


def _machine(levels: Sequence[LevelAsked], kind: str) -> dict[str, Any]:  # Any: YAML
    """The machine at hand as `pdv cluster detect` describes it, with as many devices a node as were measured."""
    from learned_cost.profile.command import cluster_of, detect_record

    world = levels[0].span
    per_node = levels[0].stride if levels[0].name == "node" else world
    found, _ = detect_record(kind, 1, per_node, "", measured=False)
    content = cluster_of(found, per_node)
    (node,) = content["nodes"]
    if per_node < world:
        content["nodes"] = [{"count": world // per_node} | node]
    return content
