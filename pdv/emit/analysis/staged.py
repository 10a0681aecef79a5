"""The outline of each stage of a pipeline: what it takes, its steps, and what it gives.

Decides where the outline of the whole program is cut. A run of equal blocks that several stages share becomes a run in
each, of the same class. A value without gradient (a mask, a slice of an input) is computed by each stage that reads it,
unless it is drawn at random, and would be another one there. Entry point: ``staged_outlines``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ir.errors import UsageError
from ir.graph import Graph, Node
from ir.sharding import Sharding
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.outline import BlockRun, Item, outline, over
from pdv.problem.workload import are_several

StageOf = Mapping[Node, int]
"""The stage of each node with a gradient that a program computes; nothing for a program of one stage."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Products in a narrow format, by the names of their matrices."""

    format: str
    weights: frozenset[str]


@dataclass(frozen=True)
class Running:
    """How a program is run: its stages, the micro-batches of a step, and their order in a pipeline."""

    stage_of: StageOf = field(default_factory=dict)
    stages: int = 1
    micro_batches: int = 1
    order: str = "1f1b"
    virtual: int = 1
    """Stages on each rank of a pipeline: of ranks in turn."""
    recompute: bool = False
    """Whether of each layer only what it takes is kept, and its forward runs again in backward."""
    hosted: bool = False
    """Whether what of each layer is kept for backward is in the host's memory in between."""
    levels: tuple[tuple[int, ...], ...] = ()
    """Of each span of the mesh, sizes of the levels that its all-reduces take one by one, slow to fast; or none."""
    light: bool = False
    """Whether what is cheap to make again of what is kept is made again where backward reads it."""
    scaled: Scaled | None = None
    """Products that are run in a narrow format."""
    masters: bool = False
    """Whether parameters rest in float32, and forward reads them in the type of compute."""
    offload: bool = False
    """Whether parameters rest in the host's memory, where the optimizer steps."""
    compiled: bool = False
    """Whether it is compiled when it is built."""
    moments: int = 1
    """Slices of a micro-batch in time, which pass the stages one by one; 1: none."""
    joined: str = ""
    """What puts rows of the batch together, so that no step can take it in parts; empty if nothing is known to."""
    ranks: tuple[int, ...] = ()
    """Of the processes, by place: stage by stage, each row-major over the mesh. Empty: each rank at its own."""

    @property
    def shares_copies(self) -> bool:
        """Whether micro-batches in flight share copies of weights, which are gathered once a step."""
        return are_several(self.stages, self.micro_batches * self.moments)

    @property
    def length(self) -> int:
        """Ranks of the pipeline."""
        return self.stages // self.virtual


ONCE = Running()


@dataclass(frozen=True)
class StageOutline:
    """One stage: what it takes of the caller and of stages before it, its items, and what it gives.

    Attributes:
        inputs: inputs of the program that it reads, or returns.
        received: values of earlier stages that it reads.
        items: its steps and runs, in an order that can run.
        results: values that later stages read, or that the program returns.
    """

    inputs: tuple[Node, ...]
    received: tuple[Node, ...]
    items: tuple[Item, ...]
    results: tuple[Node, ...]

    @property
    def arguments(self) -> tuple[Node, ...]:
        """What its forward takes: values of earlier stages, then inputs."""
        return (*self.received, *self.inputs)


def staged_outlines(
    reading: Reading, shardings: Mapping[Node, Sharding], stage_of: StageOf
) -> tuple[StageOutline, ...]:
    """Every step of the program in the stage that it belongs to.

    Raises:
        AssertionError: if a step reads what a later stage computes.
        UsageError: if a stage but the last has nothing that a later one reads, of which there is no function.
    """
    graph = reading.graph
    returned = tuple(reading.resolve(node) for _, node in graph.outputs)
    items = outline(reading, shardings)
    if not stage_of:
        return (StageOutline(graph.inputs, (), items, returned),)
    assert not graph.updates, "a program that overwrites buffers has one stage"
    last = max(stage_of.values())
    own = [_own_items(items, stage_of, stage) for stage in range(last + 1)]
    wanted = [returned if stage == last else () for stage in range(last + 1)]
    random = _random(graph)
    parts, drawn = list[tuple[Item, ...]](), set[Node]()  # the latter by the stages so far
    for steps, ends in zip(own, wanted, strict=True):
        parts.append(_closed(reading, steps, ends, items, drawn))
        drawn |= random.intersection(node for item in parts[-1] for node in _steps(item))
    made = [{node for item in part for node in _steps(item)} for part in parts]
    reads = [_reads(reading, part) for part in parts]
    found = []
    for stage, part in enumerate(parts):
        wanted_here = dict.fromkeys([*reads[stage], *wanted[stage]])
        inputs = tuple(node for node in graph.inputs if node in wanted_here)
        received = tuple(node for node in wanted_here if reading.is_own(node) and node not in made[stage])
        earlier = set[Node]().union(*made[:stage])
        assert all(node in earlier for node in received), f"stage {stage} reads what a later one computes"
        later = set(returned).union(*reads[stage + 1 :])
        given = tuple(
            node for item in part for node in _steps(item) if node in later and (node.needs_grad or node in random)
        )
        if stage != last and not given:
            raise UsageError(
                f"{last + 1} stages: stage {stage} has nothing to compute that a later one reads. Ask for fewer "
                "(--stages)."
            )
        found.append(StageOutline(inputs, received, part, returned if stage == last else given))
    return tuple(found)


def over_stages(outlines: Sequence[StageOutline], twins: Mapping[Node, Node]) -> tuple[StageOutline, ...]:
    """The same outlines of another graph, to whose nodes ``twins`` leads."""

    def each(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(twins[node] for node in nodes)

    return tuple(
        StageOutline(each(one.inputs), each(one.received), over(one.items, twins), each(one.results))
        for one in outlines
    )


def _own_items(items: Sequence[Item], stage_of: StageOf, stage: int) -> list[Item]:
    """The items of one stage; of a run the blocks that are all its own, and else the steps that are."""
    found: list[Item] = []
    for item in items:
        if not isinstance(item, BlockRun):
            found += [item] if stage_of.get(item) == stage else []
            continue
        homes = [{stage_of[node] for node in block if node in stage_of} for block in item.blocks]
        if all(len(home) == 1 for home in homes):
            own = [number for number, home in enumerate(homes) if stage in home]
            found += [_slice(item, own[0], own[-1] + 1)] if own else []
        else:  # a block that two stages share is written step by step
            found += [node for block in item.blocks for node in block if stage_of.get(node) == stage]
    return found


def _slice(run: BlockRun, start: int, stop: int) -> BlockRun:
    return replace(
        run,
        blocks=run.blocks[start:stop],
        incoming=run.incoming[start:stop],
        outgoing=run.outgoing[start:stop],
        prefixes=None if run.prefixes is None else run.prefixes[start:stop],
    )


def _random(graph: Graph) -> frozenset[Node]:
    """Values without gradient that are drawn at random, or made of such."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not node.needs_grad and (node.op.draws or not found.isdisjoint(node.operands)):
            found.add(node)
    return frozenset(found)


def _closed(
    reading: Reading, own: Sequence[Item], ends: Sequence[Node], items: Sequence[Item], given: Collection[Node]
) -> tuple[Item, ...]:
    """A stage's items and the steps without gradient that they and ``ends`` take, in the program's order.

    given: values without gradient that earlier stages give.
    """
    missing: set[Node] = set()
    made = {node for item in own for node in _steps(item)}
    stack = [*ends, *(operand for node in made for operand in reading.operands(node))]
    while stack:
        node = stack.pop()
        known = node in made or node in missing or node in given
        if not known and reading.is_own(node) and not node.needs_grad:
            missing.add(node)
            stack += reading.operands(node)
    place = {node: number for number, node in enumerate(node for item in items for node in _steps(item))}
    return tuple(sorted((*missing, *own), key=lambda item: place[next(_steps(item))]))


def _steps(item: Item) -> Iterator[Node]:
    if isinstance(item, BlockRun):
        for block in item.blocks:
            yield from block
    else:
        yield item


def _reads(reading: Reading, part: Sequence[Item]) -> dict[Node, None]:
    """What the steps of a stage read, in order."""
    return dict.fromkeys(operand for item in part for node in _steps(item) for operand in reading.operands(node))
