"""`pdv import FILE`: what a step takes under an engine's own configuration, on a cluster of yours or of a plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ir.errors import UsageError
from ir.files.reading import FileKind, read_text
from pdv.cli import values
from pdv.cli.engines.exporting import NAMES
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json
from pdv.cli.simulate import ArchText, Batch, ClusterFile, CostName, Dims, read_graph, settings_workload

FILE = FileKind(1 << 20, UsageError, "Check the path", "The engine's own configuration")
Read = Annotated[Path, typer.Argument(help="An engine's configuration file.", show_default=False)]
Model = Annotated[
    Path | None,
    typer.Argument(
        help="A package of `pdv optimize`, whose model and cluster it is for, or an ONNX file.", show_default=False
    ),
]
Manual = Annotated[
    str, typer.Option(help="Settings that the file leaves open, or in place of its own: micro_batch=2,pp=4,…")
]
Source = Annotated[str | None, typer.Option("--from", help=f"The engine, if the file does not tell: {NAMES}.")]


def import_(
    file: Read,
    model: Model = None,
    cluster: ClusterFile = None,
    arch: ArchText = None,
    batch: Batch = None,
    dim: Dims = None,
    dtype: Annotated[str | None, typer.Option(help="Compute in this type, where the file leaves it open.")] = None,
    manual: Manual = "",
    engine: Source = None,
    cost: CostName = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Price an engine's configuration: what a step takes under it, where its time goes, and whether it fits."""
    from pdv.engines.imported import Asked, imported_text

    text = read_text(file, FILE)
    wanted = None if dtype is None else str(values.dtype(dtype))
    read = partial(_read, file, text, engine, Asked(manual, batch, wanted))
    with progress_bar(quiet=as_json) as progress:
        progress("simulating", None)
        if model is not None and model.suffix != ".onnx":
            if arch is not None or dim:
                raise UsageError(f"{str(model)!r} is a plan of its own model", mend="Leave --arch and --dim out")
            document = _on_plan(read, model, cluster, cost)
        else:
            document = _on_model(read, model, arch, cluster, dim, cost)
    if as_json:
        print_json("import", file=str(file), **document)
    else:
        print(imported_text(document))


def _read(file: Path, text: str, engine: str | None, asked: Any, devices: int, layers: int) -> Any:
    from pdv.engines.engine import Reading
    from pdv.engines.imported import read_configuration

    return read_configuration(file, text, engine, Reading(devices, layers), asked)


def _on_plan(read: Any, model: Path, cluster: Path | None, cost: str | None) -> dict[str, Any]:  # Any: JSON
    """The file on a plan's model."""
    from pdv.cluster import load_cluster
    from pdv.engines.imported import about, on_plan
    from pdv.engines.nearest import count_layers
    from pdv.engines.scene import Scene
    from pdv.report.saved import saved_plan

    plan = saved_plan(values.package_folder(model), cost)
    scene = Scene.of_plan(plan, None if cluster is None else load_cluster(cluster))
    imported = read(scene.work.cluster.num_devices, count_layers(plan))
    return about(imported) | on_plan(imported, scene)


def _on_model(
    read: Any, model: Path | None, arch: str | None, cluster: Path | None, dim: list[str] | None, cost: str | None
) -> dict[str, Any]:  # Any: JSON
    """The file on a model of the user's own."""
    from pdv.cluster import load_cluster
    from pdv.engines.imported import about
    from pdv.frontend.arch.description import arch as describe
    from pdv.memory import step_memory
    from pdv.report.simulated import simulated_document
    from pdv.simulate.step import simulate

    if cluster is None:
        raise UsageError("a configuration needs a cluster to run on", mend="Add --cluster FILE, or give a plan")
    if model is not None and arch is not None:
        raise UsageError(f"--arch and {str(model)!r} are both a model", mend="Leave one of them out")
    layers = 0 if arch is None else describe(arch).layers
    imported = read(load_cluster(cluster).num_devices, layers)
    arch = arch or (imported.found.model if model is None else None)
    if model is None and arch is None:
        raise UsageError("of which model is not said", "A plan, an ONNX file, or --arch", "Add --arch llama-3-8b")
    graph_of = partial(read_graph, model, arch, values.open_dims(dim))
    work, text = settings_workload(graph_of, cluster, imported.given, imported.dtype or "bfloat16", cost)
    return about(imported) | simulated_document(work, simulate(work), step_memory(work), text)
