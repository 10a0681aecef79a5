"""`pdv export DIR --to ENGINE`: a plan as the nearest configuration of an engine, with what that loses and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ir.errors import UsageError
from ir.files.writing import write_whole
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json

if TYPE_CHECKING:
    from pdv.engines.exported import Exported

NAMES = "torchtitan, megatron, deepspeed, hf-tp-plan, accelerate or json"


def export(
    target: Annotated[Path, typer.Argument(help="A package of `pdv optimize`, or its plan.json.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help=f"The engine: {NAMES}.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write (default: the engine's name for it).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    cost: Annotated[
        str | None, typer.Option(help="The weight file or profile folder that priced the plan, if it does not ship.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Write a plan as an engine's configuration: the nearest it can say, what it cannot, and what that costs."""
    from pdv.engines.exported import exported_text
    from pdv.engines.formats.known import named

    engine = named(to)
    path = output or Path(engine.file)
    _check_output(path, overwrite=overwrite)
    with progress_bar(quiet=as_json) as progress:
        progress("simulating", None)
        found = _export(target, to, cost, str(path))
        write_whole(path, found.text.encode())
    if as_json:
        print_json("export", directory=str(target), output=str(path), **found.document)
    else:
        print(exported_text(found.document, str(path)))


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Before the work starts.

    Raises:
        UsageError: if the file could not go there.
    """
    values.check_file(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{str(path)!r} exists", mend="Choose another with -o, or add --overwrite")


def _export(target: Path, to: str, cost: str | None, file: str) -> Exported:
    from pdv.engines.exported import export as exported
    from pdv.engines.formats.known import named
    from pdv.report.saved import saved_plan

    return exported(saved_plan(values.package_folder(target), cost), named(to), file)
