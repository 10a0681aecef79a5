"""Which models are planned, refused, or planned wrong: on material that nobody tuned to.

    python benchmarks/coverage.py [--smoke] [--json OUT] [--parts nodes] [--every 20] [--only gpt2,bert] [--quick]
        [--route plain] [--alike] [--part 3/10 --merge]

``architectures``: models of transformers and of plain torch as their users train them, each in a process of its own:
exported, planned for 2x2, proved, and the text run on simulated ranks against the module (pdv/check). ``--route``:
as files of torch's exporters (plain, whole with ``optimize=False``, older) or of our own (own), which are held against
the module; with ``--alike``
those of which the same graph is read as of the module are not planned again. ``--torchrun``: the packages of modules
are run on four processes, too.
``nodes``: onnx's own backend node tests, for inference, planned for one process and for two, and the text run on as
many simulated ranks against the outputs that the test asks for, within its own tolerance. docs/coverage.md is filled in
from benchmarks/results/coverage_nodes.json.
``gradients``: the same tests with their inputs of floats as parameters, in training: gradients of the text on one
process and on two against each other, and against differences of values in float64 (coverage_runs/gradients.py).
``random``: ONNX models of several random operators, planned for two processes in both modes, and the text run on two
simulated ranks against what ONNX Runtime gives.
``--part 3/10``: each tenth architecture or test, from the third on; with ``--merge`` the other rows of the record stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.coverage_runs.architectures import OUTCOMES, ROUTES, How
from benchmarks.record import Record, arguments, merged, part_of, table


def main() -> None:
    """Run the parts; print outcomes and reasons."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--parts", default="architectures", help="comma-separated")
    parser.add_argument("--only", default="", help="architectures, comma-separated")
    parser.add_argument("--no-dropout", action="store_true", help="with all probabilities of dropout set to zero")
    parser.add_argument(
        "--quick", action="store_true", help="only read the models (node tests are evaluated as they were read)"
    )
    parser.add_argument("--route", default="torch", choices=ROUTES, help="how architectures reach pdv")
    parser.add_argument("--alike", action="store_true", help="do not plan files that give the module's graph")
    parser.add_argument("--torchrun", action="store_true", help="run the packages of modules on four processes, too")
    parser.add_argument("--files", type=Path, help="keep exported files here, and take them from here")
    parser.add_argument("--further", action="store_true", help="models that were taken later, in place of the others")
    parser.add_argument("--larger", action="store_true", help="those that small sizes harm in plain files, larger")
    parser.add_argument("--weights", action="store_true", help="of files that lack parameters, give the module's")
    parser.add_argument("--every", type=int, default=1, help="of the node tests one in so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes for node tests")
    parser.add_argument("--models", type=int, default=500, help="how many random models")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="each N-th case, from the I-th on")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of the record")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if options.smoke:
        only = ["vae", "gpt2"]
    record, kept, share = Record(), options.json if options.merge else None, part_of(options.part)
    for part in options.parts.split(","):
        if part == "nodes":
            chosen = "test_relu" if options.smoke else options.only
            run_nodes(record, kept, chosen, share, options.every, quick=options.quick, jobs=options.jobs)
            continue
        if part == "gradients":
            chosen = "test_add,test_matmul" if options.smoke else options.only
            run_gradients(record, kept, chosen, share, options.every, jobs=options.jobs)
            continue
        if part == "random":
            run_random(record, 5 if options.smoke else options.models, options.only, jobs=options.jobs)
            continue
        assert part == "architectures", f"no part {part!r}"
        how = How(options.route, not options.no_dropout, options.quick, options.alike, options.torchrun, options.files)
        how = replace(how, further=options.further, larger=options.larger, weights=options.weights)
        run_architectures(record, kept, only, share, how)
    record.print_summary()
    record.write(options.json)


def run_architectures(record: Record, kept: Path | None, only: list[str], share: slice, how: How) -> None:
    """A row for each architecture, and what stands in their way, most frequent first.

    kept: the record whose other rows stay; only: names, empty for all; share: of these.
    """
    from benchmarks.coverage_runs.architectures import reasons, survey

    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            f"{row['architecture']:16} {row['outcome']:9} {row['seconds']:6.1f} s  {'; '.join(row.get('reasons', ()))}"
        )
        sys.stdout.flush()

    survey(only, share, how, report)
    record.rows += merged(kept, rows, "architecture", "route")
    table(("models", "alone", "reason"), [(str(n), str(alone), why[:160]) for n, alone, why in reasons(record.rows)])
    counts = Counter(row["outcome"] for row in record.rows)
    record.claim("architectures", len(record.rows), "")
    for outcome in dict.fromkeys((*OUTCOMES, *sorted(counts))):
        record.claim(f"architectures {outcome}", counts[outcome], "")
    record.claim("architectures planned of all", (counts["planned"] + counts["alike"]) / len(record.rows), "of all")


def run_random(record: Record, models: int, only: str, *, jobs: int) -> None:
    """A row for each random model; only: one of them, by number."""
    from benchmarks.coverage_runs.random_models import survey
    from benchmarks.coverage_runs.running import WORST_FIRST

    rows = sorted(survey([int(only)] if only else range(models), jobs=jobs), key=lambda row: int(row["model"]))
    record.rows += rows
    for row in rows:
        if row["outcome"] != "passed":
            print(f"{row['outcome']}: {row['model']} ({row['mode']}, {' '.join(row['operators'])}): {row['why']}")
    counts = Counter(row["outcome"] for row in rows)
    record.claim("random models", len(rows), "")
    for outcome in WORST_FIRST:
        record.claim(f"random models: {outcome}", counts[outcome], "")
    record.claim("random models: accepted", 1 - counts["refused"] / len(rows), "of all")
    record.claim("random models: cut", sum(row["cut"] for row in rows) / len(rows), "of all")


def run_gradients(record: Record, kept: Path | None, only: str, share: slice, every: int, *, jobs: int) -> None:
    """A row for each node test with gradients, and how many came out; the arguments as of ``run_nodes``."""
    from benchmarks.coverage_runs.gradients import READING, REFERENCE, UNDEFINED
    from benchmarks.coverage_runs.nodes import cases, refusals, survey_gradients
    from benchmarks.coverage_runs.running import WORST_FIRST

    chosen = [case for case in cases()[::every] if any(part in case.name for part in only.split(","))][share]
    rows = merged(kept, list(survey_gradients(chosen, jobs=jobs)), "test")
    rows.sort(key=lambda row: str(row["test"]))
    record.rows += rows
    for row in rows:
        if row["outcome"] not in ("passed", "refused"):
            print(f"{row['outcome']}: {row['test']}: {row['why']}")
    table(("tests", "operator", "refused, since"), refusals(rows))
    counts = Counter(row["outcome"] for row in rows)
    record.claim("gradients", len(rows), "tests")
    for outcome in WORST_FIRST:
        record.claim(f"gradients: {outcome}", counts[outcome], "tests")
    passed = [row for row in rows if row["outcome"] == "passed"]
    record.claim("gradients: passing", len(passed) / max(len(rows), 1), "of all")
    record.claim("gradients: cut", sum(row["cut"] for row in passed) / max(len(passed), 1), "of those that passed")
    for judge in (REFERENCE, READING, UNDEFINED):
        record.claim(f"gradients: {judge}", sum(row["judge"] == judge for row in passed), "of those that passed")


def run_nodes(
    record: Record, kept: Path | None, only: str, share: slice, every: int, *, quick: bool, jobs: int
) -> None:
    """A row for each node test, and how many of each group passed.

    kept: the record whose other rows stay; only: what their names contain; every: one in so many of them, and share: of
    these; quick: they are only read.
    """
    from benchmarks.coverage_runs.nodes import GROUPS, cases, refusals, survey
    from benchmarks.coverage_runs.running import WORST_FIRST

    chosen = [case for case in cases()[::every] if any(part in case.name for part in only.split(","))][share]
    rows = merged(kept, list(survey(chosen, quick=quick, jobs=jobs)), "test")
    rows.sort(key=lambda row: str(row["test"]))
    record.rows += rows
    for row in rows:
        if row["outcome"] not in ("passed", "refused"):
            print(f"{row['outcome']}: {row['test']}: {row['why']}")
    table(("tests", "operator", "refused, since"), refusals(rows))
    for group in GROUPS:
        own = [row for row in rows if row["group"] == group]
        counts = Counter(row["outcome"] for row in own)
        record.claim(f"nodes: {group}", len(own), "tests")
        for outcome in WORST_FIRST:
            record.claim(f"nodes: {group}: {outcome}", counts[outcome], "tests")
        record.claim(f"nodes: {group}: passing", counts["passed"] / max(len(own), 1), "of all")
        cut = sum(row["cut"] for row in own if row["outcome"] == "passed")
        record.claim(f"nodes: {group}: cut", cut / max(counts["passed"], 1), "of those that passed")


if __name__ == "__main__":
    main()
