"""A user's own configuration, `tp=8,pp=4,dp=2,zero=1,recompute=full,schedule=1f1b,micro_batch=1`, and what it runs.

Decides what the words mean and which of them go together. Degrees are Megatron-LM's: tp x pp x dp x cp devices, experts
spread over ``ep`` of the ``dp`` ranks; ranks count tp fastest, then cp, ep, dp, and pp slowest.
Entry points: `configuration` and `workload`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ir.cost_model import CostModel, forward_work
from ir.dims import divisors
from ir.errors import UsageError, did_you_mean
from ir.graph import Graph, Node
from ir.mesh import Axis, Mesh
from pdv.cluster import Cluster, Device
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.manual.admits import Degrees, check_format, check_model, list_divisors
from pdv.manual.axis_moves import StraightMoves, as_made
from pdv.manual.interleave import heads_outermost
from pdv.manual.placement import Use, place
from pdv.pcg.derive import derive
from pdv.pcg.spread import spread_to_pcg
from pdv.problem import Derived, Problem
from pdv.problem.formats import FORMATS
from pdv.problem.precision import PRECISIONS
from pdv.problem.workload import STALE, Execution, Loss, Order, Overlap, Recompute, Stages, Workload
from pdv.schedule.order import why_not
from pdv.schedule.stages import cut

ALIASES = {"mbs": "micro_batch", "gbs": "batch", "global_batch": "batch", "sequence_parallel": "sp"}
REMEMBERED = 4  # graphs and their PCGs: some ten megabytes each, for a hundred layers
AxesOf = Callable[[Cluster, Mesh, int], tuple[tuple[AxisLink, ...], ...]]
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Configuration(BaseModel):
    """How a model is spread over devices and how a step runs, in the field's words.

    What is not told here is of `Execution` and `Overlap`, by the same names.

    Attributes:
        tp, pp, cp, ep: degrees of tensor, pipeline, context and expert parallelism.
        dp: data-parallel ranks, those of ``ep`` among them; None is all devices that are left.
        zero: 1 cuts the optimizer's state over data-parallel ranks, 2 gradients too, 3 weights too (FSDP).
        shard: of the ``dp`` ranks, those over which ``zero=3`` cuts weights, the nearest; the others hold copies.
        recompute: what of a layer runs again in backward.
        schedule: of micro-batches.
        vp: chunks of the model on each stage, where interleaved.
        micro_batch: samples of one data-parallel rank at once.
        batch: samples of all ranks in a step.
        sp: norms and residuals are cut along the sequence over ``tp`` (Megatron's sequence parallelism).
        partition: layers of each chunk, in the order of the model; "balanced" by arithmetic.
        precision: what training keeps of each weight (`pdv.problem.precision`).
        slices: ranks of ``tp`` send the next stage a slice each of what all of them hold, gathered there.
        pieces: whether activations of ``tp``, and of ``cp``, move in pieces beside the products that read or make them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    ep: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    shard: int | None = None
    recompute: Recompute = "none"
    schedule: Order = "1f1b"
    vp: int = 1
    micro_batch: int = 1
    batch: int | None = None
    sp: bool = False
    partition: tuple[int, ...] | Literal["balanced"] | None = None
    precision: Literal["as-emitted", "mixed", "mixed-half-gradients", "mixed-two-gradients"] = "mixed"
    fused: bool = False
    flash: bool = True
    dropout: bool = False
    gradients: bool = True
    bucket_bytes: float = Overlap().bucket_bytes
    gathers: int = 1
    activations: bool = False
    transfers: bool = True
    products: Literal["own", "fp8", "fp8-rowwise", "mxfp8", "nvfp4"] = "own"
    cast_weights: bool = False
    loss: Loss = "in-place"
    weights: bool = False
    pieces: bool = False
    light: bool = False
    slices: bool = False
    synchronous: bool = False

    def text(self) -> str:
        """What differs from the defaults: ``configuration(c.text()) == c``."""
        given = self.model_dump(exclude_defaults=True)
        return ",".join(f"{key}={_write(value)}" for key, value in given.items())

    @property
    def data(self) -> int:
        """Data-parallel ranks, once they are known."""
        assert self.dp is not None, "on no cluster yet"
        return self.dp

    @property
    def micro_batches(self) -> int:
        """In a step of each rank."""
        assert self.batch is not None, "of no batch yet"
        return self.batch // (self.data * self.micro_batch)

    def mesh(self) -> Mesh:
        """Of one stage: axes above one, slow to fast."""
        copies = self.data // (self.shard or self.ep)
        sizes = (("dp", copies), ("fsdp", self.shard or 1), ("ep", self.ep), ("cp", self.cp), ("tp", self.tp))
        return Mesh(tuple(Axis(name, size) for name, size in sizes if size > 1))

    def uses(self) -> tuple[Use, ...]:
        """What each axis of the mesh is for."""
        words: dict[str, Use] = {
            "dp": "data" if self.shard is None else "copies",
            "fsdp": "data",
            "ep": "expert",
            "cp": "context",
            "tp": "sequence" if self.sp else "tensor",
        }
        return tuple(words[axis.name] for axis in self.mesh().axes)

    def execution(self) -> Execution:
        """How a step runs, beside what the PCG says."""
        pieces = ("tp", "cp") if self.pieces else ()
        overlap = Overlap(
            self.gradients,
            self.bucket_bytes,
            self.gathers,
            self.activations,
            self.transfers,
            self.weights,
            pieces,
            self.light,
        )
        if self.synchronous:
            overlap = Overlap(bucket_bytes=self.bucket_bytes, transfers=False, light=self.light)
        axes = tuple(axis.name for axis in self.mesh().axes if axis.name != "tp")
        return Execution(
            self.micro_batches,
            self.schedule,
            self.recompute,
            0 if self.zero == 3 else self.zero,
            axes,
            PRECISIONS[self.precision],
            overlap,
            self.fused,
            self.flash,
            self.dropout,
            FORMATS.get(self.products),
            self.cast_weights,
            self.loss,
            eager=self.precision == "as-emitted",
            slices="tp" if self.slices else "",
            synchronous=self.synchronous,
        )


def configuration(text: str, batch: int | None = None) -> Configuration:
    """A configuration as people write it; ``batch``: the step's samples, where the text does not say.

    Raises:
        UsageError: if it cannot be read.
    """
    given: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = ALIASES.get(key.lower().replace("-", "_"), key.lower().replace("-", "_"))
        fields = Configuration.model_fields
        if key in fields and not equals:
            raise UsageError(f"--manual: {part!r} has no value", mend="Write for instance tp=8,pp=4,dp=2,zero=1")
        if not equals or key not in fields:
            mend = did_you_mean(key, (*fields, *ALIASES)) or "Write for instance tp=8,pp=4,dp=2,zero=1"
            raise UsageError(f"--manual: {part!r} is no setting", f"Settings: {', '.join(fields)}", mend)
        if key == "precision" and value.lower() in FORMATS:  # what people call a precision is the format of products
            key = "products"
        if key in given:
            raise UsageError(f"--manual: {key} is given twice", mend="Leave one of them out")
        given[key] = _read(key, value)
    if batch is not None and given.setdefault("batch", batch) != batch:
        raise UsageError(f"--manual says batch={given['batch']}, --batch {batch}", mend="Leave one of them out")
    if given.get("vp", 1) != 1 and "schedule" not in given:
        given["schedule"] = "interleaved"
    try:
        return Configuration.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0])
        raise UsageError(f"--manual: {place}={given.get(place)}: {first['msg']}") from None


def _read(key: str, value: str) -> object:
    """A setting's text as its field takes it.

    Raises:
        UsageError: if it is none.
    """
    default = Configuration.model_fields[key].default
    if isinstance(default, bool):
        if value.lower() not in TRUE + FALSE:
            raise UsageError(f"--manual: {key}={value!r}", "Allowed: 1 or 0, true or false")
        return value.lower() in TRUE
    if key == "partition" and value != "balanced":
        if not re.fullmatch(r"\d{1,4}(-\d{1,4})*", value, re.ASCII):
            raise UsageError(f"--manual: partition={value!r}", "Allowed: layers of each chunk, 4-4-5-3, or balanced")
        return tuple(int(part) for part in value.split("-"))
    if isinstance(default, str) or key == "partition":
        return value.lower()
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not (0 if key in ("zero", "gathers") else 1) <= int(value):
        raise UsageError(f"--manual: {key}={value!r} is no number", "Allowed: whole numbers from 1")
    return int(value)


def _write(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def complete(given: Configuration, devices: int) -> Configuration:
    """With ``dp`` and ``batch`` filled in, and everything checked that needs no model.

    Raises:
        UsageError: naming the first thing that does not go together, and what would be allowed.
    """
    others = given.tp * given.pp * given.cp
    if given.dp is None and devices % others:
        near = divisors(devices)
        raise UsageError(
            f"tp={given.tp}, pp={given.pp}, cp={given.cp} take {others} devices, which do not divide {devices}",
            f"Their product must be one of {', '.join(map(str, near[:24]))}",
        )
    dp = given.dp or devices // others
    if dp * others != devices:
        allowed = f"dp={devices // others} would take all" if devices % others == 0 else f"A product of {devices}"
        raise UsageError(
            f"tp={given.tp} x pp={given.pp} x dp={dp} x cp={given.cp} is {dp * others} devices of {devices}",
            allowed,
            "Change a degree, or leave dp out",
        )
    if dp % given.ep:
        raise UsageError(
            f"ep={given.ep} does not divide dp={dp}", f"Experts spread over data-parallel ranks: {list_divisors(dp)}"
        )
    if given.shard is not None and (given.zero != 3 or given.ep > 1 or dp % given.shard):
        raise UsageError(
            f"shard={given.shard} with zero={given.zero}, ep={given.ep}, dp={dp}",
            f"Hybrid sharding is of zero=3 without ep, over {list_divisors(dp)} ranks",
        )
    batch = given.batch or dp * given.micro_batch
    if batch % (dp * given.micro_batch):
        below = batch // (dp * given.micro_batch) * dp * given.micro_batch
        allowed = f"Multiples of {dp * given.micro_batch}, for instance {below or dp * given.micro_batch}"
        raise UsageError(f"a batch of {batch} does not divide by dp={dp} x micro_batch={given.micro_batch}", allowed)
    done = given.model_copy(update={"dp": dp, "batch": batch})
    _check_schedule(done)
    return done


def _check_schedule(given: Configuration) -> None:
    """What pipelines demand.

    Raises:
        UsageError: as ``complete``.
    """
    if given.schedule == "interleaved" and (given.vp == 1 or given.pp == 1):
        raise UsageError(
            f"schedule=interleaved with vp={given.vp}, pp={given.pp}: nothing to interleave", "vp and pp above 1"
        )
    if given.schedule in STALE and given.micro_batches < given.pp:
        what = why_not(given.schedule, given.pp, given.vp, given.micro_batches, recomputes=False)
        raise UsageError(what, "", "Choose a larger batch, a smaller micro_batch, or schedule=1f1b")
    if given.schedule != "interleaved" and given.vp > 1:
        raise UsageError(f"schedule={given.schedule} with vp={given.vp}", "vp above 1 is for schedule=interleaved")
    if given.schedule == "interleaved" and given.micro_batches % given.pp:
        raise UsageError(
            f"{given.micro_batches} micro-batches do not divide by pp={given.pp}, as the interleaved schedule needs",
            "",
            f"Choose a batch that is a multiple of {given.data * given.micro_batch * given.pp}, or schedule=1f1b",
        )


def workload(
    graph_of: Callable[[int], Graph],
    given: Configuration,
    cluster: Cluster,
    compute_of: Callable[[Device], CostModel],
    axes_of: AxesOf,
) -> Workload:
    """What a configuration runs on a cluster.

    Args:
        graph_of: the model at a number of samples.
        given: with or without ``dp``.
        cluster: all of it is used.
        compute_of: the cost model of a device.
        axes_of: by stage, the links of a mesh's axes on a cluster, of so many stages, with what is known of their
            collectives (`pdv.prices.stage_axes`), or as they are described (`pdv.cost.stage_links`).

    Raises:
        UsageError: if the configuration is none for this model and cluster.
    """
    full = complete(given, cluster.num_devices)
    check_format(full.products, [entry.device for entry in cluster.classes])
    graph = graph_of(full.micro_batch * full.data)
    check_model(graph, Degrees(full.tp, full.cp, full.ep, full.sp))
    mesh = full.mesh()
    links = axes_of(cluster, mesh, full.pp)
    graph, derived = _derive(graph, mesh, full.uses(), full.zero == 3)
    slowest = min((entry.device for entry in cluster.classes), key=lambda device: device.peak("bfloat16"))
    problem = Problem(graph, mesh, links[0], compute_of(slowest))
    stages = _stages(graph, derived, full)
    return Workload(problem, derived.pcg, cluster, stages, full.execution(), links, compute_of)


@lru_cache(maxsize=REMEMBERED)
def _derive(graph: Graph, mesh: Mesh, uses: tuple[Use, ...], resting: bool) -> tuple[Graph, Derived]:
    """The graph as it is cut, and its PCG: equal for all schedules, recomputations and clusters."""
    if any(axis.name == "tp" for axis in mesh.axes):
        graph = heads_outermost(graph)
    problem = Problem(graph, mesh, (), ComputeModel(()))  # nothing is priced here
    assignment = place(graph, mesh, uses, resting=resting)
    return graph, derive(problem, assignment, StraightMoves(mesh, ()), as_made)


def _stages(graph: Graph, derived: Derived, given: Configuration) -> Stages:
    partition = given.partition if isinstance(given.partition, tuple) else None
    weight = _arithmetic if given.partition == "balanced" else None
    chunk_of, sizes, found = cut(graph, given.pp * given.vp, partition, weight)
    chunks = spread_to_pcg(derived, chunk_of)
    layers = spread_to_pcg(derived, found.of) if found.layers else {}
    inside = {node: unit for node, unit in layers.items() if 0 <= unit < found.count}
    return Stages(given.pp, given.vp, chunks, sizes, inside)


def _arithmetic(node: Node) -> float:
    """Floating-point operations of a node, with one for what has none."""
    work = forward_work(node.op, node.loops, [operand.type for operand in node.operands], node.type)
    return work.flops + math.prod(node.type.shape)
