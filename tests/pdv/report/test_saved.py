"""What a saved plan runs on another cluster than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ir.errors import UsageError
from pdv.cluster import load_cluster
from pdv.report.saved import saved_workload
from pdv.simulate.step import simulate
from tests.pdv.pipelined import Blocks, plan_pipeline
from tests.pdv.worlds import cluster

PIPELINES: dict[str, dict[str, Any]] = {
    "of two": {"mesh": {}},
    "of two, with ranks in each": {"mesh": {"gpu": 2}},
    "in turns": {"mesh": {"gpu": 2}, "order": "interleaved", "virtual": 2},
    "with stale weights": {"mesh": {"gpu": 2}, "order": "2bw"},
}


@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES)
def test_a_pipeline_takes_the_devices_of_all_its_stages(options: dict[str, Any], tmp_path: Path) -> None:
    """On a cluster like its own a step takes as long; one stage's devices are not enough."""
    own, fewer = (cluster(count * (options["mesh"].get("gpu", 1))) for count in (2, 1))
    plan = plan_pipeline(Blocks(), (torch.ones(8, 16),), own, stages=2, micro_batches=4, **options)
    folder = plan.save(tmp_path / "plan")
    step_s = simulate(saved_workload(folder)).step_s
    assert simulate(saved_workload(folder, load_cluster(own))).step_s == step_s
    with pytest.raises(UsageError, match="2 stages, each on"):
        saved_workload(folder, load_cluster(fewer))
