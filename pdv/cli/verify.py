"""`pdv verify DIR`: replay a plan and compare it with its source, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdv.cli.output import DebugOption, JsonOption, print_json, progress_bar


def verify(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Replay the plan and prove again that it computes what its source model computes."""
    from pdv.verification import verify as verify_plan

    with progress_bar(quiet=as_json) as progress:
        progress("replaying and proving", None)
        proof = verify_plan(directory)
    if as_json:
        print_json("verify", directory=str(directory), verified=True, proof=proof)
    else:
        print(f"{directory}: verified, {proof['statement']}")
