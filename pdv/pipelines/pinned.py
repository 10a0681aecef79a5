"""What a caller fixes of how a step runs, in place of having it searched. Entry point: ``Pinned``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ir.dims import divisors
from ir.errors import ShardingError, UsageError, VerificationError
from ir.graph import Graph
from ir.mesh import Axis, Mesh
from ir.proof.in_time import verify_in_time
from ir.rows import what_joins_rows
from ir.scaling.rows import micro_batch
from pdv.cluster import Cluster
from pdv.pcg.in_slices import in_slices
from pdv.pcg.over_time import TIME
from pdv.problem import Problem
from pdv.problem.workload import ON_HOST, ONE_EACH, RECOMPUTATIONS, RUN_ORDERS, STALE, Order, Recompute
from pdv.schedule.order import why_not
from pdv.schedule.pieces import pieces
from pdv.schedule.slices import ASKED as ASKED_OF_SLICES
from pdv.schedule.slices import SLICED, why_not_in_slices

VIRTUAL = (2, 4, 8)  # stages on each rank that are looked at, where several are
ASKED = (
    "gpipe, eager-1f1b, 1f1b and 2bw have one stage on each rank, interleaved two or more, zero-bubble any number, zbv "
    "and dualpipev two; interleaved and zero-bubble take a multiple of the ranks in micro-batches, dualpipev two for "
    "each rank or more, 2bw one for each or more; zero-bubble, zbv and dualpipev recompute nothing"
)


@dataclass(frozen=True)
class Pinned:
    """Each None is searched.

    Attributes:
        stages: ranks of the pipeline, each a mesh of its own.
        virtual_stages: on each of them.
        slices: in time, of each micro-batch.
        activations: "host": what layers keep for backward waits there; "either": there or on the device.
        mesh: axis sizes of one stage, slow to fast.
    """

    stages: int | None = None
    micro_batches: int | None = None
    schedule: Order | None = None
    recompute: Recompute | None = None
    mesh: Mapping[str, int] | None = None
    virtual_stages: int | None = None
    activations: Literal["host", "either"] | None = None
    slices: int | None = None

    @property
    def says_how(self) -> bool:
        """Whether anything is fixed beside the mesh."""
        return any(value not in {None, "either"} for name, value in asdict(self).items() if name != "mesh")

    @property
    def settled(self) -> Pinned:
        """With what slices ask for, where nothing else is said."""
        if self.slices is None:
            return self
        each, recompute = self.virtual_stages or 1, self.recompute or "none"
        return replace(self, schedule=self.schedule or SLICED, virtual_stages=each, recompute=recompute)

    @property
    def allows_whole(self) -> bool:
        """Whether batch and model taken as a whole are among what is allowed."""
        again = self.recompute not in (None, "none") or self.activations == "host"
        return self.stages in (None, 1) and self.micro_batches in (None, 1) and not again

    @property
    def _keeps_batch(self) -> bool:
        """Whether the batch is surely taken whole, through all layers: what is light may be of all rows together."""
        return self.recompute == "light" and self.stages in (None, 1) and self.micro_batches in (None, 1)

    def recomputations(self, *, compiled: bool) -> tuple[Recompute, ...]:
        """What may run again in backward, or wait in the host's memory for it; on the device and kept comes first.

        A compiler decides for itself what is light enough to be made again.
        """
        found = tuple(one for one in RECOMPUTATIONS if one != "light" or not compiled)
        here = found if self.recompute is None else (self.recompute,)
        there = tuple(ON_HOST[one] for one in here if one in ON_HOST)
        return {None: here, "host": there, "either": (*here, *there)}[self.activations]

    @property
    def may_take_turns(self) -> bool:
        """Whether a rank may have several stages, or backward be in halves."""
        return self.takes_turns or (self.schedule is None and self.virtual_stages is None)

    @property
    def takes_turns(self) -> bool:
        """Whether they are to."""
        several = self.virtual_stages not in (None, 1)
        return several if self.schedule is None else self.schedule not in ONE_EACH

    def virtual(self, order: Order, layers: int = 0, ranks: int = 1) -> tuple[int, ...]:
        """Stages on each rank that are looked at in an order of passes, of a model of so many equal layers.

        Where ranks have as many layers each: numbers near ``VIRTUAL`` by which stages have, too, and one layer a stage.
        """
        if self.virtual_stages is not None:
            return (self.virtual_stages,)
        several: tuple[int, ...] = VIRTUAL
        if layers and layers % ranks == 0:
            even = divisors(layers // ranks)[1:]
            near = {min(even, key=lambda each: abs(math.log(each / some))) for some in VIRTUAL if even}
            several = tuple(sorted(near | set(even[-1:]))) or VIRTUAL
        return {"interleaved": several, "zero-bubble": (1, *several), "2bw": (1,)}.get(order, (2,))

    @property
    def devices(self) -> int | None:
        """Of a stage, if the mesh is fixed."""
        return None if self.mesh is None else math.prod(self.mesh.values())

    def meshes(self, found: tuple[Mesh, ...], devices: int) -> tuple[Mesh, ...]:
        """Of the meshes of a stage of so many devices those that are allowed."""
        if self.mesh is None:
            return found
        fixed = Mesh(tuple(Axis(name, size) for name, size in self.mesh.items()))
        return (fixed,) if devices == fixed.num_devices else ()

    def as_dict(self) -> dict[str, Any]:
        """What is fixed, as JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != "either"}

    def check(self, problem: Problem, cluster: Cluster) -> None:
        """Whether a plan of the model on the cluster can be so; ``problem`` is that of the whole batch.

        Raises:
            UsageError: if none can.
        """
        self._check_values()
        self._check_devices(cluster)
        kept = problem.precision
        if self.schedule in STALE and (kept.master or kept.on_host):
            what = "master weights" if kept.master else "the optimizer in the host's memory"
            raise UsageError(f"schedule {self.schedule!r} with {what}", "Two versions are of weights that rest as read")
        if self.slices is not None:
            self._check_slices(problem, self.slices)
        if self.allows_whole:
            return
        if not problem.train:
            raise UsageError("stages, micro-batches and recomputation are of training", "Allowed: --mode train")
        if not self._keeps_batch and (what := why_whole(problem)):
            raise UsageError(
                f"the batch of {problem.graph.name} cannot be taken in parts: it has {what}",
                "Stages and micro-batches ask that each row of the outputs depends on the same row of the inputs alone",
                "Leave --stages and --micro-batches out, and --recompute unless it is light",
            )
        self._check_pieces(problem)

    def _check_slices(self, problem: Problem, count: int) -> None:
        """Whether the model can be run slice by slice: before it is searched, on the source as it is."""
        leaves = self.recompute not in (None, "none") or self.activations == "host"
        order, each = self.schedule or SLICED, self.virtual_stages or 1
        if wrong := why_not_in_slices(problem, order, self.stages or 1, each, count, leaves=leaves):
            raise UsageError(wrong, ASKED_OF_SLICES)
        try:
            sliced = in_slices(problem.graph, Mesh(()), count)
            verify_in_time(problem.graph, sliced.graph, sliced.mesh, TIME, gradients=False)
        except ShardingError as error:
            what = f"{problem.graph.name} cannot pass in {count} slices of time: {error.what}"
            raise UsageError(what, error.allowed, "Leave --slices out") from error
        except VerificationError as error:
            why = "positions depend on later ones, as far as is known"
            what = f"{problem.graph.name} cannot pass in {count} slices of time: {why}"
            allowed = (
                "Models whose outputs at a position are made of positions up to it, which is known of causal attention "
                "and of what is -inf before a softmax; not of large negative numbers, or biases added to a mask"
            )
            raise UsageError(what, allowed, "Leave --slices out") from error

    def _check_pieces(self, problem: Problem) -> None:
        """Whether the batch has as many parts as are asked for, and the model as many pieces."""
        found, batch = pieces(problem.graph), rows_of(problem)
        if self.micro_batches is not None and batch % self.micro_batches:
            raise UsageError(f"{self.micro_batches} micro-batches of {batch} rows", f"A number that divides {batch}")
        if (self.micro_batches or 1) > 1 and micro_batch(problem.graph, self.micro_batches or 1) is None:
            what = f"{batch // (self.micro_batches or 1)} rows of {problem.graph.name} are no batch of their own"
            raise UsageError(f"{self.micro_batches} micro-batches of {batch} rows: {what}", "Fewer micro-batches, or 1")
        each = self.virtual(self.schedule or "interleaved")[0] if self.takes_turns else 1
        all_stages = (self.stages or 1) * each
        if self.stages is not None and all_stages > (most := trained_pieces(problem.graph)):
            what = f"{problem.graph.name} has {most} pieces with parameters that a pipeline can be cut between"
            raise UsageError(f"{all_stages} stages: {what}", f"At most {most}")
        if not any(found.layers):
            what = f"{problem.graph.name} is a model without repeated layers"
            if self.activations == "host":
                raise UsageError(f"offload 'activations' is of layers: {what}", "Allowed: none, optimizer")
            if self.recompute == "full":
                raise UsageError(f"recompute 'full' runs layers again: {what}", "Allowed: none")

    def _check_values(self) -> None:
        for name, value, allowed in (
            ("schedule", self.schedule, RUN_ORDERS),
            ("recompute", self.recompute, RECOMPUTATIONS),
        ):
            if value is not None and value not in allowed:
                raise UsageError(f"{name}: {value!r} is not known", f"Allowed: {', '.join(allowed)}")
        for name, number in (
            ("stages", self.stages),
            ("micro-batches", self.micro_batches),
            ("virtual stages", self.virtual_stages),
        ):
            if number is not None and number < 1:
                raise UsageError(f"{number} {name}", "Allowed: numbers from 1")
        if self.recompute == "light" and self.activations == "host":
            what = "recompute 'light' with offload 'activations': what a layer keeps waits on the host, all of it"
            raise UsageError(what, "Allowed beside it: none, full")
        order = self.schedule or ("interleaved" if self.takes_turns else "1f1b")
        if self.stages == 1 or not (self.takes_turns or self.virtual_stages or self.schedule in STALE):
            return
        ranks, each = self.stages or 2, self.virtual_stages or self.virtual(order)[0]
        count = self.micro_batches if self.micro_batches and self.stages else 2 * ranks
        leaves = self.recompute not in (None, "none") or self.activations == "host"
        if wrong := why_not(order, ranks, each, count, recomputes=leaves):
            raise UsageError(wrong, ASKED)

    def _check_devices(self, cluster: Cluster) -> None:
        count, stages, devices = cluster.num_devices, self.stages or 1, self.devices
        if count % stages:
            raise UsageError(f"{stages} stages of {count} devices", f"A number that divides {count}")
        if devices is not None and devices * stages != count:
            axes = ", ".join(f"{name}={size}" for name, size in (self.mesh or {}).items())
            raise UsageError(
                f"the mesh {axes} has {devices} devices",
                f"{cluster.name} has {count} devices, a stage {count // stages} of them",
                "Choose axis sizes that multiply to it, or leave the mesh out",
            )


FREE = Pinned()


def trained_pieces(graph: Graph) -> int:
    """How many pieces read a parameter first: every stage has one of these, for its optimizer."""
    of = pieces(graph).of
    readers = ([of[reader] for reader in graph.users[node]] for node in graph.params if node.needs_grad)
    return len({min(own) for own in readers if own})


def why_whole(problem: Problem) -> str:
    """What keeps the rows of a batch from being run apart; or nothing."""
    return what_joins_rows(problem.graph) or ("" if problem.rows else "outputs that are not by rows")


def rows_of(problem: Problem) -> int:
    """Rows that every input has."""
    return math.gcd(*(node.type.shape[0] for node in problem.graph.inputs if node.type.rank)) or 1
