"""Rows of rivals as a terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdv.report.explain import table
from pdv.report.simulated import seconds_text

Rows = Sequence[Mapping[str, Any]]  # Any: pdv.rivals.setting.Row


def rivals_text(step_s: float, experts: Rows, changed: Rows) -> str:
    """Two tables: what experts would write, and what the plan would be elsewhere; ``step_s`` is the plan's own."""
    parts = [
        ["Beside the experts, simulated alike", *_rows("this plan", step_s, experts)],
        ["Planned again where one thing is another", *_rows("as it is", step_s, changed)],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _rows(own: str, step_s: float, rows: Rows) -> list[str]:
    lines = [(own, seconds_text(step_s), "1.00", "")]
    for row in rows:
        if row["step_s"] is None:
            lines.append((row["name"], "-", "", row["why"]))
        else:
            fits = row["detail"] + ("" if row["fits"] else "; does not fit")
            lines.append((row["name"], seconds_text(row["step_s"]), f"{row['step_s'] / step_s:.2f}", fits))
    return table(("plan", "step", "times", "how"), lines)
