"""The handful of lines that a user reads first, from a plan's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdv.cluster.units import MEMORY
from pdv.cost.sources import source_shares, told_speeds
from pdv.emit.program.header import seconds
from pdv.plan.devices import read_devices
from pdv.report.axes import axis_uses, run_text


def summarize(document: Mapping[str, Any]) -> dict[str, str]:  # plan.json's content is untyped; docs/plan-format.md
    """Mesh and its uses, how a step is run, predicted step time and memory, distance from the bound, and the proof."""
    predicted, search = document["predicted"], document["search"]
    time = predicted["step_time_s"]
    sources = source_shares(predicted["sources"]) + told_speeds(read_devices(document))
    rows = {"mesh": " x ".join(f"{axis['name']}={axis['size']}" for axis in document["mesh"]) or "one device"}
    rows |= {f"axis {axis}": use for axis, use in axis_uses(document).items()}
    rows |= {"how it runs": text} if (text := run_text(document)) else {}
    rows |= {
        "predicted step": f"{seconds(time['mean'])} ± {seconds(time['std'])} ({sources})",
        "predicted memory": memory_text(document),
        "search": f"{search['strategy']}, {search['seconds']:.1f} s, {search['states']} states",
    }
    _, _, note = predicted["source"].partition("; ")
    rows |= {"prices": note} if note else {}
    rows |= {"a part is faster": text} if (text := part_text(document)) else {}
    if not search["certificate"]["complete"]:
        rows["cut short"] = _cut_short(search["certificate"]["space"])
    said = {"certificate": search["certificate"]["statement"], "proof": document["proof"]["statement"]}
    if document.get("reading"):
        said["reading"] = document["reading"]
    return rows | said | ({"run": document["run"]["statement"]} if "run" in document else {})


def part_text(document: Mapping[str, Any]) -> str:
    """Which devices alone take less than all; empty if none do, of those looked at."""
    part = document.get("part")
    if part is None:
        return ""
    whole, step = document["cluster"]["num_devices"], seconds(part["step_s"])
    return f"{part['what']} alone, of {whole} devices, would take {step} a step: describe them alone to plan for them"


def memory_text(document: Mapping[str, Any]) -> str:
    """What a device of each class holds at most, and whether that is too much."""
    held = document["predicted"]["memory_bytes"].items()
    simulated = document.get("simulated", {})
    verdict = "" if simulated.get("fits", True) else ": does not fit"
    on_host = f", {MEMORY.format(simulated['host_bytes'])} of its host" if "host_bytes" in simulated else ""
    return ", ".join(f"{MEMORY.format(size)} on {name}" for name, size in held) + on_host + verdict


def _cut_short(space: Mapping[str, Any]) -> str:
    """What the budget left undone."""
    left_out = ", ".join(space["meshes_left_out"])
    what = f"meshes left out: {left_out}" if left_out else "some of the search was left out"
    return f"the budget was spent; {what}. A larger --budget may find a better plan"
