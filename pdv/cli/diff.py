"""`pdv diff A B`: what two plans do differently, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ir.errors import UsageError
from ir.files.reading import FileKind, parse_json, read_text
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json

Plan = Annotated[Path, typer.Argument(help="A package, its plan.json, or what `pdv simulate --json` printed.")]
SAVED = FileKind(1 << 28, UsageError)


def diff(
    first: Plan,
    second: Plan,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", "-c", help="Simulate both plans on this cluster instead of their own.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Say what two plans do differently: settings, how operators are cut, where time goes, memory."""
    from pdv.report.diff import diff_document, diff_text

    with progress_bar(quiet=as_json) as progress:
        told = []
        for path in (first, second):
            progress(f"simulating {path.name}", None)
            told.append(_document(path, cluster))
        difference = diff_document(told[0], told[1])
    if as_json:
        print_json("diff", first=str(first), second=str(second), **difference)
    else:
        print(diff_text(difference, (str(first), str(second))))


def _document(path: Path, cluster: Path | None) -> dict[str, Any]:  # Any: JSON
    """The simulation of a plan, made now or read.

    Raises:
        UsageError: if it is none.
    """
    saved = _save(path)
    if saved is not None:
        if cluster is not None:
            raise UsageError(f"{path} is a simulation already", mend="Give packages, or leave --cluster out")
        return saved
    from pdv.cluster import load_cluster
    from pdv.memory import step_memory
    from pdv.report.saved import saved_workload
    from pdv.report.simulated import simulated_document
    from pdv.simulate.step import simulate

    work = saved_workload(values.package_folder(path), None if cluster is None else load_cluster(cluster))
    return simulated_document(work, simulate(work), step_memory(work))


def _save(path: Path) -> dict[str, Any] | None:
    """What `pdv simulate --json` wrote, if the file is that."""
    from pdv.report.simulated import VERSION

    if not path.is_file():
        return None
    try:
        document = parse_json(read_text(path, SAVED))
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}", "A package, or what pdv simulate --json printed") from error
    if not isinstance(document, dict) or ("derivation" not in document and "simulation_version" not in document):
        raise UsageError(f"{path} is neither a plan nor a simulation", "A package, or what pdv simulate --json printed")
    if "derivation" in document:
        return None
    if document["simulation_version"] != VERSION:
        what = f"{path} is a simulation of version {document['simulation_version']}"
        raise UsageError(what, f"Allowed: {VERSION}", "Run pdv simulate again")
    return document
