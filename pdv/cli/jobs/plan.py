"""`pdv plan JOBS.yaml`: many models on many clusters, one table and one object of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import UsageError
from ir.files.writing import make_folder, write_whole
from pdv.cli import values
from pdv.cli.long.interrupt import KEPT
from pdv.cli.long.progress import LogOption, QuietOption, progress_bar
from pdv.cli.output import DebugOption, JsonOption, end, one_line, print_json

if TYPE_CHECKING:
    from pdv.cli.jobs.processes import Outcome
    from pdv.cli.jobs.spec import Job

FAILED = 11  # exit code: some job failed, the others are there
SUMMARY = "jobs.json"
VERSION = 1  # of SUMMARY
PIPE_WIDTH = 1000  # characters: what no terminal shows is not wrapped


def plan(
    file: Annotated[Path, typer.Argument(help="The jobs, as YAML (docs/jobs.md).", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of all packages (default: <file>_plans).")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at once (default: one a core).", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace packages that are there.")] = False,
    quiet: QuietOption = False,
    log_file: LogOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Plan many models for many clusters, several at once, and compare the plans in one table."""
    from pdv.cli.jobs.processes import Outcome, Runs
    from pdv.cli.jobs.spec import read_jobs

    asked = read_jobs(file)
    folder = output or file.with_name(f"{file.stem}_plans")
    _check_output(folder, asked, overwrite=overwrite)
    make_folder(folder)
    runs = Runs(file.absolute().parent, folder, ("--overwrite",) if overwrite else ())
    found: dict[str, Outcome] = {job.name: Outcome(job) for job in asked}
    with progress_bar(quiet=as_json or quiet, log=log_file) as progress:

        def note(outcome: Outcome) -> None:
            found[outcome.job.name] = outcome
            if outcome.exit_code is None:
                return
            _write(folder, found)
            done = sum(each.exit_code is not None for each in found.values())
            progress(f"planned {done} of {len(asked)}: {one_line(outcome.job.name)}", done / len(asked))

        progress(f"planning {len(asked)} jobs", 0.0)
        outcomes = runs.outcomes(asked, min(jobs or os.cpu_count() or 1, len(asked)), note)
    if runs.interrupts and not any(outcome.plan for outcome in outcomes):
        _remove(folder)
        raise KeyboardInterrupt
    failed = sum(bool(outcome.exit_code) for outcome in outcomes)
    _print(outcomes, folder, failed, as_json=as_json, interrupted=runs.interrupts > 0)


def _check_output(folder: Path, jobs: Sequence[Job], *, overwrite: bool) -> None:
    """Before the work starts.

    Raises:
        UsageError: if the packages could not go there.
    """
    from pdv.plan.source import check_outside_packages

    check_outside_packages(folder / SUMMARY)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"-o: {str(folder)!r} is a file", mend="Choose another name")
    values.check_folder_of(folder)
    there = [name for name in (SUMMARY, *(job.package for job in jobs)) if (folder / name).exists()]
    if there and not overwrite:
        what = f"-o: {str(folder)!r} has {', '.join(there[:3])}{', …' if len(there) > 3 else ''}"
        raise UsageError(f"{what} already", mend="Choose another folder, or add --overwrite")


def _write(folder: Path, found: Mapping[str, Outcome]) -> None:
    """The file of what is known by now, whole."""
    document = {"jobs_version": VERSION, "jobs": [_describe(outcome, folder) for outcome in found.values()]}
    write_whole(folder / SUMMARY, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def _remove(folder: Path) -> None:
    """What is empty of plans."""
    (folder / SUMMARY).unlink(missing_ok=True)
    with suppress(OSError):  # others' files lie there
        folder.rmdir()


def _describe(outcome: Outcome, folder: Path) -> dict[str, Any]:  # Any: JSON
    """A job and what became of it, in plan.json's units."""
    job, plan = outcome.job, outcome.plan
    document: dict[str, Any] = {
        "name": job.name, "model": job.model, "cluster": job.cluster, "options": dict(job.options),
        "exit_code": outcome.exit_code, "seconds": round(outcome.seconds, 3),
    }  # fmt: skip
    if plan is None:
        return document | {"output": None, **({"error": dict(outcome.error)} if outcome.error else {})}
    from pdv.report.axes import strategy_text

    predicted, search = plan["predicted"], plan["search"]
    return document | {
        "output": str(folder / job.package), "step_s": predicted["step_time_s"],
        "memory_bytes": predicted["memory_bytes"], "fits": plan.get("simulated", {}).get("fits", True),
        "lower_bound_s": search["lower_bound"], "gap": search["gap"], "complete": search["certificate"]["complete"],
        "strategy": strategy_text(plan), "search_s": search["seconds"], "command": plan.get("command"),
    }  # fmt: skip


def _print(outcomes: Sequence[Outcome], folder: Path, failed: int, *, as_json: bool, interrupted: bool) -> None:
    """All that became of the jobs, and the exit code where not all went well."""
    found = {"output": str(folder), "jobs": [_describe(outcome, folder) for outcome in outcomes]}
    if not as_json:
        _print_table(outcomes, folder)
    elif not interrupted and not failed:
        print_json("plan", **found)
    if interrupted:
        end("plan", "interrupted", "interrupted: what was finished was kept", KEPT, as_json=as_json, **found)
    if failed:
        message = f"jobs-failed: {failed} of {len(outcomes)} jobs failed; each says why"
        end("plan", "jobs-failed", message, FAILED, as_json=as_json, **found)


def _print_table(outcomes: Sequence[Outcome], folder: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in ("job", 0), ("step", 1), ("memory", 1), ("gap", 1), ("strategy", 0), ("exit", 1):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for outcome in outcomes:
        table.add_row(*(Text(one_line(cell)) for cell in _row(outcome)))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    console.print(table)
    for outcome in outcomes:
        if outcome.error:
            print(f"error: {one_line(outcome.job.name)}: {one_line(outcome.error['message'])}", file=sys.stderr)
    print(f"written  {folder}/ ({SUMMARY} has all of it)")


def _row(outcome: Outcome) -> tuple[str, ...]:
    """A job's line of the table."""
    from pdv.emit.program.header import seconds
    from pdv.report.axes import strategy_text
    from pdv.report.summary import memory_text

    if outcome.plan is None:
        why = outcome.error["slug"] if outcome.error else "not begun"
        return outcome.job.name, "", "", "", why, "" if outcome.exit_code is None else str(outcome.exit_code)
    gap = outcome.plan["search"]["gap"]
    return (
        outcome.job.name,
        seconds(outcome.plan["predicted"]["step_time_s"]["mean"]),
        memory_text(outcome.plan),
        "unknown" if gap is None else f"{gap:.2%}",
        strategy_text(outcome.plan),
        str(outcome.exit_code),
    )
