"""A simulated step as Chrome-trace JSON, which Perfetto and chrome://tracing open.

A process for each class of devices of each stage, a thread for each stream; sends between stages as arrows. The format:
"Trace Event Format" (Google, 2016). A pipeline of many passes is drawn pass by pass, a shorter one task by task.
Entry point: ``trace``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdv.memory import StepMemory
from pdv.schedule.passes import Pass
from pdv.simulate.engine.streams import Clocks, simulate_tasks
from pdv.simulate.engine.task import TRANSFER, Placed, Task
from pdv.simulate.result import RunResult, Simulation
from pdv.simulate.stage import Lowered, Stage

Event = dict[str, Any]  # Any: JSON
MOST = 200_000  # tasks; beyond, passes are drawn whole
MICRO = 10**6  # picoseconds in a microsecond, the format's unit
COMPUTE_THREAD = 0
SEND_THREAD = 90


def trace(simulation: Simulation, memory: StepMemory | None = None) -> dict[str, Any]:
    """The trace; with ``memory`` also a track of what each class of devices holds."""
    drawing = _Drawing(simulation.lowered, simulation.ran)
    drawing.draw()
    if memory is not None:
        drawing.hold(memory)
    return {"traceEvents": [*drawing.names(), *drawing.events], "displayTimeUnit": "ms"}


class _Drawing:
    def __init__(self, lowered: Lowered, ran: RunResult) -> None:
        self._lowered, self._ran = lowered, ran
        self.events: list[Event] = []
        self._threads: dict[tuple[int, int], str] = {}
        self._times: dict[Pass, tuple[int, int]] = {}

    def draw(self) -> None:
        """All stages."""
        line = self._ran.timeline
        if line is None:
            self._whole(self._lowered.stages[0])
            return
        expanded = self._tasks() <= MOST
        for stage in self._lowered.stages:
            for step, start, end in line.passes[stage.number]:
                self._times[step] = (start, end)
                if expanded:
                    self._expand(stage, self._program(stage, step), start)
                else:
                    self._event(stage, 0, COMPUTE_THREAD, _title(step), (start, end), {"micro_batch": step.micro_batch})
            self._expand(stage, (Placed(stage.tail),), self._ran.body[stage.number])
        for number, (step, start, end) in enumerate(line.sends):
            self._send(number, step, start, end)

    def names(self) -> Iterator[Event]:
        """What processes and threads are called."""
        for stage in self._lowered.stages:
            for number, device in enumerate(stage.kind.links.devices):
                count = stage.kind.links.counts[number]
                name = f"stage {stage.number}: {count} x {device.name}"
                yield _name("process_name", self._process(stage.number, number), 0, name)
        for (process, thread), name in sorted(self._threads.items()):
            yield _name("thread_name", process, thread, name)

    def hold(self, memory: StepMemory) -> None:
        """A counter for each class: the most of each pass while it runs, what stays behind it after."""
        numbers = {
            (stage.number, device): self._process(stage.number, number)
            for stage in self._lowered.stages
            for number, device in enumerate(stage.kind.links.devices)
        }
        for held in memory.stages:
            process = numbers[held.stage, held.device]
            for turn, most, after in ((point.turn, point.most_bytes, point.after_bytes) for point in held.curve):
                start, end = (self._ran.body[held.stage], self._ran.end) if turn is None else self._times[turn]
                for at, num_bytes in ((start, most), (end, after)):
                    self.events.append(
                        {
                            "ph": "C",
                            "name": "memory",
                            "pid": process,
                            "tid": 0,
                            "ts": at / MICRO,
                            "args": {"bytes": num_bytes},
                        }
                    )

    def _tasks(self) -> int:
        """Events if every task were drawn."""
        line, total = self._ran.timeline, 0
        for stage in self._lowered.stages if line is not None else ():
            sizes = [sum(len(placed.segment.tasks) for placed in program.backward) for program in stage.programs]
            total += sum(sizes) * 2 * self._lowered.workload.execution.micro_batches
        return total

    def _program(self, stage: Stage, step: Pass) -> tuple[Placed, ...]:
        program = stage.programs[stage.chunks.index(step.chunk)]
        if not step.backward:
            return program.forward
        final = step.micro_batch == self._lowered.workload.execution.micro_batches - 1
        return program.last if final else program.backward

    def _whole(self, stage: Stage) -> None:
        """A stage without a pipeline, on streams that keep running."""
        workload = self._lowered.workload
        passes = stage.passes(workload.execution.micro_batches, train=workload.problem.train)
        clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
        ways = (False, True) if workload.problem.train else (False,)
        taken = (Pass(0, number, way) for number in range(workload.execution.micro_batches) for way in ways)
        for step, program in zip(taken, passes, strict=True):
            start = max(clocks.compute)
            self._run(stage, program, clocks, 0)
            self._times[step] = (start, max(clocks.compute))
        self._run(stage, (Placed(stage.tail),), clocks, 0)

    def _expand(self, stage: Stage, program: Sequence[Placed], start: int) -> None:
        """A chunk's pass, task by task, from quiet streams."""
        clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
        self._run(stage, program, clocks, start)

    def _run(self, stage: Stage, program: Sequence[Placed], clocks: Clocks, shift: int) -> None:
        def watch(task: Task, start: int, end: int) -> None:
            if task.duration:
                thread = COMPUTE_THREAD if not task.streams else 1 + task.streams[0]
                for number in task.classes:
                    detail = {"part": task.part, **dict(task.detail)}
                    self._event(stage, number, thread, task.name, (start + shift, end + shift), detail, task.part)

        for segment, offset in program:
            simulate_tasks(segment, offset, clocks, watch)

    def _send(self, number: int, step: Pass, start: int, end: int) -> None:
        place, stages = self._lowered.workload.stages.place_of, self._lowered.stages
        source, target = place(step.chunk), place(step.chunk + (-1 if step.backward else 1))
        name = f"send {'gradients' if step.backward else 'activations'} {step.micro_batch}"
        self._event(stages[source], 0, SEND_THREAD, name, (start, end), {"to stage": target}, TRANSFER)
        common = {"name": "send", "cat": TRANSFER, "id": number}
        source_thread = {"pid": self._process(source, 0), "tid": SEND_THREAD}
        self.events.append({"ph": "s", "ts": start / MICRO, **common, **source_thread})
        target_thread = {"pid": self._process(target, 0), "tid": COMPUTE_THREAD}
        self.events.append({"ph": "f", "bp": "e", "ts": end / MICRO, **common, **target_thread})

    def _event(
        self,
        stage: Stage,
        number: int,
        thread: int,
        name: str,
        times: tuple[int, int],
        detail: dict[str, Any],
        part: str = "compute",
    ) -> None:
        start, end = times
        process = self._process(stage.number, number)
        shown = "compute" if thread == COMPUTE_THREAD else TRANSFER if thread == SEND_THREAD else f"collectives {part}"
        self._threads.setdefault((process, thread), shown)
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": part,
                "pid": process,
                "tid": thread,
                "ts": start / MICRO,
                "dur": (end - start) / MICRO,
                "args": detail,
            }
        )

    def _process(self, stage: int, number: int) -> int:
        return sum(len(other.kind.links.devices) for other in self._lowered.stages[:stage]) + number


def _title(step: Pass) -> str:
    part = "" if step.part == "all" else f" of {step.part}"
    return f"{'backward' if step.backward else 'forward'}{part} {step.micro_batch}, chunk {step.chunk}"


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
