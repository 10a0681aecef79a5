"""`pdv optimize MODEL --cluster FILE`: plan, verify, and write the sharded program."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ir.errors import UsageError
from pdv import config
from pdv.cli import values
from pdv.cli.long.interrupt import KEPT, keeping_best
from pdv.cli.long.progress import LogOption, QuietOption, progress_bar
from pdv.cli.output import DebugOption, JsonOption, end, once, print_json, print_table, print_warning

if TYPE_CHECKING:
    from pdv.cluster import Cluster
    from pdv.frontend import Program
    from pdv.pins import PinSet
    from pdv.plan.cache import Cache
    from pdv.plan.package import Plan

Model = Annotated[Path | None, typer.Argument(help="An ONNX file.", show_default=False)]
ArchText = Annotated[
    str | None, typer.Option("--arch", help="In place of a file, a model's sizes: llama-3-8b, gpt:layers=24,…")
]
ClusterFile = Annotated[Path, typer.Option("--cluster", "-c", help="The cluster's YAML file.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The package to write (default: <model>_pdv).")]
Batch = Annotated[int | None, typer.Option(help="Global batch size, where the model leaves it open.", min=1)]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", help="Plan another size that the model leaves open at this: sequence=128; may be repeated."),
]
DType = Annotated[str | None, typer.Option(help="Compute in float32, bfloat16 or float16 (default: as the model).")]
PrecisionName = Annotated[
    str,
    typer.Option(
        "--precision", help="Of training: as-emitted (all in --dtype), or mixed (bfloat16 over float32 parameters)."
    ),
]
ProductFormat = Annotated[
    str, typer.Option("--products", help="Of a layer's products in training: own (as --dtype), fp8 or fp8-rowwise.")
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", help="What the search may take where it is faster, or fits alone: fp8 (changes numbers), offload."
    ),
]
Offload = Annotated[
    str,
    typer.Option("--offload", help="What is in the host's memory: none, optimizer, activations (of layers), all."),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Plan a program that torch.compile compiles, part by part, when it is built.")
]
MemoryLimit = Annotated[str | None, typer.Option(help='Memory a device may use, e.g. "70 GiB".')]
MeshSizes = Annotated[str | None, typer.Option(help="Pin the mesh, slow axis first: x=2,y=4.")]
PinsFile = Annotated[Path | None, typer.Option(help="What to fix or forbid: a YAML file (docs/pins.md).")]
Search = Annotated[str, typer.Option(help="How to search.", autocompletion=values.strategy_names)]
BudgetTime = Annotated[
    str, typer.Option(help='CPU time of search after which the best plan is taken: "5s", "500ms", "2m".')
]
Pipelines = Annotated[str, typer.Option(help="Search stages and micro-batches: always, where-needed or never.")]
StageCount = Annotated[
    int | None,
    typer.Option("--stages", help="Pin the stages of the pipeline; --mesh is then that of one stage.", min=1),
]
MicroBatches = Annotated[int | None, typer.Option(help="Pin how many micro-batches a step has.", min=1)]
Schedule = Annotated[
    str | None, typer.Option(help="Pin the order of passes in a pipeline: gpipe, 1f1b, 2bw, interleaved, zbv, ….")
]
VirtualStages = Annotated[
    int | None, typer.Option(help="Pin how many stages each rank of a pipeline has, in turn (interleaved).", min=1)
]
SliceCount = Annotated[
    int | None,
    typer.Option("--slices", help="Slices in time, in which micro-batches pass a pipeline (TeraPipe).", min=2),
]
Again = Annotated[
    str | None, typer.Option("--recompute", help="Pin what runs again in backward: full (layers), light, or none.")
]
Seed = Annotated[int, typer.Option(help="Of searches that sample; the same seed gives the same plan.", min=0)]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", help="Where searches are kept (default: the platform's cache folder).")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Search anew, and keep nothing.")]

Checkpoint = Annotated[
    Path | None,
    typer.Option("--weights", help="Take weights from a .safetensors file, or the .index.json of several."),
]
Frozen = Annotated[
    list[str] | None,
    typer.Option("--freeze", help='Do not train these: a name or pattern ("*.positions.weight"); may be repeated.'),
]
Linked = Annotated[
    bool, typer.Option("--link-weights", help="Read the tensors of --weights where they lie, instead of copying them.")
]
CostName = Annotated[
    str, typer.Option(help="What prices kernels: auto, analytic, learned, measured, a weight file, profiles.")
]
RuleFiles = Annotated[
    list[str] | None,
    typer.Option("--rules", help="Algebraic rules: shipped (default), none, or a file of laws; may be repeated."),
]


def optimize(
    cluster: ClusterFile,
    model: Model = None,
    arch: ArchText = None,
    output: Output = None,
    batch: Batch = None,
    dim: Dims = None,
    mode: Annotated[str, typer.Option(help="train or infer.")] = config.MODE,
    dtype: DType = None,
    precision: PrecisionName = config.PRECISION,
    products: ProductFormat = config.PRODUCTS,
    offload: Offload = config.OFFLOAD,
    allow: Allowed = None,
    compile: Compiled = False,  # noqa: A002  # as it is written
    memory_limit: MemoryLimit = None,
    mesh: MeshSizes = None,
    pins: PinsFile = None,
    search: Search = config.SEARCH,
    budget: BudgetTime = values.seconds_text(config.BUDGET_S),
    pipelines: Pipelines = config.PIPELINES,
    stages: StageCount = None,
    micro_batches: MicroBatches = None,
    schedule: Schedule = None,
    virtual_stages: VirtualStages = None,
    slices: SliceCount = None,
    recompute: Again = None,
    seed: Seed = 0,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    rules: RuleFiles = None,
    cost: CostName = config.COST,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run what was read against the model.")] = True,
    weights: Checkpoint = None,
    link_weights: Linked = False,
    freeze: Frozen = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse operators that have no declaration.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing package.")] = False,
    quiet: QuietOption = False,
    log_file: LogOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Plan a model for a cluster, prove the plan equal to the model, and write it as a PyTorch package."""
    values.choice("--mode", mode, get_args(config.Mode))
    target = _target(output, model, arch, overwrite=overwrite)
    limit, compute_dtype, pinned = values.memory_bytes(memory_limit), values.dtype(dtype), values.axis_sizes(mesh)
    budget_s, sizes = values.seconds(budget, "--budget"), values.open_dims(dim)
    devices, fixed = _load(cluster, pins, quiet=as_json)
    names = pins and pins.name, [Path(name).name for name in rules or ()], values.cost_name(cost)
    how = pipelines, stages, micro_batches, schedule, virtual_stages, recompute, slices
    about = arch, batch, dim, freeze, mode, dtype, precision, products, offload, allow, compile
    options = *about, memory_limit, mesh, names[0], search, budget, *how, seed, *names[1:]
    given = dict(zip(values.RECORDED, options, strict=True))

    from pdv.compile import optimize as plan_model
    from pdv.report.opaque import OpaqueWarning
    from pdv.watch import Watch

    running = _running(*how)
    values.check_limit(limit, devices.memory_bytes)
    shown = progress_bar(quiet=as_json or quiet, log=log_file)
    with shown as progress, keeping_best(progress) as interrupts, warnings.catch_warnings():
        warnings.simplefilter("ignore", OpaqueWarning)  # said below
        source = model if arch is None else _describe(arch, batch, compute_dtype)
        plan = plan_model(
            source, cluster=devices, batch=batch, dims=sizes, mode="infer" if mode == "infer" else "train",
            dtype=compute_dtype, precision=precision, products=products, offload=offload, allow=allow or (),
            compiled=compile, memory_limit=limit, search=search, mesh=pinned, pins=fixed, budget_s=budget_s,
            **running, seed=seed, cache=_keep(cache, no_cache=no_cache), rules=rules or None, cost=cost,
            check=check, strict=strict, freeze=freeze or (), weights=weights, progress=progress,
            watch=Watch(progress.tell, interrupts.stopped),
        ).made_by(values.command_line(model, cluster, given))  # fmt: skip
        progress("writing", None)
        if target is not None:
            if arch is None:
                plan.save(target, overwrite=overwrite, link_weights=link_weights)
            else:
                plan.save_plan(target, overwrite=overwrite)
        interrupts.ignore()
        _print(plan, target, as_json=as_json, interrupted=interrupts.stopped())


def _running(
    pipelines: str,
    stages: int | None,
    micro_batches: int | None,
    schedule: str | None,
    virtual_stages: int | None,
    recompute: str | None,
    slices: int | None,
) -> dict[str, Any]:  # Any: as pdv.optimize takes them
    """What is said of how a step runs."""
    from pdv.problem.workload import RECOMPUTATIONS, RUN_ORDERS

    return {
        "pipelines": values.choice("--pipelines", pipelines, get_args(config.Pipelines)),
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule and values.choice("--schedule", schedule, RUN_ORDERS),
        "virtual_stages": virtual_stages,
        "slices": slices,
        "recompute": recompute and values.choice("--recompute", recompute, RECOMPUTATIONS),
    }


def _load(cluster: Path, pins: Path | None, *, quiet: bool) -> tuple[Cluster, PinSet | None]:
    """The files beside the model."""
    from pdv.cluster import load_cluster
    from pdv.pins import load_pins

    devices, fixed = load_cluster(cluster), None if pins is None else load_pins(pins)
    for warning in () if quiet else devices.warnings:
        print_warning(warning)
    return devices, fixed


def _target(output: Path | None, model: Path | None, arch: str | None, *, overwrite: bool) -> Path | None:
    """Where the plan goes; nowhere for a model without a file, unless a place is given.

    Raises:
        UsageError: if there is no model, or two.
    """
    if (model is None) == (arch is None):
        what = "no model to plan" if model is None else f"--arch and {str(model)!r} are both a model"
        raise UsageError(what, "An ONNX file, or --arch with --batch", "Write pdv optimize MODEL.onnx --cluster FILE")
    if model is None and output is None:
        return None
    return values.output_directory(output, model or Path("model"), overwrite=overwrite)


def _describe(arch: str, batch: int | None, dtype: str | None) -> Program:
    """A model without a file, in bfloat16 unless another type is asked for.

    Raises:
        ModelError: if the description cannot be read.
        UsageError: if there is no batch.
    """
    from ir.types import DType as Type
    from pdv.frontend.arch.description import arch as read
    from pdv.frontend.arch.graph import program

    if batch is None:
        raise UsageError("--arch needs a batch", mend="Add --batch N, samples of a step over all devices")
    return program(read(arch), batch, Type.from_name(dtype or "bfloat16"))


def _keep(directory: Path | None, *, no_cache: bool) -> Cache | None:
    """Where searches are kept, if anywhere."""
    from pdv.folders import cache_folder
    from pdv.plan.cache import open_cache

    if no_cache and directory is not None:
        raise UsageError("--cache and --no-cache say opposite things", mend="Leave one of them out")
    if no_cache:
        return None
    folder = directory or cache_folder(os.environ)
    if folder is None:
        print_warning("there is no home folder: searches are not kept. --cache names a folder")
        return None
    return open_cache(folder, once(print_warning))


def _print(plan: Plan, target: Path | None, *, as_json: bool, interrupted: bool) -> None:
    from pdv.report.opaque import opaque_warning

    found = {"output": None if target is None else str(target), "plan": plan.document}
    told = "interrupted: this is the best plan of what had been searched by then"
    if not as_json:
        if warning := opaque_warning(plan.document):
            print_warning(warning)
        if interrupted:
            print_warning(told)
        print_table(dict(plan.told) | {"written": "nothing" if target is None else f"{target}/"})
    elif not interrupted:
        print_json("optimize", **found)
    if interrupted:
        end("optimize", "interrupted", told, KEPT, as_json=as_json, interrupted=True, **found)
