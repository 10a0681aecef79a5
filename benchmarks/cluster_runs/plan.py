"""pdv's side of a cell, before it runs: python -m benchmarks.cluster_runs.plan TASK CLUSTER DIRECTORY."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pdv
from benchmarks.cluster_runs.clusters import CLUSTERS
from benchmarks.cluster_runs.models import TASKS


def main() -> None:
    """Plan, save, and write beside it what was predicted."""
    task, cluster, directory = TASKS[sys.argv[1]], CLUSTERS[sys.argv[2]], Path(sys.argv[3])
    plan = pdv.optimize(task.module(), (task.batch()[0],), cluster=cluster.describe(), cost="measured")
    plan.save(directory)
    told = {
        "predicted_s": plan.document["predicted"]["step_time_s"]["mean"],
        "simulated": plan.document["simulated"],
        "mesh": {axis.name: axis.size for axis in plan.mesh.axes},
        "described": cluster.describe(),
    }
    (directory.parent / f"{directory.name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
