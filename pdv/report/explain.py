"""`pdv explain`: a plan as text: what each axis is for, where time and memory go, what each operator does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdv.cluster.units import MEMORY
from pdv.report.axes import axis_uses, run_text
from pdv.report.opaque import explain_opaque
from pdv.report.simulated import order_shares, part_text
from pdv.report.summary import memory_text

Document = Mapping[str, Any]  # Any: plan.json; docs/plan-format.md


def explain_document(document: Document, why: Mapping[str, Any]) -> str:
    """The report of one plan.json, with what ``reasons`` says of it."""
    return _join(
        _heading(document),
        _axes(document),
        _rewrites(why["rewrites"]),
        _time(document),
        _memory(document),
        _operators(why["operators"], why["cheaper"]),
        explain_opaque(document),
        _storage(document),
    )


def explain_operators(entries: Sequence[Mapping[str, Any]]) -> str:
    """One section for each class of operators: its cut, its price, and every other cut."""
    return _join(*map(_in_detail, entries))


def _join(*sections: list[str]) -> str:
    return "\n\n".join("\n".join(section) for section in sections if section)


def _heading(document: Document) -> list[str]:
    source, search = document["source"], document["search"]
    proof = document["proof"]
    return [
        f"{source['name']}: {document['mode']} on {document['cluster']['name']}",
        f"search: {search['strategy']}, cost {search['cost'] * 1e3:.4g} ms, {search['states']} states",
        f"certificate: {search['certificate']['statement']}",
        f"proof: {proof['statement']}",
        *([f"how it runs: {text}"] if (text := run_text(document)) else []),
    ]


def _axes(document: Document) -> list[str]:
    if not document["mesh"]:
        return ["One device: nothing is cut."]
    uses = axis_uses(document)
    rows = [(axis["name"], str(axis["size"]), axis["link"]["name"], uses[axis["name"]]) for axis in document["mesh"]]
    return ["Mesh axes, slow to fast", *table(("axis", "size", "link", "what it does"), rows)]


def _rewrites(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    if not entries:
        return ["No algebraic rewrite was worth taking."]
    rows = []
    for entry in entries:
        without = entry["without_s"]
        saved = "nothing fits" if without is None else _sign(without - entry["with_s"])
        rows.append((entry["rule"], str(entry["sites"]), _sign(entry["alone_s"]), saved))
    header = ("rule", "sites", "alone ms", "without ms")
    notes = [
        "  alone: what it adds to a step of the whole model on one device; without: how much longer than this plan the",
        "  best plan takes that uses only the other rules, both as the search prices them",
    ]
    laws = [line for entry in entries for line in _law(entry)]
    return ["Algebraic rewrites, in the order taken", *table(header, rows), *notes, *laws]


def _law(entry: Mapping[str, Any]) -> list[str]:
    """A law in lines of a terminal's width."""
    indent = " " * 4
    return textwrap.wrap(
        f"{entry['rule']}: {entry['equation']}",
        116,
        initial_indent="  ",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _time(document: Document) -> list[str]:
    time = document["predicted"]["step_time_s"]
    parts = document["predicted"]["breakdown_s"]
    rows = [
        (part_text(name), f"{seconds * 1e3:.4g}", f"{_share(seconds, time['mean']):.1%}")
        for name, seconds in order_shares(parts).items()
    ]
    return [
        f"Predicted step: {time['mean'] * 1e3:.4g} ± {time['std'] * 1e3:.4g} ms ({document['predicted']['source']})",
        *table(("part", "ms", "share"), rows),
        *_fallbacks(document["predicted"].get("fallbacks", ())),
    ]


def _share(part: float, whole: float) -> float:
    """Of nothing, nothing."""
    return part / whole if whole else 0.0


def _fallbacks(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the chosen cost model does not know, and what was done instead."""
    if not entries:
        return []
    rows = [(entry["op"], str(entry["count"]), f"{entry['seconds'] * 1e3:.4g}", entry["why"]) for entry in entries]
    return ["Priced by the analytic model, for want of a better one", *table(("op", "count", "ms", "why"), rows)]


def _memory(document: Document) -> list[str]:
    parts = document["predicted"]["memory_breakdown_bytes"]
    rows = [(name, MEMORY.format(size)) for name, size in parts.items()]
    limit = document["search"]["certificate"]["space"]["memory_limit_bytes"]
    limited = "" if limit is None else f", limit {MEMORY.format(limit)}"
    heading = f"Memory: at most {memory_text(document)}{limited}; as the search adds it up"
    return [heading, *table(("lifetime", "bytes"), rows)]


def _operators(entries: Sequence[Mapping[str, Any]], cheaper: str) -> list[str]:
    """Equal operators once: what they do, how often, what they take altogether, and what else they might do."""
    rows = []
    for entry in entries:
        times = (entry[f"{part}_s"] for part in ("time", "compute", "communication_forward", "communication_backward"))
        numbers = [str(entry["count"]), *(f"{seconds * 1e3:.4g}" for seconds in times), str(entry["source"])]
        rejected = entry["rejected"]
        other = "too wide" if entry["too_wide"] else "-" if rejected is None else _other_cut(entry)
        more = "" if rejected is None else _more(rejected)
        cut = _cut(entry["splits"], entry["roles"])
        rows.append((entry["op"], entry["type"], cut, entry["sharding"] or "-", *numbers, other, more))
    timed = ("count", "ms", "compute", "forward", "backward", "source")
    header = ("op", "result", "cut", "sharding", *timed, "rejected", "each ms")
    return [
        "Operators by time: the loop cut along each axis; compute, communication forward and backward (altogether)",
        *table(header, rows),
        "  rejected: the best other cut, all else in its block free and the block's boundary kept; each: what a step",
        f"  would take more for each such operator. {cheaper}",
    ]


def _in_detail(entry: Mapping[str, Any]) -> list[str]:
    times = "once" if entry["count"] == 1 else f"{entry['count']} times"
    named = f"{_few(entry['names']) or 'no name'}; number {_few(map(str, entry['numbers']))}"
    lines = [
        f"{entry['op']} -> {entry['type']}, {times} ({named})",
        f"  loops {', '.join(_loop(name, loop) for name, loop in entry['loops'].items()) or 'none'}",
        f"  cut {_cut(entry['splits'], entry['roles'])}, result {entry['sharding'] or 'whole'}",
        (
            f"  takes {entry['time_s'] * 1e3:.4g} ms a step: compute {entry['compute_s'] * 1e3:.4g}, communication "
            f"forward {entry['communication_forward_s'] * 1e3:.4g}, backward "
            f"{entry['communication_backward_s'] * 1e3:.4g}"
        ),
    ]
    rejected = entry["rejected"]
    if entry["too_wide"]:
        return [*lines, "  its block is too wide to be solved again without this cut"]
    if rejected is None:
        return [*lines, "  no other cut is possible between the same boundary shardings (within the pins, if any)"]
    parts = ""
    if rejected["extra_compute_s"] is not None:
        compute, moved = _sign(rejected["extra_compute_s"]), _sign(rejected["extra_communication_s"])
        parts = f" (compute {compute}, communication {moved})"
    more = f"{_more(rejected)} ms a step each{parts}"
    lines.append(f"  best rejected: {_other_cut(entry)}, {more}")
    for axis, options in entry["instead"].items():
        ranked = sorted(options.items(), key=lambda item: (item[1] is None, item[1] and item[1]["extra_s"], item[0]))
        rows = [
            (_label(label, entry["loops"]), "not possible" if extra is None else f"{_more(extra)} ms")
            for label, extra in ranked
        ]
        lines += [f"  along {axis}, instead of {entry['splits'][axis]}:", *("  " + line for line in table(None, rows))]
    return lines


def _cut(splits: Mapping[str, str], roles: Mapping[str, str]) -> str:
    """``dp:_1 (data) tp:n (tensor)``."""
    cuts = (f"{axis}:{label}" + (f" ({roles[axis]})" if axis in roles else "") for axis, label in splits.items())
    return " ".join(cuts) or "-"


def _other_cut(entry: Mapping[str, Any]) -> str:
    """The rejected alternative, in the same words."""
    splits: Mapping[str, str] = entry["rejected"]["splits"]
    loops = entry["loops"]
    return _cut(splits, {axis: loops[label]["role"] for axis, label in splits.items() if label in loops})


def _loop(name: str, loop: Mapping[str, Any]) -> str:
    """``k=768 (tensor)``; a loop that is taken whole has no role."""
    return f"{name}={loop['extent']}" + (f" ({loop['role']})" if loop["role"] else " (whole)")


def _label(label: str, loops: Mapping[str, Any]) -> str:
    """A cut's label with what it is for."""
    if label in loops:
        return f"{label} ({loops[label]['role']})"
    return f"{label} (a pending sum passes)" if label.startswith("sum") else label


def _few(names: Iterable[str]) -> str:
    """The first three."""
    every = list(names)
    return ", ".join(every[:3]) + (", …" if len(every) > 3 else "")


def _more(extra: Mapping[str, Any]) -> str:
    """Milliseconds more, or at least so many."""
    return ("" if extra["exact"] else "≥ ") + _sign(extra["extra_s"])


def _sign(seconds: float) -> str:
    """Milliseconds with a sign."""
    return f"{seconds * 1e3:+.4g}" if abs(seconds) > 1e-12 else "0"


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


def table(header: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces in front."""
    lines = [*([] if header is None else [tuple(header)]), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
