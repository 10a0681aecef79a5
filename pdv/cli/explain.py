"""`pdv explain DIR`: what the plan does, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdv.cli.output import DebugOption, JsonOption, print_json


def explain(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    operator: Annotated[
        str | None, typer.Option(help="Tell about operators of this kind, name or number alone, in detail.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Say how each operator is sharded and why, what that costs, and what was weighed against it."""
    from pdv.compile import explain as explain_plan
    from pdv.compile import explanation
    from pdv.plan import read_document

    if not as_json:
        print(explain_plan(directory, operator))
        return
    search = read_document(directory)["search"]
    print_json("explain", directory=str(directory), search=search, **explanation(directory, operator))
