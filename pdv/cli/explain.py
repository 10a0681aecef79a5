"""`pdv explain DIR`: what the plan does, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdv.cli.output import DebugOption, JsonOption, print_json


def explain(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Say how each operator is sharded, what that costs, and what was weighed against it."""
    from pdv.compile import explain as explain_plan

    text = explain_plan(directory)
    if as_json:
        print_json("explain", directory=str(directory), text=text)
    else:
        print(text)
