"""Why a plan is as it is, as data: each class of equal operators with its price, its cut, and what was weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ir.errors import UsageError, did_you_mean
from ir.graph import Node
from ir.sharding import format_sharding
from pdv.cost.sources import node_source
from pdv.report.alternatives import Extra, Weighed, Weighing
from pdv.report.loaded import Loaded
from pdv.report.rewrites import brought
from pdv.report.shares import Share, shares

Entry = dict[str, Any]  # Any: JSON


def reasons(plan: Loaded) -> Entry:
    """Operators by time, rewrites by what they brought, and why a cut that was rejected may be the cheaper one."""
    rewrites = [asdict(entry) for entry in brought(plan)]
    return {"operators": operator_classes(plan), "rewrites": rewrites, "cheaper": _why_cheaper(plan.document)}


def _why_cheaper(document: Mapping[str, Any]) -> str:
    """What else a plan is chosen by than the prices that are added up here."""
    certificate = document["search"]["certificate"]
    limited = certificate["space"]["memory_limit_bytes"] is not None
    causes = ["memory decided, or the simulated step did" if limited else "the simulated step decided"]
    causes += [] if certificate["complete"] else ["the search was stopped before its end"]
    return f"Below zero it is cheaper by added prices: {', or '.join(causes)}."


def operators_called(plan: Loaded, name: str) -> list[Entry]:
    """The classes of operators of a kind, of a name, or of a number as in plan.json, alternatives in detail.

    Raises:
        UsageError: if there is none.
    """
    nodes = {node for number, node in enumerate(plan.operators) if name in {node.op.name, node.name, str(number)}}
    if not nodes:
        known = {node.op.name for node in plan.operators} | {node.name for node in plan.operators if node.name}
        kinds = ", ".join(sorted({node.op.name for node in plan.operators}))
        raise UsageError(f"no operator of this plan is called {name!r}", f"Kinds: {kinds}", did_you_mean(name, known))
    entries = operator_classes(plan, nodes.__contains__)
    numbers = {number for number, node in enumerate(plan.operators) if node in nodes}
    return [entry for entry in entries if numbers.intersection(entry["numbers"])]


def operator_classes(plan: Loaded, apart: Callable[[Node], bool] = lambda node: False) -> list[Entry]:
    """Operators that are alike and cut alike, with the same alternatives, as one entry; by time, longest first.

    ``apart`` says of which the alternative's compute and communication are told apart.
    """
    weighed, taken = Weighing(plan, apart).all(), shares(plan)
    groups: dict[str, list[tuple[int, Node]]] = {}
    entries: dict[str, Entry] = {}
    for number, node in enumerate(plan.operators):
        entry = _entry(plan, node, weighed.get(node))
        rejected = entry["rejected"] and {key: entry["rejected"][key] for key in ("splits", "extra_s", "exact")}
        alike = repr({**entry, "rejected": rejected})
        if alike not in entries or apart(node):
            entries[alike] = entry
        groups.setdefault(alike, []).append((number, node))
    for key, members in groups.items():
        nodes = [node for _, node in members]
        total = sum((taken[node] for node in nodes), Share())
        entries[key] = {
            **entries[key],
            "numbers": [number for number, _ in members],
            "names": [node.name for node in nodes if node.name],
            "count": len(nodes),
            "time_s": total.seconds,
            "compute_s": total.compute_s,
            "communication_forward_s": total.forward_s,
            "communication_backward_s": total.backward_s,
        }
    return sorted(entries.values(), key=lambda entry: (-entry["time_s"], entry["numbers"]))


def _entry(plan: Loaded, node: Node, weighed: Weighed | None) -> Entry:
    axes = plan.problem.mesh.axes
    return {
        "op": node.op.name,
        "source": node_source(plan.cost.nodes[plan.derived.places[node]]),
        "type": str(node.type),
        "loops": _loops(plan, node),
        "sharding": format_sharding(plan.shardings[plan.derived.places[node]]),
        "splits": plan.splits(node),
        "roles": {
            axis.name: plan.role(node, split)
            for axis, split in zip(axes, plan.assignment.splits[node], strict=True)
            if split.loop is not None
        },
        "rejected": _reject(plan, weighed),
        "too_wide": weighed is not None and weighed.wide,
        "instead": {
            axis.name: {label: _as_dict(extra) for label, extra in sorted(options.items())}
            for axis, options in zip(axes, weighed.by_axis if weighed else (), strict=False)
        },
    }


def _loops(plan: Loaded, node: Node) -> Entry:
    """Each loop's extent, and what a cut of it is for (null: it cannot be cut)."""
    roles = {split.loop: plan.role(node, split) for split in node.op.splits(node.loops) if split.loop is not None}
    return {name: {"extent": size, "role": roles.get(name)} for name, size in node.loops.extents.items()}


def _reject(plan: Loaded, weighed: Weighed | None) -> Entry | None:
    """The best alternative: its splits, and what the step would take more for each such operator."""
    if weighed is None or weighed.best is None:
        return None
    best = weighed.best
    names: Mapping[str, str] = dict(zip((axis.name for axis in plan.problem.mesh.axes), best.splits, strict=True))
    return {
        "splits": names,
        "extra_s": _round_up(best.extra.seconds),
        "exact": best.extra.exact,
        "extra_compute_s": _round_up(best.compute_s),
        "extra_communication_s": _round_up(best.communication_s),
    }


def _as_dict(extra: Extra | None) -> Entry | None:
    return None if extra is None else {"extra_s": _round_up(extra.seconds), "exact": extra.exact}


def _round_up(seconds: float | None) -> float | None:
    """To 9 digits: sums of the same numbers in another order are the same reason."""
    return None if seconds is None else float(f"{seconds:.9g}") if abs(seconds) > 1e-15 else 0.0
