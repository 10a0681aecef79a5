"""What each rank of a cell does: check every competitor, tune it, then step the finalists in turn.

    python -m benchmarks.cluster_runs.measure SPEC RANK

SPEC is a JSON file that ``launch`` writes; rank 0 writes the answer. A step begins for all ranks behind a barrier and
ends when the last rank has ended it.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cluster_runs.clusters import CLUSTERS
from benchmarks.cluster_runs.models import TASKS, Task
from benchmarks.cluster_runs.profile import measure_links, profile_step
from benchmarks.cluster_runs.strategies import OWN, Strategy, is_own, packages_in, strategies_for
from benchmarks.cluster_runs.trainers import Place, Settings, Trainer

Row = dict[str, Any]  # Any: JSON
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
SCALE_FLOOR = 1e-3  # of the largest gradient: what is far smaller is rounding (a key's bias has a gradient of zero)
HOPELESS = 1.5  # times the experts' best step so far: a setting this slow in one step is not stepped again
# Up to so many times the experts' best tuned step: stepped every so many rounds
EVERY = ((1.6, 1), (4.0, 4), (math.inf, 10))
COMPARED = 8  # first steps, before each of which an emitted program compares its ranks
BEHIND = 3.0  # times the experts' best step so far: a strategy whose start is this slow is not tuned further


@cache
def mesh_of(shape: tuple[int, ...], strided: bool) -> DeviceMesh:
    """All ranks as a mesh; neighbours in rank lie along the last axis, or with ``strided`` along the first."""
    ranks = torch.arange(dist.get_world_size())
    ranks = ranks.view(*reversed(shape)).permute(*reversed(range(len(shape)))) if strided else ranks.view(shape)
    return DeviceMesh("cpu", ranks.contiguous(), mesh_dim_names=("outer", "inner")[-len(shape) :])


def timed(trainer: Trainer) -> tuple[float, float, float]:
    """Seconds of a step, of what precedes the optimizer, and of this thread's CPU; on this rank."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.thread_time()
    trainer.train()
    trained = time.perf_counter()
    trainer.update()
    ended = time.perf_counter()
    return ended - started, trained - started, time.thread_time() - cpu


def slowest(values: list[float]) -> list[float]:
    """Of all ranks, each."""
    x = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return [float(value) for value in x.tolist()]


def reference(task: Task) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    module, (x, y) = task.module(), task.batch()
    loss = task.loss(module(x), y)
    torch.autograd.backward(loss)
    return float(loss), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check(trainer: Trainer, expected: tuple[float, dict[str, Tensor]]) -> tuple[float, float]:
    """Relative difference of loss and of gradients, by each one's largest element, from one process's."""
    loss = trainer.train()
    seen = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0], dtype=torch.float64)
    dist.all_reduce(seen)
    found = trainer.gradients()
    scale = SCALE_FLOOR * max(float(g.abs().max()) for g in expected[1].values())
    errors = [
        float((found[name] - wanted).abs().max()) / max(float(wanted.abs().max()), scale)
        for name, wanted in expected[1].items()
        if name in found
    ]
    trainer.update()
    here = [abs(float(seen[0] / seen[1]) / expected[0] - 1), max(errors)]
    wrong_loss, wrong_gradient = slowest(here)
    return wrong_loss, wrong_gradient


def tune(strategy: Strategy, place: Place, best_s: float, steps: int) -> tuple[float, Settings, list[Row]]:
    """The best settings of a strategy, one dimension after the other; its step, and all that was tried."""
    tried: list[Row] = []
    rows, world = place.task.batch()[1].size(0), dist.get_world_size()
    assert is_own(strategy.name) or strategy.allows(strategy.start(), rows, world), strategy.start()

    def seconds(settings: Settings, bound: float) -> float:
        trainer = strategy.make(place, settings)
        timed(trainer)  # makes buffers, learns shapes
        found = slowest([timed(trainer)[0]])[0]
        if found < HOPELESS * bound:
            found = min(found, *slowest([timed(trainer)[0] for _ in range(steps)]))
        tried.append({"settings": settings, "step_s": found})
        return found

    best = strategy.start()
    fastest = seconds(best, best_s)
    for choices in strategy.dimensions(best):
        if fastest > BEHIND * best_s:
            break
        for settings in choices:
            if not strategy.allows(settings, rows, world):
                continue
            if (found := seconds(settings, min(best_s, fastest))) < fastest:
                fastest = found
                best.update(settings)
    return fastest, best, tried


def run(spec: Row) -> Row:
    """A cell: rows of all strategies."""
    cluster = CLUSTERS[spec["cluster"]]
    task = TASKS[spec["task"]]
    speeds = tuple(cluster.share_of(cluster.host_of(rank)) for rank in range(cluster.size))
    place = Place(task, speeds, mesh_of)
    expected = reference(task)
    experts = [one for one in strategies_for(task.name, cluster) if not spec["only"] or one.name in spec["only"]]
    known = [*packages_in(spec["folder_of_plans"], spec["plans"]), *experts]
    links = measure_links(slowest)
    say(f"  links: {links}")
    found: dict[str, Row] = {}
    best_s = float("inf")
    for strategy in known:
        began = time.perf_counter()
        step_s, settings, tried = tune(strategy, place, best_s, spec["tune"])
        best_s = best_s if is_own(strategy.name) else min(best_s, step_s)
        found[strategy.name] = {"settings": settings, "tuned_s": step_s, "tried": tried}
        say(f"  {strategy.name}: {step_s * 1e3:.0f} ms, {settings}, tuned in {time.perf_counter() - began:.0f} s")
    trainers = {one.name: one.make(place, found[one.name]["settings"]) for one in known}
    for name, trainer in trainers.items():
        loss, gradient = check(trainer, expected)
        found[name] |= {"loss_error": loss, "gradient_error": gradient}
        if loss > LOSS_TOLERANCE or gradient > GRADIENT_TOLERANCE:
            raise AssertionError(f"{name} is wrong: loss off by {loss:.1e}, gradients by {gradient:.1e}")
    for name, row in found.items():
        behind = 1.0 if name == OWN else row["tuned_s"] / best_s  # of the experts' best: pdv's lead costs nobody steps
        row["every"] = next(every for most, every in EVERY if behind <= most)
    alternate(trainers, found, spec["rounds"])
    for name, trainer in trainers.items():
        found[name]["profile"] = profile_step(trainer, slowest)
    return {"links": links, "strategies": found}


def alternate(trainers: dict[str, Trainer], found: dict[str, Row], rounds: int) -> None:
    """One step of each in turn, the first one another each round; seconds of the slowest rank, by round."""
    for name, trainer in trainers.items():
        for _ in range(COMPARED if is_own(name) else 1):
            timed(trainer)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trainers}
    names = list(trainers)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if number % found[name]["every"] == 0:
                times[name].append(timed(trainers[name]))
    for name, rows in times.items():
        whole, train, cpu = (slowest([row[part] for row in rows]) for part in range(3))
        found[name] |= {"steps_s": whole, "train_s": train, "cpu_s": cpu}


def say(text: str) -> None:
    """One line, by rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """One rank."""
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    store, timeout = f"file://{spec['folder']}/store", dt.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=spec["world"], timeout=timeout)
    try:
        answer = run(spec)
        dist.barrier()
    except BaseException:
        Path(spec["folder"], f"error-{rank}").write_text(traceback.format_exc())
        raise
    if rank == 0:
        Path(spec["folder"], "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
