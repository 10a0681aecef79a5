"""README's first command on plain exports of published models at full size: what planning costs, and if it trains.

    python benchmarks/exports.py [--smoke] [--json OUT] [--only gpt2,bert] [--routes own,new] [--merge]

Each model of transformers, with random weights, is exported by our own function and by torch's two exporters, in
training and in eval mode, planned for 2x4 GPUs, written, and built on one process. One step of it is held against one
of the module: loss, and gradients by the module's names. Each case runs in a process of its own; CPU-seconds are those
of the parts of `pdv optimize` without imports. ``--merge``: keep rows of other cases in the record that is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.exports_runs.models import MODELS
from benchmarks.record import ROOT, Record, arguments, environment, merged, table

ROUTES = ("own", "new, eval", "new, train", "old, eval", "old, train")
SMOKE = ("own", "new, eval", "old, train")  # of each exporter one
PARTS = ("reading", "check", "search", "proof", "emission")
SECONDS = 900


def main() -> None:
    """Run the cases; print CPU-seconds of each part, and the outcome."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="models, comma-separated")
    parser.add_argument("--routes", default="", help="ways to export, comma-separated beginnings of their names")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of the record")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "ROUTE"), help="run one here (what the others start)")
    options = parser.parse_args()
    size = "small" if options.smoke else "full"
    if options.case:
        from benchmarks.exports_runs.run import run

        print(json.dumps(run(*options.case, size)))
        return
    models = [name for name in options.only.split(",") if name] or (["gpt2"] if options.smoke else list(MODELS))
    starts = tuple(options.routes.split(","))
    routes = [route for route in (SMOKE if options.smoke else ROUTES) if route.startswith(starts)]
    record = Record()
    for model in models:
        for route in routes:
            row = measure(model, route, smoke=options.smoke)
            record.rows.append(row)
            print(f"{model:10}{route:12}{row['result']}", flush=True)
    if options.merge:
        places = list(MODELS), list(ROUTES)
        both = merged(options.json, record.rows, "model", "route")
        record.rows = sorted(both, key=lambda row: (places[0].index(row["model"]), places[1].index(row["route"])))
    show(record)
    claim(record)
    record.print_summary()
    record.write(options.json)


def measure(model: str, route: str, *, smoke: bool) -> dict[str, Any]:
    """The row of a case, from a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", model, route, *(["--smoke"] if smoke else [])]

    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"model": model, "route": route, "seconds": {}, "result": f"longer than {SECONDS} s"}
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"model": model, "route": route, "seconds": {}, "result": f"crashed: {why[:300]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def total(row: dict[str, Any]) -> float | None:
    """CPU-seconds of planning in all; None where nothing was planned."""
    return sum(row["seconds"][part] for part in PARTS) if "gradients" in row else None


def show(record: Record) -> None:
    """The rows as a table."""
    own = {row["model"]: total(row) for row in record.rows if row["route"] == "own"}
    lines = []
    for row in record.rows:
        seconds, mine, found = row["seconds"], own.get(row["model"]), total(row)
        ratio = f"{found / mine:.2f}" if found and mine else "-"
        gap = row.get("gradients")
        lines.append((
            row["model"], row["route"], f"{seconds.get('export', 0.0):.1f}",
            *(f"{seconds.get(part, 0.0):.1f}" for part in PARTS),
            "-" if found is None else f"{found:.1f}", ratio,
            "-" if gap is None else f"{gap:.0e}", row.get("names", "-"), row["result"][:160],
        ))  # fmt: skip
    table(("model", "export", "CPU-s", *PARTS, "all", "/ own", "gradients off by", "names kept", "result"), lines)


def claim(record: Record) -> None:
    """Counts and figures as README quotes them."""
    own = {row["model"]: total(row) for row in record.rows if row["route"] == "own"}
    plain = [row for row in record.rows if row["route"] != "own"]
    record.claim("plain exports", len(plain), "")
    for outcome in ("trains as the module", "refused", "torch cannot export", "not trained", "trains another", "crash"):
        record.claim(f"plain exports: {outcome}", sum(row["result"].startswith(outcome) for row in plain), "")
    for how in ("new", "old"):
        each = [row for row in plain if row["route"].startswith(how)]
        ratios = [one / mine for row in each if (one := total(row)) and (mine := own.get(row["model"]))]
        if ratios:
            record.claim(f"plain exports, {how}: CPU-seconds of planning over own export, largest", max(ratios), "")
    for row in record.rows:
        if row["route"] == "own" and "the outputs are the same" in row.get("reading", ""):
            record.claim(f"{row['model']}: reading checked against the file", row["seconds"]["check"], "CPU-s")


if __name__ == "__main__":
    main()
