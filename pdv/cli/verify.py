"""`pdv verify DIR`: a package held against its plan, and the plan proved again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json


def verify(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    cost: Annotated[
        str | None, typer.Option(help="The weight file or profile folder that priced the plan, if not a shipped one.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the program's text on simulated ranks, and compare it with the source.")
    ] = False,
    allow_edits: Annotated[
        bool, typer.Option("--allow-edits", help="Edited Python files are run likewise; weights may have other values.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Prove the plan again, and hold the program, the weights and every field of plan.json to it."""
    from pdv.verification import verify as verify_package

    with progress_bar(quiet=as_json) as progress:
        progress("replaying, proving and comparing", None)
        told = verify_package(directory, cost, run=run, allow_edits=allow_edits)
    if as_json:
        print_json("verify", directory=str(directory), verified=True, **told)
    else:
        print(f"{directory}: verified, {told['proof']['statement']}")
        same = [name for name in ("plan.json", *told["files"]) if name not in told["edited"]]
        print(f"as the plan gives them: {', '.join(same)}{' (names, types, shapes)' if allow_edits else ''}")
        if told["edited"]:
            print(f"edited: {', '.join(told['edited'])}")
        if told["run"]:
            print(told["run"])
        print(f"not checked: {'; '.join(told['claims'])}")
