"""Modules as people write them, planned, emitted, trained for some steps, and compared with themselves.

    python benchmarks/strangers.py [--only NAME,...] [--devices 4] [--real] [--part I/N] [--device cuda] [--jobs 8]

Each of ``benchmarks/strangers_runs`` goes to ``pdv.optimize`` as the README has it; the package that is written takes
five steps with AdamW and with SGD, in one process, and with ``--real`` on as many gloo processes as it is planned for.
``--device cuda``: that one process trains on a GPU, and so does the module.
"""

from __future__ import annotations

import collections
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.record import Record, arguments, part_of

if TYPE_CHECKING:
    from benchmarks.strangers_runs.judge import Verdict


def main() -> None:
    """Judge modules; print what became of them."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--real", action="store_true", help="on real processes, too")
    parser.add_argument("--device", default="cpu", help="where the package of one process trains")
    parser.add_argument("--jobs", type=int, default=1, help="modules at once")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="I/N", help="each N-th, from the I-th on")
    options = parser.parse_args()
    from benchmarks.strangers_runs.catalogue import names

    chosen = options.only.split(",") if options.only else names()[options.part]
    record = Record()
    judged = partial(timed, devices=options.devices, real=options.real, device=options.device)
    for name, verdict, seconds in several(judged, chosen[:1] if options.smoke else chosen, options.jobs):
        row = {"module": name, "outcome": verdict.outcome, "stage": verdict.stage, "plan": verdict.plan}
        record.rows.append({**row, "said": verdict.said, "cpu_s": round(seconds, 1)})
        said = verdict.said if verdict.outcome != "refused" else verdict.said.splitlines()[0]
        record.write(options.json)
        print(f"{verdict.outcome:8}{name:28}{verdict.plan:14}{seconds:6.1f} s {verdict.stage} {said}", flush=True)
    for outcome, number in sorted(collections.Counter(row["outcome"] for row in record.rows).items()):
        record.claim(outcome, number, "modules")
    record.print_summary()
    record.write(options.json)
    sys.exit(any(row["outcome"] in ("wrong", "crash") for row in record.rows))


def timed(name: str, *, devices: int, real: bool, device: str) -> tuple[str, Verdict, float]:
    """A module, what became of it, and the CPU time that took."""
    import torch

    from benchmarks.strangers_runs.judge import judge

    torch.backends.cudnn.allow_tf32 = False
    started = time.process_time()
    verdict = judge(name, devices, real=real, device=device)
    return name, verdict, time.process_time() - started


def several(
    judged: partial[tuple[str, Verdict, float]], chosen: Sequence[str], jobs: int
) -> Iterator[tuple[str, Verdict, float]]:
    """Of each module, in their order; several at once in processes of their own."""
    if jobs == 1:
        yield from map(judged, chosen)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judged, chosen)


if __name__ == "__main__":
    main()
