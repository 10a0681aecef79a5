"""One step of a workload in time. Entry point: ``simulate``.

A single stage runs all its micro-batches on one set of streams; stages of a pipeline are put together from their
chunks. Devices that wait for each other run at the pace of the slowest: its deviation is drawn (``factors``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from pdv.problem.workload import STALE, Workload
from pdv.schedule.order import Pipeline
from pdv.simulate.calibration import Calibration, constants
from pdv.simulate.engine.pipeline import STEADY, Durations, Timeline, compose, way_of
from pdv.simulate.engine.shared import Busy, Cores, compose_shared
from pdv.simulate.engine.streams import Clocks, Parts
from pdv.simulate.engine.task import BUBBLE, COMPUTE, HOST, PICO, RECOMPUTATION, WAITING, Placed, picoseconds
from pdv.simulate.result import RunResult, Share, Simulation
from pdv.simulate.stage import Lowered, Stage, Timed
from pdv.simulate.uncertainty import Confidence, confidence, of_step

Factors = np.ndarray[tuple[int, int], np.dtype[np.float64]]

SURE = 1e-12  # uniform numbers are kept this far from 0 and 1


def simulate(
    workload: Workload, *, calibration: Calibration | None = None, draws: int = 16, seed: int = 0
) -> Simulation:
    """What a step takes, and where its time goes.

    Args:
        workload: a PCG and how it is run.
        calibration: constants of running programs; None: of the one that the workload says.
        draws: of stragglers; 0: no device is slower than another, and the result is deterministic.
        seed: of the draws.

    Raises:
        ShardingError: if the workload's graph is no PCG of its mesh.
    """
    return simulate_lowered(Lowered(workload, calibration or constants(workload.execution)), draws, seed)


def simulate_lowered(lowered: Lowered, draws: int = 16, seed: int = 0) -> Simulation:
    """The same of what is lowered already."""
    ran = run(lowered)
    slowed_s = _draw(lowered, ran, draws, seed)
    late = max(0, picoseconds(float(np.mean(slowed_s)) - ran.end / PICO)) if draws else 0
    straggler_std_s = float(np.std(slowed_s)) if draws else 0.0
    step = ran.end + late
    sure: Confidence = confidence(lowered, ran.parts, step)
    shares = [
        Share(stage.number, device.name, stage.kind.links.counts[number], _with(ran.parts[stage.number][number], late))
        for stage in lowered.stages
        for number, device in enumerate(stage.kind.links.devices)
    ]

    std_s = of_step(lowered, math.hypot(sure.std_s, straggler_std_s), step / PICO)
    return Simulation(step, std_s, straggler_std_s, tuple(shares), sure.by_source, lowered, ran)


def run(lowered: Lowered) -> RunResult:
    """A step in which no device is slower than another of its class."""
    workload, stage = lowered.workload, lowered.stages[0]
    devices = [device for stage in lowered.stages for device in stage.kind.links.devices]
    outside = picoseconds(lowered.calibration.outside_s(devices, train=workload.problem.train))
    if workload.stages.chunks > 1:
        return _pipeline(lowered, outside)
    passes = stage.passes(workload.execution.micro_batches, train=workload.problem.train)
    clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
    for segments in passes:
        stage.kind.engine.run(segments, clocks)
    body = max(clocks.compute)
    stage.kind.engine.run((Placed(stage.tail),), clocks)
    end = max(*clocks.compute, *clocks.streams, 0)
    if not end + outside:  # nothing runs, as of a model that returns its input: a step is a call all the same
        outside = picoseconds(max(device.launch_latency_s for device in devices))
    for parts, at in zip(clocks.parts, clocks.compute, strict=True):
        _add(parts, WAITING, end - at)
        _add(parts, HOST, outside)
    return RunResult(end + outside, [clocks.parts], [body], [end - body])


def _pipeline(lowered: Lowered, outside: int) -> RunResult:
    stages = lowered.stages
    line = _last_step(lowered) if goes_on(lowered) else _timeline(lowered, chunk_durations(lowered))
    begins = list(line.ends)
    shared = lowered.tied_stages
    for number in shared:
        begins[number] = max(line.ends[other] for other in shared)
    found: list[list[Parts]] = []
    tails = []
    for stage in stages:
        links, start = stage.kind.links, begins[stage.number]
        clocks = Clocks.quiet(len(links.devices), links.num_streams)
        for number in range(len(links.devices)):
            clocks.compute[number] = clocks.host[number] = start
            clocks.parts[number] = _stage_parts(lowered, stage, number, line)
            _add(clocks.parts[number], BUBBLE, start - line.ends[stage.number])
        clocks.streams[:] = [max(start, line.behind[stage.number])] * links.num_streams
        stage.kind.engine.run((Placed(stage.tail),), clocks)
        tails.append(clocks)
        found.append(clocks.parts)
    end = line.period if goes_on(lowered) else max(max(clocks.compute) for clocks in tails)
    for clocks in tails:
        for parts, at in zip(clocks.parts, clocks.compute, strict=True):
            _add(parts, BUBBLE, end - at)
            _add(parts, HOST, outside)
    tail = [max(clocks.compute) - begin for clocks, begin in zip(tails, begins, strict=True)]
    body = [own[-1][2] for own in line.passes] if goes_on(lowered) else list(line.ends)
    return RunResult(end + outside, found, body, tail, line, tails)


def goes_on(lowered: Lowered) -> bool:
    """Whether a stage begins a step before others end the one before: none waits for others to sum what both hold."""
    stale = lowered.workload.execution.order in STALE and lowered.workload.problem.train
    return stale and not lowered.tied_stages


def _last_step(lowered: Lowered) -> Timeline:
    """Of several steps of a pipeline that none empties."""
    durations, tails = chunk_durations(lowered), []
    for stage, own in zip(lowered.stages, durations, strict=True):
        clocks = Clocks.quiet(len(stage.kind.links.devices), stage.kind.links.num_streams)
        clocks.streams[:] = [own.behind] * stage.kind.links.num_streams
        stage.kind.engine.run((Placed(stage.tail),), clocks)
        tails.append(max(clocks.compute))
    durations = [one._replace(tail=tail) for one, tail in zip(durations, tails, strict=True)]
    line = _timeline(lowered, durations).last_step(pipeline_of(lowered.workload), tails)
    line.behind = [end + one.behind for end, one in zip(line.ends, durations, strict=True)]
    return line


def _timeline(lowered: Lowered, durations: Sequence[Durations]) -> Timeline:
    """Passes of all stages, on cores that they share where they do."""
    several = STEADY if goes_on(lowered) else 0
    workload = lowered.workload
    pipeline, blocking = pipeline_of(workload), not workload.execution.overlap.transfers
    cores = Cores.of(workload.cluster, workload.stages.count)
    if cores is None:
        return compose(pipeline, durations, lowered.sends, blocking=blocking, several=several)
    busy = chunk_busy(lowered)
    return compose_shared(pipeline, durations, busy, lowered.sends, cores, blocking=blocking, several=several)


def chunk_busy(lowered: Lowered) -> list[Busy]:
    """By chunk, the part of each pass in which its devices compute."""
    found: dict[int, Busy] = {}
    for stage in lowered.stages:
        for chunk, program in zip(stage.chunks, stage.programs, strict=True):
            passes = [lowered.timed(stage, one) for one in (program.forward, program.backward, program.last)]
            found[chunk] = Busy(*map(_busy, passes))
    return [found[chunk] for chunk in range(len(found))]


def _busy(timed: Timed) -> float:
    most = max(sum(parts.get(kind, 0) for kind in (COMPUTE, RECOMPUTATION)) for parts in timed.parts)
    return most / timed.duration if timed.duration else 0.0


def chunk_durations(lowered: Lowered) -> list[Durations]:
    """By chunk."""
    found: dict[int, Durations] = {}
    for stage in lowered.stages:
        for chunk, program in zip(stage.chunks, stage.programs, strict=True):
            forward, backward = lowered.timed(stage, program.forward), lowered.timed(stage, program.backward)
            last = lowered.timed(stage, program.last)
            weight = lowered.weight_time(stage, chunk)
            found[chunk] = Durations(forward.duration, backward.duration, last.duration, last.behind, weight)
    return [found[chunk] for chunk in range(len(found))]


def pipeline_of(workload: Workload) -> Pipeline:
    """The schedule's shape."""
    stages, execution = workload.stages, workload.execution
    train, moments = workload.problem.train, execution.moments
    return Pipeline(stages.count, stages.virtual, execution.micro_batches, execution.order, train, moments)


def _stage_parts(lowered: Lowered, stage: Stage, number: int, line: Timeline) -> Parts:
    """Of a class of devices until its stage's last pass."""
    parts = dict(line.waits[stage.number])
    counts: dict[tuple[int, int], int] = {}
    final = pipeline_of(lowered.workload).final
    for step, _, _ in line.passes[stage.number]:
        if step.part != "values":  # counted with the other half
            way = (0, 1, 2, 0, 1, 2)[way_of(step, final)]
            counts[step.chunk, way] = counts.get((step.chunk, way), 0) + 1
    for (chunk, way), count in counts.items():
        program = stage.programs[stage.chunks.index(chunk)]
        timed = lowered.timed(stage, (program.forward, program.backward, program.last)[way])
        for name, time in timed.parts[number].items():
            _add(parts, name, count * time)
    gained = line.gained[stage.number]
    computed = {kind: parts[kind] for kind in (COMPUTE, RECOMPUTATION) if kind in parts}
    for kind, time in computed.items():
        parts[kind] -= gained * time // sum(computed.values())
    rest = line.ends[stage.number] - sum(parts.values())
    _add(parts, max(computed, key=lambda kind: computed[kind], default=WAITING), rest if gained else 0)
    return parts


def _draw(lowered: Lowered, ran: RunResult, draws: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of the step in each draw."""
    size = lowered.workload.num_devices
    slow = factors(len(lowered.stages), size, draws, lowered.calibration.straggler_std, seed)
    if not draws:
        return np.zeros(0)
    if ran.timeline is None or goes_on(lowered):
        return np.asarray(ran.end / PICO * slow.max(axis=0), dtype=np.float64)
    line_ends = _drawn_ends(lowered, slow)
    ends = [line_ends[number] + ran.tail[number] * slow[number] for number in range(len(lowered.stages))]
    base = max(end + tail for end, tail in zip(ran.body, ran.tail, strict=True))
    drawn = np.max(np.stack(ends), axis=0) + (ran.end - base)
    return np.asarray(drawn / PICO, dtype=np.float64)


def _drawn_ends(lowered: Lowered, slow: Factors) -> list[np.ndarray[Any, Any]]:
    """[stages][draws] picoseconds until the last pass of a stage, its devices slower by ``slow`` [stages, draws]."""
    nominal, workload = chunk_durations(lowered), lowered.workload
    place = workload.stages.place_of
    if Cores.of(workload.cluster, workload.stages.count) is not None:
        drawn = [
            _timeline(lowered, [_slower(of, slow[place(chunk), draw]) for chunk, of in enumerate(nominal)]).ends
            for draw in range(slow.shape[1])
        ]
        return list(np.array(drawn).T)
    durations = [Durations(*(np.round(time * slow[place(chunk)]) for time in of)) for chunk, of in enumerate(nominal)]
    blocking = not workload.execution.overlap.transfers
    line = compose(
        pipeline_of(workload), durations, lowered.sends, blocking=blocking, later=np.maximum, record=False, several=0
    )
    return line.ends


def _slower(durations: Durations, factor: float) -> Durations:
    return Durations(*(round(time * factor) for time in durations))


def _with(parts: Parts, late: int) -> Parts:
    found = dict(parts)
    _add(found, WAITING, late)
    return found


def _add(parts: Parts, name: str, time: int) -> None:
    if time:
        parts[name] = parts.get(name, 0) + time


def factors(
    stages: int, devices: int, draws: int, std: float, seed: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[stages, draws]: by what the slowest of a stage's devices is slower; never less than half of what a step takes.

    The largest of n standard normals is drawn at once, by the inverse of its distribution function at the n-th root of
    a uniform number, so that 100,000 devices cost no more than one. Draws are spread evenly (McKay et al.,
    Technometrics 1979), for a few of them to have the mean of many.
    """
    rng = np.random.default_rng(seed)
    spread = np.stack([rng.permutation(draws) for _ in range(stages)]) if draws else np.zeros((stages, 0))
    uniform = np.clip((spread + rng.random((stages, draws))) / max(draws, 1), SURE, 1.0 - SURE)
    normal = NormalDist()
    largest = [[normal.inv_cdf(min(u ** (1.0 / devices), 1.0 - SURE)) for u in row] for row in uniform.tolist()]
    return np.maximum(0.5, 1.0 + std * np.array(largest).reshape(stages, draws))
