"""What is simulated: a PCG for one micro-batch, its cut into pipeline stages, and how a step of it is run.

Decides the words in which a step is described. Who makes a `Workload`: `pdv.report.loaded` of a saved plan,
`pdv.manual.configuration` of a user's own settings. Who reads it: `pdv.simulate.step` (time), `pdv.memory` (bytes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ir.cost_model import CostModel
from ir.graph import Graph, Node
from pdv.cluster import Cluster, Device
from pdv.cost.comm import AxisLink
from pdv.problem.formats import Format
from pdv.problem.precision import AS_EMITTED, Precision
from pdv.problem.problem import Problem

Order = Literal["gpipe", "eager-1f1b", "1f1b", "2bw", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Recompute = Literal[
    "none", "hosted", "light", "selective", "operators", "elementwise", "offload", "alternate", "full", "full-hosted"
]
Zero = Literal[0, 1, 2]
Loss = Literal["in-place", "float32", "fused"]
RUN_ORDERS: tuple[Order, ...] = (  # that emitted programs run
    "gpipe", "eager-1f1b", "1f1b", "2bw", "interleaved", "zero-bubble", "zbv", "dualpipev"
)  # fmt: skip
ONE_EACH: tuple[Order, ...] = RUN_ORDERS[:4]  # of one stage on each rank
SEARCHED: tuple[Order, ...] = RUN_ORDERS[:3]  # of these, those that nobody has to ask for; what holds least is last
AHEAD: Mapping[Order, int] = {"1f1b": 1, "eager-1f1b": 2}  # forward passes ahead, for each stage behind
STALE: Mapping[Order, int] = {"2bw": 1}  # by how many steps gradients are of older weights; others have none
FOLDED: tuple[Order, ...] = ("zbv", "dualpipev")  # of two, one on the way through the ranks, and one on the way back
IN_HALVES: tuple[Order, ...] = ("zero-bubble", *FOLDED)  # gradients of weights may wait
RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "light", "full")  # that they know
BUCKET_BYTES = 25.0 * 2**20  # of gradients that are summed at once, by the emitted program as by DDP
ON_HOST: Mapping[Recompute, Recompute] = {"none": "hosted", "full": "full-hosted"}  # what is kept waits there


@dataclass(frozen=True, slots=True)
class Overlap:
    """What runs beside compute. The emitted program overlaps nothing: its collectives are waited for where they stand.

    Attributes:
        gradients: sums of gradients run in buckets of ``bucket_bytes`` behind the backward pass (DDP, Li et al.,
            VLDB'20), instead of after it.
        bucket_bytes: of such a bucket.
        gathers: how many layers ahead a resting weight is gathered (FSDP, Zhao et al., VLDB'23); 0: where it is used.
        activations: collectives on activations run beside work that does not wait for them.
        transfers: pipeline sends run beside the next micro-batch.
        weights: weights whose optimizer state is cut (ZeRO 1) are gathered beside the next step's first forward pass
            (Megatron-LM's --overlap-param-gather), instead of before it.
        pieces: axes along which an activation is moved in as many pieces as the axis has devices, each beside the
            product or attention of the piece before it (Wang et al., "Overlap communication with dependent
            computation", ASPLOS'23; torch's asynchronous tensor parallelism, Megatron-LM's --tp-comm-overlap).
        light: collectives beside compute take little of a device, as on GPUs since Hopper: sums are made in the switch
            (NVLink SHARP), and copies are asynchronous (TMA).
        apart: sums of gradients have communicators of their own: along an axis, other collectives do not wait for those
            issued before, but share the links.
    """

    gradients: bool = False
    bucket_bytes: float = BUCKET_BYTES
    gathers: int = 0
    activations: bool = False
    transfers: bool = True
    weights: bool = False
    pieces: tuple[str, ...] = ()
    light: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Execution:
    """How a step runs, beside what the PCG says.

    Attributes:
        micro_batches: how often each stage runs forward and backward in a step.
        order: of micro-batches in a stage (`pdv.schedule.order`).
        recompute: "full": of each layer only its input is kept, and forward runs again in backward (Chen et al., 2016);
            "alternate": the same of every second layer (torchtitan's selective checkpointing by layer);
            "light": of what backward reads, what is cheap to make of what is kept is made again, and activations are
            gathered again, one by one (``ir.memory.kept``), as the emitted program has it;
            "selective": attention's inside alone is computed again (Korthikanti et al., MLSys'23, section 5);
            "operators": of a layer the results of attention and of every second product are kept, all else is computed
            again (torchtitan's selective activation checkpointing by operator); "elementwise": the results of all
            products are kept as well (Megatron-LM's --recompute-modules layernorm mlp); "offload": these lie in the
            host's memory in between, over a link so fast that it costs nothing beside compute (NVLink-C2C; NeMo's
            activation offloading); "hosted": what a layer keeps is in the host's memory until backward of the layer
            behind it, over its link, as the emitted program has it; "full-hosted": the same of layers' inputs, which
            are all that is kept.
        zero: of parameters that rest whole along ``data_axes``: 1 cuts their optimizer state, 2 their gradients too.
        data_axes: mesh axes along which gradients are summed once a step.
        fused: element-wise operators between products run as one kernel (a compiler's or Megatron's fusions), so that
            each such group reads its inputs and writes its result once.
        flash: attention never writes its scores (Dao et al., NeurIPS'22); without it they are written and kept.
        dropout: masks are made and kept, one byte an element, where the model description says that dropout stands.
        products: the format of products inside layers, where it is narrower than their type.
        eager: the emitted program: torch's own autograd, and the copies that its ``parallel.py`` makes. False of a
            framework that keeps a copy of each weight, reduces in place and accumulates into buffers made beforehand
            (Megatron-LM).
        several: micro-batches are in flight at once, in a pipeline, and share a copy of each weight that rests cut and
            is not gathered again: it is gathered once a step, and its gradient scattered once (ZeRO-1).
        cast_weights: weights rest, and are gathered, in that format where it admits that: no micro-batch casts them.
        slices: the mesh axis, if any, of which each rank sends the next stage its slice of what all hold alike; the
            slices are gathered there (Narayanan et al., SC'21, section 4.1; DeepSpeed's pipe_partitioned).
        moments: slices of each micro-batch in time, which pass one by one (TeraPipe, Li et al., ICML'21); 1: none.
        synchronous: the host waits for each kernel before it issues the next, so nothing overlaps and each kernel costs
            its issue as well (CUDA_LAUNCH_BLOCKING=1, which runs of many nodes set against hangs).
        loss: "in-place": in float32, exponentials over which their gradient is written (Megatron-LM); "float32": logits
            are cast to it, and each step makes a tensor (F.cross_entropy, eager); "fused": one kernel each way reads
            logits as they are (a compiled loss; Megatron-LM's --cross-entropy-loss-fusion).
    """

    micro_batches: int = 1
    order: Order = "1f1b"
    recompute: Recompute = "none"
    zero: Zero = 0
    data_axes: tuple[str, ...] = ()
    precision: Precision = AS_EMITTED
    overlap: Overlap = field(default_factory=Overlap)
    fused: bool = False
    flash: bool = True
    dropout: bool = False
    products: Format | None = None
    cast_weights: bool = False
    loss: Loss = "in-place"
    eager: bool = True
    several: bool = False
    slices: str = ""
    synchronous: bool = False
    moments: int = 1

    @property
    def passes(self) -> int:
        """How often a step passes each stage, one way."""
        return self.micro_batches * self.moments

    def name(self, number: int) -> str:
        """What passes by that number; "" if it is all of the batch."""
        found = f"micro-batch {number // self.moments}" if self.micro_batches > 1 else ""
        return found + f", slice {number % self.moments}".removeprefix("" if found else ", ") * (self.moments > 1)

    @property
    def resting(self) -> Format | None:
        """The format in which weights of layers rest, if it is not their own."""
        return self.products if self.cast_weights and self.products is not None and self.products.rests else None


EMITTED = Execution(overlap=Overlap(transfers=False))  # of a plan that says nothing of how a step runs


def emitted(
    cluster: Cluster,
    problem: Problem,
    micro_batches: int = 1,
    recompute: Recompute = "none",
    order: Order = "1f1b",
    stages: int = 1,
    moments: int = 1,
) -> Execution:
    """How the emitted program runs a step: gradients are summed once, in buckets behind the last backward pass.

    Sends between stages run beside the next micro-batch; collectives on activations are waited for where they stand.
    """
    overlap = Overlap(gradients=True, apart=True)
    axes, precision = problem.mesh.spans, problem.precision
    return Execution(
        micro_batches, order, recompute, data_axes=axes, precision=precision, overlap=overlap,
        several=are_several(stages, micro_batches * moments), moments=moments,
    )  # fmt: skip


def are_several(stages: int, micro_batches: int) -> bool:
    """Whether micro-batches, or slices of them, are in flight at once, in a pipeline of so many stages."""
    return stages > 1 and micro_batches > 1


@dataclass(frozen=True)
class Stages:
    """A pipeline: ``chunk_of`` says which chunk runs a PCG node; chunk ``c`` lives on stage ``c % count``.

    Chunks are numbered in the order of the model; there are ``count`` times ``virtual`` of them, more than one a stage
    where the schedule is interleaved (Narayanan et al., SC'21, section 2.2), or ``folded``: then the second half comes
    back through the stages (Qi et al., ICLR'24, section 6). ``layers`` lists, by chunk, how many of
    the model's repeated blocks it has. A node that no entry names (leaves; what needs no gradient, such as masks) runs
    with each reader.
    """

    count: int = 1
    virtual: int = 1
    chunk_of: Mapping[Node, int] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    layer_of: Mapping[Node, int] = field(default_factory=dict)  # which repeated block a node belongs to, if any
    folded: bool = False

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return self.count * self.virtual

    def place_of(self, chunk: int) -> int:
        """The stage that a chunk lives on."""
        turn, place = divmod(chunk, self.count)
        return self.count - 1 - place if self.folded and turn % 2 else place

    def chunks_on(self, stage: int) -> tuple[int, ...]:
        """The chunks that live on a stage."""
        return tuple(chunk for chunk in range(self.chunks) if self.place_of(chunk) == stage)


ONE_STAGE = Stages()


def runs_whole(stages: Stages, execution: Execution) -> bool:
    """Whether a plan says nothing of how a step runs: batch and model are taken as a whole."""
    return stages == ONE_STAGE and execution == EMITTED


@dataclass(frozen=True)
class Workload:
    """All that a simulation reads.

    Attributes:
        problem: its graph is at the size of one micro-batch over all devices of a stage; its mesh is that of a stage.
        pcg: what the stages run together.
        cluster: ``stages.count`` times the mesh's devices; stage ``s`` has ranks ``s * n`` to ``(s + 1) * n - 1`` for
            ``n = num_devices``, row-major over the mesh.
        axes: by stage, the links of the mesh's axes there.
        compute_of: the cost model of one kind of device.
    """

    problem: Problem
    pcg: Graph
    cluster: Cluster
    stages: Stages
    execution: Execution
    axes: tuple[tuple[AxisLink, ...], ...]
    compute_of: Callable[[Device], CostModel]

    @property
    def num_devices(self) -> int:
        """Of a stage: an axis of time has no links, and is one device."""
        return math.prod(link.size for link in self.axes[0])


def workload_of_pcg(problem: Problem, pcg: Graph, cluster: Cluster) -> Workload:
    """What the emitted program of a PCG runs, batch and model as a whole; ``problem`` is on the rewritten graph."""
    execution, axes = emitted(cluster, problem), (problem.axes,)

    def compute_of(device: Device) -> CostModel:
        return problem.compute.on((device,))

    return Workload(problem, pcg, cluster, ONE_STAGE, execution, axes, compute_of)
