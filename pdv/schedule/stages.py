"""Where a model is cut into the chunks of a pipeline: between its layers, or at bottlenecks.

Decides which chunk runs an operator. Layers are the repeated modules that parameters are named by
(`transformer.h.0.…`, `transformer.h.1.…`), or else equal blocks behind each other; what comes before the first of them
belongs to the first chunk, what comes behind the last to the last, as in Megatron-LM. A model without any (most
convolutional ones) is cut at values on which alone all behind them depends. Entry point: `cut`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ir.errors import UsageError
from ir.graph import Graph, Node
from ir.proof.repeats import FEWEST
from pdv.search.blocks import longest_repeat, split_blocks

NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")
REMEMBERED = 4  # graphs
SHARE = 0.5  # of all operators, that a stack must have for its layers to be the units of a pipeline


@dataclass(frozen=True)
class Units:
    """The pieces that a pipeline may be cut between, in order.

    Attributes:
        of: the unit of each operator; -1 before the first, ``count`` behind the last.
        count: how many there are.
        layers: whether they are a model's layers.
    """

    of: Mapping[Node, int]
    count: int
    layers: bool


@lru_cache(maxsize=REMEMBERED)
def units(graph: Graph) -> Units:
    """The layers of a graph, or else its blocks between bottlenecks."""
    names = _stack(graph)
    if not names:
        return _blocks(graph)
    prefix, numbers = names
    place = {number: index for index, number in enumerate(sorted(numbers))}
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_param:
            match = NUMBERED.match(str(node.attr("name")))
            found[node] = place[int(match[2])] if match and match[1] == prefix else len(place)
    of: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        before = [of[operand] for operand in node.operands if operand in of]
        own = [found[operand] for operand in node.operands if operand in found]
        latest = max(before, default=-1)
        named = [unit for unit in own if unit < len(place)]
        if named:
            of[node] = max(latest, *named)
        else:  # a weight of no layer: before the first, or behind the last
            of[node] = len(place) if own and latest >= len(place) - 1 else latest
    return Units(of, len(place), layers=True)


def _stack(graph: Graph) -> tuple[str, set[int]] | None:
    """The name and numbers of the repeated module that holds most of the parameters, if it holds enough."""
    stacks: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    trained = [node for node in graph.params if node.needs_grad]
    for node in trained:
        match = NUMBERED.match(str(node.attr("name")))
        if match:
            stacks.setdefault(match[1], set()).add(int(match[2]))
            counts[match[1]] = counts.get(match[1], 0) + 1
    best = max(counts, key=lambda name: (counts[name], name), default="")
    if not best or len(stacks[best]) < FEWEST or counts[best] < SHARE * len(trained):
        return None
    if not _alike(best, stacks[best], trained):
        return None
    matches = [match for node in graph.params if (match := NUMBERED.match(str(node.attr("name"))))]
    return best, {int(match[2]) for match in matches if match[1] == best}  # frozen layers are layers


def _alike(prefix: str, numbers: set[int], trained: Sequence[Node]) -> bool:
    """Whether most members of a stack have parameters of the same shapes: stages of a ResNet do not."""
    shapes: dict[int, list[tuple[int, ...]]] = {number: [] for number in numbers}
    for node in trained:
        match = NUMBERED.match(str(node.attr("name")))
        if match and match[1] == prefix:
            shapes[int(match[2])].append(node.type.shape)
    kinds = Counter(tuple(sorted(found)) for found in shapes.values())
    return max(kinds.values()) >= SHARE * len(numbers) and max(kinds.values()) >= FEWEST


def _blocks(graph: Graph) -> Units:
    """Layers by structure, where equal blocks follow each other; else every block is a unit."""
    blocks = split_blocks(graph)
    aside = sum(block.beside for block in blocks)  # which goes with the first
    found = longest_repeat([block.key for block in blocks])
    inside = sum(len(block.nodes) for block in blocks[found.start : found.stop]) if found else 0
    if found is None or inside < SHARE * sum(len(block.nodes) for block in blocks):
        of = {node: max(at - aside, 0) for at, block in enumerate(blocks) for node in block.nodes}
        return Units(of, len(blocks) - aside, layers=False)
    place = [min(max((at - found.start) // found.period, -1), found.count) for at in range(len(blocks))]
    return Units({node: place[at] for at, block in enumerate(blocks) for node in block.nodes}, found.count, layers=True)


def cut(
    graph: Graph,
    chunks: int,
    partition: Sequence[int] | None = None,
    weight: Callable[[Node], float] | None = None,
) -> tuple[dict[Node, int], tuple[int, ...], Units]:
    """The chunk of each operator, how many units each chunk has, and the units.

    Args:
        graph: the serial program.
        chunks: how many to cut.
        partition: units of each chunk; by default equal numbers of layers, or blocks of equal weight.
        weight: of an operator, to balance by: for a model without layers, or where it is given.

    Raises:
        UsageError: if there are fewer units than chunks, or a partition does not name all of them.
    """
    found = units(graph)
    what = "layers" if found.layers else "places where it can be cut"
    if chunks > found.count and partition is None:
        raise UsageError(
            f"{graph.name} has {found.count} {what}, too few for {chunks} chunks of a pipeline",
            mend=f"Choose pp x vp of at most {found.count}",
        )
    sizes = _sizes(found, chunks, partition, weight)
    if len(sizes) != chunks or sum(sizes) != found.count or min(sizes) < 0:
        raise UsageError(
            f"partition {'-'.join(map(str, sizes))} has {len(sizes)} chunks and {sum(sizes)} {what}",
            f"{chunks} chunks (pp x vp) that together have {found.count}",
        )
    ends = list(accumulate(sizes))
    chunk_of_unit = [next(chunk for chunk, end in enumerate(ends) if unit < end) for unit in range(found.count)]
    places = [0, *chunk_of_unit, chunks - 1]  # what is before the first unit, and behind the last
    of = {node: places[unit + 1] for node, unit in found.of.items()}
    return of, tuple(sizes), found


def _sizes(
    found: Units, chunks: int, partition: Sequence[int] | None, weight: Callable[[Node], float] | None
) -> list[int]:
    if partition is not None:
        return list(partition)
    if weight is None and found.layers:
        return even(found.count, chunks)
    weights = [0.0] * found.count
    for node, unit in found.of.items():  # those before the first and behind the last count with these
        weights[min(max(unit, 0), found.count - 1)] += weight(node) if weight is not None else float(node.loops.points)
    return balance(weights, chunks)


def even(count: int, chunks: int) -> list[int]:
    """Equal numbers; what remains is spread: 10 over 4 is 2, 3, 2, 3."""
    ends = [count * (chunk + 1) // chunks for chunk in range(chunks)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def balance(weights: Sequence[float], chunks: int) -> list[int]:
    """Runs of units whose heaviest is as light as can be; none is empty.

    The least bound that a greedy packing keeps, by bisection over the sums of runs.
    """
    low, high = max(weights), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_pack(weights, middle)) <= chunks else (middle, high)
    sizes = _pack(weights, high)
    while len(sizes) < chunks:  # a run of several gives its last unit away
        place = max(range(len(sizes)), key=lambda at: sizes[at])
        sizes[place : place + 1] = [sizes[place] - sizes[place] // 2, sizes[place] // 2]
    return sizes


def _pack(weights: Sequence[float], bound: float) -> list[int]:
    sizes, filled = [0], 0.0
    for weight in weights:
        if sizes[-1] and filled + weight > bound * (1 + 1e-12):
            sizes.append(0)
            filled = 0.0
        sizes[-1] += 1
        filled += weight
    return sizes
