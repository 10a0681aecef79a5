"""A simulated step as the page draws it: rows, lanes, and strips of tasks, of which equal ones are written once.

Times are whole picoseconds. Entry point: ``timeline``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pdv.memory import StepMemory
from pdv.simulate.drawing import Drawing, Strip
from pdv.simulate.engine.streams import Timed
from pdv.simulate.engine.task import TRANSFER, Task
from pdv.simulate.result import OTHERS

COMPUTE_LANE = 0
Facts = dict[str, Any]  # Any: JSON


def timeline(drawing: Drawing, memory: StepMemory) -> Facts:
    """What runs when, and what is held when; docs/report.md says what the fields are."""
    found = _Strips(drawing)
    for strip in drawing.strips:
        found.add(strip)
    line, place = drawing.ran.timeline, drawing.lowered.workload.stages.place_of
    sends = [
        [place(turn.chunk), place(turn.chunk + (-1 if turn.backward else 1)), start, end, turn.micro_batch]
        for turn, start, end in (() if line is None else line.sends)
    ]
    return {
        "end": drawing.end,
        "pipelined": line is not None,
        "rows": _rows(drawing, found),
        "kinds": [{"name": name, "part": part, **dict(detail)} for name, part, detail in found.kinds],
        "patterns": found.patterns,
        "strips": found.strips,
        "sends": sends,
        "held": _held(drawing, memory),
    }


def traffic(drawing: Drawing) -> dict[str, Facts]:
    """By mesh axis, and `pipeline` of sends: of a device of the busiest stage, bytes of its collectives and their
    picoseconds, waited for or not.
    """
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    moved = [_moved(tasks) for tasks in drawing.tasks]
    for strip in drawing.strips:
        for part, num_bytes, time, count in moved[strip.tasks]:
            total = sums[part][strip.stage]
            total[0] += num_bytes
            total[1] += time
            total[2] += count
    return {part: _busiest(stages) for part, stages in sums.items()} | _sent(drawing)


def _moved(tasks: tuple[Timed, ...]) -> list[tuple[str, float, float, int]]:
    """Communication of the first class of devices, by part: bytes (NaN: nobody says), picoseconds, how many."""
    found: dict[str, tuple[float, float, int]] = {}
    for task, _, _ in tasks:
        if 0 in task.classes and task.duration and task.part not in OTHERS:
            num_bytes = float(dict(task.detail).get("bytes", math.nan))
            before = found.get(task.part, (0.0, 0.0, 0))
            found[task.part] = (before[0] + num_bytes, before[1] + task.duration, before[2] + 1)
    return [(part, *sums) for part, sums in found.items()]


def _sent(drawing: Drawing) -> dict[str, Facts]:
    """Of the stage that sends most: bytes, from what crosses between chunks, and picoseconds."""
    line = drawing.ran.timeline
    if line is None or not line.sends:
        return {}
    place, crossings = drawing.lowered.workload.stages.place_of, drawing.lowered.chunks.crossings
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for turn, start, end in line.sends:
        crossing = crossings[turn.chunk - 1].backward if turn.backward else crossings[turn.chunk].forward
        total = sums[place(turn.chunk)]
        total[0] += crossing
        total[1] += end - start
        total[2] += 1
    return {TRANSFER: _busiest(sums)}


def _busiest(stages: Mapping[int, list[float]]) -> Facts:
    """Of the busiest stage; bytes are null where a part of them is unknown."""
    num_bytes, time, count = max(stages.values(), key=lambda sums: sums[1])
    return {"bytes": None if math.isnan(num_bytes) else num_bytes, "busy_ps": time, "calls": count}


def _held(drawing: Drawing, memory: StepMemory) -> list[Facts]:
    """By stage and kind of device: who holds the peak, and what is allocated at most in each turn and behind it."""
    found = []
    for held in memory.stages:
        points: list[float] = []
        for point in held.curve:
            start, end = drawing.turn_times(held.stage, point.turn)
            points += [start, round(point.most_bytes), end, round(point.after_bytes)]
        found.append(
            {
                "stage": held.stage,
                "device": held.device.name,
                "count": held.count,
                "capacity_bytes": held.device.memory_bytes,
                "total_bytes": held.total_bytes,
                "reserved_bytes": held.reserved_bytes,
                "peak_bytes": held.peak_bytes,
                "when": held.when,
                "fits": held.fits(),
                "by_kind_bytes": held.by_kind,
                "holders": _holders(held.holders),
                "curve": points,
            }
        )
    return found


def _holders(holders: Any, most: int = 8) -> list[list[Any]]:  # Any: pdv.memory.Holder by bytes; JSON
    """The largest, layers together: kind, operator, bytes."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for holder, num_bytes in holders.items():
        found[holder.kind, holder.op] += num_bytes
    largest = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [[kind, op, num_bytes] for (kind, op), num_bytes in largest]


class _Strips:
    """Strips as numbers: [stage, start, pattern, end, micro-batch, way], with patterns and kinds of tasks once each.

    A pattern is five numbers a task: kind, class of devices, lane, start, duration.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self.kinds: dict[tuple[str, str, tuple[tuple[str, float | str], ...]], int] = {}
        self.patterns: list[list[int]] = []
        self.strips: list[list[int]] = []
        self.lanes: dict[tuple[int, int], str] = {}
        self._known: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()  # stages with patterns: hundreds of thousands of strips have few
        self._lanes_of: list[dict[tuple[int, int], str]] = []

    def add(self, strip: Strip) -> None:
        """One more, if there is anything in it."""
        tasks = self._drawing.tasks[strip.tasks]
        if not tasks and (strip.turn is None or self._drawing.ran.timeline is None):
            return
        if strip.tasks not in self._known:
            self._known[strip.tasks] = self._pattern(tasks)
        number = self._known[strip.tasks]
        if (strip.stage, number) not in self._seen:
            self._seen.add((strip.stage, number))
            for (kind, lane), name in self._lanes_of[number].items():
                self.lanes[self._row(strip.stage, kind), lane] = name
        if strip.turn is not None and self._drawing.ran.timeline is not None:
            end = self._drawing.turns[strip.turn][1]
        else:
            end = strip.start + max((end for _, _, end in tasks), default=0)
        self.strips.append([strip.stage, strip.start, number, end, *_turn(strip)])

    def _pattern(self, tasks: tuple[Timed, ...]) -> int:
        numbers: list[int] = []
        lanes: dict[tuple[int, int], str] = {}
        for task, start, end in tasks:
            if task.duration:
                lane = 1 + task.streams[0] if task.streams else COMPUTE_LANE
                kind = self.kinds.setdefault(_kind(task), len(self.kinds))
                for device in task.classes:
                    numbers += [kind, device, lane, start, end - start]
                    lanes[device, lane] = "compute" if lane == COMPUTE_LANE else task.part
        self.patterns.append(numbers)
        self._lanes_of.append(lanes)
        return len(self.patterns) - 1

    def _row(self, stage: int, kind: int) -> int:
        return sum(len(other.kind.links.devices) for other in self._drawing.lowered.stages[:stage]) + kind


def _kind(task: Task) -> tuple[str, str, tuple[tuple[str, float | str], ...]]:
    return task.name, task.part, task.detail


def _turn(strip: Strip) -> tuple[int, int, int]:
    """Micro-batch (-1: what is due once a step), way (0 forward, 1 backward, 2 and 3 its halves), and chunk."""
    if strip.turn is None:
        return -1, 0, -1
    way = {"all": 1, "values": 2, "weights": 3}[strip.turn.part] if strip.turn.backward else 0
    return strip.turn.micro_batch, way, strip.turn.chunk


def _rows(drawing: Drawing, found: _Strips) -> list[Facts]:
    """One for each class of devices of each stage, with the lanes on which it runs anything."""
    rows: list[Facts] = []
    for stage in drawing.lowered.stages:
        links = stage.kind.links
        moves, sums = ({one[0] for axis in of for one in axis} for of in (links.streams, links.sums))
        said = {1 + stream: ", sums" for stream in sums - moves}
        for number, device in enumerate(stage.kind.links.devices):
            row = len(rows)
            lanes = [
                {"lane": lane, "name": name + said.get(lane, "")}
                for (of, lane), name in sorted(found.lanes.items())
                if of == row
            ]
            count = stage.kind.links.counts[number]
            entry = {"stage": stage.number, "class": number, "device": device.name, "count": count, "lanes": lanes}
            rows.append(entry)
    return rows
