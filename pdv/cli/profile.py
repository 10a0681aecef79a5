"""`pdv profile`: measure kernels, fused subgraphs and collectives on the machine at hand, over the shapes of plans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ir.errors import UsageError
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table
from pdv.folders import text_of

if TYPE_CHECKING:
    from ir.graph import Graph
    from learned_cost.profile.command import Options
    from learned_cost.profile.programs.pieces import Piece

Ops = Annotated[
    list[str] | None,
    typer.Option(
        help="What to measure (default: all): linear, attention, subgraph, triton, collectives …; commas too."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to add rows to.")]
Model = Annotated[Path | None, typer.Option("--model", "-m", help="Measure the shapes of a plan of this ONNX file.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", "-c", help="The cluster that --model is planned for.")]
Record = Annotated[
    str | None,
    typer.Option("--record", help="Name of the device's record (default: the plan's, the driver's, or measured)."),
]
Devices = Annotated[Path | None, typer.Option("--devices", help="A folder of further device records.")]


def profile(
    device: Annotated[str, typer.Option(help="cpu or cuda.", show_default=False)],
    ops: Ops = None,
    budget: Annotated[str, typer.Option(help='Time to measure: "5m", "90s".')] = "5m",
    output: Output = Path("profiles"),
    model: Model = None,
    cluster: ClusterFile = None,
    for_plan: Annotated[
        Path | None,
        typer.Option("--for-plan", help="Measure the kernels that decide this package's plan, those first."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch size of --model, where it is open.", min=1)] = None,
    threads: Annotated[int, typer.Option(help="Threads of a process on a CPU.", min=1)] = 1,
    record: Record = None,
    devices: Devices = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Measure kernels on this machine, adding to a folder; started again, it goes on where it stopped.

    Collectives are measured by processes: torchrun --nproc-per-node 4 -m pdv profile --device cpu --ops collectives
    """
    if device not in {"cpu", "cuda"}:
        raise UsageError(f"--device: {device!r} is not known", "Allowed: cpu, cuda")
    if (model is None) != (cluster is None):
        raise UsageError("--model and --cluster go together", mend="Give both, or neither: then example models' shapes")
    if for_plan is not None and (model is not None or ops):
        raise UsageError("--for-plan says what to measure", mend="Leave --model and --ops out")
    values.check_no_file(output)
    names = tuple(name.strip() for entry in ops or () for name in entry.split(",") if name.strip())
    budget_s = values.seconds(budget, "--budget")
    try:
        from learned_cost.profile.command import Options
    except ImportError as error:
        raise UsageError(f"profiling needs {error.name}", mend="pip install 'pipedejavu[learned]'") from None
    kind = cast(Literal["cpu", "cuda"], device)
    if for_plan is not None and record is None and kind == "cpu":
        from pdv.measure.deciding import processors_of

        record = processors_of(for_plan, devices)
    options = Options(kind, output, budget_s, names, threads, record, devices)
    if "collectives" in names:
        _collectives(options, as_json=as_json)
    else:
        listed = [] if for_plan is None else _deciding(for_plan)
        _kernels(options, _plan(model, cluster, batch), listed, as_json=as_json)


def _kernels(
    options: Options,
    planned: tuple[list[Piece], list[tuple[str, Graph]]] | None,
    listed: list[Piece],
    *,
    as_json: bool,
) -> None:
    from learned_cost.profile.command import measure

    with progress_bar(quiet=as_json) as progress:
        outcome = measure(options, planned, lambda what, share: progress(f"measuring {what}", share), listed)
    rows = sum(outcome.measured.values())
    if as_json:
        print_json(
            "profile",
            folder=str(options.folder),
            rows=rows,
            before=outcome.before,
            measured=dict(outcome.measured),
            failed=dict(outcome.failed),
        )
        return
    by_count = ", ".join(f"{op} {count}" for op, count in outcome.measured.most_common())
    table = {"rows": f"{rows} new, {outcome.before} before, in {options.folder}", "measured": by_count or "nothing"}
    failed = {f"not run ({count})": reason for reason, count in outcome.failed.items()}
    print_table(table | failed)


def _collectives(options: Options, *, as_json: bool) -> None:
    """One process of a torchrun."""
    if "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "--ops collectives: one process has nobody to talk to",
            mend="Run `torchrun --nproc-per-node 4 -m pdv profile --device cpu --ops collectives`",
        )
    if options.ops != ("collectives",):
        raise UsageError("--ops: collectives are measured alone", mend="Run the rest without torchrun")
    from learned_cost.profile.command import measure_collectives

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rows = measure_collectives(options, per_node=per_node, system=f"{options.device}-{per_node}-a-node")
    if os.environ.get("RANK") != "0":
        return
    if as_json:
        print_json(
            "profile", folder=str(options.folder), rows=rows, before=0, measured={"collectives": rows}, failed={}
        )
    else:
        print_table({"rows": f"{rows} new, in {options.folder}"})


def _deciding(package: Path) -> list[Piece]:
    """Shapes of a package's plan and of its operators' rivals, those that decide first.

    Raises:
        UsageError: if it is no package, or there is nothing to measure.
    """
    from learned_cost.profile.programs.planned import of_plan
    from pdv.measure.deciding import of_package

    found = of_plan(of_package(package), package.name)
    if not found:
        raise UsageError(f"{str(package)!r}: no kernel of the plan runs alone", mend="Profile with --ops instead")
    return found


def _plan(
    model: Path | None, cluster: Path | None, batch: int | None
) -> tuple[list[Piece], list[tuple[str, Graph]]] | None:
    """Shapes and fusible parts of the best plan of a model."""
    if model is None or cluster is None:
        return None
    from learned_cost.profile.programs.planned import of_pcg, segments
    from pdv.compile import optimize

    plan = optimize(model, cluster=cluster, batch=batch)
    name = text_of(f"{model.stem} on {cluster.stem}")
    return of_pcg(plan.pcg, plan.mesh, name), [(name, part) for part in segments(plan.source)]
