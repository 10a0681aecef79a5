"""What a plan does along each mesh axis, in the field's words, and along which it does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdv.plan.running import (
    ACCUMULATE,
    COMPILE,
    LIGHT,
    OFFLOAD,
    OFFLOAD_ACTIVATIONS,
    RECOMPUTE,
    ROUND,
    SCALE,
    SLICE,
    STAGE,
)

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


def strategy_text(document: Document) -> str:
    """The whole plan in one line: "2 stages (1f1b), 4 micro-batches; dp=8: ZeRO-3; recomputation"."""
    uses = axis_uses(document)
    line, rest = _pipeline(document["derivation"]), _types(document["derivation"])
    parts = [", ".join(line)] if line else []
    parts += [f"{axis['name']}={axis['size']}: {uses[axis['name']]}" for axis in document["mesh"]]
    return "; ".join([*parts, *rest]) or "one device"


def run_text(document: Document) -> str:
    """How a step is run: "2 stages (1f1b), 4 micro-batches, recomputation"; empty: the whole batch at once."""
    return ", ".join([*_pipeline(document["derivation"]), *_types(document["derivation"])])


def _types(steps: Sequence[Document]) -> list[str]:
    """What is computed again, in which types, and what is elsewhere than on the devices."""
    rules = {step["rule"] for step in steps}
    again = [step["sites"] for step in steps if step["rule"] == RECOMPUTE]
    words = ["light recomputation" if sites == LIGHT else "recomputation" for sites in again]
    words += ["activations on the host"] if OFFLOAD_ACTIVATIONS in rules else []
    words += ["mixed precision"] if ROUND in rules else []
    words += ["optimizer on the host"] if OFFLOAD in rules else []
    words += [f"products in {step['bindings']['format']}" for step in steps if step["rule"] == SCALE]
    return words + ["compiled"] * (COMPILE in rules)


def _pipeline(steps: Sequence[Document]) -> list[str]:
    """Stages and micro-batches."""
    words = []
    staged = next((step["bindings"] for step in steps if step["rule"] == STAGE), None)
    if staged is not None:
        count = staged.get("ranks", staged["of"])
        turns = "" if count == staged["of"] else f", {staged['of'] // count} chunks each"
        words.append(f"{count} stages ({staged['order']}{turns})")
        words += ["gradients of weights one step old"] if "staleness" in staged else []
    words += [f"in {step['bindings']['slices']} slices in time" for step in steps if step["rule"] == SLICE]
    taken = next((step["bindings"] for step in steps if step["rule"] == ACCUMULATE), None)
    return words + ([] if taken is None else [f"{taken['micro_batches']} micro-batches"])
