"""Pipelines by ``torch.distributed.pipelining``, alone and with data parallelism of each stage."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cluster_runs.models import Task
from benchmarks.cluster_runs.trainers import Place, Settings, Trainer, adamw, average, own_block

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline(Trainer):
    """``stages`` stages; where there are more ranks, each stage is trained by several with rows cut over them.

    ``across``: stages lie on different hosts and the ranks of a stage on one, or the other way round.
    """

    def __init__(self, place: Place, settings: Settings) -> None:
        world, stages = dist.get_world_size(), int(settings["stages"])
        self.task, self.bucket = place.task, settings.get("bucket", 25)
        ways = world // stages
        # The mesh is (stages, ranks of a stage) where stages are on different hosts, else the other way round
        outer = settings.get("across", True)
        mesh = place.mesh((stages, ways) if outer else (ways, stages), settings.get("order") == "strided")
        stage_axis, data_axis = ("outer", "inner") if outer else ("inner", "outer")
        group = mesh.get_group(stage_axis)
        number = mesh.get_local_rank(stage_axis)
        self.data = mesh.get_group(data_axis) if ways > 1 else None
        speeds = [place.speeds[rank] for rank in dist.get_process_group_ranks(group)]
        path = settings.get("path") or tuple(range(stages))  # the group's ranks in the order of the stages
        number = path.index(number)
        module = place.task.module()
        cuts = cut(costs(place.task, module), [speeds[i] for i in path], settings["parts"])
        first, last = cuts[number], cuts[number + 1]
        self.module = nn.Sequential(OrderedDict(list(module.named_children())[first:last]))
        stage = PipelineStage(self.module, number, stages, torch.device("cpu"), group=group)
        stage.stage_index_to_group_rank = dict(enumerate(path))
        self.schedule = SCHEDULES[settings["schedule"]](stage, int(settings["micro"]), loss_fn=place.task.loss)
        index = mesh.get_local_rank(data_axis)
        x, y = place.task.batch()
        self.x = own_block(x, index, ways) if number == 0 else None
        self.y = own_block(y, index, ways) if number == stages - 1 else None
        self.optimizer = adamw(self.module.parameters())

    def train(self) -> Tensor | None:
        """See Trainer."""
        losses: list[Tensor] = []
        inputs = () if self.x is None else (self.x,)
        self.schedule.step(*inputs, target=self.y, losses=losses if self.y is not None else None)
        if self.data is not None:
            average([p.grad for p in self.module.parameters() if p.grad is not None], self.data, self.bucket)
        return torch.stack(losses).mean().detach() if losses else None

    def gradients(self) -> dict[str, Tensor]:
        """See Trainer."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}


def costs(task: Task, module: nn.Sequential) -> list[float]:
    """FLOPs of each part's forward pass; a part without any costs next to nothing."""
    found, x = [], task.batch()[0]
    with torch.no_grad():
        for part in module:
            with FlopCounterMode(display=False) as counter:
                x = part(x)
            found.append(float(max(counter.get_total_flops(), 1)))
    return found


def cut(loads: Sequence[float], speeds: Sequence[float], parts: str) -> tuple[int, ...]:
    """Where each stage begins, and the end: equal numbers of parts, or the slowest stage as fast as can be."""
    stages = len(speeds)
    if parts == "equal":
        return tuple(round(i * len(loads) / stages) for i in range(stages + 1))

    def slowest(inner: tuple[int, ...]) -> list[float]:
        bounds = (0, *inner, len(loads))
        times = (sum(loads[a:b]) / s for (a, b), s in zip(itertools.pairwise(bounds), speeds, strict=True))
        return sorted(times, reverse=True)

    best = min(itertools.combinations(range(1, len(loads)), stages - 1), key=slowest)
    return (0, *best, len(loads))
