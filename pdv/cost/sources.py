"""Where a plan's seconds come from, as data for plan.json and as the words that reports use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ir.cost_model import SOURCES, Source
from pdv.cluster import Device
from pdv.cost.breakdown import NodeCost, PlanCost

ROOFLINE = "roofline and alpha-beta, not calibrated on this cluster"


def node_source(cost: NodeCost) -> Source:
    """The least trusted source of an operator's seconds."""
    return max((e.source for e in cost.estimates if e.mean_s > 0.0), key=SOURCES.index, default="analytic")


def cost_document(
    cost: PlanCost, provenance: Mapping[str, Any], devices: Iterable[Device] = (), note: str = ""
) -> dict[str, Any]:  # Any: JSON
    """``source``: a sentence, with the cost model's ``note``; ``sources``: seconds by source; ``fallbacks``: what no
    better source knew, and why.
    """
    fallbacks: dict[tuple[str, str], list[float]] = {}
    for node, priced in cost.nodes.items():
        for estimate in priced.estimates:
            if estimate.why and estimate.mean_s > 0.0:
                fallbacks.setdefault((node.op.name, estimate.why), []).append(estimate.mean_s)
    for name, estimates in (("optimizer", cost.optimizer), ("outside the graph", (cost.outside,))):
        for estimate in estimates:
            if estimate.why and estimate.mean_s > 0.0:
                fallbacks.setdefault((name, estimate.why), []).append(estimate.mean_s)
    told = [
        {"op": op, "why": why, "count": len(seconds), "seconds": sum(seconds)}
        for (op, why), seconds in sorted(fallbacks.items(), key=lambda item: (-sum(item[1]), item[0]))
    ]
    by_source = cost.seconds_by_source
    sentence = _sentence(by_source, provenance) + told_speeds(devices)
    return {"source": f"{sentence}; {note}" if note else sentence, "sources": by_source, "fallbacks": told}


def _sentence(by_source: Mapping[Source, float], provenance: Mapping[str, Any]) -> str:
    """``learned 93 % (weights kernels 0f3a...), analytic 7 %``."""
    if provenance["name"] == "analytic":
        return ROOFLINE
    files = [provenance.get(kind) for kind in ("weights", "profiles")]
    used = ", ".join(f"{file['name']} {str(file['hash'])[:12]}" for file in files if file)
    return f"{source_shares(by_source)} ({used})"


def source_shares(by_source: Mapping[Source, float]) -> str:
    """``learned 93 %, analytic 7 %``."""
    total = sum(by_source.values())
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in by_source.items()) if total else "analytic"


def told_speeds(devices: Iterable[Device]) -> str:
    """``, cpu-core at 0.86 of its speed``, of machines whose speed was measured."""
    return "".join(f", {device.name} at {device.speed:.2f} of its speed" for device in devices if device.speed != 1.0)
