"""Two plans side by side: what they do differently, and what that does to time and memory.

Entry points: ``diff_document`` of two documents of ``pdv.report.simulated``, and ``diff_text``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdv.cluster.units import MEMORY
from pdv.report.simulated import SMALL, order_shares, part_text, seconds_text

Document = dict[str, Any]  # Any: JSON
SETTINGS = (
    "mode",
    "configuration",
)  # of the whole document; the model's and cluster's names, mesh and pipeline besides
MOST = 40  # operators told of in text


def diff_document(first: Mapping[str, Any], second: Mapping[str, Any]) -> Document:
    """What differs: settings, operators by kind and module with their counts, seconds, and bytes by stage."""
    return {
        "settings": _settings(first, second),
        "operators": _operators(first, second),
        "step_s": [first["step_s"], second["step_s"]],
        "std_s": [first["std_s"], second["std_s"]],
        "ratio": second["step_s"] / first["step_s"],
        "mfu": [first["mfu"], second["mfu"]],
        "breakdown_s": _both(order_shares(first["breakdown_s"]), order_shares(second["breakdown_s"])),
        "peak_bytes": [first["peak_bytes"], second["peak_bytes"]],
        "fits": [first["fits"], second["fits"]],
        "memory_by_kind_bytes": _both(_held_bytes(first), _held_bytes(second)),
    }


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    one, other = (_flat(document) for document in (first, second))
    names = [*one, *(name for name in other if name not in one)]
    return {name: [one.get(name), other.get(name)] for name in names if one.get(name) != other.get(name)}


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    found = {"model": document["model"]["name"], "parameters": document["model"]["parameters"]}
    found |= {"cluster": document["cluster"]["name"], "devices": document["cluster"]["num_devices"]}
    found |= {name: document[name] for name in SETTINGS}
    found |= {f"mesh {name}": size for name, size in document["mesh"].items()}
    return found | {name.replace("_", " "): value for name, value in document["pipeline"].items()}


def _operators(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Document]:
    """Operators of one kind and module that are cut otherwise, or as often: [shardings with counts] on either side."""
    one, other = (_by_name(document) for document in (first, second))
    names = [*one, *(name for name in other if name not in one)]
    axes = [" ".join(document["mesh"]) for document in (first, second)]
    return [
        {"op": op, "name": name, "first": one.get((op, name), {}), "second": other.get((op, name), {}), "axes": axes}
        for op, name in names
        if one.get((op, name)) != other.get((op, name)) or axes[0] != axes[1]
    ]


def _by_name(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, int]]:
    found: dict[tuple[str, str], dict[str, int]] = {}
    for entry in document["operators"]:
        found.setdefault((entry["op"], entry["name"]), {})[entry["sharding"]] = entry["count"]
    return found


def _both(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, list[float]]:
    names = order_shares({**other, **one})
    return {name: [one.get(name, 0.0), other.get(name, 0.0)] for name in names}


def _held_bytes(document: Mapping[str, Any]) -> dict[str, float]:
    """What the fullest stage holds."""
    entries = [entry["memory"] for entry in document["stages"] if entry["memory"]]
    fullest = max(entries, key=lambda memory: memory["total_bytes"] / memory["device_bytes"], default=None)
    return {} if fullest is None else dict(fullest["by_kind_bytes"])


# ---- Text ----


def diff_text(difference: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The document as people read it; ``names``: of the two plans."""
    lines = [f"a: {names[0]}", f"b: {names[1]}", "", *_settings_text(difference), *_operators_text(difference)]
    lines += _step_text(difference)
    lines += _table(
        "time goes to",
        {part_text(k): v for k, v in difference["breakdown_s"].items()},
        seconds_text,
        _least(difference),
    )
    held = difference["memory_by_kind_bytes"]
    lines += ["", *_table("the fullest stage holds", held, MEMORY.format, 2.0**20)]
    verdicts = ["fits" if fits else "does not fit" for fits in difference["fits"]]
    sizes = [MEMORY.format(size) for size in difference["peak_bytes"]]
    return "\n".join([*lines, f"  in all: a {sizes[0]} ({verdicts[0]}), b {sizes[1]} ({verdicts[1]})"])


def _least(difference: Mapping[str, Any]) -> float:
    return float(SMALL * min(difference["step_s"]))


def _settings_text(difference: Mapping[str, Any]) -> list[str]:
    if not difference["settings"]:
        return ["settings: the same", ""]
    width = max(map(len, difference["settings"]))
    rows = [f"  {name:<{width}}  {_word(a)} -> {_word(b)}" for name, (a, b) in difference["settings"].items()]
    return ["settings", *rows, ""]


def _word(value: object) -> str:
    return "-" if value is None or value == "" else "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _operators_text(difference: Mapping[str, Any]) -> list[str]:
    operators = difference["operators"]
    if not operators:
        return ["operators: cut alike", ""]
    axes = operators[0]["axes"]
    width = max(len(f"{entry['op']} {entry['name']}") for entry in operators[:MOST])
    rows = [
        f"  {entry['op'] + ' ' + entry['name']:<{width}}  {_cuts(entry['first'])} -> {_cuts(entry['second'])}"
        for entry in operators[:MOST]
    ]
    more = [f"  … {len(operators) - MOST} more …"] if len(operators) > MOST else []
    head = f"operators cut otherwise (results along {axes[0] or 'no axis'} -> {axes[1] or 'no axis'})"
    return [head, *rows, *more, ""]


def _cuts(shardings: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {text or 'whole'}" for text, count in shardings.items()) or "none"


def _step_text(difference: Mapping[str, Any]) -> list[str]:
    (a, b), (std_a, std_b) = difference["step_s"], difference["std_s"]
    verdict = f"b takes {difference['ratio']:.3g} x as long"
    step = (
        f"step    a {seconds_text(a)} ± {seconds_text(std_a)}, b {seconds_text(b)} ± {seconds_text(std_b)}: {verdict}"
    )
    return [step, f"MFU     a {100 * difference['mfu'][0]:.1f} %, b {100 * difference['mfu'][1]:.1f} %", ""]


def _table(title: str, rows: Mapping[str, list[float]], text: Any, least: float) -> list[str]:  # Any: number -> text
    kept = {name: pair for name, pair in rows.items() if max(pair) > least}
    width = max([len(title), *(len(name) + 2 for name in kept)])
    lines = [f"{title:<{width}}  {'a':>10}  {'b':>10}  {'b - a':>11}"]
    for name, (a, b) in kept.items():
        change = "" if a == b else f"{'+' if b > a else '-'}{text(abs(b - a))}"
        lines.append(f"  {name:<{width - 2}}  {_or_none(a, text):>10}  {_or_none(b, text):>10}  {change:>11}")
    return lines


def _or_none(value: float, text: Any) -> str:  # Any: as _table
    return str(text(value)) if value else "-"
