"""Steps of plans that differ in a few operators from one that was simulated (FlexFlow's delta simulation).

What a search by small changes asks: not the whole program is derived, priced and run again, but the operators that
change, the moves of what they read and make, and the segments with any of these in them; the engine knows what the
others do. Times are whole picoseconds and the same tasks come in the same order as in a full simulation of the plan's
PCG, so the result is the same to the last bit.

For programs as they are emitted: one stage, collectives that are waited for. Source: Jia et al., "Beyond Data and Model
Parallelism for Deep Neural Networks" (SysML'19), section 5.3. Entry point: ``Delta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ir.cost_model import CostModel
from ir.graph import Graph, Node
from ir.operator import Split
from ir.sharding import Sharding, format_sharding, invariant
from pdv.cluster import Cluster, Device
from pdv.pcg.derive import exit_sharding
from pdv.pcg.redistribute import Redistribution, Step
from pdv.problem import Assignment, Problem, Storage
from pdv.simulate.calibration import CALIBRATION, Calibration
from pdv.simulate.engine import Engine
from pdv.simulate.entries import Entries, Entry
from pdv.simulate.links import Links
from pdv.simulate.price import DevicePrices
from pdv.simulate.result import Ran
from pdv.simulate.runs import EACH
from pdv.simulate.segments import Item, Segments
from pdv.simulate.setup import EMITTED, Stages, Workload
from pdv.simulate.stage import loss_segments
from pdv.simulate.step import outside_ps, run_single
from pdv.simulate.sums import finish
from pdv.simulate.task import PICO, Placed, Segment, picoseconds


class Event(NamedTuple):
    """A place in the program's order: an operator, or where a reader (None: the caller) may want a value moved."""

    value: Node
    reader: Node | None = None
    operand: int = -1
    whole: bool = False  # an output that leaves whole

    @property
    def is_operator(self) -> bool:
        """Whether it is no move."""
        return self.operand < 0


@dataclass(frozen=True)
class Script:
    """The order in which any plan of a graph runs: that of its PCG's nodes, depth first from the outputs.

    Attributes:
        events: operators, and before them the moves of what they read.
        runs: by event, the run of operators that it is in.
        moved: by value, the places where it may be moved.
        at: the place of each operator.
        reads: by operator, the places where its operands are moved.
        outputs: places where outputs, not buffers, leave.
    """

    events: tuple[Event, ...]
    runs: tuple[int, ...]
    moved: Mapping[Node, tuple[int, ...]]
    at: Mapping[Node, int]
    reads: Mapping[Node, tuple[int, ...]]
    outputs: tuple[tuple[int, Event], ...]

    @classmethod
    def of(cls, graph: Graph) -> Script:
        """Of a serial graph."""
        events = tuple(_events(graph))
        runs, operators = [], 0
        moved: dict[Node, list[int]] = {}
        at: dict[Node, int] = {}
        reads: dict[Node, list[int]] = {}
        for place, event in enumerate(events):
            runs.append(operators // EACH)
            if event.is_operator:
                at[event.value] = place
                operators += 1
            else:
                moved.setdefault(event.value, []).append(place)
                if event.reader is not None:
                    reads.setdefault(event.reader, []).append(place)
        outputs = [(place, e) for place, e in enumerate(events) if e.operand >= 0 and e.reader is None and not e.whole]
        return cls(events, tuple(runs), _fixed(moved), at, _fixed(reads), tuple(outputs))

    @cached_property
    def spans(self) -> tuple[range, ...]:
        """By run, its events."""
        starts = [0, *(at for at in range(1, len(self.runs)) if self.runs[at] != self.runs[at - 1]), len(self.runs)]
        return tuple(range(start, end) for start, end in pairwise(starts))


def _fixed(places: Mapping[Node, list[int]]) -> dict[Node, tuple[int, ...]]:
    return {node: tuple(found) for node, found in places.items()}


def _events(graph: Graph) -> Iterator[Event]:
    """Depth first: a value is moved when its reader has come to it, before what the reader reads next is made."""
    done: set[Node] = set()
    for outputs, whole in ((graph.outputs, False), (graph.updates, True)):
        for _, root in outputs:
            stack = [(root, 0)]
            while stack:
                node, operand = stack.pop()
                if operand == 0 and node in done:
                    continue
                if operand and node.operands:
                    yield Event(node.operands[operand - 1], node, operand - 1)
                if operand < len(node.operands):
                    stack += [(node, operand + 1), (node.operands[operand], 0)]
                elif not node.is_leaf:
                    yield Event(node)
                    done.add(node)
            yield Event(root, None, 0, whole)


@dataclass(frozen=True)
class Tables:
    """What all plans of a problem share."""

    problem: Problem
    script: Script
    entries: Entries
    links: Links
    prices: tuple[DevicePrices, ...]
    segments: Segments
    engine: Engine
    moves: Redistribution
    outside: int

    def learn(self, known: int) -> None:
        """Price entries beyond the first ``known``."""
        for price in self.prices:
            price.learn(self.entries.all[known:])

    def segments_of(self, entries: Sequence[Entry]) -> tuple[Segment, Segment]:
        """A run's, forward and backward."""
        items = [Item(entry, place) for place, entry in enumerate(entries)]
        return self.segments.of("forward", items), self.segments.of("backward", items)

    def optimizer(self, entry: Entry) -> tuple[int, ...]:
        """Picoseconds for a parameter, by class."""
        return tuple(picoseconds(price.optimizer(entry, EMITTED.precision, 1).mean_s) for price in self.prices)


@dataclass(frozen=True)
class Delta:
    """A simulated plan, of a training step as its program is emitted.

    Attributes:
        assignment: the plan.
        made: what each operator, and each leaf, is.
        at: by event, what runs there.
        read: by event that is a move, what its reader gets.
        runs: by run, its segments forward and backward.
        optimizer: by trained parameter, picoseconds by class.
        leaving: how all outputs leave.
    """

    tables: Tables
    assignment: Assignment
    made: Mapping[Node, Entry]
    at: Sequence[tuple[Entry, ...]]
    read: Sequence[Entry | None]
    runs: Sequence[tuple[Segment, Segment]]
    optimizer: Mapping[Node, tuple[int, ...]]
    leaving: Sharding

    @classmethod
    def of(
        cls,
        problem: Problem,
        assignment: Assignment,
        cluster: Cluster,
        *,
        compute_of: Callable[[Device], CostModel],
        calibration: Calibration = CALIBRATION,
    ) -> Delta:
        """Simulate a plan in full, so that others can be simulated by what differs.

        Raises:
            ShardingError: if an operator has no such split.
        """
        assert problem.train, "a step of training"
        workload = Workload(problem, problem.graph, cluster, Stages(), EMITTED, (problem.axes,), compute_of)
        links, entries = Links.of(workload, 0, calibration), Entries(problem, EMITTED)
        prices = tuple(
            DevicePrices.of(entries, EMITTED, device, compute_of(device), calibration) for device in links.devices
        )
        script = Script.of(problem.graph)
        tables = Tables(
            problem, script, entries, links, prices, Segments(links, prices, EMITTED, calibration), Engine(),
            Redistribution(problem.mesh, problem.axes), outside_ps(links.devices, calibration),
        )  # fmt: skip
        count = len(script.events)
        nothing = [()] * count, [None] * count, [_NO_RUN] * len(script.spans)
        empty = cls(tables, Assignment({}, {}), {}, *nothing, {}, problem.exits[0])
        leaves = [node for node in problem.graph.nodes if node.is_leaf]
        return empty._with(assignment, {*leaves, *script.at}, {*leaves, *script.at})

    def changed(
        self,
        splits: Mapping[Node, tuple[Split, ...]] | None = None,
        storage: Mapping[Node, Storage] | None = None,
    ) -> Delta:
        """The plan in which some operators are split, or some parameters rest, otherwise; this one stays as it is.

        Raises:
            ShardingError: if an operator has no such split.
        """
        splits, storage = splits or {}, storage or {}
        before = self.assignment
        assignment = Assignment({**before.splits, **splits}, {**before.storage, **storage}, before.leaving)
        touched = {*splits, *storage}
        return self._with(assignment, touched, touched.union(*(node.operands for node in splits)))

    def _with(self, assignment: Assignment, touched: Set[Node], moved: Set[Node]) -> Delta:
        """The plan, with what ``touched`` values are, and how ``moved`` ones are moved, worked out again."""
        return _Change(self, assignment).made(touched, moved)

    @cached_property
    def ran(self) -> Ran:
        """The step in which no device is slower than another: what `pdv.simulate.step.run` says of the plan's PCG."""
        tables = self.tables
        outputs = [(event.value.type, self._leaving(place)) for place, event in tables.script.outputs]
        losses = [price.loss(outputs) for price in tables.prices]
        ahead, behind = loss_segments(tables.segments, losses)
        begun = tables.segments.begun()
        forward = [*begun, *(Placed(run) for run, _ in self.runs), Placed(ahead)]
        backward = [Placed(behind), *begun, *(Placed(run) for _, run in reversed(self.runs))]
        times = [sum(times) for times in zip(*self.optimizer.values(), strict=True)]
        issue = tables.segments.issue[0]
        tail = tables.segments.made(finish(tables.links, times or [0] * len(tables.prices), issue), "step")
        return run_single(tables.engine, tables.links, (forward, backward), tail, tables.outside)

    @property
    def step_s(self) -> float:
        """Seconds of that step."""
        return self.ran.end / PICO

    def _leaving(self, place: int) -> Sharding:
        entry = self.read[place]
        assert entry is not None, "all events were worked out"
        return entry.sharding


_NO_RUN = (Segment(()), Segment(()))


class _Change:
    """Works out the parts of a plan that differ from another's."""

    def __init__(self, before: Delta, assignment: Assignment) -> None:
        self._before, self._assignment, self._tables = before, assignment, before.tables
        self._made, self._at, self._read = dict(before.made), list(before.at), list(before.read)
        self._leaving = before.leaving
        self._places: set[int] = set()  # events that were worked out again

    def made(self, touched: Set[Node], moved: Set[Node]) -> Delta:
        """Values in the order of the program, each after what it reads."""
        tables, script = self._tables, self._tables.script
        known = len(tables.entries.all)
        optimizer = dict(self._before.optimizer)
        for value in sorted(moved, key=lambda node: script.at.get(node, -1)):
            if value in touched:
                self._touch(value, optimizer)
            self._move(value)
        outputs = {event.value: None for _, event in script.outputs}
        if self._leaving != (leaving := self._together(outputs)):
            self._leaving = leaving
            for value in outputs:
                self._move(value)
        tables.learn(known)
        runs = list(self._before.runs)
        for number in sorted({script.runs[place] for place in self._places}):
            entries = [entry for place in script.spans[number] for entry in self._at[place]]
            runs[number] = tables.segments_of(entries)
        return Delta(tables, self._assignment, self._made, self._at, self._read, runs, optimizer, self._leaving)

    def _together(self, outputs: Iterable[Node]) -> Sharding:
        """How outputs leave, given how they are made now."""
        if self._assignment.leaving is not None:
            return self._assignment.leaving
        made = [(node, self._made[node].sharding) for node in outputs]
        after = exit_sharding(self._tables.moves, made, self._tables.problem.exits, train=True)
        assert after is not None, f"{made} cannot leave the program"
        return after

    def _touch(self, value: Node, optimizer: dict[Node, tuple[int, ...]]) -> None:
        """What an operator or a leaf is now."""
        script, entries = self._tables.script, self._tables.entries
        if not value.is_leaf:
            operands = [self._read[place] for place in script.reads[value]]
            self._made[value] = made = entries.local(value, [entry for entry in operands if entry is not None])
            self._put(script.at[value], (made,))
            return
        whole = invariant(self._tables.problem.mesh)
        storage = self._assignment.storage.get(value, Storage(whole)) if value.op.name == "param" else Storage(whole)
        stored = format_sharding(storage.sharding) if storage.sharding != whole else ""
        self._made[value] = entries.leaf(value, stored, regather=storage.regather)
        if value.op.name == "param" and value.needs_grad:
            optimizer[value] = self._tables.optimizer(self._made[value])

    def _move(self, value: Node) -> None:
        """What each reader of a value gets, and which of the moves to there are the first of their kind."""
        script, entries, made = self._tables.script, self._tables.entries, self._made[value]
        base = made if value.is_leaf else None
        moved: dict[tuple[Step, ...], Entry] = {}
        for place in script.moved.get(value, ()):
            entry, new = made, []
            steps = self._chain(value, script.events[place])
            for count, step in enumerate(steps, 1):
                known = moved.get(steps[:count])
                if known is None:
                    attrs = {**dict(step.dims), "axis": step.axis}
                    known = moved[steps[:count]] = entries.move(step.name, attrs, value, entry, base)
                    new.append(known)
                entry = known
            self._read[place] = entry
            self._put(place, tuple(new))

    def _chain(self, value: Node, event: Event) -> tuple[Step, ...]:
        moves, gradient = self._tables.moves, value.needs_grad
        before = self._made[value].sharding
        if event.reader is None:
            after = invariant(self._tables.problem.mesh) if event.whole else self._leaving
        else:
            after = tuple(split.operands[event.operand] for split in self._assignment.splits[event.reader])
        if before == after:
            return ()
        chain = moves.chain(value.type, before, after, gradient=gradient)
        assert chain is not None, f"{value!r} cannot go from {before} to {after}"
        return chain.steps

    def _put(self, place: int, entries: tuple[Entry, ...]) -> None:
        if self._at[place] != entries:
            self._at[place] = entries
            self._places.add(place)
