"""The problem that every search strategy solves: a serial graph on a mesh, its prices, limits and pins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

from ir.cost_model import CostModel, Estimate
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.rows import by_rows
from ir.sharding import Invariant, Shard, Sharding, State, fits, invariant
from ir.types import TensorType
from pdv.cluster import Device
from pdv.cluster.host import Host, slowest_host
from pdv.config import Mode
from pdv.cost.comm import AxisLink, joint_link
from pdv.problem.formats import Products
from pdv.problem.fused import Fused
from pdv.problem.precision import AS_EMITTED, Precision, step_estimate
from pdv.rewrite.rule import Rule


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a parameter rests between its uses, and whether a gathered copy is dropped after forward (ZeRO-3)."""

    sharding: Sharding
    regather: bool = False


def allow_all(*_: object) -> bool:
    """What nobody pinned."""
    return True


def allow_none(*_: object) -> bool:
    """What no plan may have."""
    return False


def _no_mark(nodes: Sequence[Node]) -> str:
    return ""


def loses_nothing(before: Sequence[Node], after: Sequence[Node]) -> bool:
    """A rewrite where nothing is pinned."""
    return False


@dataclass(frozen=True)
class Pins:
    """What the user (or an expert's plan) fixes, as predicates. Pure and cheap; ``pdv.pins`` makes them of a file.

    Attributes:
        split: whether an operator may run in a split along an axis.
        storage: whether a parameter may rest in a state along an axis.
        regather: whether parameters that rest cut are gathered again in backward.
        name: for messages.
        rests: whether a parameter may rest so, all axes considered.
        gathers: whether a parameter that rests cut may be gathered along an axis when it is used.
        mark: what the pins say about these nodes beyond their structure; blocks of different marks are not equal.
        loses: whether a rewrite from the first nodes to the second loses a pinned value.
    """

    split: Callable[[Node, str, Split], bool] = allow_all
    storage: Callable[[Node, str, State], bool] = allow_all
    regather: Literal["free", "always", "never"] = "free"
    name: str = "free"
    rests: Callable[[Node, Storage], bool] = allow_all
    gathers: Callable[[Node, str, bool], bool] = allow_all
    mark: Callable[[Sequence[Node]], str] = _no_mark
    loses: Callable[[Sequence[Node], Sequence[Node]], bool] = loses_nothing


@dataclass(frozen=True)
class Problem:
    """A serial graph on a mesh. ``memory_limit`` in bytes per device; ``axes`` aligned with ``mesh.axes``.

    ``memory_limit`` is for what stays allocated, ``working_limit`` for what one node reads and makes.
    ``rules`` are the algebraic rules that may be applied; parallel ones follow from the operators.
    ``leaving`` is how all outputs leave, where that is decided already; ``rows`` whether dim 0 of every output is the
    batch, which is read in the source graph and stays true however it is rewritten.

    A graph of one of a step's micro-batches counts ``once`` of what the step does once (the sums of gradients of
    parameters that rest whole, the optimizer; where ``several`` are in flight, which share copies, gathering those that
    are kept), and each byte that stays all step (parameters, such copies, what training keeps of both, inputs) as
    ``resting`` of a micro-batch's activations; ``memory_limit`` is of bytes that count so.
    Gradients of parameters that rest whole are summed ``bucket_bytes`` at once, and so take their share of a bucket.
    ``adding_s`` are seconds a byte of a parameter that its gradient takes to be added to those of micro-batches before.
    ``hides``: gradients of parameters move behind compute, at no price but ``slowed``, the share of their time that
    this takes of compute: what costs so bounds a step from below. Those of the parameters that ``last`` reads, whose
    backward is the last of a step, are waited for. ``lean``: nor is what may be made again in backward kept for it.
    ``precision``: in which types training keeps parameters, gradients and moments; types in the graph are of compute.
    ``versions``: of parameters, that a step keeps (PipeDream-2BW has two).
    ``products``: those of layers that multiply in a narrower format, if any do.
    ``fused``: what operators take of a program that is compiled, if it is.
    ``host``: a device's part of its host, where that is asked for (``precision.on_host``).
    """

    graph: Graph
    mesh: Mesh
    axes: tuple[AxisLink, ...]
    compute: CostModel
    mode: Mode = "train"
    memory_limit: float = float("inf")
    pins: Pins = field(default_factory=Pins)
    rules: tuple[Rule, ...] = ()
    working_limit: float = float("inf")
    leaving: Sharding | None = None
    rows: bool | None = None
    once: float = 1.0
    several: bool = False
    resting: float = 1.0
    bucket_bytes: float = 0.0
    adding_s: float = 0.0
    hides: bool = False
    lean: bool = False
    slowed: float = 0.0
    last: Node | None = None
    precision: Precision = AS_EMITTED
    versions: int = 1
    products: Products | None = None
    fused: Fused | None = None
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", by_rows(self.graph))

    @cached_property
    def exits(self) -> tuple[Sharding, ...]:
        """How the outputs may leave, all of them alike: whole, or (in training) cut by rows of the batch.

        A loss is a mean over samples, so each rank may take that of its own (docs/architecture.md).
        """
        if self.leaving is not None:
            return (self.leaving,)
        if not (self.train and self.rows):
            return (invariant(self.mesh),)
        states: tuple[State, ...] = (Invariant(), Shard(0))
        ways = product(states, repeat=len(self.mesh.axes))
        outputs = [node.type for _, node in self.graph.outputs]
        return tuple(way for way in ways if all(fits(tensor, way, self.mesh) for tensor in outputs))

    @property
    def undecided(self) -> bool:
        """True if how outputs leave is a choice that concerns more than the operator that makes the one output.

        Several leave alike; one that is read on shares its way with its readers.
        """
        outputs = {node for _, node in self.graph.outputs}
        return len(self.exits) > 1 and (len(outputs) > 1 or any(self.graph.users[node] for node in outputs))

    def link(self, axis: str) -> AxisLink:
        """The links of an axis, or of a joint one."""
        return joint_link(tuple(self.axes[position] for position in self.mesh.positions(axis)))

    def held_bytes(self, param: TensorType, num_bytes: float) -> float:
        """All that a step keeps of a trained parameter of which a device has ``num_bytes``."""
        weight = param.dtype.itemsize
        more = self.versions - 1
        return num_bytes * (self.precision.held_bytes(weight) / weight + more) if self.train else float(num_bytes)

    def optimizer(self, param: TensorType, num_bytes: float) -> Estimate:
        """AdamW's step for it."""
        return step_estimate(self.precision, self.compute, self.host, num_bytes, param.dtype.itemsize)

    @property
    def train(self) -> bool:
        """True where a backward pass and an optimizer run."""
        return self.mode == "train"


def with_host(problem: Problem, devices: Iterable[Device]) -> Problem:
    """The same with the part of its host that each of the devices has, where anything lies there."""
    return replace(problem, host=slowest_host(devices)) if problem.precision.on_host else problem


def ungathered(problem: Problem) -> Problem:
    """The same problem where parameters are used as they rest."""
    return replace(problem, pins=replace(problem.pins, gathers=allow_none))


def idle(problem: Problem, axes: Sequence[str]) -> Problem:
    """The same problem, nothing pinned else, where no operator and no parameter is cut along ``axes``."""

    def split(node: Node, axis: str, way: Split) -> bool:
        return axis not in axes or all(isinstance(state, Invariant) for state in (*way.operands, way.result))

    def storage(param: Node, axis: str, state: State) -> bool:
        return axis not in axes or isinstance(state, Invariant)

    return replace(problem, pins=Pins(split=split, storage=storage, name=f"idle along {', '.join(axes)}"))


def offloaded(problem: Problem, devices: Iterable[Device]) -> Problem:
    """The same problem whose optimizer is in the memory of the devices' hosts."""
    return with_host(replace(problem, precision=replace(problem.precision, on_host=True)), devices)
