"""From a thousand to a hundred thousand devices: the best configuration of a dense and of a mixture-of-experts model.

    python benchmarks/scale_out.py [--smoke] [--json OUT] [--plot FILE]

For each number of devices a lattice of tensor, pipeline, context, expert and data parallelism, chunks a stage,
micro-batches and recomputation is estimated, and the most promising configurations that fit are simulated in full
(`pdv.manual.lattice`). Strong scaling keeps the batch; weak scaling lets it grow with the devices. Times are the
simulator's, with kernels by the roofline; "seconds" are CPU-seconds of one core for everything, imports left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.record import Record, arguments, table
from pdv.cluster import Cluster, Device, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.manual.lattice import Lattice, SimulatedConfiguration, best, points
from pdv.report.simulated import simulated_document

ClusterOf = Callable[[int], Cluster]
CHEAPER = 7  # what a pod sends out is a seventh of what it could: Grattafiori et al. (2024), section 3.3.1
POD_NODES = 256


@dataclass(frozen=True)
class Case:
    """A model on a kind of cluster.

    Attributes:
        model: as `--arch` takes it.
        cluster_of: the cluster of a number of devices.
        sizes: numbers of devices.
        strong: the batch of strong scaling.
        weak: devices for each sample of weak scaling.
    """

    model: str
    cluster_of: ClusterOf
    sizes: tuple[int, ...]
    lattice: Lattice
    strong: int
    weak: int


@cache
def h100(devices: int) -> Cluster:
    """DGX H100 nodes on rails, in pods of 2,048 whose uplinks are oversubscribed."""
    return _cluster("dgx-h100", devices, 8, {"preset": "ib-ndr", "ports_per_node": 8, "rails": True})


@cache
def gb200(devices: int) -> Cluster:
    """GB200 NVL72 racks with a port a GPU, in pods of 32 racks whose uplinks are oversubscribed."""
    return _cluster("gb200-nvl72", devices, 72, {"preset": "ib-ndr", "ports_per_node": 72}, pod=32)


def _cluster(preset: str, devices: int, per_node: int, network: dict[str, Any], pod: int = POD_NODES) -> Cluster:
    nodes = max(1, devices // per_node)
    if devices < per_node:  # a stage that is a part of a node
        return load_cluster({"name": preset, "nodes": [{"preset": preset, "devices": devices}]})
    content: dict[str, Any] = {"name": preset, "nodes": [{"preset": preset, "count": nodes}]}
    if nodes > pod and nodes % pod == 0:
        network = {**network, "switches": [{"name": "pod", "nodes": pod, "oversubscription": CHEAPER}]}
    return load_cluster(content | ({"network": network} if nodes > 1 else {}))


CASES = (
    Case(
        "llama-3-405b", h100, (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
        Lattice(tp=(8,), pp=(8, 16, 32), vp=(1, 2, 4), cp=(1, 2, 4), micro_batch=(1,), recompute=("none", "full")),
        strong=2048, weak=8,
    ),
    Case(
        "mixtral-8x22b", gb200, (1152, 2304, 4608, 9216, 18432, 36864, 73728, 147456),
        Lattice(
            tp=(1, 2, 4), pp=(2, 4, 8), vp=(1, 2), cp=(1,), ep=(1, 8), micro_batch=(1, 2), recompute=("none", "full")
        ),
        strong=9216, weak=1,
    ),
)  # fmt: skip


def row_of(case: Case, devices: int, batch: int, scaling: str) -> dict[str, Any]:
    """The best configuration found, and how long that took."""
    start = time.process_time()
    described = arch(case.model)
    tried = len(list(points(described, devices, batch, case.lattice)))
    found = best(described, case.cluster_of, devices, batch, _compute_of, stage_links, case.lattice, keep=3, tries=8)
    row: dict[str, Any] = {"model": case.model, "scaling": scaling, "devices": devices, "batch": batch, "tried": tried}
    row |= _told(found[0]) if found else {"configuration": None}
    return row | {"seconds": time.process_time() - start}


def _compute_of(device: Device) -> ComputeModel:
    return ComputeModel((device,))


def _told(choice: SimulatedConfiguration) -> dict[str, Any]:
    document = simulated_document(choice.work, choice.simulation, choice.memory, choice.given.text())
    return {
        "configuration": document["configuration"],
        **{name: getattr(choice.given, name) for name in ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch")},
        "recompute": choice.given.recompute,
        "micro_batches": choice.given.micro_batches,
        "step_s": document["step_s"],
        "std_s": document["std_s"],
        "mfu": document["mfu"],
        "tokens_per_s": document["tokens_per_s"],
        "peak_bytes": document["peak_bytes"],
        "breakdown_s": document["breakdown_s"],
    }


def run(cases: Sequence[Case], record: Record) -> None:
    """Every case, both scalings."""
    for case in cases:
        for scaling in ("strong", "weak"):
            for devices in case.sizes:
                batch = case.strong if scaling == "strong" else devices // case.weak
                same = [
                    r for r in record.rows if (r["model"], r["devices"], r["batch"]) == (case.model, devices, batch)
                ]
                record.rows.append(same[0] | {"scaling": scaling} if same else row_of(case, devices, batch, scaling))
                print(_line(record.rows[-1]), flush=True)


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<14} {row['scaling']:<6} {row['devices']:>7,} devices, batch {row['batch']:>6,}: "
    if row["configuration"] is None:
        return head + f"nothing of {row['tried']} fits ({row['seconds']:.1f} s)"
    return head + (
        f"{row['step_s']:7.2f} s, MFU {100 * row['mfu']:4.1f} %, {row['peak_bytes'] / 2**30:5.1f} GiB, "
        f"of {row['tried']} in {row['seconds']:4.1f} s: {row['configuration']}"
    )


def summarize(record: Record) -> None:
    """The figures claimed."""
    rows = [row for row in record.rows if row["configuration"] is not None]
    record.claim("devices, most", max(row["devices"] for row in rows), "devices")
    seconds = list({(row["model"], row["devices"], row["batch"]): row["seconds"] for row in record.rows}.values())
    record.claim(
        "seconds for a number of devices, most", max(seconds), "CPU-s", f"mean {sum(seconds) / len(seconds):.1f}"
    )
    record.claim("configurations considered", sum(row["tried"] for row in record.rows), "configurations")
    record.claim("seconds for all of it", sum(seconds), "CPU-s")
    for model in dict.fromkeys(row["model"] for row in rows):
        for scaling in ("strong", "weak"):
            some = [row for row in rows if (row["model"], row["scaling"]) == (model, scaling)]
            if len(some) > 1:
                first, last = some[0], some[-1]
                name = f"{model}, {scaling}: MFU at {first['devices']:,} and {last['devices']:,} devices"
                record.claim(name, 100 * last["mfu"], "%", f"from {100 * first['mfu']:.1f} %")


def plot(record: Record, path: Path) -> None:
    """Throughput and utilization over devices, for both scalings."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    models = list(dict.fromkeys(row["model"] for row in record.rows))
    for color, model in zip(("tab:blue", "tab:orange", "tab:green"), models, strict=False):
        for scaling, style in (("strong", "o--"), ("weak", "s-")):
            rows = [r for r in record.rows if r["model"] == model and r["scaling"] == scaling and r["configuration"]]
            devices = [row["devices"] for row in rows]
            label = f"{model}, {'batch fixed' if scaling == 'strong' else 'batch grows'}"
            panels[0].plot(devices, [row["tokens_per_s"] for row in rows], style, color=color, label=label)
            panels[1].plot(devices, [100 * row["mfu"] for row in rows], style, color=color, label=label)
    panels[0].set_ylabel("tokens a second")
    panels[0].set_yscale("log")
    panels[1].set_ylabel("model FLOP/s utilization, %")
    panels[1].set_ylim(bottom=0)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("devices")
        panel.set_xticks([1024, 4096, 16384, 65536], ["1 k", "4 k", "16 k", "64 k"])
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run it."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the scaling here")
    chosen = parser.parse_args()
    record = Record()
    if chosen.smoke:
        small = Lattice(tp=(8,), pp=(8,), vp=(1,), micro_batch=(1,), recompute=("full",))
        run((Case("llama-3-70b", h100, (512, 1024), small, strong=256, weak=2),), record)
    else:
        run(CASES, record)
    print()
    head = ("model", "scaling", "devices", "batch", "step s", "MFU %", "GiB", "tp.pp.vp.cp.ep.dp", "recompute", "CPU-s")
    table(head, [_cells(row) for row in record.rows])
    summarize(record)
    record.print_summary()
    record.write(chosen.json)
    if chosen.plot is not None:
        plot(record, chosen.plot)
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["model"], row["scaling"], f"{row['devices']:,}", f"{row['batch']:,}")
    if row["configuration"] is None:
        return (*head, "none fits", "", "", "", "", f"{row['seconds']:.1f}")
    degrees = ".".join(str(row[name]) for name in ("tp", "pp", "vp", "cp", "ep", "dp"))
    figures = (f"{row['step_s']:.2f}", f"{100 * row['mfu']:.1f}", f"{row['peak_bytes'] / 2**30:.1f}")
    return (*head, *figures, degrees, row["recompute"], f"{row['seconds']:.1f}")


if __name__ == "__main__":
    sys.exit(main())
