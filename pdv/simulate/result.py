"""What a simulation found: the step, its deviation, and where its time goes, which adds up to it exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ir.cost_model import Source
from pdv.simulate.engine.pipeline import Timeline
from pdv.simulate.engine.streams import Clocks, Parts
from pdv.simulate.engine.task import PICO
from pdv.simulate.stage import Lowered

# Parts that are no communication, in the order of reports; every other part is a mesh axis or a kind of transfer.
OTHERS = ("compute", "recomputation", "optimizer", "host", "waiting", "bubble")


@dataclass(frozen=True, slots=True)
class Share:
    """Where the time of one class of devices of a stage goes.

    Attributes:
        stage: its number.
        device: the kind of device.
        count: how many of them the stage has.
        parts: picoseconds by part; they add up to the step.
    """

    stage: int
    device: str
    count: int
    parts: Mapping[str, int]

    @property
    def seconds(self) -> dict[str, float]:
        """By part."""
        return {name: time / PICO for name, time in self.parts.items()}

    @property
    def communication(self) -> dict[str, float]:
        """Seconds of exposed communication by mesh axis, and ``pipeline`` and ``tied``, sums between stages."""
        return {name: time / PICO for name, time in self.parts.items() if name not in OTHERS}


@dataclass
class RunResult:
    """A step without stragglers.

    Attributes:
        end: picoseconds.
        parts: by stage and class, adding up to ``end``.
        body: by stage, picoseconds until its last pass; ``tail``: of what is due once a step.
        timeline: of a pipeline.
    """

    end: int
    parts: list[list[Parts]]
    body: list[int]
    tail: list[int]
    timeline: Timeline | None = None
    tails: list[Clocks] = field(default_factory=list)


@dataclass(frozen=True)
class Simulation:
    """One step.

    Attributes:
        step_ps: picoseconds, the mean over drawn stragglers.
        std_s: deviation of the step: errors of the cost model, correlated as ``PlanCost.std_s`` takes them, and drawn
            stragglers.
        straggler_std_s: the part of it that is drawn.
        breakdown: by stage and class of devices; of each, the parts add up to ``step_ps``.
        seconds_by_source: of the device that works most, local work and communication by where their prices are from.
        lowered, ran: what was simulated and when it ran, stragglers apart; ``pdv.simulate.trace`` draws it.
    """

    step_ps: int
    std_s: float
    straggler_std_s: float
    breakdown: tuple[Share, ...]
    seconds_by_source: Mapping[Source, float]
    lowered: Lowered = field(repr=False, compare=False)
    ran: RunResult = field(repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.step_ps / PICO

    @cached_property
    def totals(self) -> dict[str, float]:
        """Seconds by part, mean over all devices; they add up to ``step_s``."""
        devices = sum(share.count for share in self.breakdown)
        found: dict[str, int] = {}
        for share in self.breakdown:
            for name, time in share.parts.items():
                found[name] = found.get(name, 0) + time * share.count
        return {name: time / devices / PICO for name, time in found.items()}
