"""Drawings of clusters, as golden text of at most 100 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdv.cluster import load_cluster
from pdv.cluster.drawing import COLUMNS, drawing
from tests.conftest import Golden
from tests.pdv.cluster.test_build import PAIRS

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
DRAWN: dict[str, Any] = {  # Any: YAML
    "switches": {
        "nodes": [{"count": 16, "preset": "dgx-a100"}],
        "network": {"preset": "ib-hdr", "switches": [{"nodes": 4, "oversubscription": 2}, {"nodes": 8}]},
    },
    "parts": {"nodes": [PAIRS | {"count": 3}, {"devices": 1, "device": "t4"}], "network": "ethernet-25g"},
    "wires": {
        "nodes": [{"count": 2, "devices": 2, "device": "rtx-3090"}], "network": "ethernet-10g",
        "links": [{"between": ["n*.g0", "n*.g1"], "link": "nvlink3-bridge"}],
    },
    "nvl72": {"nodes": [{"preset": "gb200-nvl72", "count": 100}]},
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_drawings(name: str, golden: Golden) -> None:
    text = drawing(load_cluster(DRAWN[name]))
    assert max(map(len, text.splitlines())) <= COLUMNS
    golden(f"cli/cluster-drawing-{name}.txt", text + "\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    lines = drawing(load_cluster(path)).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= COLUMNS
