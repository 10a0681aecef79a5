"""The handful of lines that a user reads first, from a plan's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summarize(document: Mapping[str, Any]) -> dict[str, str]:  # plan.json's content is untyped; docs/plan-format.md
    """Mesh, predicted step time and memory, distance from the bound, and the proof."""
    predicted, search = document["predicted"], document["search"]
    time = predicted["step_time_s"]
    memory = ", ".join(f"{size / 2**30:.2f} GiB on {name}" for name, size in predicted["memory_bytes"].items())
    return {
        "mesh": " x ".join(f"{axis['name']}={axis['size']}" for axis in document["mesh"]) or "one device",
        "predicted step": f"{_time(time['mean'])} ± {_time(time['std'])}",
        "predicted memory": memory,
        "search": f"{search['strategy']}, {search['seconds']:.1f} s, {search['states']} states",
        "certificate": search["certificate"]["statement"],
        "proof": document["proof"]["statement"],
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
