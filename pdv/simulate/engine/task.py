"""Tasks of a step in the order of issue, and segments: runs of them whose times are worked out once.

Time is counted in integer picoseconds, so that a run of tasks takes exactly as long whenever it begins: what was
simulated once is not simulated again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

PICO = 10**12  # picoseconds in a second

# What a device's time goes into; communication counts under the mesh axis that it runs along.
COMPUTE, RECOMPUTATION, OPTIMIZER, HOST, WAITING, BUBBLE = (
    "compute",
    "recomputation",
    "optimizer",
    "host",
    "waiting",
    "bubble",
)
TRANSFER = "pipeline"  # sends between stages
OFFLOAD = "offload"  # between a device and its host


def picoseconds(seconds: float) -> int:
    """The nearest number of picoseconds."""
    return round(seconds * PICO)


class Task(NamedTuple):
    """One kernel, or one collective of several devices.

    Attributes:
        name: what traces call it.
        part: what a device's time goes into while it runs (`COMPUTE`, ..., or the name of a mesh axis).
        classes: the classes of devices that take part.
        duration: picoseconds.
        issue: picoseconds of the host of each class, before the task can start.
        streams: what it occupies beside compute: streams of communication and links shared with other axes.
        blocks: whether it occupies the compute stream too: kernels do, and collectives that are waited for.
        makes: the number under which others wait for a task that does not block; -1: nobody does.
        after: numbers of tasks, not blocking ones, that it waits for. Blocking ones precede it in any case.
        slows: picoseconds that it takes from compute beside which it runs.
        detail: for traces: bytes, algorithm, source of the estimate.
    """

    name: str
    part: str
    classes: tuple[int, ...]
    duration: int
    issue: int = 0
    streams: tuple[int, ...] = ()
    blocks: bool = True
    makes: int = -1
    after: tuple[int, ...] = ()
    slows: int = 0
    detail: tuple[tuple[str, float | str], ...] = ()


@dataclass(frozen=True, eq=False)
class Segment:
    """Tasks of one layer's forward or backward. Equal segments are one object.

    ``makes`` and ``after`` of its tasks are relative to where it stands: `Placed.offset` is added.
    """

    tasks: tuple[Task, ...]
    name: str = field(default="", compare=False)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """What tasks wait for that others made."""
        if not any(task.after for task in self.tasks):
            return ()
        made: set[int] = set()
        found: dict[int, None] = {}
        for task in self.tasks:
            found.update((number, None) for number in task.after if number not in made)
            if task.makes >= 0 or not task.blocks:
                made.add(task.makes)
        return tuple(found)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """What others may wait for."""
        return tuple(task.makes for task in self.tasks if not task.blocks)

    @cached_property
    def issue(self) -> dict[int, int]:
        """Picoseconds of each class's host."""
        total: dict[int, int] = {}
        for task in self.tasks:
            for number in task.classes:
                total[number] = total.get(number, 0) + task.issue
        return total


class Placed(NamedTuple):
    """A segment where it runs."""

    segment: Segment
    offset: int = 0
