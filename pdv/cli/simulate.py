"""`pdv simulate`: what one step of a plan, or of a user's own configuration, takes, and where its time goes."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import ModelError, UsageError
from ir.files.writing import write_whole
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json, print_warning
from pdv.folders import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ir.cost_model import CostModel
    from ir.graph import Graph
    from pdv.manual.configuration import Configuration
    from pdv.memory import StepMemory
    from pdv.problem.workload import Workload
    from pdv.simulate.result import Simulation

Target = Annotated[
    Path | None,
    typer.Argument(
        help="A package of `pdv optimize`, its plan.json, or with --manual an ONNX file.", show_default=False
    ),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", "-c", help="The cluster's YAML file; of a plan, another than its own.")
]
Manual = Annotated[str | None, typer.Option(help="A configuration of your own: tp=8,pp=4,zero=1,recompute=full,…")]
ArchText = Annotated[
    str | None, typer.Option("--arch", help="A model's sizes: llama-3-8b, gpt:layers=24,hidden=2048,…")
]
Batch = Annotated[int | None, typer.Option(help="Samples of a step, over all devices.", min=1)]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", help="Take another size that an ONNX file leaves open at this: sequence=128; may be repeated."
    ),
]
DType = Annotated[str, typer.Option(help="Compute in float32, bfloat16 or float16.")]
CostName = Annotated[
    str | None, typer.Option(help="What prices kernels: auto, analytic, learned, measured, a weight file, profiles.")
]
Trace = Annotated[Path | None, typer.Option(help="Write the step as a Chrome trace, which Perfetto opens.")]


def simulate(
    context: typer.Context,
    target: Target = None,
    cluster: ClusterFile = None,
    manual: Manual = None,
    arch: ArchText = None,
    batch: Batch = None,
    dim: Dims = None,
    dtype: DType = "bfloat16",
    cost: CostName = None,
    trace: Trace = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Say what a step takes, where its time goes, what it holds in memory, and whether that fits."""
    _check(target, manual, arch, cluster)
    if manual is None and arch is None:
        _check_of_plan([name for name in ("batch", "dim", "dtype") if values.is_given(context, name)])
    if trace is not None:
        values.check_file(trace, "--trace")
    from pdv.manual.configuration import configuration
    from pdv.memory import step_memory
    from pdv.report.simulated import simulated_document, simulated_text
    from pdv.simulate.step import simulate as simulated

    with progress_bar(quiet=as_json) as progress:
        progress("reading", None)
        if manual is None and arch is None:
            assert target is not None, "checked"
            work, text = _of_plan(target, cluster, cost), None
            if cost is not None:
                from pdv.prices import cost_model

                _tell(cost_model(cost, [entry.device for entry in work.cluster.classes]))
        else:
            assert cluster is not None, "checked"
            graph_of = partial(read_graph, target, arch, values.open_dims(dim))
            work, text = settings_workload(graph_of, cluster, configuration(manual or "", batch), dtype, cost)
        progress("simulating", None)
        simulation, memory = simulated(work), step_memory(work)
        document = simulated_document(work, simulation, memory, text)
        if trace is not None:
            progress("drawing", None)
            _draw(trace, simulation, memory)
    for warning in () if as_json else work.cluster.warnings:
        print_warning(warning)
    if as_json:
        print_json("simulate", **document)
    else:
        print(simulated_text(document))


def _check(target: Path | None, manual: str | None, arch: str | None, cluster: Path | None) -> None:
    """Which arguments go together.

    Raises:
        UsageError: if these do not.
    """
    own = manual is not None or arch is not None
    if own and cluster is None:
        raise UsageError("--manual and --arch need a cluster to run on", mend="Add --cluster FILE")
    if target is None and arch is None:
        raise UsageError("nothing to simulate", "A package, or a model with --manual", "Write pdv simulate DIR")
    if target is not None and arch is not None:
        raise UsageError(f"--arch and {str(target)!r} are both a model", mend="Leave one of them out")
    if not own and target is not None and target.suffix == ".onnx":
        raise UsageError(f"{str(target)!r} is a model, not a plan", mend="Add --manual tp=…,pp=…, or run pdv optimize")


def _check_of_plan(given: Sequence[str]) -> None:
    """Whether options ask nothing that a plan has already settled.

    Raises:
        UsageError: naming them.
    """
    if given:
        options = " and ".join(f"--{name}" for name in given)
        allowed = f"{options} with --manual or --arch: batch, sizes and types of a plan are its own"
        raise UsageError(f"{options}: a plan is simulated as it is", allowed, "Plan again with pdv optimize")


def _draw(trace: Path, simulation: Simulation, memory: StepMemory) -> None:
    """A step as a Chrome trace."""
    from pdv.simulate.trace import trace as drawn

    write_whole(trace, json.dumps(drawn(simulation, memory)).encode())


def _tell(priced: CostModel) -> None:
    """Warn of a file that says nothing of the devices."""
    if priced.note:
        print_warning(priced.note)


def _of_plan(target: Path, cluster: Path | None, cost: str | None) -> Workload:
    """A saved plan, on its own cluster or on another one."""
    from pdv.cluster import load_cluster
    from pdv.report.saved import saved_workload

    return saved_workload(values.package_folder(target), None if cluster is None else load_cluster(cluster), cost)


def settings_workload(
    read: Callable[[str, int], Callable[[int], Graph]],
    cluster: Path,
    asked: Configuration,
    dtype: str,
    cost: str | None,
) -> tuple[Workload, str]:
    """A configuration on a cluster, and its text with what was left out."""
    from pdv.cluster import load_cluster
    from pdv.manual.configuration import complete, workload
    from pdv.prices import cost_model, stage_axes

    devices = load_cluster(cluster)
    if dtype in values.FORMATS:  # of the products in layers; all else is in bfloat16
        asked, dtype = asked.model_copy(update={"products": dtype}), "bfloat16"
    given = complete(asked, devices.num_devices)
    wanted = str(values.dtype(dtype))
    graph_of = read(wanted, given.tp)
    for entry in devices.classes:
        if wanted not in entry.device.peak_flops:
            slow = f"{entry.device.name} has no {wanted} rate: it is priced at its float32 rate"
            print_warning(f"{slow}. Known: {', '.join(entry.device.peak_flops)}; choose by --dtype")
    compute_of = cache(lambda device: cost_model(cost, [device]))
    priced = cost_model(cost, [entry.device for entry in devices.classes])
    if cost is not None:
        _tell(priced)
    work = workload(graph_of, given, devices, compute_of, partial(stage_axes, priced))
    return work, given.text()


def read_graph(
    target: Path | None, arch: str | None, dims: Mapping[str, int | list[float]], dtype: str, tp: int
) -> Callable[[int], Graph]:
    """A model at any number of samples, by its sizes or from an ONNX file.

    Raises:
        UsageError: if ``--dim`` is given of a model that is no file.
    """
    from ir.types import DType as Type

    if arch is not None and dims:
        raise UsageError("--dim is about an ONNX file", "With --arch, the sizes in its text", "Write seq=N there")
    if arch is not None:
        from pdv.frontend.arch.description import arch as read
        from pdv.frontend.arch.graph import graph

        described = read(arch)
        return lambda samples: graph(described, samples, Type.from_name(dtype), tp=tp)

    def load(samples: int) -> Any:
        from dataclasses import replace

        from pdv.frontend import load_program
        from pdv.passes.precision import with_dtype

        assert target is not None, "checked"
        try:
            program = load_program(target, batch=samples, dims=dims)
        except ModelError:  # a batch that the model fixes will do, if it is this one
            program = load_program(target, dims=dims)
            if program.graph.inputs[0].type.shape[:1] != (samples,):
                raise
        return with_dtype(replace(program.graph, name=text_of(target.stem)), Type.from_name(dtype))

    return load


__all__ = ["read_graph", "settings_workload", "simulate"]
