"""How fast a large step is simulated, in CPU-seconds.

    python benchmarks/simulate_speed.py [--smoke] [--json OUT]

A Llama-3-405B step on 1,024 devices is simulated once, from its PCG on, with nothing known beforehand.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.record import Record, arguments
from ir.types import DType
from pdv.cluster import Device, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.simulate.step import simulate

LARGE = "tp=8,pp=16,dp=8,vp=4,schedule=interleaved,micro_batch=1,batch=1024,sp=1"  # 128 micro-batches


def main() -> None:
    """Print the figure; with --json write the record."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    row = large()
    record.rows.append(row)
    name = "Llama-3-405B on 1,024 devices, 16 stages, 128 micro-batches, interleaved: simulated in full"
    record.claim(name, row["cpu_s"], "CPU-s", f"{row['nodes']} nodes")
    record.print_summary()
    record.write(options.json)


def large() -> dict[str, Any]:
    """Llama-3-405B: CPU-seconds from the PCG on, in a process that has simulated nothing yet."""
    from pdv.frontend.arch.description import arch
    from pdv.frontend.arch.graph import graph
    from pdv.manual.configuration import configuration, workload

    node = {"count": 128, "devices": 8, "device": "h100-80gb-sxm", "link": "nvlink4"}
    cluster, given, model = (
        load_cluster({"nodes": [node], "network": "ib-ndr"}),
        configuration(LARGE),
        arch("llama-3-405b"),
    )
    made = workload(lambda batch: graph(model, batch, DType.BF16, tp=8), given, cluster, analytic, stage_links)
    started = time.process_time()
    found = simulate(made)
    spent = time.process_time() - started
    return {
        "model": "llama-3-405b",
        "configuration": LARGE,
        "nodes": len(made.pcg.nodes),
        "cpu_s": spent,
        "step_s": found.step_s,
    }


def analytic(device: Device) -> ComputeModel:
    """By arithmetic: what is timed here is the simulator, not a cost model."""
    return ComputeModel((device,))


if __name__ == "__main__":
    main()
