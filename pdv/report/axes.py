"""What a plan does along each mesh axis, in the field's words, and along which it does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDLE = "idle, every device along it does the same work"
UNNAMED = "cuts that have no name"
Document = Mapping[str, Any]  # Any: plan.json; docs/plan-format.md


def axis_uses(document: Document) -> dict[str, str]:
    """By axis: its techniques, most used first, or that it is idle."""
    return {axis: ", ".join(names) or _leave_unnamed(document, axis) for axis, names in document["techniques"].items()}


def _leave_unnamed(document: Document, axis: str) -> str:
    """Operators and parameters that are cut without being a technique are work shared, too."""
    place = [entry["name"] for entry in document["mesh"]].index(axis)
    cut = any(entry["splits"][axis] != "none" for entry in document["operators"])
    stored = (step["bindings"]["sharding"] for step in document["derivation"] if step["kind"] == "storage")
    rests = any(sharding.split(",")[place] != "I" for sharding in stored)
    return UNNAMED if cut or rests else IDLE
