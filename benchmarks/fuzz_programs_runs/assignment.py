"""Random legal assignments: a split for every operator along every axis, and a resting place for every parameter.

Entry points: ``draw_plan`` draws one as plain data; ``assigned`` makes an ``Assignment`` of that data, also for a graph
that has changed a little since: what is no longer legal runs whole.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.fuzz_programs_runs.running import draw_run, micro_graph
from benchmarks.fuzz_programs_runs.spec import PlanSpec, RunSpec
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Invariant, Partial, Shard, Sharding, fits, format_sharding, invariant, parse_sharding
from ir.verify import divides
from pdv.cluster import Device, Link
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.pcg.redistribute import Redistribution
from pdv.plan.steps import operators
from pdv.problem import Assignment, Problem, Storage
from pdv.problem.problem import offloaded

DEVICE = Device(
    "any",
    1 << 40,
    {"float32": 1e12, "float64": 1e12},
    memory_bandwidth_bytes_per_s=1e12,
    launch_latency_s=1e-6,
    efficiency=1.0,
)
LINK = Link("any", 1e10, 1e-6)
# sizes of axes, slow to fast, by number of devices: unequal ones, odd ones, and axes of one device
MESHES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,),),
    2: ((2,), (2,), (2, 1), (1, 2)),
    3: ((3,),),
    4: ((4,), (2, 2), (2, 2), (4, 1)),
    6: ((6,), (2, 3), (3, 2), (3, 2, 1), (1, 2, 3)),
    8: ((8,), (2, 4), (4, 2), (2, 2, 2)),
    12: ((3, 4), (4, 3), (2, 3, 2), (6, 2)),
}
AXES = "abc"
Choice = Sequence[Sequence[Split]]
"""The splits that an operator may take along each axis."""


def problem_of(graph: Graph, plan: PlanSpec) -> Problem:
    """The problem that a plan is an answer to; prices do not matter."""
    mesh = Mesh.of(**dict(plan.mesh))
    axes = tuple(AxisLink(axis.size, LINK) for axis in mesh.axes)
    problem = Problem(graph, mesh, axes, ComputeModel((DEVICE,)), plan.mode)
    return offloaded(problem, [DEVICE]) if plan.run.offload else problem


def draw_plan(graph: Graph, devices: int, rng: random.Random, parts: random.Random | None = None) -> PlanSpec:
    """A legal plan on a drawn mesh of so many devices; sometimes one that trains nothing, or is searched.

    parts: draws the micro-batches and stages of a step; default: it is taken whole.
    """
    trained = any(node.needs_grad for _, node in graph.outputs)
    run = draw_run(graph, devices, parts) if parts and trained else RunSpec()
    sizes = rng.choice(MESHES[devices // run.ranks])
    mode = "infer" if (rng.random() < 0.1 and run == RunSpec()) or not trained else "train"
    plan = PlanSpec(tuple(zip(AXES, sizes, strict=False)), mode, run=run)  # type: ignore[arg-type]
    if rng.random() < 0.1:
        return replace(plan, searched=True)
    return replace(draw_splits(micro_graph(graph, plan), plan, rng), run=run)


def draw_splits(graph: Graph, plan: PlanSpec, rng: random.Random) -> PlanSpec:
    """``plan`` filled in: how often operators are cut, and whether they follow their operands, is drawn for all."""
    settle = _Settling(problem_of(graph, plan))
    whole, follow = rng.choice([0.0, 0.1, 0.4]), rng.choice([0.0, 0.5, 0.9])
    rests, again = rng.choice([0.0, 0.3, 0.7]), rng.choice([0.0, 0.5])
    for param in graph.params:
        settle.rest(param, _drawn_storage(settle.problem.mesh, param, rng, rests, again))
    for node in operators(graph):
        settle.split(node, partial(_drawn_splits, settle, node, rng, whole, follow))
    return settle.written()


def _drawn_storage(mesh: Mesh, param: Node, rng: random.Random, rests: float, again: float) -> Storage:
    """Cut along each axis with some probability; whole where that does not divide. Buffers are whole."""
    dims = range(param.type.rank)
    if not dims or not param.needs_grad:
        return Storage(invariant(mesh))
    sharding = tuple(Shard(rng.choice(dims)) if rng.random() < rests else Invariant() for _ in mesh.axes)
    if not fits(param.type, sharding, mesh):
        return Storage(invariant(mesh))
    return Storage(sharding, regather=rng.random() < again)


def _drawn_splits(
    settle: _Settling, node: Node, rng: random.Random, whole: float, follow: float, choice: Choice
) -> tuple[Split, ...]:
    """Along each axis: nothing, something that operands are ready for, or anything."""
    found = []
    for axis, splits in enumerate(choice):
        ready = [split for split in splits[1:] if settle.is_ready(node, axis, split)]
        if rng.random() < whole or len(splits) == 1:
            found.append(splits[0])
        elif ready and rng.random() < follow:
            found.append(rng.choice(ready))
        else:
            found.append(rng.choice(splits))
    return tuple(found)


def assigned(problem: Problem, plan: PlanSpec) -> Assignment:
    """What the plan says, wherever the graph still has it and it is legal."""
    return _settled(problem, plan).assignment()


def tidied(graph: Graph, plan: PlanSpec) -> PlanSpec:
    """The plan in terms of the operators that the graph has."""
    return plan if plan.searched else replace(_settled(problem_of(graph, plan), plan).written(), run=plan.run)


def _settled(problem: Problem, plan: PlanSpec) -> _Settling:
    settle = _Settling(problem)
    for param in problem.graph.params:
        if param.attr("name") in plan.storage:
            text, regather = plan.storage[param.attr("name")]
            states = parse_sharding(text)
            if len(states) == len(problem.mesh.axes) and fits(param.type, states, problem.mesh):
                settle.rest(param, Storage(states, regather))
    nodes = operators(problem.graph)
    said = _aligned([node.op.name for node in nodes], plan.splits)
    for node, labels in zip(nodes, said, strict=True):
        settle.split(node, partial(_labelled, labels), tries=1)
    return settle


def _labelled(labels: Sequence[str], choice: Choice) -> tuple[Split, ...]:
    """The splits of these labels; none for those that there are not."""
    found = []
    for axis, splits in enumerate(choice):
        label = labels[axis] if axis < len(labels) else "none"
        found.append(next((split for split in splits if split.label == label), splits[0]))
    return tuple(found)


def _aligned(names: list[str], said: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """For each operator what is said of it, found by the sequence of names."""
    found: list[tuple[str, ...]] = [()] * len(names)
    matcher = difflib.SequenceMatcher(None, [name for name, _ in said], names, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[block.b + offset] = said[block.a + offset][1]
    return found


class _Settling:
    """Splits fixed one operator after another, each legal after those before."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.moves = Redistribution(problem.mesh, problem.axes)
        whole = invariant(problem.mesh)
        self.states: dict[Node, Sharding] = {node: whole for node in problem.graph.nodes if node.is_leaf}
        self.chosen: dict[Node, tuple[Split, ...]] = {}
        self.storage: dict[Node, Storage] = {}

    def rest(self, param: Node, storage: Storage) -> None:
        """Where a parameter rests."""
        self.storage[param], self.states[param] = storage, storage.sharding

    def split(self, node: Node, wish: Callable[[Choice], tuple[Split, ...]], tries: int = 8) -> None:
        """The first wish that is legal; else the last without some axes; else no cut at all."""
        options = node.op.splits(node.loops)
        choice = [options] * len(self.problem.mesh.axes)
        wished: tuple[Split, ...] = ()
        for _ in range(tries):
            wished = wish(choice)
            if self.legal(node, wished):
                break
        else:
            for axis in range(len(wished)):
                wished = (*wished[:axis], options[0], *wished[axis + 1 :])
                if self.legal(node, wished):
                    break
        assert self.legal(node, wished), f"{node!r} cannot even run whole"
        self.chosen[node], self.states[node] = wished, tuple(split.result for split in wished)

    def is_ready(self, node: Node, axis: int, split: Split) -> bool:
        """Whether an operand is cut, or a sum, as a split wants it."""
        wanted = zip(node.operands, split.operands, strict=True)
        return any(self.states[x][axis] == state != Invariant() for x, state in wanted)

    def legal(self, node: Node, splits: tuple[Split, ...]) -> bool:
        """Even cuts, and a chain of parallel operators from where each operand is to where it is wanted."""
        mesh = self.problem.mesh
        if not divides(node.loops, splits, mesh) or not fits(node.type, tuple(s.result for s in splits), mesh):
            return False
        for number, operand in enumerate(node.operands):
            wanted = tuple(split.operands[number] for split in splits)
            if operand.is_leaf and any(isinstance(state, Partial) for state in wanted):
                return False
            gradient = self.problem.train and operand.needs_grad
            if not fits(operand.type, wanted, mesh):
                return False
            if self.moves.chain(operand.type, self.states[operand], wanted, gradient=gradient) is None:
                return False
        return True

    def assignment(self) -> Assignment:
        """Of all that is settled; only what is gathered is gathered again."""
        return Assignment(self.chosen, {param: self._plain(param) for param in self.storage})

    def _plain(self, param: Node) -> Storage:
        storage = self.storage[param]
        return storage if storage.regather and self._gathered(param) else replace(storage, regather=False)

    def _gathered(self, param: Node) -> bool:
        """Whether every reader gathers a parameter before it uses it."""
        routes = self.moves.routes(param.type, gradient=self.problem.train)
        before, found = routes.states.index[self.states[param]], []
        for node, splits in self.chosen.items():
            for number, operand in enumerate(node.operands):
                if operand is param:
                    wanted = tuple(split.operands[number] for split in splits)
                    found.append(bool(routes.gathered[before, routes.states.index[wanted]]))
        return bool(found) and all(found)

    def written(self) -> PlanSpec:
        """As plain data, on the mesh and in the mode of the problem."""
        mesh = tuple((axis.name, axis.size) for axis in self.problem.mesh.axes)
        return PlanSpec(mesh, self.problem.mode, splits=self.labels(), storage=self.storages())

    def labels(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """For a ``PlanSpec``."""
        return tuple((node.op.name, tuple(split.label for split in splits)) for node, splits in self.chosen.items())

    def storages(self) -> dict[str, tuple[str, bool]]:
        """For a ``PlanSpec``: parameters that do not rest whole."""
        whole = invariant(self.problem.mesh)
        return {
            param.attr("name"): (format_sharding(storage.sharding), self._plain(param).regather)
            for param, storage in self.storage.items()
            if storage.sharding != whole
        }
