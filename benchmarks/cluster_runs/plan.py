"""pdv's side of a cell, before it runs: python -m benchmarks.cluster_runs.plan TASK CLUSTER FOLDER [CANDIDATE ...].

Writes FOLDER/plan, what ``pdv.optimize`` finds, and FOLDER/NAME for each candidate, a plan pinned to a technique; and
FOLDER/plans.json, what was predicted of each. A candidate that no plan keeps is left out.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pdv
from benchmarks.cluster_runs.clusters import CLUSTERS
from benchmarks.cluster_runs.models import TASKS
from ir.errors import PdvError
from pdv.cluster.presets import DEVICES
from pdv.measure.speed import present_speed

Pinned = dict[str, Any]  # Any: YAML
CANDIDATES: dict[str, Pinned] = {
    "ddp": {"mesh": {"dp": 4}, "techniques": {"dp": "ddp"}},
    "tensor": {"mesh": {"tp": 4}, "techniques": {"tp": "tensor"}},
    "ddp_tensor": {"mesh": {"dp": 2, "tp": 2}, "techniques": {"dp": "ddp", "tp": "tensor"}},
}


def main() -> None:
    """Plan, save, and write what was predicted."""
    task, cluster, folder = TASKS[sys.argv[1]], CLUSTERS[sys.argv[2]], Path(sys.argv[3])
    speed = present_speed(DEVICES["cpu-core"], cluster.size)
    described = cluster.describe(speed.factor)
    told = {}
    for name in ("plan", *sys.argv[4:]):
        started = time.monotonic()
        try:
            plan = pdv.optimize(
                task.module(),
                (task.batch()[0],),
                cluster=described,
                cost="measured",
                pins=CANDIDATES.get(name),
            )
        except PdvError as error:
            if name == "plan":
                raise
            print(f"{name}: {error}", file=sys.stderr)
            continue
        plan.save(folder / name)
        told[name] = {
            "predicted_s": plan.document["predicted"]["step_time_s"]["mean"],
            "predicted": plan.document["predicted"],
            "simulated": plan.document["simulated"],
            "techniques": plan.document["techniques"],
            "mesh": {axis.name: axis.size for axis in plan.mesh.axes},
            "planning_s": time.monotonic() - started,
        }
    (folder / "plans.json").write_text(json.dumps({"described": described, "speed": asdict(speed), "plans": told}))


if __name__ == "__main__":
    main()
