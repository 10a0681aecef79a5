"""What takes turns in a profiling run: the operators, compiled subgraphs with their parts, and our own kernels.

A group hands out the rows of one turn after the other as ``RowTask``s; a task that is in the folder already is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ir.graph import Graph
from ir.types import DType
from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.describe import DTYPES
from learned_cost.profile.programs.library import can_call
from learned_cost.profile.programs.pieces import Piece, jobs
from learned_cost.profile.programs.sampling import Pool
from learned_cost.profile.programs.shapes import is_sampled, sample_piece
from learned_cost.profile.programs.subgraphs import compile_graph, describe_graph, eager, random_pattern
from learned_cost.profile.rows import Setting
from learned_cost.profile.timing import Caches

BATCH = 96  # sampled candidates of an operator at a time
COLD_EVERY = 3  # one piece in so many is measured with cold caches too
LONGER_FOR_PLANS = 5.0
SHARE_OF_MEMORY = 0.1  # of the device, that the operands of one piece may take


@dataclass(frozen=True)
class RowTask:
    """One row to be: what it describes, and how to make ready a call that runs it."""

    what: Kernel | Subgraph
    prepare: Callable[[torch.device], Callable[[], Any]]  # Any: results are dropped
    l2: Caches = "warm"
    layout: str = ""
    plan: str = ""
    name: str = ""


class Group(Protocol):
    """Takes turns."""

    name: str
    weight: float

    def turn(self) -> Sequence[RowTask] | None:
        """The next rows, or None: nothing left."""

    def learn(self, what: Kernel | Subgraph, surprise: float) -> None:
        """Something was measured; ``surprise``: log of its time over the roofline's."""


@dataclass(frozen=True)
class Limits:
    """What is too much for one measurement: seconds of the roofline, forward; shapes of plans may take longer."""

    setting: Setting
    seconds: float
    dtypes: tuple[DType, ...]

    def allow(self, piece: Piece) -> bool:
        """Whether the piece may be measured here."""
        record = self.setting.record
        size = sum(t.num_bytes for t in (*piece.operands, piece.node.type))
        kernel = piece.forward
        held = {DTYPES.get(t.dtype, "") for t in piece.operands if t.dtype.is_floating}
        longest = self.seconds * (LONGER_FOR_PLANS if piece.plan else 1.0)
        return (
            self.setting.roofline_s(kernel.flops, kernel.bytes, kernel.dtype) <= longest
            and size <= SHARE_OF_MEMORY * record.memory_bytes
            and (bool(piece.plan) or held <= {DTYPES[dtype] for dtype in self.dtypes})
        )


@dataclass
class ListedGroup:
    """Shapes in a given order, each once."""

    limits: Limits
    listed: Sequence[Piece]
    name: str = "the plan's kernels"
    weight: float = 1.0

    def __post_init__(self) -> None:
        self._left = iter([piece for piece in self.listed if self.limits.allow(piece)])

    def turn(self) -> Sequence[RowTask] | None:
        """Forward and backward of the next shape."""
        piece = next(self._left, None)
        return None if piece is None else [*tasks_of(piece, cold=False)]

    def learn(self, what: Kernel | Subgraph, surprise: float) -> None:
        """Nothing changes the order."""


@dataclass
class OperatorGroup:
    """Forward and backward of one operator of ir, over shapes of plans and sampled ones."""

    op: str
    limits: Limits
    weight: float = 1.0
    planned: Sequence[Piece] = ()
    plans_first: bool = False
    _batch: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.name = self.op
        self._pool = Pool([piece for piece in self.planned if self.limits.allow(piece)], self.plans_first)

    def turn(self) -> Sequence[RowTask] | None:
        """Forward and backward of a shape, of one in three with cold caches too."""
        if len(self._pool.pieces) < BATCH // 4 and is_sampled(self.op):
            self._refill()
        piece = self._pool.take()
        if piece is None:
            return None
        self._turns += 1
        cold = self._turns % COLD_EVERY == 0
        return [task for caches in ((True, False) if cold else (False,)) for task in tasks_of(piece, cold=caches)]

    def learn(self, what: Kernel | Subgraph, surprise: float) -> None:
        """Steer away from what is known."""
        if isinstance(what, Kernel):
            self._pool.learn(what, surprise)

    def _refill(self) -> None:
        """The pool with another batch of sampled candidates, which are the same in every run."""
        seeds = range(self._batch * BATCH, (self._batch + 1) * BATCH)
        self._batch += 1
        fresh = [sample_piece(self.op, seed, self.limits.dtypes) for seed in seeds]
        allowed = [piece for piece in fresh if self.limits.allow(piece)]
        old = self._pool
        self._pool = Pool([*old.pieces, *allowed], self.plans_first, old.places, old.surprise)


def tasks_of(piece: Piece, *, cold: bool = False, forward_only: bool = False) -> Iterator[RowTask]:
    """The rows of a piece."""
    for job in jobs(piece):
        yield RowTask(job.kernel, job.prepare, "cold" if cold else "warm", job.layout, job.plan)
        if forward_only:
            return


@dataclass
class SubgraphGroup:
    """Random subgraphs, and graphs of plans: compiled, operator by operator, and each operator alone."""

    limits: Limits
    weight: float = 30.0  # as all operators together: compiling takes a share
    planned: Sequence[tuple[str, Graph]] = ()
    name: str = field(default="subgraph", init=False)
    _seed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._waiting = deque(self.planned)

    def turn(self) -> Sequence[RowTask] | None:
        """A graph compiled, operator by operator, and its operators alone."""
        plan, graph = self._next()
        tasks = [_whole(graph, plan, fused=True), _whole(graph, plan, fused=False)]
        parts = [node for node in graph.nodes if node.op.kernel and can_call(node.op)]
        for node in parts:
            piece = Piece(node.op.name, tuple(o.type for o in node.operands), tuple(node.attrs.items()))
            tasks += tasks_of(piece, forward_only=True)
        return tasks

    def learn(self, what: Kernel | Subgraph, surprise: float) -> None:
        """Which subgraph is next does not depend on it."""

    def _next(self) -> tuple[str, Graph]:
        while self._waiting:
            plan, graph = self._waiting.popleft()
            if self._fits(graph):
                return plan, graph
        while True:
            _, graph = random_pattern(self._seed, self.limits.dtypes[0])
            self._seed += 1
            if self._fits(graph):
                return "", graph

    def _fits(self, graph: Graph) -> bool:
        what = describe_graph(graph, fused=True, stack="inductor")
        return self.limits.setting.roofline_s(what.flops, what.traffic, what.kernels[0].dtype) <= self.limits.seconds


def _whole(graph: Graph, plan: str, *, fused: bool) -> RowTask:
    run, stack = (compile_graph, "inductor") if fused else (eager, "torch")
    return RowTask(describe_graph(graph, fused=fused, stack=stack), lambda device: run(graph, device), plan=plan)
