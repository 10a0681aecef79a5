"""A simulated step as Chrome-trace JSON, which Perfetto and chrome://tracing open.

A process for each class of devices of each stage, a thread for each stream; sends between stages as arrows. The format:
"Trace Event Format" (Google, 2016). A pipeline of many passes is drawn pass by pass, a shorter one task by task.
Entry point: ``trace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdv.memory import StepMemory
from pdv.schedule.passes import Pass
from pdv.simulate.drawing import Drawing, Strip, draw
from pdv.simulate.engine.task import TRANSFER
from pdv.simulate.result import Simulation
from pdv.simulate.stage import Stage

Event = dict[str, Any]  # Any: JSON
MOST = 200_000  # tasks; beyond, passes are drawn whole
MICRO = 10**6  # picoseconds in a microsecond, the format's unit
COMPUTE_THREAD = 0
SEND_THREAD = 90


def trace(simulation: Simulation, memory: StepMemory | None = None) -> dict[str, Any]:
    """The trace; with ``memory`` also a track of what each class of devices holds."""
    found = _Events(draw(simulation))
    found.add()
    if memory is not None:
        found.hold(memory)
    return {"traceEvents": [*found.names(), *found.events], "displayTimeUnit": "ms"}


class _Events:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing, self._stages = drawing, drawing.lowered.stages
        self.events: list[Event] = []
        self._threads: dict[tuple[int, int], str] = {}

    def add(self) -> None:
        """All stages."""
        line = self._drawing.ran.timeline
        expanded = line is None or self._drawing.num_tasks <= MOST
        for strip in self._drawing.strips:
            stage = self._stages[strip.stage]
            if line is not None and strip.turn is not None and not (expanded and self._drawing.tasks[strip.tasks]):
                detail = {"micro_batch": strip.turn.micro_batch}
                self._event(stage, 0, COMPUTE_THREAD, turn_text(strip.turn), self._drawing.turns[strip.turn], detail)
            else:
                self._tasks(stage, strip)
        for number, (step, start, end) in enumerate(line.sends if line is not None else ()):
            self._send(number, step, start, end)

    def names(self) -> Iterator[Event]:
        """What processes and threads are called."""
        for stage in self._stages:
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
            for stage in self._stages
            for number, device in enumerate(stage.kind.links.devices)
        }
        for held in memory.stages:
            process = numbers[held.stage, held.device]
            for turn, most, after in ((point.turn, point.most_bytes, point.after_bytes) for point in held.curve):
                start, end = self._drawing.turn_times(held.stage, turn)
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

    def _tasks(self, stage: Stage, strip: Strip) -> None:
        for task, start, end in self._drawing.tasks[strip.tasks]:
            if task.duration:
                thread = COMPUTE_THREAD if not task.streams else 1 + task.streams[0]
                for number in task.classes:
                    detail = {"part": task.part, **dict(task.detail)}
                    times = (strip.start + start, strip.start + end)
                    self._event(stage, number, thread, task.name, times, detail, task.part)

    def _send(self, number: int, step: Pass, start: int, end: int) -> None:
        place, stages = self._drawing.lowered.workload.stages.place_of, self._stages
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
        return sum(len(other.kind.links.devices) for other in self._stages[:stage]) + number


def turn_text(step: Pass) -> str:
    """A turn of a pipeline's stage in words."""
    part = "" if step.part == "all" else f" of {step.part}"
    return f"{'backward' if step.backward else 'forward'}{part} {step.micro_batch}, chunk {step.chunk}"


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
