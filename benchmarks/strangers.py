"""Modules as people write them, planned, emitted, trained for some steps, and compared with themselves.

    python benchmarks/strangers.py [--only NAME,...] [--devices 4] [--real] [--part I/N]

Each of ``benchmarks/strangers_runs`` goes to ``pdv.optimize`` as the README has it; the package that is written takes
five steps with AdamW and with SGD, in one process, and with ``--real`` on as many gloo processes as it is planned for.
"""

from __future__ import annotations

import collections
import sys
import time

from benchmarks.record import Record, arguments, part_of


def main() -> None:
    """Judge modules; print what became of them."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--real", action="store_true", help="on real processes, too")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="I/N", help="each N-th, from the I-th on")
    options = parser.parse_args()
    from benchmarks.strangers_runs.catalogue import names
    from benchmarks.strangers_runs.judge import judge

    chosen = options.only.split(",") if options.only else names()[options.part]
    record = Record()
    for name in chosen[:1] if options.smoke else chosen:
        started = time.process_time()
        verdict = judge(name, options.devices, real=options.real)
        seconds = time.process_time() - started
        row = {"module": name, "outcome": verdict.outcome, "stage": verdict.stage, "plan": verdict.plan}
        record.rows.append({**row, "said": verdict.said, "cpu_s": round(seconds, 1)})
        said = verdict.said if verdict.outcome != "refused" else verdict.said.splitlines()[0]
        print(f"{verdict.outcome:8}{name:28}{verdict.plan:14}{seconds:6.1f} s {verdict.stage} {said}", flush=True)
    for outcome, number in sorted(collections.Counter(row["outcome"] for row in record.rows).items()):
        record.claim(outcome, number, "modules")
    record.print_summary()
    record.write(options.json)
    sys.exit(any(row["outcome"] in ("wrong", "crash") for row in record.rows))


if __name__ == "__main__":
    main()
