"""What runs when in a simulated step, in strips of tasks: what traces and reports draw.

A strip is a chunk's pass, or where there is no pipeline a layer's; strips that run alike share their tasks, so that a
step of thousands of micro-batches is small. Entry point: ``draw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pdv.schedule.passes import Pass
from pdv.simulate.engine.streams import Clocks, Engine, Timed
from pdv.simulate.engine.task import Placed
from pdv.simulate.result import RunResult, Simulation
from pdv.simulate.stage import Lowered, Stage


@dataclass(frozen=True, slots=True)
class Strip:
    """Tasks of a stage in a turn of its schedule (None: what is due once a step); picoseconds.

    ``tasks`` are relative to ``start``; of a backward pass in halves they are not told apart, and there are none.
    """

    stage: int
    turn: Pass | None
    start: int
    tasks: tuple[Timed, ...]


@dataclass
class Drawing:
    """All strips in time, by stage; when each turn of the schedule runs; when each stage sends."""

    lowered: Lowered
    ran: RunResult
    strips: list[Strip] = field(default_factory=list)
    turns: dict[Pass, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def num_tasks(self) -> int:
        """Tasks of all strips."""
        return sum(len(strip.tasks) for strip in self.strips)

    def turn_times(self, stage: int, turn: Pass | None) -> tuple[int, int]:
        """When a stage runs a turn; None: what is due once a step."""
        return (self.ran.body[stage], self.ran.end) if turn is None else self.turns[turn]


def draw(simulation: Simulation) -> Drawing:
    """The step, stragglers apart."""
    drawing = Drawing(simulation.lowered, simulation.ran)
    if simulation.ran.timeline is None:
        _draw_whole(drawing, simulation.lowered.stages[0])
    else:
        known: dict[tuple[int, tuple[Placed, ...]], tuple[Timed, ...]] = {}
        for stage in simulation.lowered.stages:
            _draw_stage(drawing, stage, known)
    return drawing


def _draw_whole(drawing: Drawing, stage: Stage) -> None:
    """A stage without a pipeline, on streams that keep running."""
    workload, engine = drawing.lowered.workload, Engine(record=True)
    programs = stage.passes(workload.execution.micro_batches, train=workload.problem.train)
    clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
    ways = (False, True) if workload.problem.train else (False,)
    turns = (Pass(0, number, way) for number in range(workload.execution.micro_batches) for way in ways)
    for turn, program in zip(turns, programs, strict=True):
        start = max(clocks.compute)
        drawing.strips += (Strip(0, turn, at, tasks) for at, tasks in engine.draw(program, clocks))
        drawing.turns[turn] = (start, max(clocks.compute))
    drawing.strips += (Strip(0, None, at, tasks) for at, tasks in engine.draw((Placed(stage.tail),), clocks))


def _draw_stage(
    drawing: Drawing, stage: Stage, known: dict[tuple[int, tuple[Placed, ...]], tuple[Timed, ...]]
) -> None:
    """Passes of a stage of a pipeline, each from quiet streams."""
    line = drawing.ran.timeline
    assert line is not None, "a pipeline has a timeline"
    for turn, start, end in line.passes[stage.number]:
        drawing.turns[turn] = (start, end)
        tasks = _draw_program(stage, _program(drawing, stage, turn), known) if turn.part == "all" else ()
        drawing.strips.append(Strip(stage.number, turn, start, tasks))
    tail = _draw_program(stage, (Placed(stage.tail),), known)
    drawing.strips.append(Strip(stage.number, None, drawing.ran.body[stage.number], tail))


def _draw_program(
    stage: Stage, program: Sequence[Placed], known: dict[tuple[int, tuple[Placed, ...]], tuple[Timed, ...]]
) -> tuple[Timed, ...]:
    key = (id(stage.kind), tuple(program))
    if key not in known:
        clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
        segments = Engine(record=True).draw(program, clocks)
        known[key] = tuple((task, at + start, at + end) for at, tasks in segments for task, start, end in tasks)
    return known[key]


def _program(drawing: Drawing, stage: Stage, turn: Pass) -> tuple[Placed, ...]:
    program = stage.programs[stage.chunks.index(turn.chunk)]
    if not turn.backward:
        return program.forward
    final = turn.micro_batch == drawing.lowered.workload.execution.micro_batches - 1
    return program.last if final else program.backward
