"""`pdv explain DIR` and `pdv report DIR`: what a plan does, and why, as text and as a page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.files.writing import write_whole
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json

if TYPE_CHECKING:
    from pdv.guard import Progress

Target = Annotated[Path, typer.Argument(help="A package of `pdv optimize`, or its plan.json.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The page to write (default: DIR/report.html).")]
CostName = Annotated[
    str | None, typer.Option(help="The weight file or profile folder that priced the plan, where that is not shipped.")
]
SearchTime = Annotated[str, typer.Option(help='CPU time after which no further plan is looked for: "30s", "5m".')]


def explain(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    operator: Annotated[
        str | None, typer.Option(help="Tell about operators of this kind, name or number alone, in detail.")
    ] = None,
    rivals: Annotated[
        bool, typer.Option("--rivals", help="Also plan as experts do, and again where one thing is another.")
    ] = False,
    budget: SearchTime = "2m",
    cost: CostName = None,
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
        beside = _rivals(directory, cost, values.seconds(budget, "--budget"), progress) if rivals else {}
    if as_json:
        print_json("explain", directory=str(directory), search=read_document(directory)["search"], **told, **beside)
        return
    print(text)
    if beside:
        from pdv.rivals.text import rivals_text

        step_s = read_document(directory)["predicted"]["step_time_s"]["mean"]
        print("\n" + rivals_text(step_s, beside["experts"], beside["sensitivity"]))


def report(
    target: Target,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out all that takes searches.")] = False,
    budget: SearchTime = "2m",
    cost: CostName = None,
    opened: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Write a plan as one page: step, memory, graph, reasons, rewrites, experts' plans, what would change it."""
    from pdv.page import REPORT
    from pdv.plan.package import read_document
    from pdv.report.html.facts import saved_page

    folder = values.package_folder(target)
    read_document(folder)  # what is no package is refused before anything takes long
    page = output or folder / REPORT
    values.check_file(page)
    with progress_bar(quiet=as_json) as progress:
        asked = {} if quick else _ask(folder, cost, values.seconds(budget, "--budget"), progress)
        progress("drawing", None)
        text = saved_page(folder, cost, asked)
        write_whole(page, text.encode())
    if as_json:
        print_json("report", output=str(page), bytes=len(text.encode()), asked=sorted(asked))
    else:
        print(f"{page}: {len(text.encode()) / 2**20:.1f} MiB")
    if opened:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def _ask(folder: Path, cost: str | None, budget_s: float, progress: Progress) -> dict[str, Any]:  # Any: JSON
    """What takes searches."""
    from pdv.report.saved import explanation

    progress("solving parts of the plan again", None)
    return {"why": explanation(folder, cost=cost), **_rivals(folder, cost, budget_s, progress)}


def _rivals(folder: Path, cost: str | None, budget_s: float, progress: Progress) -> dict[str, Any]:  # Any: JSON
    """Experts' plans, and the plan where one thing is another."""
    from pdv.plan.package import read_document
    from pdv.prices import priced_by
    from pdv.report.loaded import load_plan
    from pdv.rivals.circumstances import circumstances
    from pdv.rivals.experts import experts
    from pdv.rivals.setting import Setting

    setting = Setting.of(load_plan(folder, priced_by(read_document(folder), cost)), budget_s)
    progress("planning as experts do", None)
    rows = experts(setting)
    progress("planning where one thing is another", None)
    return {"experts": rows, "sensitivity": circumstances(setting)}
