"""Tasks of one run of nodes, forward or backward, on one kind of stage.

The backward pass runs in the reverse order of the forward one. Runs of equal content become the same `Segment` object,
so that the engine knows them again. Entry point: ``Segments.of``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ir.ops import OPERATORS
from ir.ops.parallel import transition_of
from pdv.problem.recomputation import run_again
from pdv.problem.workload import Execution
from pdv.simulate.calibration import Calibration
from pdv.simulate.engine.task import COMPUTE, HOST, OFFLOAD, RECOMPUTATION, Placed, Segment, Task, picoseconds
from pdv.simulate.lowering.entries import Entry
from pdv.simulate.lowering.fusion import Fusion
from pdv.simulate.lowering.links import Links
from pdv.simulate.lowering.pieces import Pieces
from pdv.simulate.lowering.price import DevicePrices, Price

# Numbers of tasks that others wait for: the node's place in its chunk, what it does, and the set of classes.
FORWARD, BACKWARD, AGAIN, GATHER, REGATHER, SENT, FETCHED = range(7)
FIRST = (FORWARD, GATHER)  # issued in the forward pass
KINDS = 8

Waits = tuple[tuple[int, int], ...]
"""Moves that run beside compute: place in the chunk, and axis."""

Due = tuple[tuple[int, int, int, float], ...]
"""Buckets of gradients: place in the run behind which they start, axis, picoseconds, bytes."""


@dataclass(frozen=True, slots=True)
class Item:
    """A node in a run: its entry, its place in the chunk, and the moves beside compute that it waits for."""

    entry: Entry
    place: int
    waits: Waits = ()  # forward: of operands
    gradient: Waits = ()  # backward: of readers
    light: bool = False  # made again in backward


class Segments:
    """Segments by content, for stages of one kind."""

    def __init__(
        self, links: Links, prices: Sequence[DevicePrices], execution: Execution, calibration: Calibration, chunks: int
    ) -> None:
        self.links, self.prices, self.execution = links, prices, execution
        self._known: dict[Hashable, Segment] = {}
        self.tasks: dict[tuple[int, int, str], tuple[Task, ...]] = {}  # of entries that wait for nothing beside compute
        gpu = any(device.kind == "gpu" for device in links.devices)
        self.issue = (
            picoseconds(calibration.host_forward_s) if gpu else 0,
            picoseconds(calibration.host_backward_s) if gpu else 0,
        )
        read_s, gradient_s = calibration.host_read_s, calibration.host_gradient_s
        if execution.eager and execution.precision.master:  # each is rounded as it is read: half as much as a call
            read_s, gradient_s = read_s + calibration.host_forward_s / 2, gradient_s + calibration.host_backward_s / 2
        self.reads = (picoseconds(read_s), picoseconds(gradient_s)) if gpu else (0, 0)
        self.kept = picoseconds(calibration.host_kept_s) if gpu and execution.recompute != "none" else 0
        self.updates = picoseconds(calibration.host_update_s) if gpu else 0
        # of a program in Python its collectives' backward is, too
        self.moves = (self.issue[0],) * 2 if execution.eager else self.issue
        self.adds = picoseconds(calibration.host_add_s) if gpu else 0
        self.waits = picoseconds(calibration.host_pass_s) if gpu else 0
        begins_s = calibration.pass_cpu_s / min(device.share for device in links.devices)
        self.begins = 0 if gpu else picoseconds(begins_s * (chunks > 1))
        light = execution.overlap.light
        slowdown = calibration.overlap_slowdown_light if light else calibration.overlap_slowdown
        of_device = 1.0 - 1.0 / slowdown
        self.slowed = (of_device,) * len(links.axes) if gpu else links.of_cores
        self.most_slowed = slowdown - 1.0
        self.hidden = calibration.pieces_hidden

    def of(
        self,
        phase: Literal["forward", "backward"],
        items: Sequence[Item],
        *,
        layer: bool = True,
        gathers: Sequence[tuple[Entry, int]] = (),
        due: Due = (),
        fused: Fusion | None = None,
    ) -> Segment:
        """The segment of a run; ``layer``: whether recomputation is of all of it.

        ``gathers``: parameters of it and of later runs that are gathered from its beginning on, with their places.
        """
        start = items[0].place if items else 0
        beside = self.execution.overlap.activations
        key = (
            phase,
            layer,
            due,
            fused,
            tuple([(entry.number, at) for entry, at in gathers]),
            tuple([(item.entry.number, item.light) for item in items]),
            tuple([(_relative(i.waits, start), _relative(i.gradient, start)) for i in items]) if beside else (),
        )
        segment = self._known.get(key)
        if segment is None:
            work = _Work(self, items, start, fused)
            tasks = (
                work.forward(gathers, again=layer) if phase == "forward" else work.backward(gathers, due, again=layer)
            )
            segment = self._known[key] = Segment(self._issued(self._bound(tasks)), phase)
        return segment

    def host_start(self) -> list[Placed]:
        """What the host does before it issues a pass."""
        everyone = tuple(range(len(self.links.devices)))
        tasks = [Task("begin", HOST, everyone, 0, self.waits)] if self.waits else []
        tasks += [Task("begin", COMPUTE, everyone, self.begins)] if self.begins else []
        return [Placed(self.made(tuple(tasks), "begin"))] if tasks else []

    def host_moves(self, start: int, num_bytes: Mapping[int, float], awaited: Sequence[int], *, back: bool) -> Placed:
        """What goes to the host, or comes back: of layers that start in some places; ``awaited``: waited for, behind.

        A CPU copies by itself.
        """
        number, tasks, classes = FETCHED if back else SENT, list[Task](), len(self.links.devices)
        for kind, device in enumerate(self.links.devices):
            name = "from the host" if back else "to the host"
            for place, size in num_bytes.items():
                duration, beside = self.links.host_move(kind, size), device.kind != "cpu"
                makes = ((place - start) * KINDS + number) * classes + kind
                stream = (self.links.to_host(kind, back=back),)
                detail = (("bytes", size),)
                tasks.append(
                    Task(name, OFFLOAD, (kind,), duration, 0, stream, False, makes, detail=detail)
                    if beside
                    else Task(name, OFFLOAD, (kind,), duration, detail=detail)
                )
            after = tuple(((place - start) * KINDS + number) * classes + kind for place in awaited)
            if after and device.kind != "cpu":
                tasks.append(Task("wait", OFFLOAD, (kind,), 0, after=after))
        return Placed(self.made(tuple(tasks), "host"), start * KINDS * classes)

    def _bound(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """What runs behind compute slows it at most as long as it lasts, however much longer the sending takes."""
        if not any(task.slows for task in tasks):
            return tuple(tasks)
        share: list[tuple[int, int]] = []  # by class: at most, and asked for
        for number in range(len(self.links.devices)):
            own = [task for task in tasks if number in task.classes]
            compute = sum(task.duration for task in own if task.part in {COMPUTE, RECOMPUTATION})
            share.append((round(compute * self.most_slowed), sum(task.slows for task in own)))
        return tuple(task._replace(slows=_least(task, share)) if task.slows else task for task in tasks)

    def made(self, tasks: tuple[Task, ...], name: str) -> Segment:
        """The segment of some tasks."""
        return self._known.setdefault(tasks, Segment(self._issued(tasks), name))

    def _issued(self, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        """The same where a host that waits for each kernel cannot issue the next one ahead: devices wait for it."""
        if not self.execution.synchronous:
            return tasks
        pairs = [(Task("issue", HOST, task.classes, task.issue), task._replace(issue=0)) for task in tasks]
        return tuple(task for ahead, itself in pairs for task in (ahead, itself) if task is itself or task.duration)


def _least(task: Task, share: Sequence[tuple[int, int]]) -> int:
    """What is left of a task's slowing where some class has less compute than is asked to be slowed."""
    return min(task.slows * min(most, asked) // asked for most, asked in (share[number] for number in task.classes))


def _relative(waits: Waits, start: int) -> Waits:
    return tuple((place - start, axis) for place, axis in waits)


class _Work:
    """Makes the tasks of one run."""

    def __init__(self, lowering: Segments, items: Sequence[Item], start: int, fused: Fusion | None) -> None:
        self._lowering, self._items, self._start, self._fused = lowering, items, start, fused
        self._links, self._overlap = lowering.links, lowering.execution.overlap
        self._classes = len(lowering.links.devices)
        self._pieces = Pieces(
            lowering.links, lowering.prices[0], lowering.execution, [x.entry for x in items], lowering.hidden
        )
        self._kept = 0  # of the host, for each call forward
        self._held: list[Task] = []  # products that may run behind the next collective
        self.tasks: list[Task] = []

    def forward(self, gathers: Sequence[tuple[Entry, int]], *, again: bool) -> list[Task]:
        """In order; parameters of later runs are gathered first. ``again``: whether it is a layer's."""
        self._kept = self._lowering.kept if again else 0
        self._gather(gathers, GATHER)
        self._await_gathers(GATHER)
        for number, item in enumerate(self._items):
            self._forward(number, item, COMPUTE, FORWARD)
        return self.tasks

    def backward(self, gathers: Sequence[tuple[Entry, int]], due: Due, *, again: bool) -> list[Task]:
        """In reverse; with recomputation the run's forward, or its attention's inside, again."""
        recompute = self._lowering.execution.recompute
        self._kept = self._lowering.kept if again else 0
        self._gather(gathers, REGATHER)
        self._await_gathers(REGATHER)
        for item in () if self._overlap.gathers else self._items:
            if item.entry.regathers:
                self._collective(item.entry, item.place, 0, REGATHER, blocks=True)
        every = run_again([OPERATORS[item.entry.name] for item in self._items], recompute)
        for number, item in enumerate(self._items):
            selected = number in every and (again or (item.entry.backward and recompute == "selective"))
            if selected or item.light:
                self._forward(number, item, RECOMPUTATION, AGAIN)
        for number in reversed(range(len(self._items))):
            item = self._items[number]
            self._backward(number, item)
            for place, axis, duration, num_bytes in due:
                if place == item.place - self._start:
                    self._release()
                    self._beside("gradients", (axis, duration, num_bytes), BACKWARD, item.place)
        self._release()
        return self.tasks

    # ---- One node ----

    def _forward(self, number: int, item: Item, part: str, kind: int) -> None:
        entry, again = item.entry, kind == AGAIN
        match entry.role:
            case "local":
                self._kernels(number, item, 0, part, self._numbers(item.waits, kind))
            case "move":
                blocks = not self._overlap.activations
                left = self._pieces.left(number, 0) if blocks else -1
                self._collective(entry, item.place, 0, kind, blocks=blocks, after=item.waits, left=left)
            case "parameter" if not self._overlap.gathers and not again:
                self._collective(entry, item.place, 0, kind, blocks=True)

    def _backward(self, number: int, item: Item) -> None:
        entry = item.entry
        if not entry.backward:
            return
        match entry.role:
            case "local":
                self._release()
                self._kernels(number, item, 1, COMPUTE, self._numbers(item.gradient, BACKWARD))
            case "move":
                blocks = not self._overlap.activations
                left = self._pieces.left(number, 1) if blocks else -1
                self._collective(entry, item.place, 1, BACKWARD, blocks=blocks, after=item.gradient, left=left)
                self._release()
            case "parameter":
                self._release()
                self._collective(entry, item.place, 1, BACKWARD, blocks=not self._overlap.gradients)

    def _kernels(self, number: int, item: Item, way: int, part: str, after: Sequence[tuple[int, ...]]) -> None:
        """Local work of each class; a product's second gradient may run behind a collective of the first."""
        entry = item.entry
        plain = self._fused is None and not any(after)
        key = (entry.number, way, f"{part} kept" if self._kept else part)
        found = self._lowering.tasks.get(key) if plain else None
        if found is None:
            found = tuple(self._local(number, entry, way, part, after))
            if plain:
                self._lowering.tasks[key] = found
        if way == 1 and entry.two_products and self._overlap.activations:
            for task in found:
                later = task.duration // 2
                self.tasks.append(task._replace(duration=task.duration - later, issue=task.issue // 2))
                self._held.append(task._replace(duration=later, issue=task.issue - task.issue // 2))
        else:
            self.tasks += found

    def _local(
        self, number: int, entry: Entry, way: int, part: str, after: Sequence[tuple[int, ...]]
    ) -> Iterator[Task]:
        """Of each class that has anything to do."""
        scale, launches = (1.0, True) if self._fused is None else self._fused[number]
        issue = self._lowering.issue[way]  # what runs again is the model's own forward pass
        issue += self._kept if way == 0 else 0
        read = self._lowering.reads[way] * entry.read
        name = entry.name if way == 0 else f"{entry.name} backward"
        for kind in range(self._classes):
            price: Price = self._lowering.prices[kind].entries[entry.number]
            duration, kernels = (price.forward, price.backward)[way], price.kernels[way] if launches else 0
            if scale != 1.0:
                duration = round(duration * scale)
            if kernels or duration:
                detail = (("source", price.estimates[way].source),)
                yield Task(name, part, (kind,), duration, issue * kernels + read, after=after[kind], detail=detail)

    def _collective(
        self, entry: Entry, place: int, way: int, kind: int, *, blocks: bool, after: Waits = (), left: int = -1
    ) -> None:
        """What a parallel operator runs forward or backward, if anything; ``left``: picoseconds of it, if not all."""
        self._copies(entry, way, kind)
        if left >= 0:
            moves = self._moves(entry, place, way, kind, blocks=True, after=())
            self.tasks += [task._replace(duration=left) for task in moves]
            return
        if not blocks:
            self.tasks += self._moves(entry, place, way, kind, blocks=False, after=after)
            return
        key = (entry.number, way, "" if kind in FIRST else "again")
        found = self._lowering.tasks.get(key)
        if found is None:
            found = self._lowering.tasks[key] = self._moves(entry, place, way, kind, blocks=True, after=())
        self.tasks += found

    def _moves(self, entry: Entry, place: int, way: int, kind: int, *, blocks: bool, after: Waits) -> tuple[Task, ...]:
        duration = self._links.move(entry)[way]
        if entry.role == "parameter" and way == 0:
            duration = round(duration * self._lowering.prices[0].cast_share(entry.node))
        collective = transition_of(entry.name).communications[way].collective
        if not duration or collective is None:
            return ()
        axis = self._links.mesh.spans[entry.axis]
        size = max(entry.held, entry.bytes)
        detail = (("bytes", size), ("algorithm", self._links.algorithm(collective, entry.axis, size)))
        waits = self._numbers(after, kind)
        sums = entry.role == "parameter" and way == 1 and not blocks
        streams = (self._links.sums if sums else self._links.streams)[entry.axis]
        return tuple(
            Task(
                collective,
                axis,
                classes,
                duration,
                self._lowering.moves[0 if kind in FIRST else 1],
                streams[place_of],
                blocks,
                -1 if blocks else self._number(place, kind, classes[0]),
                tuple(dict.fromkeys(w for c in classes for w in waits[c])),
                0 if blocks else round(duration * self._lowering.slowed[entry.axis]),
                detail,
            )
            for place_of, classes in enumerate(self._links.coupled[entry.axis])
        )

    def _copies(self, entry: Entry, way: int, kind: int) -> None:
        """What the emitted program copies around a collective, and what it takes to call one on a CPU."""
        issue = self._lowering.moves[0 if kind in FIRST else 1]
        for number, prices in enumerate(self._lowering.prices):
            price = prices.entries.get(entry.number)
            if price is not None and (price.forward, price.backward)[way]:
                time = (price.forward, price.backward)[way]
                self.tasks.append(Task("copy", COMPUTE, (number,), time, issue * price.kernels[way]))

    def _gather(self, gathers: Sequence[tuple[Entry, int]], kind: int) -> None:
        for entry, distance in gathers:
            self._collective(entry, self._start + distance, 0, kind, blocks=False)

    def _await_gathers(self, kind: int) -> None:
        """A layer begins when its parameters have come, as FSDP's units do."""
        for item in self._items if self._overlap.gathers else ():
            entry = item.entry
            if entry.role == "parameter" and (kind == GATHER or entry.regathers) and self._links.move(entry)[0]:
                axis = self._links.mesh.spans[entry.axis]
                for classes in self._links.coupled[entry.axis]:
                    number = self._number(item.place, kind, classes[0])
                    self.tasks.append(Task("wait", axis, classes, 0, after=(number,)))

    def _beside(self, name: str, bucket: tuple[int, int, float], kind: int, place: int) -> None:
        """A bucket of gradients, behind compute."""
        axis, duration, num_bytes = bucket
        for place_of, classes in enumerate(self._links.coupled[axis]):
            self.tasks.append(
                Task(
                    name,
                    self._links.mesh.spans[axis],
                    classes,
                    duration,
                    self._lowering.moves[1],
                    self._links.sums[axis][place_of],
                    blocks=False,
                    makes=self._number(place, kind, classes[0]),
                    slows=round(duration * self._lowering.slowed[axis]),
                    detail=(("bytes", num_bytes),),
                )
            )

    def _release(self) -> None:
        self.tasks += self._held
        self._held = []

    def _number(self, place: int, kind: int, number: int) -> int:
        return ((place - self._start) * KINDS + kind) * self._classes + number

    def _numbers(self, waits: Waits, kind: int) -> list[tuple[int, ...]]:
        """By class, the numbers of moves that it waits for: each is numbered after the first class of its set."""
        if not waits:
            return [()] * self._classes
        return [
            tuple(
                self._number(place, kind, classes[0])
                for place, axis in waits
                for classes in self._links.coupled[axis]
                if number in classes
            )
            for number in range(self._classes)
        ]
