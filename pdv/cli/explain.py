"""`pdv explain DIR`: what the plan does, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdv.cli.output import DebugOption, JsonOption, print_json, progress_bar


def explain(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    operator: Annotated[
        str | None, typer.Option(help="Tell about operators of this kind, name or number alone, in detail.")
    ] = None,
    cost: Annotated[
        str | None, typer.Option(help="The weight file or profile folder that priced the plan, if not a shipped one.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Say how each operator is sharded and why, what that costs, and what was weighed against it."""
    from pdv.plan.package import read_document
    from pdv.report.saved import explain as explain_plan
    from pdv.report.saved import explanation

    with progress_bar(quiet=as_json) as progress:
        progress("replaying, and weighing alternatives", None)
        if as_json:
            told, text = explanation(directory, operator, cost), ""
        else:
            told, text = {}, explain_plan(directory, operator, cost)
    if as_json:
        print_json("explain", directory=str(directory), search=read_document(directory)["search"], **told)
    else:
        print(text)
