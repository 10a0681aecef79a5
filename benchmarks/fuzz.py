"""Mutated files of every kind that pdv reads: each is answered, or refused by one error with its documented code.

    python benchmarks/fuzz.py [--smoke] [--count 5000] [--seed 1] [--real 200] [--only onnx,plan] [--json OUT]
        [--part 3/10 --merge --rest]

ONNX files, cluster files, pins, laws, device records, topologies, plans, source graphs, weights, measurements: bytes
flipped, fields left out, doubled, of other types and values, and files made to hurt. Each is given to a command in a
fork of a process that has everything imported, within 30 CPU-seconds and 6 GiB, and watched: what it opens, what it
leaves behind. ``--real N`` runs N of them as programs of their own. ``--keep FOLDER`` keeps those that fail;
``--case KIND:NUMBER`` runs one again. ``--part 3/10``: each tenth case, from the third on; with ``--merge``
rows of other cases stay in the record that is there, and ``--rest`` runs only what it lacks, or has as failed.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.fuzz_runs.case import Case
from benchmarks.fuzz_runs.measured import cost_weights_case, profile_case
from benchmarks.fuzz_runs.onnx_files import hostile_cases, onnx_cases
from benchmarks.fuzz_runs.packages import graph_case, make_packages, plan_case, weights_case
from benchmarks.fuzz_runs.run import Result, Runner
from benchmarks.fuzz_runs.settings import (
    cluster_case,
    device_case,
    disk_case,
    hostile_clusters,
    laws_case,
    pins_case,
    topology_case,
)  # fmt: skip
from benchmarks.record import Record, arguments, merged, part_of, table

# how many of a hundred are of each kind; files made to hurt come once each, before
SHARES = {
    "onnx": 40,
    "plan": 14,
    "graph": 8,
    "weights": 6,
    "cluster": 12,
    "pins": 4,
    "laws": 2,
    "device": 4,
    "topology": 3,
    "profiles": 4,
    "cost": 2,
    "disk": 1,
}
FAILURES = ("traceback", "time", "memory", "escape", "half-written", "noise", "wrong-code")
Draw = Callable[[random.Random], Case]


def main() -> None:
    """Run cases; print what became of them."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", type=int, default=200, help="how many run as programs of their own")
    parser.add_argument("--only", default="", help="kinds, comma-separated; 'hostile' is one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where files of what fails go")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="run this one again, and say all")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="each N-th case, from the I-th on")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of the record")
    parser.add_argument("--rest", action="store_true", help="what the record lacks, or has as failed")
    options = parser.parse_args()
    if options.smoke:
        options.count, options.real = 40, 1
    done = _done(options.json) if options.rest else frozenset[str]()
    runner, record = Runner(), Record()
    try:
        drawn = draws(runner)
        if options.case:
            kind, _, number = options.case.partition(":")
            chosen: Iterator[tuple[str, Case]] = iter(
                [(options.case, drawn_case(drawn, kind, options.seed, int(number)))]
            )
        else:
            part = part_of(options.part)
            every_case = cases(drawn, options.count, options.seed, options.only, hostile=not options.smoke)
            own = islice(every_case, part.start, None, part.step)
            chosen = ((name, case) for name, case in own if name not in done)
        results = list(
            judged(runner, chosen, max(options.count // options.real, 1) if options.real else 0, options.keep)
        )
    finally:
        runner.close()
    now = [_row(*entry) for entry in results]
    record.rows += merged(options.json, now, "case") if options.merge else now
    report(record)
    record.write(options.json)
    if any(result.failed for _, result, _ in results):
        sys.exit(1)


def _done(path: Path) -> frozenset[str]:
    """Cases of a record that were answered or refused as they should be."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return frozenset(row["case"] for row in rows if row["outcome"] not in FAILURES)


def judged(
    runner: Runner, chosen: Iterable[tuple[str, Case]], every: int, keep: Path | None
) -> Iterator[tuple[str, Result, bool]]:
    """Each case's name, result, and whether it ran as a program of its own, as one in ``every`` does (0: none)."""
    for number, (name, case) in enumerate(chosen):
        runner.real = every > 0 and number % every == every // 2
        result = runner(case, keep=keep is not None)
        if result.failed:
            told = f"{case.kind}: {case.what[:150]}: {case.command[0]}: {result.said[:300]}"
            print(f"{name} {result.outcome}: {told}", flush=True)
        if keep is not None:
            _keep(runner, result, keep / name.replace(":", "-"))
        yield name, result, runner.real


def draws(runner: Runner) -> Mapping[str, Draw]:
    """What draws a case of each kind."""
    packages = make_packages(runner)
    return {
        "onnx": onnx_cases,
        "cluster": cluster_case,
        "pins": pins_case,
        "laws": laws_case,
        "device": device_case,
        "topology": topology_case,
        "disk": disk_case,
        "profiles": profile_case,
        "cost": cost_weights_case,
        "plan": partial(plan_case, packages),
        "graph": partial(graph_case, packages),
        "weights": partial(weights_case, packages),
    }


def drawn_case(drawn: Mapping[str, Draw], kind: str, seed: int, number: int) -> Case:
    """The same for the same numbers."""
    if kind == "hostile":
        return [*hostile_cases(), *hostile_clusters()][number]
    return drawn[kind](random.Random(f"{kind} {seed} {number}"))


def cases(drawn: Mapping[str, Draw], count: int, seed: int, only: str, *, hostile: bool) -> Iterator[tuple[str, Case]]:
    """Each with its name: those made to hurt, then of each kind its share of ``count``."""
    wanted = [kind for kind in only.split(",") if kind] or ["hostile", *SHARES]
    if hostile and "hostile" in wanted:
        for number, case in enumerate([*hostile_cases(), *hostile_clusters()]):
            yield f"hostile:{number}", case
    kinds = {kind: SHARES[kind] for kind in wanted if kind in SHARES}
    for kind, share in kinds.items():
        for number in range(-(-count * share // sum(kinds.values()))):
            yield f"{kind}:{number}", drawn_case(drawn, kind, seed, number)


def _row(name: str, result: Result, real: bool) -> dict[str, Any]:  # Any: texts and numbers
    return {
        "case": name,
        "kind": result.case.kind,
        "what": result.case.what[:200],
        "command": result.case.command[0],
        "outcome": result.outcome,
        "said": result.said[:300] if result.failed else "",
        "real": real,
        "cpu_s": round(result.cpu_s, 2),
        "peak_mib": result.peak_bytes >> 20,
    }


def report(record: Record) -> None:
    """A row for each kind: inputs, answers, refusals by slug, and what must not be."""
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in record.rows):
        own = Counter(row["outcome"] for row in record.rows if row["kind"] == kind)
        slugs = ", ".join(f"{slug} {n}" for slug, n in sorted(own.items()) if slug not in ("answer", *FAILURES))
        rows.append((kind, str(own.total()), str(own["answer"]), *(str(own[name]) for name in FAILURES), slugs))
    table(("kind", "inputs", "answers", *FAILURES, "refused"), rows)
    total = Counter(row["outcome"] for row in record.rows)
    record.claim("inputs", len(record.rows), "")
    record.claim("answered", total["answer"], "")
    record.claim("refused", len(record.rows) - total["answer"] - sum(total[name] for name in FAILURES), "")
    for name in FAILURES:
        record.claim(name, total[name], "")
    record.claim("most CPU time of one", max((row["cpu_s"] for row in record.rows), default=0.0), "s")
    record.claim("most memory of one", max((row["peak_mib"] for row in record.rows), default=0) / 2**10, "GiB")
    record.print_summary()


def _keep(runner: Runner, result: Result, target: Path) -> None:
    """The folder of a case that failed; others are removed."""
    folder = runner.root / str(runner.number)
    if result.failed:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(folder, target)
    else:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
