"""A model whose stages are on different ranks, which a step runs micro-batch by micro-batch: ``PipelinedModule``.

Stages and values between them are named in ``model.py``. ``torch.distributed.pipelining`` sends values and gradients
between neighbours and orders the passes (GPipe, Huang et al., NeurIPS'19; 1F1B, Narayanan et al., SOSP'19; interleaved
1F1B, Narayanan et al., SC'21; zero bubble and ZBV, Qi et al., ICLR'24; DualPipeV, DeepSeek-AI, 2025); a value that a
later stage reads passes through those between. ``later.py`` has what no step empties (2bw), and GPipe and 1F1B on CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .accumulate import Given, Scales
from .calls import cast_inputs
from .kernels.tied import Tied
from .later import EAGER, LaterWeights, Turns, TwoBatches, eager_schedule, unbroken
from .parallel import NONE
from .runtime import Bounds, Cuts, Mesh, ParallelModule, Shapes, Weights

ORDERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""In ``torch.distributed.pipelining``; all but the first two take several stages on each rank."""
ONE_STAGE_EACH = ("gpipe", EAGER, "1f1b")
HERE = ("cpu",)
"""Devices for which this file has passes of one stage on each rank in turns."""
FOLDED = ("zbv", "dualpipev")
"""Two stages on each rank: one on the way through the ranks, and one on the way back."""
IN_HALVES = ("zero-bubble", *FOLDED)
"""Gradients of weights may wait."""
TWO_VERSIONS = "2bw"
"""Gradients are of weights one step old: a step begins a batch and ends the one before (``drain`` ends the last)."""


class Stage(NamedTuple):
    """One stage: its class, the names of the values and inputs that it takes, and of the values that it gives."""

    make: Callable[[Mesh, Weights], nn.Module]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class PipelinedModule(ParallelModule):
    """A model as a chain of stages, on the ranks of a pipeline in turn, or all on every rank, one after another.

    stages: in order. inputs, cuts, most, batch_axes, own_types: as ``ParallelModule``, of one micro-batch.
    micro_batches: in a step. order: of their passes, one of ``ORDERS``, ``EAGER`` or ``TWO_VERSIONS``.
    joint: axes that stages take as one; every rank makes their groups, whichever stage it has.
    tied: parameters that several stages hold, as names by stage; their gradients are summed.
    """

    def __init__(
        self,
        mesh: Mesh,
        weights: Weights,
        stages: Sequence[Stage],
        *,
        batch_axes: Sequence[str],
        inputs: Shapes,
        cuts: Cuts = NONE,
        most: Bounds = NONE,
        micro_batches: int = 1,
        order: str = "1f1b",
        joint: Sequence[tuple[str, ...]] = (),
        tied: Sequence[Mapping[int, str]] = (),
        own_types: Sequence[str] = (),
    ) -> None:
        super().__init__(mesh, batch_axes, inputs, cuts, most, micro_batches, own_types)
        for names in joint:
            mesh[names]
        self.order = order
        self.chain = tuple(stages)
        self.own = [number for number in range(len(stages)) if self.place(number) == mesh.stage.rank]
        self.stages = nn.ModuleDict({str(number): stages[number].make(mesh, weights) for number in self.own})
        self.tied = Tied(self, tied)
        self._schedules: dict[object, Any] = {}  # by what ``Given.kinds`` says
        self._given: dict[int, Given] = {}
        self._num_hooks = self._count_hooks()
        self.scales = Scales(self) if mesh.stage.size > 1 else None

    def _count_hooks(self) -> int:
        """Of those that a call of the model would call."""
        kinds = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        return sum(map(len, kinds))

    def place(self, number: int) -> int:
        """The place, in its pipeline, of a stage."""
        turn, place = divmod(number, self.mesh.stage.size)
        back = turn % 2 == 1 and self.order in FOLDED
        return self.mesh.stage.size - 1 - place if back else place

    def __getstate__(self) -> dict[str, Any]:
        """Of a copied model: it makes schedules of its own."""
        return {**self.__dict__, "_schedules": {}, "_given": {}}

    # ---- Forward, without gradients where stages are apart ----

    def forward(self, *args: Tensor, **named: Tensor) -> Any:
        """Takes the whole batch on every rank, returns this rank's rows of the output, on every stage.

        Raises:
            RuntimeError: if gradients are wanted of stages on different ranks: these are ``train_step``'s.
        """
        values: dict[str, Any] = {**dict(zip(self.takes, args, strict=False)), **named}
        for unit in self.mesh.sums.kept if not self.mesh.sums.is_quiet else ():
            unit.begin()
        if self.mesh.stage.size == 1:
            return [self._run(number, values) for number in range(len(self.chain))][-1]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "no-gradients-here: the stages of this model are on different ranks. Call train_step, which runs "
                "forward and backward of all micro-batches, or call the model under torch.no_grad()."
            )
        return self._relay(values)

    def _run(self, number: int, values: dict[str, Any]) -> Any:
        """What a stage returns; its values are added to the others."""
        stage = self.chain[number]
        output = self.stages[str(number)](*(values[name] for name in stage.takes))
        values.update(zip(stage.gives, output if isinstance(output, tuple) else (output,), strict=True))
        return output

    def _relay(self, values: dict[str, Any]) -> Any:
        """The last stage's output on every rank; each stage gets what it takes from those before it."""
        for number, stage in enumerate(self.chain):
            if number in self.own:
                self._run(number, values)
            for name in stage.gives:
                values[name] = self._broadcast(values.get(name), self.place(number))
        results = tuple(values[name] for name in self.chain[-1].gives)
        return results if len(results) > 1 else results[0]

    def _broadcast(self, x: Tensor | None, place: int) -> Tensor:
        """A value of one rank of the pipeline on all of them."""
        meta = [None if x is None else (x.shape, x.dtype)]
        dist.broadcast_object_list(meta, src=self.peer(place), group=self.mesh.stage.group, device=self.mesh.device)
        shape, dtype = meta[0]  # type: ignore[misc]  # the stage that has it said so
        x = torch.empty(shape, dtype=dtype, device=self.mesh.device) if x is None else x.detach().contiguous()
        dist.broadcast(x, src=self.peer(place), group=self.mesh.stage.group)
        return x

    def peer(self, place: int) -> int:
        """The rank, of all, at a place of this rank's pipeline."""
        ranks = self.mesh.by_stage()
        return int(ranks[place][ranks[self.mesh.stage.rank] == dist.get_rank()])

    def own_parameters(self) -> Sequence[Tensor]:
        """See ParallelModule: of those that several stages hold, the first stage's."""
        others = {id(parameter) for parameter in self.tied.held_before()}
        return [parameter for parameter in self.parameters() if id(parameter) not in others]

    # ---- A training step ----

    def run_batches(self, given: Given) -> None:
        """Forward and backward of every micro-batch, in order; gradients are summed behind a stage's last."""
        if self.mesh.stage.size == 1:
            super().run_batches(given)
            return
        for unit in self.mesh.sums.kept[:1] if self.mesh.sums.use_leaves else ():
            unit.start()  # while the stage's first micro-batch comes
        if self.order in ONE_STAGE_EACH and self.mesh.device.type in HERE:
            turns = self._schedules.get(Turns) or Turns(self, _Link(self, self.own[0], self._carried()))
            self._schedules[Turns] = turns
            like = self.sent(given)[self.own[0] : self.own[0] + 2]
            with self.mesh.sums.hold_quietly(), unbroken(self):
                turns.run(given, like)
            self.end_step()
            return
        self._given = {0: given}
        numbers = torch.arange(len(given.batches))
        schedule = self._schedule(given)
        with self.mesh.sums.hold_quietly(), unbroken(self):
            schedule.step(
                *([numbers] if 0 in self.own else []),
                target=numbers if len(self.chain) - 1 in self.own else None,
                number=numbers,
                return_outputs=False,  # else the outputs of all micro-batches are kept, and copied into one
            )
        self.end_step()
        self._given = {}

    def end_step(self) -> None:
        """Sum what waits, and over stages what several hold."""
        self.flush()
        self.tied.sum_gradients()

    def run_given(self, given: Given) -> Tensor:
        """See ParallelModule; of stale weights, the loss and gradients of the batch before, nan where there is none."""
        if self.mesh.stage.size > 1 and self._count_hooks() != self._num_hooks:
            raise RuntimeError(
                "hooks-not-called: this model has a hook of register_forward_hook, register_full_backward_hook or the "
                "like, and its stages are on different ranks: nobody calls the whole of it. Remove the hook; what it "
                "does to outputs goes into loss_fn."
            )
        for unit in self.mesh.sums.kept:
            unit.begin()
        return self.two.go_on(given) if self.two else super().run_given(given)

    @property
    def two(self) -> TwoBatches | None:
        """What no step empties, made once, if the stages are run so; nothing is under way in that of a copied model."""
        if self.order != TWO_VERSIONS or self.mesh.stage.size == 1:
            return None
        if TWO_VERSIONS not in self._schedules:
            self._schedules[TWO_VERSIONS] = TwoBatches(self, _Link(self, self.own[0], self._carried()))
        made: TwoBatches = self._schedules[TWO_VERSIONS]
        return made

    @property
    def is_under_way(self) -> bool:
        """Whether a batch was begun whose gradients are still to come (``drain``)."""
        return self.two is not None and self.two.is_under_way

    def drain(self) -> Tensor:
        """The loss, and the gradients, of the batch that is under way, nan if none is; then nothing is."""
        return self.two.go_on(None) if self.two else torch.full((), torch.nan, device=self.mesh.device)

    # ---- torch.distributed.pipelining ----

    def sent(self, given: Given) -> list[tuple[Tensor, ...]]:
        """By stage, what it takes, and what the last one gives, without data, for micro-batches of these shapes."""
        key = "sent", *given.kinds(self)
        if key not in self._schedules:
            self._schedules[key] = [(), *self._sent_values(self.named(given.batches[0]))]
        found: list[tuple[Tensor, ...]] = self._schedules[key]
        return found

    def _schedule(self, given: Given) -> Any:
        """The schedule for micro-batches of these shapes, made once."""
        from torch.distributed import pipelining

        key = given.kinds(self)
        if key not in self._schedules:
            number = (torch.empty(1, dtype=torch.int64, device="meta"),)
            sent, carried = [number, *self._sent_values(self.named(given.batches[0]))], self._carried()
            links = [_Link(self, number, carried) for number in self.own]
            group = self.mesh.stage.group
            assert group is not None, "of several ranks"
            peers = {number: self.peer(self.place(number)) for number in range(len(self.chain))}
            places = {number: dist.get_group_rank(group, peer) for number, peer in peers.items()}
            parts = [
                pipelining.PipelineStage(
                    link,
                    link.place,
                    len(self.chain),
                    self.mesh.device,
                    input_args=sent[link.place],
                    output_args=sent[link.place + 1],
                    group=group,
                    dw_builder=link.later.take if link.later else None,
                )
                for link in links
            ]
            for link, part in zip(links, parts, strict=True):
                part.stage_index_to_group_rank = places
                for way in ("backward_one_chunk", "backward_weight_one_chunk"):
                    setattr(part, way, link.summing(getattr(part, way)))
            few = self.order == "1f1b" and self.micro_batches < len(self.chain)  # torch's 1F1B needs one for each stage
            order = "gpipe" if few else self.order
            made = eager_schedule if order == EAGER else getattr(pipelining, ORDERS[order])
            ranked = parts[0] if self.order in ONE_STAGE_EACH else parts
            self._schedules[key] = made(ranked, self.micro_batches, loss_fn=self._any_loss, scale_grads=False)
        return self._schedules[key]

    def _any_loss(self, output: Any, number: Tensor) -> Tensor:
        return self._given[0].loss_of(output, number)

    def named(self, inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Inputs by their names, in the type that the program computes in."""
        return cast_inputs(self, dict(zip(self.takes, inputs, strict=False)))

    def _carried(self) -> list[tuple[str, ...]]:
        """By stage, the names of the values that pass to the next: those that one behind it takes."""
        found = []
        for number in range(len(self.chain)):
            made = dict.fromkeys(name for stage in self.chain[: number + 1] for name in stage.gives)
            taken = {name for stage in self.chain[number + 1 :] for name in stage.takes}
            found.append(tuple(name for name in made if name in taken))
        return found

    def _sent_values(self, inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
        """By stage, what it gives to the next, without data; the last one's is its output."""
        values: dict[str, Any] = dict(inputs)
        with torch.no_grad(), torch.random.fork_rng(devices=[self.mesh.device] if self.mesh.device.index else []):
            self._relay(values)
        names = [*self._carried()[:-1], self.chain[-1].gives]
        return [tuple(_without_data(values[name]) for name in of) for of in names]

    # ---- All of the model ----

    def whole_parts(self, read: Callable[[Tensor], Tensor | None], *, rest: bool) -> Iterator[dict[str, Tensor]]:
        """See ParallelModule: one stage after the other."""
        own = super().whole_parts(read, rest=rest)
        if self.mesh.stage.size == 1:
            yield from own
            return
        seen: set[str] = set()
        for place in range(self.mesh.stage.size):
            while True:
                part = next(own, None) if place == self.mesh.stage.rank else None
                names = [None if part is None else sorted(part)]
                dist.broadcast_object_list(
                    names, src=self.peer(place), group=self.mesh.stage.group, device=self.mesh.device
                )
                if names[0] is None:
                    break
                found = {name: self._broadcast(None if part is None else part[name], place) for name in names[0]}
                yield {name: value for name, value in found.items() if name not in seen}
                seen |= found.keys()


class _Link(nn.Module):
    """A stage as its neighbours see it: it takes and gives tensors alone, and passes on what later ones read."""

    def __init__(self, model: PipelinedModule, number: int, carried: Sequence[tuple[str, ...]]) -> None:
        super().__init__()
        self.owner = [model]  # in a list: it is no part of this module
        self.place = number
        self.taken = carried[number - 1] if number else ()
        self.given = carried[number]
        self.later = LaterWeights() if model.order in IN_HALVES else None

    def summing(self, backward: Callable[..., None]) -> Callable[..., None]:
        """A backward pass of ``PipelineStage``, behind whose last gradients are summed; ``flush`` sums those of others.

        A parameter that another stage on this rank holds, too, has its gradient when both are done.
        """
        (model,) = self.owner
        held = Counter(id(parameter) for stage in model.stages.values() for parameter in stage.parameters())
        own = [x for x in model.stages[str(self.place)].parameters() if held[id(x)] == 1]

        def run(*args: Any, last_backward: bool = False, **named: Any) -> None:  # Any: as torch calls it
            with model.mesh.sums.complete(own) if last_backward else nullcontext():
                backward(*args, last_backward=last_backward, **named)

        return run

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        with self.later or nullcontext():
            return self.run(received, self.owner[0]._given[0].batches[int(number)])  # noqa: SLF001  # of one file

    def run(self, received: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What the stage gives, for those behind it, or as output."""
        (model,) = self.owner
        values: dict[str, Any] = {**dict(zip(self.taken, received, strict=False)), **model.named(inputs)}
        output = model._run(self.place, values)  # noqa: SLF001
        if self.place == len(model.chain) - 1:
            return output
        return tuple(values[name].contiguous() for name in self.given)


def _without_data(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.is_floating_point())
