"""What a plan says of operators that nobody declared: which torch runs as they are, what that costs, what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]  # Any: plan.json; docs/plan-format.md


class OpaqueWarning(UserWarning):
    """A plan has operators that nobody declared."""


def opaque_warning(document: Document) -> str:
    """One line about what is run as it is and whole; empty if nothing is."""
    whole = [entry for entry in document.get("opaque_operators", ()) if not entry["loops"]]
    if not whole:
        return ""
    named = ", ".join(f"{entry['function'].removeprefix('torch.ops.')} ({entry['count']})" for entry in whole)
    return (
        f"no declaration of {named}: torch runs {_them(whole)} whole on every rank ({_cost(document, whole)}); {_ASK}"
    )


def explain_opaque(document: Document) -> list[str]:
    """The section of `pdv explain`."""
    entries = document.get("opaque_operators", ())
    if not entries:
        return []
    lines = [f"Operators that torch runs as they are ({_cost(document, entries)})"]
    for entry in entries:
        how = f"rows of {entry['loops']!r}" if entry["loops"] else "whole on every rank"
        lines.append(f"  {entry['function']}  {entry['count']} times, {entry['time_s'] * 1e3:.4g} ms, {how}")
    names = dict.fromkeys(_registered(entry["function"]) for entry in entries if not entry["loops"])
    return lines + [f'  to let it be cut: pdv.register_operator("{name}", LOOPS) (docs/operators.md)' for name in names]


_ASK = "pdv.register_operator says how they may be cut, --strict refuses them"


def _them(entries: list[Any]) -> str:
    return "it" if sum(entry["count"] for entry in entries) == 1 else "them"


def _cost(document: Document, entries: Any) -> str:
    step, ranks = document["predicted"]["step_time_s"]["mean"], math.prod(axis["size"] for axis in document["mesh"])
    spent = sum(entry["time_s"] for entry in entries)
    return f"{100 * spent / step if step else 0:.2g} % of the predicted step, the same on {ranks} ranks"


def _registered(function: str) -> str:
    """``torch.ops.mylib.smooth.default`` as ``mylib::smooth``."""
    return function.removeprefix("torch.ops.").replace(".", "::", 1).removesuffix(".default")
