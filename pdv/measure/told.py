"""What `pdv bench` found, for a reader. Entry point: ``told``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdv.cluster.units import MEMORY
from pdv.report.simulated import count_text, seconds_text

Document = Mapping[str, Any]  # Any: JSON


def told(found: Document) -> dict[str, str]:
    """Names and sentences."""
    step, worst, memory = found["step"], found["worst"], found["memory"]
    rows = {
        "step": f"{_pair(step)}; predicted ± {seconds_text(step['std_s'])}, {found['steps']} steps",
        **{f"  {row['part']}": _pair(row) for row in found["parts"]},
        "most wrong": f"{worst['part']}, {seconds_text(abs(worst['seconds']))} "
        f"{'longer' if worst['seconds'] > 0 else 'shorter'} than predicted",
    }
    for row in found["blocks"]:
        rows[f"  {row['block']}, {row['pass']}"] = f"{_pair(row)}; one of {row['blocks']}, without collectives"
    for row in found["collectives"]:
        name = f"  {row['collective']}, {count_text(row['bytes'])}B over {row['devices']}"
        rows[name] = f"{_pair(row)}; {row['count']:.3g} a step, waiting included"
    predicted, measured = memory["predicted_bytes"], memory["measured_bytes"]
    error = f", {predicted / measured - 1:+.0%}" if measured else ""
    rows["memory"] = f"{MEMORY.format(measured)} measured, {MEMORY.format(predicted)} predicted{error}"
    if "kept" in found:
        rows["kept"] = f"{found['kept']['kernels']} kernels in {found['kept']['folder']}: plan with --cost by it"
    return rows


def _pair(row: Document) -> str:
    """``12 ms measured, 10 ms predicted, -17%``."""
    if row["predicted_s"] is None:
        return f"{seconds_text(row['measured_s'])} measured"
    error = "" if row.get("error") is None else f", {row['error']:+.0%}"
    return f"{seconds_text(row['measured_s'])} measured, {seconds_text(row['predicted_s'])} predicted{error}"
