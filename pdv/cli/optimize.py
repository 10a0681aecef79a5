"""`pdv optimize MODEL --cluster FILE`: plan, verify, and write the sharded program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ir.errors import UsageError
from pdv import config
from pdv.cli import values
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table, print_warning, progress_bar
from pdv.cli.summary import summarize


def optimize(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    cluster: Annotated[Path, typer.Option("--cluster", "-c", help="The cluster's YAML file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The package to write (default: <model>_pdv).")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch size, where the model leaves it open.", min=1)] = None,
    mode: Annotated[str, typer.Option(help="train or infer.")] = config.MODE,
    dtype: Annotated[
        str | None, typer.Option(help="Compute in float32, bfloat16 or float16 (default: as the model).")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help='Memory a device may use, e.g. "70 GiB".')] = None,
    mesh: Annotated[str | None, typer.Option(help="Pin the mesh, slow axis first: x=2,y=4.")] = None,
    search: Annotated[str, typer.Option(help="How to search.")] = config.SEARCH,
    budget: Annotated[
        float, typer.Option(help="Seconds of search after which the best plan is taken.", min=0.1)
    ] = config.BUDGET_S,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing package.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Plan a model for a cluster, prove the plan equal to the model, and write it as a PyTorch package."""
    if mode not in {"train", "infer"}:
        raise UsageError(f"--mode: {mode!r} is not known", "Allowed: train, infer")
    target = values.output_directory(output, model, overwrite=overwrite)
    limit, compute_dtype, pinned = values.memory_bytes(memory_limit), values.dtype(dtype), values.axis_sizes(mesh)

    from pdv.cluster import load_cluster

    devices = load_cluster(cluster)
    if not as_json:
        for warning in devices.warnings:
            print_warning(warning)

    given = {"--batch": batch, "--mode": mode, "--dtype": dtype, "--memory-limit": memory_limit, "--mesh": mesh}
    command = values.command_line(model, cluster, given)

    from pdv.compile import optimize as plan_model

    with progress_bar(quiet=as_json) as progress:
        plan = plan_model(
            model, cluster=devices, batch=batch, mode="infer" if mode == "infer" else "train", dtype=compute_dtype,
            memory_limit=limit, search=search, mesh=pinned, budget_s=budget, progress=progress,
        ).made_by(command)  # fmt: skip
        progress("writing", None)
        plan.save(target, overwrite=overwrite)
    if as_json:
        print_json("optimize", output=str(target), plan=plan.document)
    else:
        print_table(summarize(plan.document) | {"written": f"{target}/"})
