"""Random modules under random legal plans: planned, proved, emitted, run, and compared with the modules themselves.

    python benchmarks/fuzz_programs.py [--seed 1] [--count 200] [--processes 0|2,4,8] [--torchrun K] [--out FOLDER]

A program is a drawn module under a drawn assignment on one to three mesh axes; with ``--parts`` its step is taken in
micro-batches, in stages that are cut anywhere, in every order but 2bw, with recomputation, and with what is trained in
the host's memory, as is drawn. With ``--processes 0`` it runs in one process; with numbers, on that many gloo
processes, too. ``--torchrun K`` takes K more programs the user's way: saved by ``Plan.save`` and started by torchrun.
Outputs, loss, gradients and buffers are compared at the planned batch and at twice that. Failures are shrunk and
written to FOLDER, each with a test that fails as it does; ``--replay FILE`` judges one again. The same seed draws the
same programs, byte by byte; ``--start N`` goes on at program N.
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.fuzz_programs_runs.campaign import Campaign, Result
from benchmarks.fuzz_programs_runs.spec import Program
from benchmarks.record import Record, arguments, table

IN_ONE = (1, 2, 3, 4, 6, 8, 12)


def main() -> None:
    """Judge programs; print what became of them."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="programs: modules under plans")
    parser.add_argument("--start", type=int, default=0, help="the first program's number")
    parser.add_argument(
        "--processes", default="0", help="0: one process; or numbers of gloo processes, comma-separated"
    )
    parser.add_argument("--torchrun", type=int, default=0, metavar="K", help="K programs by Plan.save and torchrun")
    parser.add_argument("--parts", action="store_true", help="draw micro-batches, stages and recomputation, too")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where failures go, and a line for each program")
    parser.add_argument("--as-drawn", action="store_true", help="do not shrink failures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="judge this program only")
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help="what torchrun starts")
    options = parser.parse_args()
    if options.worker:
        from benchmarks.fuzz_programs_runs.torchrun import observe_here

        observe_here(options.worker)
        return
    if options.replay:
        replay(options.replay, [int(n) for n in options.processes.split(",")])
        return
    if options.smoke:
        options.count, options.torchrun = 8, 0
    processes = tuple(int(n) for n in options.processes.split(","))
    real = processes != (0,)
    devices = processes if real else IN_ONE
    campaign = Campaign(options.seed, devices, real, options.out, not options.as_drawn, options.parts)
    record = Record()
    started = time.process_time(), time.monotonic()
    results = campaign.run(options.start, options.count)
    digest = judge_all(record, results, options.out)
    campaign.isolated.close()
    if options.torchrun:
        from benchmarks.fuzz_programs_runs.torchrun import by_torchrun

        digest += judge_all(record, by_torchrun(options.seed, options.torchrun), options.out)
    report(record, time.monotonic() - started[1], digest)
    record.write(options.json)
    if any(row["outcome"] in ("wrong", "crash") for row in record.rows):
        sys.exit(1)


def judge_all(record: Record, results: Iterable[Result], folder: Path | None) -> str:
    """A row for each program; a hash of all programs and what became of them."""
    digest = hashlib.sha256()
    for result in results:
        plan, verdict = result.program.plan if result.program else None, result.verdict
        row = {
            "program": result.name,
            "mesh": "x".join(str(size) for _, size in plan.mesh) if plan else "",
            "run": asdict(plan.run) if plan else {},
            "outcome": verdict.outcome, "stage": verdict.stage, "kind": verdict.kind,
            "twice": verdict.twice, "ranks": verdict.ranks, "cpu_s": round(result.seconds, 2),
        }  # fmt: skip
        record.rows.append(row)
        text = result.program.text() if result.program else ""
        digest.update(f"{text}{verdict.signature}".encode())
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "programs.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if verdict.failed:
            said = verdict.text.strip().splitlines()[-1] if verdict.text.strip() else ""
            print(f"{result.name} {row['mesh']}: {' / '.join(verdict.signature)}: {said[:200]}", file=sys.stderr)
    return digest.hexdigest()[:16]


def report(record: Record, wall_s: float, digest: str) -> None:
    """How many programs came to which end; the figures that are claimed."""
    ends = collections.Counter((row["outcome"], row["stage"], row["kind"]) for row in record.rows)
    table(("outcome", "stage", "kind", "programs"), [(*end, str(n)) for end, n in sorted(ends.items())])
    count = collections.Counter(row["outcome"] for row in record.rows)
    total = len(record.rows)
    record.claim("programs", total, "", f"hash {digest}")
    for outcome in ("equal", "refused", "wrong", "crash"):
        record.claim(outcome, count[outcome], "programs")
    record.claim("accepted", 100 * (total - count["refused"]) / max(1, total), "%")
    runs = [row["run"] for row in record.rows if row["run"]]
    record.claim("in stages", sum(bool(run["cuts"]) for run in runs), "programs")
    record.claim("in micro-batches", sum(run["micro_batches"] > 1 for run in runs), "programs")
    record.claim("with recomputation", sum(run["recompute"] for run in runs), "programs")
    record.claim("in the host's memory", sum(run["offload"] for run in runs), "programs")
    for order in sorted({run["order"] for run in runs if run["cuts"]}):
        record.claim(
            f"in the order {order}", sum(bool(run["cuts"]) and run["order"] == order for run in runs), "programs"
        )
    record.claim("on several real processes", sum(row["ranks"] > 1 for row in record.rows), "programs")
    record.claim("batch fixed, and said so", sum(row["twice"] == "fixed" for row in record.rows), "programs")
    record.claim("CPU time of a program", sum(row["cpu_s"] for row in record.rows) / max(1, total), "s")
    record.claim("wall time", wall_s, "s")
    record.print_summary()


def replay(path: Path, processes: list[int]) -> None:
    """One program's verdict, in full."""
    from benchmarks.fuzz_programs_runs.judge import Judge

    program = Program.parse(path.read_text(encoding="utf-8"))
    ranks = program.plan.devices if processes != [0] else 0
    verdict = Judge(program.module, ranks, lambda stage: print(stage, file=sys.stderr)).judge(program.plan)
    print(verdict.outcome, verdict.stage, verdict.kind, verdict.twice)
    print(verdict.text)
    sys.exit(verdict.failed)


if __name__ == "__main__":
    main()
