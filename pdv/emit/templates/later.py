"""What a stage of a pipeline leaves for later: gradients of weights, the end of a batch, or waiting for what it sent.

Schedules without bubbles (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24) run backward in two passes. The first
gives gradients of values, and leaves of every ``F.linear`` what it takes to work out the gradient of its weight; the
second does that. ``torch.distributed.pipelining`` asks for it by ``dw_builder``. Entry point: ``LaterWeights``.

Or no step ends with an empty pipeline: 1F1B goes on from batch to batch, each of which reads one version of the weights
in all its passes, the newest when it begins. The one before it is still under way then, so gradients are of weights one
step old (PipeDream-2BW, Narayanan et al., ICML'21). Entry point: ``TwoBatches``.

And 1F1B and GPipe on CPUs: gloo sends nothing before its receiver has asked for it, and
``torch.distributed.pipelining`` asks when it waits, and waits for what it sends, so that neither of two stages computes
while they talk. Here a stage asks for what it takes next before it begins a pass, and waits for what it sent when the
step ends. NCCL takes what two ranks send each other in one order, so on GPUs the order is torch's. Entry point:
``Turns``.

Eager 1F1B is 1F1B with twice as many forward passes ahead, so that what is sent hides behind them (Zhuang et al.,
MLSys'23, section 4); torch has no schedule of it, but a runtime of any order. Entry point: ``eager_schedule``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from .accumulate import Given
from .gradients import Leaves

if TYPE_CHECKING:
    from .pipeline import PipelinedModule

Product = tuple[GradientEdge, Tensor, Tensor]
"""Where the gradient of a weight goes, what the weight was multiplied with, and the gradient of the result."""
Shapes = Mapping[int, Sequence[Sequence[Tensor]]]
AHEAD = 1
"""Passes of each way whose values are asked for before it is their turn."""
EAGER = "eager-1f1b"


class LaterWeights(TorchFunctionMode):
    """Context of a stage's forward pass, whose backward pass leaves gradients of weights for later."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Product] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # Any: as the function
        if func is F.linear and not kwargs and _may_wait(*args[:2]):
            x, weight, bias = (*args, None)[:3]
            return _Linear.apply(x, bias, weight.detach(), get_gradient_edge(weight), self)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def take(self) -> Callable[[], None]:
        """What the backward pass behind us has left to do."""
        left, self.left = self.left, []

        def finish() -> None:
            inner: list[tuple[GradientEdge, Tensor]] = []  # of weights that others are made of
            while left:
                edge, x, grad = left.pop(0)
                found = grad.flatten(0, -2).T @ x.flatten(0, -2)
                if edge.node.next_functions:
                    inner.append((edge, found))
                else:
                    torch.autograd.backward([edge], [found])
            if inner:
                edges, grads = zip(*inner, strict=True)
                torch.autograd.backward(edges, grads)

        return finish


def _may_wait(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a gradient to hand on meanwhile; under autocast types of results and gradients are not ours."""
    trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    return trained and not torch.is_autocast_enabled(x.device.type)


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward leaves the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, edge: GradientEdge, later: LaterWeights
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edge, ctx.later = edge, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.later.left.append((ctx.edge, x, grad))
        return grad @ weight, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None, None


class Flight:
    """Micro-batches that a stage holds between their forward and their backward pass.

    link: the stage as its neighbours see it.
    """

    def __init__(self, model: PipelinedModule, link: Any) -> None:
        self._model, self._link = model, link
        self._held: dict[object, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}

    def forward(self, key: object, given: Given, number: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a pass has for the stage behind."""
        inputs = [x.requires_grad_(x.is_floating_point()) for x in received]
        output = self._link.run(inputs, given.batches[number])
        if self._link.place == len(self._model.chain) - 1:
            self._held[key] = inputs, (given.loss_of(output, torch.tensor(number)),)
            return ()
        self._held[key] = inputs, output
        return [x.detach() for x in output]

    def backward(self, key: object, received: Sequence[Tensor], *, is_last: bool) -> Sequence[Tensor]:
        """What a pass has for the stage before; ``received``: of what it gave, nothing where that is the loss."""
        inputs, outputs = self._held.pop(key)
        floats = [x for x in outputs if x.is_floating_point()]
        grads: Sequence[Tensor | None] = received or [None] * len(floats)
        pairs = [(x, grad) for x, grad in zip(floats, grads, strict=True) if x.requires_grad]

        def run(last_backward: bool) -> None:
            if pairs:
                torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

        self._link.summing(run)(last_backward=is_last)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad]


@contextmanager
def unbroken(model: PipelinedModule) -> Iterator[None]:
    """Of what a stage does with its neighbours; where an error ends it half-way, the model runs no more.

    What was sent or asked for is under way still, and the next step would take it for its own.
    """
    try:
        yield
    except BaseException:
        model.train_step = model.forward = model.drain = _refuse  # type: ignore[method-assign]
        raise


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "step-not-ended: an error ended a step of this pipeline half-way, other stages wait for what it did not send, "
        "so no step can follow. Let the error end the process, and go on from a checkpoint."
    )


class Pass(NamedTuple):
    """Of a micro-batch through a stage."""

    number: int
    backward: bool = False


class Turns:
    """The stage of a model whose passes go in 1F1B's or GPipe's order. link: the stage as its neighbours see it."""

    def __init__(self, model: PipelinedModule, link: Any) -> None:
        self._flight, self._group = Flight(model, link), model.mesh.stage.group
        place, last, count = link.place, len(model.chain) - 1, model.micro_batches
        before, behind = (model.peer(model.place(at)) if 0 <= at <= last else None for at in (place - 1, place + 1))
        self._sources, self._targets = (before, behind), (behind, before)  # of forward and backward passes
        ways = [Pass(number) for number in range(count)], [Pass(number, backward=True) for number in range(count)]
        ahead, self._ahead_before = (passes_ahead(model.order, last - at, count) for at in (place, place - 1))
        self._passes = in_turns(*ways, ahead)
        self._asked: list[list[Pass]] = []  # before each pass
        asked = [0, 0]
        for turn in self._passes:
            known = [turn.number + 1 + AHEAD if turn.backward == way else asked[way] or AHEAD for way in (0, 1)]
            self._asked.append([one for way in (0, 1) for one in ways[way][asked[way] : known[way]]])
            asked = known

    def run(self, given: Given, like: Sequence[Sequence[Tensor]]) -> None:
        """Forward and backward of every micro-batch; ``like``: without data, what the stage takes and what it gives."""
        wanted = like[0], [x for x in like[1] if x.requires_grad]
        coming: dict[Pass, tuple[list[Tensor], list[Any]]] = {}
        sent: dict[Pass, list[tuple[Any, Tensor]]] = {}  # held until it is
        for turn, asked in zip(self._passes, self._asked, strict=True):
            for one in asked:
                coming[one] = self._ask(one, wanted[one.backward])
            received, works = coming.pop(turn)
            for work in works:
                work.wait()
            for one in [one for one in sent if self._is_taken(one, turn)]:
                _wait(sent.pop(one))
            number = turn.number
            if turn.backward:
                found = self._flight.backward(number, received, is_last=number == len(given.batches) - 1)
            else:
                found = self._flight.forward(number, given, number, received)
            target = self._targets[turn.backward]
            values = [] if target is None else [x.contiguous() for x in found]
            sent[turn] = [(dist.isend(x, target, self._group), x) for x in values]
        for works in sent.values():
            _wait(works)

    def _is_taken(self, one: Pass, turn: Pass) -> bool:
        """Whether a neighbour had what ``one`` sent before it sent what ``turn`` takes.

        Gloo tells of no send that it is complete before it is waited for, and keeps the values.
        """
        if turn.backward:
            return not one.backward and one.number <= turn.number
        return one.backward and one.number < turn.number - self._ahead_before

    def _ask(self, turn: Pass, wanted: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """For what a pass takes, of a neighbour in the order in which it sends."""
        source = self._sources[turn.backward]
        buffers = [] if source is None else [torch.empty_like(x, device="cpu", requires_grad=False) for x in wanted]
        return buffers, [dist.irecv(x, source, self._group) for x in buffers]


def _wait(sent: Iterable[tuple[Any, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()


def passes_ahead(order: str, behind: int, count: int) -> int:
    """Forward passes, of so many, that a stage makes before its first backward pass with one in turns."""
    return {"1f1b": behind, EAGER: 2 * behind}.get(order, count)


def in_turns(forward: Sequence[Any], backward: Sequence[Any], ahead: int) -> list[Any]:
    """Forward passes, so many ahead, then backward and forward in turns."""
    ahead = min(ahead, len(forward))
    turns = [turn for pair in zip(forward[ahead:], backward, strict=False) for turn in pair]
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]


def eager_schedule(part: Any, micro_batches: int, **given: Any) -> Any:  # Any: as torch's schedules take it
    """Torch's runtime of a stage whose passes go in eager 1F1B's order."""
    from torch.distributed.pipelining import schedules

    places = part.stage_index_to_group_rank
    made: Any = schedules._PipelineScheduleRuntime([part], micro_batches, **given)  # type: ignore[no-untyped-call]  # noqa: SLF001
    numbers, last = range(micro_batches), len(places) - 1
    for stage, place in places.items():
        ways = ((stage, way) for way in (schedules.FORWARD, schedules.FULL_BACKWARD))
        forward, backward = ([schedules._Action(*of, number) for number in numbers] for of in ways)  # noqa: SLF001
        made.pipeline_order[place] = in_turns(forward, backward, passes_ahead(EAGER, last - stage, micro_batches))
    made._prepare_schedule_with_comms(made.pipeline_order)  # noqa: SLF001
    return made


class Turn(NamedTuple):
    """A micro-batch through a stage, of the one or the other of the two batches that are under way."""

    batch: int
    number: int
    backward: bool = False


class TwoBatches:
    """The stage of a model that no step empties. link: the stage as its neighbours see it."""

    def __init__(self, model: PipelinedModule, link: Any) -> None:
        self._model, self._link = model, link
        self._given: dict[int, Given] = {}  # batches under way
        self._flight = Flight(model, link)
        self._neighbours, self._posted = Neighbours(model, link.place), False
        model.mesh.sums.turn = 0
        for parameter in model.parameters():
            if not hasattr(parameter, "leaves"):
                parameter.leaves = Leaves(model.mesh.sums, {})  # type: ignore[attr-defined]

    @property
    def is_under_way(self) -> bool:
        """Whether a batch was begun and not ended."""
        return bool(self._given)

    def go_on(self, given: Given | None) -> Tensor:
        """Begin a batch, or none, and end the one before: its loss; its gradients are there.

        Raises:
            RuntimeError: if a parameter is not read by way of its leaf, of which alone there are versions.
        """
        model, sums = self._model, self._model.mesh.sums
        if not sums.use_leaves or any(parameter._backward_hooks for parameter in model.parameters()):  # noqa: SLF001
            raise RuntimeError(
                "one-version: parameters in autograd's graph, or with hooks of register_hook, have their newest values "
                "alone, and this schedule reads older ones, too. Use register_post_accumulate_grad_hook, or plan "
                "another --schedule."
            )
        turn = sums.turn or 0
        before = self._given.get(1 - turn)
        if given is not None:
            self._given[turn] = given
        if before is None:
            self._run(turn)
            return torch.full((), torch.nan, device=model.mesh.device)
        loss = before.run(model, partial(self._run, turn), model.peer(model.place(len(model.chain) - 1)))
        if given is None:  # the last stage waits for nobody in a step, and may not be gone before others have its loss
            dist.barrier(group=model.mesh.stage.group)
        return loss

    def _run(self, turn: int) -> None:
        """What is left of the batch before, and first passes of this turn's, with the weights that are newest now."""
        model, sums = self._model, self._model.mesh.sums
        place, stages, count = self._link.place, len(model.chain), model.micro_batches
        like = {of: model.sent(given)[place : place + 2] for of, given in self._given.items()}
        passes = passes_of_step(place, stages, count, *(of if of in like else None for of in (1 - turn, turn)))
        following = Turn(turn, stages - 1 - place) if turn in like else None
        with sums.hold_quietly(), unbroken(model):
            for taken, after in zip(passes, [*passes, following][1:], strict=True):
                if not self._posted:
                    self._post((), taken, like)
                received = self._neighbours.wait()
                sums.turn = taken.batch
                self._post(self._take(taken, received), after, like, back=taken.backward)
        sums.turn = turn
        if self._given.pop(1 - turn, None) is not None:
            model.end_step()
        if following is not None:
            for parameter in model.parameters():
                parameter.leaves.move(parameter)  # type: ignore[attr-defined]
            sums.turn = 1 - turn

    def _take(self, taken: Turn, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a pass; what it has for a neighbour."""
        key, count = (taken.batch, taken.number), self._model.micro_batches
        if taken.backward:
            return self._flight.backward(key, received, is_last=taken.number == count - 1)
        return self._flight.forward(key, self._given[taken.batch], taken.number, received)

    def _post(self, given: Sequence[Tensor], after: Turn | None, like: Shapes, *, back: bool = False) -> None:
        """Send what a pass gave, and receive what the next takes; ``like``: by batch, as ``Neighbours`` has it."""
        self._posted = after is not None
        wanted = () if after is None else like[after.batch]
        self._neighbours.post(given, wanted, back=back, after=after is not None and after.backward)


class Neighbours:
    """What a stage sends to those before and behind it, and receives from them, between two of its passes."""

    def __init__(self, model: PipelinedModule, place: int) -> None:
        self._group, self._device = model.mesh.stage.group, model.mesh.device
        places = (model.place(at) if 0 <= at < len(model.chain) else None for at in (place - 1, place + 1))
        self.before, self.behind = (None if at is None else model.peer(at) for at in places)
        self._received: list[Tensor] = []
        self._sent: Sequence[Tensor] = ()  # held until it is
        self._works: list[Any] = []

    def post(self, given: Sequence[Tensor], like: Sequence[Sequence[Tensor]], *, back: bool, after: bool) -> None:
        """Send what a pass gave, and receive what the next takes, in one go: neighbours do so in one order.

        back, after: whether that pass, and the next, are backward. like: without data, what the stage takes and what
        it gives; nothing if there is no next pass.
        """
        target, source = self.before if back else self.behind, self.behind if after else self.before
        ops = [] if target is None else [dist.P2POp(dist.isend, x.contiguous(), target, self._group) for x in given]
        values = [x for x in like[after] if x.requires_grad or not after] if like and source is not None else []
        self._received = [torch.empty_like(x, device=self._device, requires_grad=False) for x in values]
        ops += [dist.P2POp(dist.irecv, x, source, self._group) for x in self._received]
        self._sent = [op.tensor for op in ops]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        """What was received; all is sent."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._received


def passes_of_step(stage: int, stages: int, count: int, before: int | None, batch: int | None) -> list[Turn]:
    """Of a stage: all that is left of the batch before, and forward passes of the next, as many as are held.

    Without a batch before, a pipeline fills; without a next one, it runs empty.
    """
    ahead = stages - 1 - stage
    rest = [Turn(before, number) for number in range(ahead, count)] if before is not None else []
    begun = [Turn(batch, number) for number in range(ahead)] if batch is not None else []
    if before is None:
        return begun
    forward, found = [*rest, *begun], list[Turn]()
    for number in range(count):
        found += [*forward[number : number + 1], Turn(before, number, backward=True)]
    return found
