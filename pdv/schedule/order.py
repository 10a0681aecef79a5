"""In which order each stage of a pipeline runs forward and backward of its micro-batches.

GPipe (Huang et al., NeurIPS'19), 1F1B (Narayanan et al., "PipeDream", SOSP'19, its variant that flushes), eager 1F1B
(Zhuang et al., "On optimizing the communication of model parallelism", MLSys'23: twice as many forward passes ahead,
behind which sends hide) and interleaved 1F1B (Narayanan et al., SC'21, section 2.2); those whose gradients of weights
may wait are in ``halves``.
2bw is 1F1B that goes on from step to step (PipeDream-2BW, Narayanan et al., ICML'21): a step ends what is left of the
batch before, and begins its own, whose micro-batches are numbered on from that one's.
Where micro-batches pass in slices (TeraPipe, Li et al., ICML'21), passes are numbered slice by slice: forward in order,
backward of each micro-batch from its last slice to its first, which is what stages wait for before they begin.
Entry points: ``orders``, and ``why_not`` of what has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pdv.problem.workload import AHEAD, FOLDED, IN_HALVES, ONE_EACH, STALE, Order, Stages
from pdv.schedule.halves import dualpipev, zbv, zero_bubble
from pdv.schedule.passes import Pass

FILLED = 3  # times as many micro-batches as stages: what a pipeline holds it has held by then


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``stages`` with ``virtual`` chunks each; where each lives: ``layout``.

    moments: slices of a micro-batch in time, each of which passes by itself.
    """

    stages: int
    virtual: int
    micro_batches: int
    order: Order
    train: bool = True
    moments: int = 1

    @property
    def count(self) -> int:
        """How often a step passes each chunk, one way."""
        return self.micro_batches * self.moments

    @property
    def final(self) -> int:
        """The number of the last pass backward."""
        return self.count - self.moments

    def back(self, number: int) -> int:
        """The pass forward to whose backward pass it comes to in the place of this one."""
        return number + self.moments - 1 - 2 * (number % self.moments)

    @property
    def layout(self) -> Stages:
        """Which chunks each stage has."""
        return Stages(self.stages, self.virtual, folded=self.order in FOLDED)

    def shortened(self, rounds: int) -> Pipeline:
        """With fewer micro-batches by a multiple of stages, ``rounds`` times as many as those or a few more.

        The same where there are no more, and where passes do not take turns but all go forward first.
        """
        p, most = self.stages, (rounds + 1) * self.stages
        if self.order == "gpipe" or not self.train or self.micro_batches < most:
            return self
        return replace(self, micro_batches=rounds * p + self.micro_batches % p)

    def ahead(self, stage: int) -> tuple[Pass, ...]:
        """Forward passes of a stage that the step before has made."""
        count = self.stages - 1 - stage if self.order in STALE and self.train else 0
        return tuple(Pass(stage, number) for number in range(count))


@lru_cache(maxsize=64)
def orders(pipeline: Pipeline) -> tuple[tuple[Pass, ...], ...]:
    """By stage, its passes in order."""
    return tuple(_stage(pipeline, stage) for stage in range(pipeline.stages))


def why_not(order: Order, ranks: int, each: int, micro_batches: int, *, recomputes: bool) -> str:
    """Why passes cannot be in an order on so many ranks of a pipeline, ``each`` with so many stages; "" if they can.

    As ``torch.distributed.pipelining`` asks, which runs them.
    """
    if order in ONE_EACH and each != 1:
        return f"{each} stages on each of {ranks} ranks in the order {order}, which has one"
    if order in STALE and micro_batches < ranks:
        return f"{micro_batches} micro-batches in the order {order} on {ranks} stages, which asks for as many"
    if order in FOLDED and each != 2:
        return f"{each} stages on each of {ranks} ranks in the order {order}, which has two"
    if order == "interleaved" and each < 2:
        return "one stage on each rank, which leaves nothing to interleave"
    if order in ("interleaved", "zero-bubble") and micro_batches % ranks:
        return f"{micro_batches} micro-batches take turns on stages of {ranks} ranks, which asks for a multiple"
    if order == "dualpipev" and micro_batches < 2 * ranks:
        return f"{micro_batches} micro-batches in the order dualpipev on {2 * ranks} stages, which asks for as many"
    if order in IN_HALVES and recomputes:
        what = f"the order {order} with recomputation or activations on the host"
        return f"{what}: gradients of weights that wait hold what that would let go of"
    return ""


def in_flight(pipeline: Pipeline, stage: int) -> int:
    """The most chunks' activations that a stage holds at once: forward passes without their backward."""
    return sum(most_held(pipeline, stage).values())


@lru_cache(maxsize=1 << 12)  # of estimates of a candidate, which share few pipelines
def most_held(pipeline: Pipeline, stage: int) -> Mapping[int, int]:
    """The same by chunk, at the first moment when there are most."""
    held = dict.fromkeys(pipeline.layout.chunks_on(stage), 0)
    now = most = 0
    found = dict(held)
    few = pipeline.shortened(FILLED)
    for step in (*few.ahead(stage), *orders(few)[stage]):
        change = {"all": -1, "values": 0, "weights": -1}[step.part] if step.backward else 1
        held[step.chunk] += change
        now += change
        if now > most:
            most, found = now, dict(held)
    return found


def _stage(pipeline: Pipeline, stage: int) -> tuple[Pass, ...]:
    if pipeline.order in FOLDED and pipeline.train:
        return (zbv if pipeline.order == "zbv" else dualpipev)(stage, pipeline.stages, pipeline.micro_batches)
    forward = _forward(pipeline, stage)
    if not pipeline.train:
        return tuple(forward)
    last = pipeline.virtual - 1
    backward = [
        Pass(stage + (last - chunk // pipeline.stages) * pipeline.stages, pipeline.back(m), True)
        for chunk, m, *_ in forward
    ]
    if pipeline.order == "gpipe":
        return (*forward, *backward)
    ahead = min(_warm_up(pipeline, stage), len(forward))
    if pipeline.order in IN_HALVES:
        return zero_bubble(stage, forward, backward, ahead)
    if pipeline.order in STALE:
        following = [Pass(stage, pipeline.micro_batches + number) for number in range(ahead)]
        return tuple(one for pair in zip([*forward[ahead:], *following], backward, strict=True) for one in pair)
    steady: list[Pass] = []
    for one, other in zip(forward[ahead:], backward, strict=False):
        steady += [one, other]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


def _forward(pipeline: Pipeline, stage: int) -> list[Pass]:
    """Micro-batches in groups, each group through one chunk after the other."""
    return [
        Pass(stage + chunk * pipeline.stages, micro_batch)
        for group in _groups(pipeline)
        for chunk in range(pipeline.virtual)
        for micro_batch in group
    ]


def _groups(pipeline: Pipeline) -> list[range]:
    """Of as many micro-batches as there are stages; what is left over joins the last group, as in Megatron-LM."""
    p, m = pipeline.stages, pipeline.count
    if pipeline.order == "gpipe" or m < 2 * p:
        return [range(m)]
    starts = range(0, m - m % p, p)
    return [range(start, m if start == starts[-1] else start + p) for start in starts]


def _warm_up(pipeline: Pipeline, stage: int) -> int:
    """Forward passes before the first backward pass, which takes turns with a further one."""
    behind = pipeline.stages - 1 - stage
    if pipeline.virtual == 1:
        return AHEAD.get(pipeline.order, 1) * behind + pipeline.moments - 1
    most = max(pipeline.stages, *(len(group) for group in _groups(pipeline)))
    return (1 if pipeline.order in IN_HALVES else 2) * behind + (pipeline.virtual - 1) * most
