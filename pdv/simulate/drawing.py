"""What runs when in a simulated step, in strips of tasks: what traces and reports draw.

A strip is a chunk's pass, or where there is no pipeline a layer's; strips that run alike share their tasks, so that a
step of thousands of micro-batches is small. Entry point: ``draw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdv.schedule.passes import Pass
from pdv.simulate.engine.streams import Clocks, Engine, Timed
from pdv.simulate.engine.task import Placed
from pdv.simulate.result import RunResult, Simulation
from pdv.simulate.stage import Lowered, Stage
from pdv.simulate.step import pipeline_of


@dataclass(frozen=True, slots=True)
class Strip:
    """Tasks of a stage in a turn of its schedule (None: what is due once a step), from ``start`` on, in picoseconds.

    ``tasks`` is their number in ``Drawing.tasks``.
    """

    stage: int
    turn: Pass | None
    start: int
    tasks: int


@dataclass
class Drawing:
    """All strips in time, by stage; when each turn of the schedule runs; tasks that several strips may share.

    Of a backward pass in halves tasks are not told apart: it has none.
    """

    lowered: Lowered
    ran: RunResult
    strips: list[Strip] = field(default_factory=list)
    tasks: list[tuple[Timed, ...]] = field(default_factory=lambda: [()])
    turns: dict[Pass, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        """Tasks of all strips."""
        return sum(len(self.tasks[strip.tasks]) for strip in self.strips)

    @property
    def end(self) -> int:
        """Of all that is drawn: a stage may begin the step before another ends the one before."""
        return max(self.ran.end, *(sum(both) for both in zip(self.ran.body, self.ran.tail, strict=True)))

    def turn_times(self, stage: int, turn: Pass | None) -> tuple[int, int]:
        """When a stage runs a turn; None: what is due once a step."""
        return (self.ran.body[stage], self.end) if turn is None else self.turns[turn]


def draw(simulation: Simulation) -> Drawing:
    """The step, stragglers apart."""
    drawing = Drawing(simulation.lowered, simulation.ran)
    if simulation.ran.timeline is None:
        _draw_whole(drawing, simulation.lowered.stages[0])
    else:
        _Stages(drawing).draw()
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
    drawing.tasks = engine.recorded


class _Stages:
    """Stages of a pipeline: passes, each from quiet streams; those of equal stages that run alike are drawn once."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing, self._stages = drawing, drawing.lowered.stages
        self._known: dict[tuple[int, tuple[Placed, ...]], int] = {}

    def draw(self) -> None:
        """All of them."""
        line, ran = self._drawing.ran.timeline, self._drawing.ran
        assert line is not None, "a pipeline has a timeline"
        for stage in self._stages:
            like = next(other.number for other in self._stages if other.kind is stage.kind)
            for turn, start, end in line.passes[stage.number]:
                self._drawing.turns[turn] = (start, end)
                tasks = self._tasks(like, self._program(stage, turn)) if turn.part == "all" else 0
                self._drawing.strips.append(Strip(stage.number, turn, start, tasks))
            tail = self._tasks(like, (Placed(stage.tail),))
            self._drawing.strips.append(Strip(stage.number, None, ran.body[stage.number], tail))

    def _tasks(self, like: int, program: Sequence[Placed]) -> int:
        """The number of a program's tasks on a stage like that one."""
        key = (like, tuple(program))
        if key not in self._known:
            links, engine = self._stages[like].kind.links, Engine(record=True)
            clocks = Clocks.quiet(len(links.devices), links.num_streams)
            found = [(at, number) for at, number in engine.draw(program, clocks)]
            tasks = ((task, at + start, at + end) for at, n in found for task, start, end in engine.recorded[n])
            self._known[key] = len(self._drawing.tasks)
            self._drawing.tasks.append(tuple(tasks))
        return self._known[key]

    def _program(self, stage: Stage, turn: Pass) -> tuple[Placed, ...]:
        program = stage.programs[stage.chunks.index(turn.chunk)]
        if not turn.backward:
            return program.forward
        final = turn.micro_batch == pipeline_of(self._drawing.lowered.workload).final
        return program.last if final else program.backward
