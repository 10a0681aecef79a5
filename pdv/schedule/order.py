"""In which order each stage of a pipeline runs forward and backward of its micro-batches.

GPipe (Huang et al., NeurIPS'19), 1F1B (Narayanan et al., "PipeDream", SOSP'19, its variant that flushes) and
interleaved 1F1B (Narayanan et al., SC'21, section 2.2). Entry point: ``orders``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Order = Literal["gpipe", "1f1b", "interleaved"]


class Pass(NamedTuple):
    """A micro-batch through one chunk, forward or backward; chunks are numbered in the order of the model."""

    chunk: int
    micro_batch: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``stages`` with ``virtual`` chunks each; chunk ``c`` lives on stage ``c % stages``."""

    stages: int
    virtual: int
    micro_batches: int
    order: Order
    train: bool = True


@lru_cache(maxsize=64)
def orders(pipeline: Pipeline) -> tuple[tuple[Pass, ...], ...]:
    """By stage, its passes in order."""
    return tuple(_stage(pipeline, stage) for stage in range(pipeline.stages))


def in_flight(pipeline: Pipeline, stage: int) -> int:
    """The most chunks' activations that a stage holds at once: forward passes without their backward."""
    held = most = 0
    for step in orders(pipeline)[stage]:
        held += -1 if step.backward else 1
        most = max(most, held)
    return most


def _stage(pipeline: Pipeline, stage: int) -> tuple[Pass, ...]:
    forward = _forward(pipeline, stage)
    if not pipeline.train:
        return tuple(forward)
    last = pipeline.virtual - 1
    backward = [Pass(stage + (last - chunk // pipeline.stages) * pipeline.stages, m, True) for chunk, m, _ in forward]
    if pipeline.order == "gpipe":
        return (*forward, *backward)
    ahead = min(_warm_up(pipeline, stage), len(forward))
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
    p, m = pipeline.stages, pipeline.micro_batches
    if pipeline.order == "gpipe" or m < 2 * p:
        return [range(m)]
    starts = range(0, m - m % p, p)
    return [range(start, m if start == starts[-1] else start + p) for start in starts]


def _warm_up(pipeline: Pipeline, stage: int) -> int:
    """Forward passes before the first backward pass, which takes turns with a further one."""
    behind = pipeline.stages - 1 - stage
    if pipeline.virtual == 1:
        return behind
    most = max(pipeline.stages, *(len(group) for group in _groups(pipeline)))
    return 2 * behind + (pipeline.virtual - 1) * most
