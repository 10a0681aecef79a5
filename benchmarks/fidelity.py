"""Published training runs against the simulator: step time, choice among plans, memory.

    python benchmarks/fidelity.py --runs FILE.csv [--json OUT] [--cost auto] [--fit] [--smoke]
                                  [--sets SET … --merge RECORD]

Each row of the file is simulated from what it states alone (`benchmarks.published.runs`), and compared with what was
measured. Constants of `pdv/simulate/calibration.py` are the only ones fitted: on the groups of one half, so figures are
given for the other half as well. A group is all plans of one model on the same devices at the same batch. Where a row
leaves open how large a micro-batch is, the simulator chooses as a user would: the fastest that fits.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.published.cross import cross_validate, interval
from benchmarks.published.fit import fit
from benchmarks.published.runs import Refused, Run, read_runs
from benchmarks.published.simulate import Simulated, simulate_runs
from benchmarks.record import Record, arguments, table
from learned_cost.evaluation.evaluate import Z90
from pdv.simulate.calibration import OF_FRAMEWORKS

# Two invented runs, to see that the script works; nothing is claimed of them.
SMOKE = """model,params,layers,hidden,heads,seq,vocab,gpu,num_gpus,gpus_per_node,intra_bw,inter_bw,global_batch,\
micro_batch,tp,pp,dp,zero,recompute,schedule,measured(value),unit,source,set,precision,mem_gb,notes
made-up,,2,256,4,128,1024,A100-80G,2,2,,,4,2,2,1,1,0,none,none,10,ms/iteration,invented,invented,fp16,,
made-up,,2,256,4,128,1024,A100-80G,2,2,,,4,2,1,1,2,0,none,none,9,ms/iteration,invented,invented,fp16,,
"""


Entry = TypeVar("Entry")
FITTED = 1  # the half that constants are fitted on; it has runs of every set


def main() -> None:
    """Simulate every run, print errors by set, and claim the figures of the whole and of each half."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="FILE", help="a CSV file in the form of training_runs.csv")
    parser.add_argument("--cost", default="auto", help="what prices kernels, as pdv takes it")
    parser.add_argument("--fit", action="store_true", help="fit the constants on one half, and print them")
    parser.add_argument("--cross", action="store_true", help="fit the constants of modern machines, each part left out")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="simulate the runs of these sets alone")
    parser.add_argument("--merge", type=Path, metavar="RECORD", help="runs of other sets as this record has them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    record = Record()
    with tempfile.TemporaryDirectory() as scratch:
        path: Path | None = options.runs
        if options.smoke:
            path = Path(scratch) / "smoke.csv"
            path.write_text(SMOKE, encoding="utf-8")
        if path is None:
            parser.error("--runs FILE is needed")
        runs, refused = read_runs(path)
    if options.fit:
        print(fit([run for run in runs if half_of(run) == FITTED], options.cost, options.jobs))
        return
    if options.cross:
        crossed(record, runs, options.cost, options.jobs)
        record.print_summary()
        record.write(options.json)
        return
    asked = [run for run in runs if options.sets is None or run.set in options.sets]
    found = simulate_runs(asked, OF_FRAMEWORKS, options.cost, options.jobs)
    others = [run for run in runs if run not in asked] if options.merge else []
    kept = recall(others, json.loads(options.merge.read_text(encoding="utf-8"))["rows"]) if others else []
    done = [entry for entry in [*found, *kept] if isinstance(entry, Simulated)]
    done.sort(key=lambda entry: entry.run.number)
    record.rows = [row_of(entry) for entry in done]
    failed = [*refused, *(entry for entry in found if isinstance(entry, Refused))]
    record.rows += [{"row": entry.number, "set": entry.set, "refused": entry.why} for entry in failed]
    report(record, done, failed)
    record.print_summary()
    record.write(options.json)


def crossed(record: Record, runs: Sequence[Run], cost: str, jobs: int) -> None:
    """Errors of each part under constants that were fitted without it, with intervals: the runs are few."""
    found = cross_validate(runs, cost, jobs)
    print(found.calibration)
    rows = zip(runs, found.parts, found.errors, strict=True)
    record.rows = [{"row": run.number, "set": run.set, "part": part, "error": error} for run, part, error in rows]
    narrow = [error for run, error in zip(runs, found.errors, strict=True) if run.manual["products"] != "own"]
    wide = [error for run, error in zip(runs, found.errors, strict=True) if run.manual["products"] == "own"]
    by_set = grouped(zip(runs, found.errors, strict=True), lambda entry: entry[0].set)
    groups = {f"set {name}": [error for _, error in entries] for name, entries in by_set.items()}
    groups |= {"bf16": wide, "fp8 and fp4": narrow}
    for name, errors in groups.items():
        if errors:
            low, high = interval(errors)
            note = f"{len(errors)} runs; 90 % of means {100 * low:.1f} to {100 * high:.1f}"
            record.claim(f"cross-validated, {name}: error of the step time", mean_of(errors), "%", note)
    means = [mean_of([error for _, error in entries]) for entries in by_set.values()]
    record.claim("cross-validated: error of the step time, mean over sets", statistics.fmean(means), "%")


def mean_of(errors: Sequence[float]) -> float:
    """Mean absolute error in percent."""
    return 100 * statistics.fmean(map(abs, errors))


def half_of(run: Run) -> int:
    """0 or 1, equal for all runs of a group."""
    return zlib.crc32(repr(run.group).encode()) % 2


def row_of(entry: Simulated) -> dict[str, Any]:
    """A row of the record: by number and relative, so that nothing of the source's is repeated."""
    run = entry.run
    memory = None if run.memory_bytes is None else entry.memory_bytes / run.memory_bytes - 1
    return {
        "row": run.number, "set": run.set, "half": half_of(run), "error": error(entry),
        "deviation": entry.std_s / entry.step_s, "memory_error": memory, "fits": entry.fits, "chosen": entry.chosen,
        "shares": {name: seconds / entry.step_s for name, seconds in entry.breakdown.items()},
    }  # fmt: skip


def recall(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[Simulated]:
    """What rows of a record say of runs: the inverse of `row_of`."""
    known = {row["row"]: row for row in rows if "error" in row}
    return [_recall(run, known[run.number]) for run in runs if run.number in known]


def _recall(run: Run, row: dict[str, Any]) -> Simulated:
    step_s = run.measured_s * (1 + row["error"])
    memory = (run.memory_bytes or 0.0) * (1 + (row["memory_error"] or 0.0))
    parts = {name: share * step_s for name, share in row["shares"].items()}
    return Simulated(run, step_s, row["deviation"] * step_s, memory, row["fits"], parts, row["chosen"])


def error(entry: Simulated) -> float:
    """Relative error of the step time, signed."""
    return entry.step_s / entry.run.measured_s - 1


def report(record: Record, done: Sequence[Simulated], failed: Sequence[Refused]) -> None:
    """Tables by set and half; claims of the whole."""
    for entry in failed:
        print(f"row {entry.number} ({entry.set}) not simulated: {entry.why}")
    parts = ("fitted on", FITTED), ("held out", 1 - FITTED)
    halves = [("all", done), *((name, [x for x in done if half_of(x.run) == half]) for name, half in parts)]
    for name, entries in halves:
        if entries:
            by_set(record, name, entries)
    by_format(record, done)
    by_memory(record, done)


def by_format(record: Record, entries: Sequence[Simulated]) -> None:
    """Errors of runs whose products are in 8 or 4 bits, and of the others, where there are both."""
    kinds = {
        "products in 8 or 4 bits": [entry for entry in entries if entry.run.manual["products"] != "own"],
        "products in their own type": [entry for entry in entries if entry.run.manual["products"] == "own"],
    }
    for name, members in kinds.items() if all(kinds.values()) else ():
        errors = [error(entry) for entry in members]
        low, high = interval(errors)
        note = f"{len(errors)} runs; 90 % of means {100 * low:.1f} to {100 * high:.1f}"
        record.claim(f"{name}: error of the step time", mean_of(errors), "%", note)


def by_set(record: Record, name: str, entries: Sequence[Simulated]) -> None:
    """Errors of step times by set, and how well plans are ordered in groups."""
    sets = grouped(entries, lambda entry: entry.run.set)
    rows: list[tuple[str, ...]] = []
    means: list[float] = []
    for key, members in sorted(sets.items()):
        errors = [error(entry) for entry in members]
        sizes = sorted(abs(x) for x in errors)
        means.append(statistics.fmean(sizes))
        inside = sum(abs(entry.step_s - entry.run.measured_s) <= Z90 * entry.std_s for entry in members)
        rows.append((
            key, str(len(members)), f"{means[-1]:.1%}", f"{statistics.median(sizes):.1%}",
            f"{statistics.fmean(errors):+.1%}", f"{sizes[-1]:.0%}", f"{inside / len(members):.0%}",
        ))  # fmt: skip
    print(f"\n{name}")
    table(("set", "runs", "error", "median", "bias", "worst", "in 90 %"), rows)
    record.claim(f"{name}: error of the step time, mean over sets", 100 * statistics.fmean(means), "%")
    held = [abs(entry.step_s - entry.run.measured_s) <= Z90 * entry.std_s for entry in entries]
    record.claim(f"{name}: 90 % intervals of the step time hold", 100 * statistics.fmean(held), "% of runs")
    median = statistics.median(abs(error(entry)) for entry in entries)
    record.claim(f"{name}: error of the step time, median row", 100 * median, "%")
    chosen(record, name, entries)


def chosen(record: Record, name: str, entries: Sequence[Simulated]) -> None:
    """How much slower than its group's best the plan is that the simulator would choose; Kendall's tau."""
    groups = [g for g in grouped(entries, lambda entry: entry.run.group).values() if len(g) > 1]
    if not groups:
        return
    regrets = []
    for group in groups:
        best = min(entry.run.measured_s for entry in group)
        regrets.append(min(group, key=lambda entry: entry.step_s).run.measured_s / best - 1)
    record.claim(
        f"{name}: slower than the group's best, mean", 100 * statistics.fmean(regrets), "%", f"{len(groups)} groups"
    )
    record.claim(f"{name}: slower than the group's best, worst", 100 * max(regrets), "%")
    taus = [
        tau([entry.run.measured_s for entry in group], [entry.step_s for entry in group])
        for group in groups
    ]  # fmt: skip
    known = [found for found in taus if not math.isnan(found)]
    if known:
        record.claim(f"{name}: Kendall's tau, mean over groups", statistics.fmean(known), "", f"{len(known)} groups")


def tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's tau-b; NaN where one side is constant."""
    from scipy.stats import kendalltau

    return float(kendalltau(measured, predicted)[0])


def by_memory(record: Record, entries: Sequence[Simulated]) -> None:
    """Errors of peak memory, where it is stated; and runs that ran though the simulator says they do not fit."""
    stated = [entry for entry in entries if entry.run.memory_bytes is not None]
    if stated:
        errors = [entry.memory_bytes / (entry.run.memory_bytes or 1.0) - 1 for entry in stated]
        record.claim("peak memory: error", 100 * statistics.fmean(map(abs, errors)), "%", f"{len(stated)} runs")
        record.claim("peak memory: median error", 100 * statistics.median(map(abs, errors)), "%")
        record.claim("peak memory: bias", 100 * statistics.fmean(errors), "%")
    too_large = sum(not entry.fits for entry in entries)
    record.claim("runs said not to fit, which ran", float(too_large), "runs", f"of {len(entries)}")


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    """By key, in order of appearance."""
    found: dict[Any, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[key(entry)].append(entry)
    return found


if __name__ == "__main__":
    main()
