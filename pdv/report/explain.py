"""`pdv explain`: a plan as text: what each axis is for, where time and memory go, what each operator does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB = 2.0**30
Document = Mapping[str, Any]  # Any: plan.json; docs/plan-format.md


def explain_document(document: Document) -> str:
    """The report of one plan.json."""
    return "\n\n".join(
        "\n".join(section)
        for section in (
            _heading(document),
            _axes(document),
            _rewrites(document),
            _time(document),
            _memory(document),
            _operators(document),
            _storage(document),
        )
        if section
    )


def _heading(document: Document) -> list[str]:
    source, search = document["source"], document["search"]
    proof = document["proof"]
    return [
        f"{source['name']}: {document['mode']} on {document['cluster']['name']}",
        f"search: {search['strategy']}, cost {search['cost'] * 1e3:.4g} ms, {search['states']} states",
        f"certificate: {search['certificate']['statement']}",
        f"proof: {proof['statement']}",
    ]


def _axes(document: Document) -> list[str]:
    rows = [
        (axis["name"], str(axis["size"]), axis["link"]["name"], ", ".join(document["techniques"][axis["name"]]) or "-")
        for axis in document["mesh"]
    ]
    return ["Mesh axes, slow to fast", *table(("axis", "size", "link", "what it does"), rows)]


def _rewrites(document: Document) -> list[str]:
    algebraic = [step for step in document["derivation"] if step["kind"] == "algebraic"]
    if not algebraic:
        return ["No algebraic rewrite was worth taking."]
    rows = [(step["rule"], step["law"], str(len(step["sites"]))) for step in algebraic]
    return ["Algebraic rewrites", *table(("rule", "law", "blocks"), rows)]


def _time(document: Document) -> list[str]:
    time = document["predicted"]["step_time_s"]
    parts = document["predicted"]["breakdown_s"]
    rows = [(name, f"{seconds * 1e3:.4g}", f"{seconds / time['mean']:.1%}") for name, seconds in parts.items()]
    return [
        f"Predicted step: {time['mean'] * 1e3:.4g} ± {time['std'] * 1e3:.4g} ms ({document['predicted']['source']})",
        *table(("part", "ms", "share"), rows),
    ]


def _memory(document: Document) -> list[str]:
    parts = document["predicted"]["memory_breakdown_bytes"]
    rows = [(name, f"{size / GIB:.3f}") for name, size in parts.items()]
    return ["Memory per device", *table(("lifetime", "GiB"), rows)]


def _operators(document: Document) -> list[str]:
    """Equal operators once: what they do, how often, and what they take altogether."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for entry in document["operators"]:
        splits = " ".join(f"{axis}:{label}" for axis, label in entry["splits"].items())
        groups.setdefault((entry["op"], entry["type"], splits, entry["sharding"]), []).append(entry)
    rows = []
    for (op, tensor, splits, sharding), entries in groups.items():
        seconds = sum(entry["time_s"] for entry in entries)
        rows.append((seconds, (op, tensor, splits, sharding, str(len(entries)), f"{seconds * 1e3:.4g}")))
    rows.sort(key=lambda row: -row[0])
    return [
        "Operators by time (loop cut along each axis; sharding of the result)",
        *table(("op", "result", "splits", "sharding", "count", "ms"), [row for _, row in rows]),
    ]


def _storage(document: Document) -> list[str]:
    steps = [step for step in document["derivation"] if step["kind"] == "storage"]
    if not steps:
        return ["Every parameter rests whole on every device."]
    rows = [
        (
            step["bindings"]["sharding"],
            "gathered again in backward" if step["bindings"]["regather"] else "-",
            str(len(step["sites"])),
            ", ".join(step["sites"][:3]) + (", …" if len(step["sites"]) > 3 else ""),
        )
        for step in steps
    ]
    return ["Parameters that rest cut", *table(("sharding", "regather", "count", "which"), rows)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces in front."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
