"""The order of a program's steps, and the runs of equal blocks in it that are written once, as a class.

Two steps match if they do the same to operands at the same distance (or to the very same value), with parameters of
their own of equal type and storage. A run is a stretch in which every step matches the one ``period`` steps before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ir.graph import Graph, Node, param_view
from ir.proof.repeats import find_stretches
from ir.sharding import Sharding, format_sharding
from ir.views import sources_of
from pdv.emit.analysis.leaves import Leaf, Reading
from pdv.passes.tied_views import check_buffers

_START = -1  # before all steps
MIN_SAVED = 6  # steps; a class for less is harder to read than the repetition


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks in a row.

    Attributes:
        blocks: the steps of each block.
        incoming: per block, the values it takes from outside that differ from block to block.
        outgoing: per block, the values it leaves, in the same order for all.
        fixed: values and leaves that all blocks read alike, from the outside.
        prefixes: per block, the part of its parameters' names that is its own; None where names do not line up.
    """

    blocks: tuple[tuple[Node, ...], ...]
    incoming: tuple[tuple[Node, ...], ...]
    outgoing: tuple[tuple[Node, ...], ...]
    fixed: tuple[Node, ...]
    prefixes: tuple[str, ...] | None


Item = Node | BlockRun


def outline(reading: Reading, shardings: Mapping[Node, Sharding]) -> tuple[Item, ...]:
    """Every step once, in an order that can run, equal blocks folded into runs.

    Where a layer is left beside a run, moves are taken first of all that reads what they move: those of the stream then
    stand between layers, where the first one and the last may have others.
    """
    steps = ordered_steps(reading)
    items = _Folding(reading, shardings, steps).run()
    largest = max((len(item.blocks[0]) for item in items if isinstance(item, BlockRun)), default=len(steps))
    if sum(not isinstance(item, BlockRun) for item in items) < largest:
        return items
    others = _Folding(reading, shardings, _moved_first(reading, steps)).run()
    return others if _save(others) > _save(items) else items


def _save(items: Sequence[Item]) -> int:
    """How many steps are not written because others stand for them."""
    return sum((len(item.blocks) - 1) * len(item.blocks[0]) for item in items if isinstance(item, BlockRun))


def _moved_first(reading: Reading, steps: Sequence[Node]) -> list[Node]:
    """The same steps, each move of a value with a gradient right behind what it moves."""
    moves: dict[Node, list[Node]] = {}
    own = set(steps)
    for node in steps:
        if node.op.kind == "parallel" and node.needs_grad and reading.operands(node)[0] in own:
            moves.setdefault(reading.operands(node)[0], []).append(node)
    moved = {node for found in moves.values() for node in found}
    order: list[Node] = []
    waiting = [node for node in reversed(steps) if node not in moved]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(moves.get(order[-1], ()))
    return order


def over(items: Sequence[Item], twins: Mapping[Node, Node]) -> tuple[Item, ...]:
    """The same outline of another graph, to whose nodes ``twins`` leads."""

    def all_of(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(twins[node] for node in nodes)

    def each(groups: Sequence[Sequence[Node]]) -> tuple[tuple[Node, ...], ...]:
        return tuple(all_of(group) for group in groups)

    return tuple(
        BlockRun(each(item.blocks), each(item.incoming), each(item.outgoing), all_of(item.fixed), item.prefixes)
        if isinstance(item, BlockRun)
        else twins[item]
        for item in items
    )


def ordered_steps(reading: Reading) -> list[Node]:
    """Steps without gradient (masks, slices of inputs) that read no others first; new values of buffers as soon as they
    can be had.
    """
    graph = reading.graph
    needed = _reachable(reading, [node for _, node in graph.outputs])
    steps = [node for node in graph.nodes if reading.is_own(node)]
    early: list[Node] = []
    main: dict[Node, None] = {}
    for node in steps:
        if node in needed and (node.needs_grad or any(operand in main for operand in reading.operands(node))):
            main[node] = None
        elif node in needed:
            early.append(node)
    order = [*early, *main]
    place = {node: index for index, node in enumerate(order)}
    later = [node for node in steps if node not in needed]
    earliest = _earliest(reading, later, place)
    after: dict[int, list[Node]] = {}
    for node in later:
        after.setdefault(earliest[node], []).append(node)
    first = after.get(_START, [])
    return [*first, *(step for index, node in enumerate(order) for step in (node, *after.get(index, ())))]


def _earliest(reading: Reading, later: Sequence[Node], place: Mapping[Node, int]) -> dict[Node, int]:
    """Behind which of the steps that have a ``place`` each of the others comes.

    A buffer is overwritten once nothing reads its old value any more; what reads nothing but buffers goes where it is
    read.
    """
    overwritten = {reading.resolve(node): name for name, node in reading.graph.updates}
    readers: dict[str, list[Node]] = {}
    for param in reading.graph.params:
        readers[param.attr("name")] = [node for node in reading.readers(param) if node in place]
    found: dict[Node, int] = {}
    for node in later:
        before = [*reading.operands(node), *readers.get(overwritten.get(node, ""), ())]
        found[node] = max((place[x] if x in place else found.get(x, _START) for x in before), default=_START)
    for node in reversed(later):
        if found[node] == _START:
            users = [found[user] for user in reading.users[node] if user in found]
            found[node] = min(users, default=_START)
    return found


def _reachable(reading: Reading, roots: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = [reading.resolve(root) for root in roots]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += reading.operands(node)
    return found


class _Folding:
    def __init__(self, reading: Reading, shardings: Mapping[Node, Sharding], steps: Sequence[Node]) -> None:
        self._reading = reading
        self._shardings = shardings
        self._steps = steps
        self._place = {node: index for index, node in enumerate(steps)}
        graph = reading.graph
        self._results = {reading.resolve(node) for _, node in graph.outputs}
        self._updates = {reading.resolve(node) for _, node in graph.updates}
        numbers: dict[str, int] = {}
        self._keys = [numbers.setdefault(self._key(node), len(numbers)) for node in steps]
        self._sources = [tuple(self._place.get(x, -1) for x in reading.operands(node)) for node in steps]

    def run(self) -> tuple[Item, ...]:
        return tuple(self._fold(0, len(self._steps)))

    def _fold(self, start: int, stop: int) -> Iterator[Item]:
        best = self._best(start, stop)
        if best is None:
            yield from self._steps[start:stop]
            return
        first, period, run = best
        yield from self._fold(start, first)
        yield run
        yield from self._fold(first + period * len(run.blocks), stop)

    def _best(self, start: int, stop: int) -> tuple[int, int, BlockRun] | None:
        """(first step, period, run) that saves most; what could save less than one that is known is not made."""
        best: tuple[int, int, BlockRun] | None = None
        most: tuple[float, ...] = (0.0,)
        candidates = sorted(self._candidates(start, stop), key=lambda found: -(found[2] - 1) * found[1])
        for begin, period, count in candidates:
            saved = (count - 1) * period
            if saved < most[0]:
                break
            run = self._make(begin, period, count)
            if run is None:
                continue
            worth = (saved * (1.0 if run.prefixes else 0.4), -float(len(run.incoming[0])), begin, -period)
            if worth > most:
                most, best = worth, (begin, period, run)
        return best

    def _candidates(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first step, period, number of blocks)"""
        for period in self._periods(start, stop):
            for first, last in find_stretches(start, stop, period, self._matches):
                count = (last - first) // period
                if (count - 1) * period >= MIN_SAVED:
                    for begin in range(first, min(first + period, last - count * period + 1)):
                        yield begin, period, count
                        if begin - period >= start and self._enters(begin - period, period):
                            yield begin - period, period, count + 1

    def _periods(self, start: int, stop: int) -> list[int]:
        """Distances between neighbours of one key: among them is the period of any run with a step of its own kind."""
        found: set[int] = set()
        seen: dict[int, int] = {}
        for index in range(start, stop):
            if (before := seen.get(self._keys[index])) is not None:
                found.add(index - before)
            seen[self._keys[index]] = index
        return sorted(period for period in found if 1 < period <= (stop - start) // 2)

    def _matches(self, i: int, j: int) -> bool:
        if self._keys[i] != self._keys[j]:
            return False
        pairs = zip(self._sources[i], self._sources[j], strict=True)
        return all(a == b or (a >= 0 and b >= 0 and i - a == j - b) for a, b in pairs)

    def _enters(self, first: int, period: int) -> bool:
        """Whether the steps from ``first`` on match those a period later, but for which values they take from before.

        What a block takes from the one before it, the first one may take from anywhere.
        """
        taken: dict[int, int] = {}
        for i in range(first, first + period):
            if self._keys[i] != self._keys[i + period]:
                return False
            for a, b in zip(self._sources[i], self._sources[i + period], strict=True):
                inside = b >= first + period
                if (inside and a == b - period) or (not inside and a == b):
                    continue
                if (
                    inside
                    or not 0 <= a < first
                    or taken.setdefault(b, a) != a
                    or self._sharding(a) != self._sharding(b)
                ):
                    return False
        return True

    def _sharding(self, place: int) -> Sharding:
        return self._shardings[self._steps[place]]

    def _key(self, node: Node) -> str:
        operands = [self._operand_key(operand) for operand in self._reading.operands(node)]
        attrs = [f"{key}={value}" for key, value in node.attrs.items()]
        flags = f"{node.needs_grad} {node in self._updates}"
        return f"{node.op.name} {attrs} {operands} {node.type} {format_sharding(self._shardings[node])} {flags}"

    def _operand_key(self, operand: Node) -> str:
        leaf = self._reading.leaf(operand)
        if leaf is None:
            return str(operand.type)
        return leaf_key(leaf) if self.is_own_param(leaf) else operand.digest

    def is_own_param(self, leaf: Leaf) -> bool:
        """True if one step alone reads the parameter."""
        return leaf.base.is_param and len(self._reading.readers(leaf.base)) == 1

    def _make(self, begin: int, period: int, count: int) -> BlockRun | None:
        """The run of ``count`` blocks, or None if values cross its blocks in a way that a loop cannot say."""
        stop = begin + period * count
        blocks = tuple(tuple(self._steps[begin + r * period : begin + (r + 1) * period]) for r in range(count))
        fixed: dict[Node, None] = {}
        incoming: list[dict[Node, None]] = []
        for number, block in enumerate(blocks):
            first = begin + number * period
            taken: dict[Node, None] = {}
            for operand in (x for node in block for x in self._reading.operands(node)):
                place = self._place.get(operand)
                leaf = self._reading.leaf(operand)
                if leaf is not None and not self.is_own_param(leaf):
                    fixed[operand] = None
                elif place is not None and place < first:
                    taken[operand] = None
            incoming.append(taken)
        everywhere = set(incoming[0]).intersection(*incoming[1:])
        fixed |= dict.fromkeys(node for node in incoming[0] if node in everywhere)
        moving = [tuple(node for node in taken if node not in everywhere) for taken in incoming]
        outgoing = self._outgoing(begin, period, count)
        if outgoing is None or len({len(taken) for taken in moving}) != 1:
            return None
        for number in range(1, count):
            places = {self._place[node] - begin - (number - 1) * period for node in moving[number]}
            if not places <= set(outgoing) or any(self._place[n] >= begin for n in fixed if n in self._place):
                return None
        if stop > len(self._steps):
            return None
        leaving = tuple(tuple(block[place] for place in outgoing) for block in blocks)
        return BlockRun(blocks, tuple(moving), leaving, tuple(fixed), self._prefixes(blocks))

    def _outgoing(self, begin: int, period: int, count: int) -> tuple[int, ...] | None:
        """Places in a block of the values it leaves; None if a block before the last leaves one to a later reader."""
        stop = begin + period * count
        found: set[int] = set()
        for index in range(begin, stop):
            node = self._steps[index]
            block = (index - begin) // period
            readers = [self._place[user] for user in self._reading.users[node] if user in self._place]
            outside = [place for place in readers if (place - begin) // period != block or place >= stop]
            leaves_program = node in self._results
            if not outside and not leaves_program:
                continue
            if block < count - 1 and (
                leaves_program or any(not begin <= p < stop or (p - begin) // period != block + 1 for p in outside)
            ):
                return None
            found.add((index - begin) % period)
        return tuple(sorted(found))

    def _prefixes(self, blocks: Sequence[Sequence[Node]]) -> tuple[str, ...] | None:
        names = [own_names(self._reading, block) for block in blocks]
        return common_prefixes(names)


def own_params(reading: Reading, block: Sequence[Node]) -> tuple[Node, ...]:
    """Parameters and buffers that only this block reads, in order of use."""
    found: dict[Node, None] = {}
    for node in block:
        for operand in reading.operands(node):
            leaf = reading.leaf(operand)
            if leaf is not None and leaf.base.is_param and len(reading.readers(leaf.base)) == 1:
                found[leaf.base] = None
    return tuple(found)


def own_names(reading: Reading, block: Sequence[Node]) -> list[str]:
    """Stored names of a block's own parameters."""
    return [source for param in own_params(reading, block) for source in sources_of(param)]


def common_prefixes(names: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Per block the prefix ``p`` such that its names are ``p.suffix`` with the same suffixes in every block.

    None if there is no such prefix, or if there are no names at all.
    """
    if not names[0] or len({len(block) for block in names}) != 1:
        return None
    split = [[name.split(".") for name in block] for block in names]
    first, second = split[0][0], split[1][0]
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if at is None:
        return None
    prefixes = []
    suffixes = {tuple(tuple(parts[at + 1 :]) for parts in block) for block in split}
    for block in split:
        heads = {tuple(parts[: at + 1]) for parts in block}
        if len(heads) != 1 or any(len(parts) <= at + 1 for parts in block):
            return None
        prefixes.append(".".join(heads.pop()))
    return tuple(prefixes) if len(suffixes) == 1 and len(set(prefixes)) == len(prefixes) else None


def leaf_key(leaf: Leaf) -> str:
    """What two parameters must agree in to be the same attribute of two instances of a class."""
    base = leaf.base
    chain = [(node.op.name, *node.attrs.items()) for node in leaf.chain]
    attrs = [base.attr(name) for name in ("trainable", "stored", "regather")]
    view = param_view(base)
    if view and view[0][0] == "concat":  # the names of what is joined differ from block to block
        view = (("concat", view[0][1], tuple(part[1:] for part in view[0][2])), *view[1:])
    return f"{base.type} {view} {attrs} {chain}"


def graph_updates(graph: Graph, reading: Reading) -> dict[Node, str]:
    """New value -> name of the buffer that it overwrites."""
    found = {reading.resolve(node): name for name, node in graph.updates}
    assert len(found) == len(graph.updates), "two buffers take one value"
    assert all(reading.is_own(node) for node in found), "a buffer is overwritten with what is not computed"
    check_buffers(graph)
    return found
