"""The same pair of programs with fewer of their equal layers, so that a proof does not grow with depth.

What is proved is proved of the short pair. That it holds for the long pair is an induction over layers: the source is
A, S, S, …, S, B and the parallel program A', P, P, …, P, B', where the kth S and the kth P read the same stored tensors
in the same places, and differ from the other S and P in the names of these alone. Of each run one S and one P are kept.
``exact.py`` begins them, and what follows them, with fresh random values (``Short.pairs``), and with fresh random
gradients on the way back. So A and A' arrive at the same value; S and P make the same of *any* value, not just of
those that some layers reach; and B and B' make the same of any value.

Programs whose values grow too much from end to end for a proof worth its name are cut at every such value that both
have: ``cut_apart``. Each part then makes the same of any value as its partner does.

Entry points: ``shorten`` and ``cut_apart``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ir.builder import Builder
from ir.graph import Graph, Node, bottlenecks, param_view
from ir.mesh import Mesh
from ir.proof.repeats import find_repeats
from ir.sharding import Invariant, Shard, Sharding
from ir.types import TensorType
from ir.verify import infer_shardings
from ir.views import readings, sources_of

KEPT = 1  # of a run of equal layers

Pairs = tuple[tuple[Node, Node], ...]


@dataclass(frozen=True, slots=True)
class Short:
    """A pair of programs with fewer layers.

    Attributes:
        source, pcg: the programs.
        pairs: values before and behind the layers kept, of the source and of the PCG. The pair stands for the longer
            one if these agree, and if what reads them is right for any value.
        note: what was left out, in words; empty if nothing.
    """

    source: Graph
    pcg: Graph
    pairs: Pairs = ()
    note: str = ""


def shorten(source: Graph, pcg: Graph, mesh: Mesh, kept: int = KEPT) -> Short:
    """The pair without what repeats; as it is where nothing does.

    kept: how many of equal layers stay.

    Raises:
        ShardingError: if ``pcg`` is no legal PCG for ``mesh``.
    """
    short = Short(source, pcg)
    while (found := _shorten(short, mesh, kept)) is not None:
        short = found
    return short


def cut_apart(short: Short, mesh: Mesh) -> Short | None:
    """The same pair, begun anew behind each bottleneck that both have; None if they have no more than it has.

    Partners are the last values of a type at which either program has read the same stored tensors.

    Raises:
        ShardingError: if the PCG is no legal PCG for ``mesh``.
    """
    serial, parallel = Chain(short.source, Mesh(())), Chain(short.pcg, mesh)
    stored = {source for node in short.source.params for source in sources_of(node)}
    there = _by_what_was_read(parallel, stored)
    taken = {one for pair in short.pairs for one in pair} | {*short.source.roots, *short.pcg.roots}
    found = [
        (end, there[key])
        for key, end in _by_what_was_read(serial, stored).items()
        if key in there and not {end, there[key]} & taken
    ]
    return replace(short, pairs=(*short.pairs, *found)) if found else None


def _by_what_was_read(chain: Chain, stored: set[str]) -> dict[tuple[frozenset[str], TensorType], Node]:
    """The last bottleneck of each type that is whole on the mesh, by the stored tensors read so far."""
    each = zip(chain.read_before(stored), chain.ends, strict=True)
    whole = Invariant | Shard
    return {
        (read, end.type): end
        for read, end in each
        if end.type.dtype.is_floating and all(isinstance(state, whole) for state in chain.shardings[end])
    }


def _shorten(short: Short, mesh: Mesh, kept: int) -> Short | None:
    """The pair without the longest run; None if there is none, or its values are needed already."""
    if short.source.updates or short.pcg.updates:  # each overwrites a buffer of its own
        return None
    serial, parallel = Chain(short.source, Mesh(())), Chain(short.pcg, mesh)
    run = _longest_run(serial, kept)
    if run is None:
        return None
    ends = [serial.ends[at] for at in run]
    found = _same_run(serial, parallel, run, kept)
    if found is None:
        return None
    first, last, partners = found
    cuts = ((ends[first + kept], ends[last]), (partners[first + kept], partners[last]))
    (new_source, in_source), (new_pcg, in_pcg) = (
        _without(graph, *cut) for graph, cut in zip((short.source, short.pcg), cuts, strict=True)
    )
    wanted = [*short.pairs, *((ends[k], partners[k]) for k in range(first, first + kept + 1))]
    if any(a not in in_source or b not in in_pcg for a, b in wanted):
        return None
    pairs = tuple((in_source[a], in_pcg[b]) for a, b in wanted)
    note = f"{kept} of {last - first} equal layers"
    return Short(new_source, new_pcg, pairs, f"{short.note}, {note}" if short.note else note)


def _longest_run(chain: Chain, kept: int) -> list[int] | None:
    """Bottlenecks (by number) between which the program repeats, at least once more than is kept."""
    keys = [chain.key(at, at + 1, chain.own(at, at + 1)) for at in range(len(chain.ends) - 1)]
    best = max(find_repeats(keys), key=lambda one: (one.count - kept) * one.period, default=None)
    if best is None or best.count <= kept:
        return None
    return [best.start + k * best.period for k in range(best.count + 1)]


def _same_run(serial: Chain, parallel: Chain, run: Sequence[int], kept: int) -> tuple[int, int, dict[int, Node]] | None:
    """(first, last, values of the PCG at those ends of the run) between which the PCG repeats as the source does.

    The value that the source has behind its kth layer is looked for where the PCG has read the same tensors so far.
    """
    own = [serial.own(start, end) for start, end in pairwise(run)]
    of_run = {source for layer in own for source in layer}
    number = {end: at for at, end in enumerate(parallel.ends)}
    before = {key: number[end] for key, end in _by_what_was_read(parallel, of_run).items()}
    places: list[int | None] = []
    done: set[str] = set()
    for k in range(len(run)):
        places.append(before.get((frozenset(done), serial.ends[run[k]].type)))
        if k < len(own):
            done |= set(own[k])
    keys: list[str | None] = []
    for (start, end), layer in zip(pairwise(places), own, strict=True):
        if start is None or end is None or start >= end or not set(layer) <= set(parallel.own(start, end)):
            keys.append(None)
        else:
            keys.append(parallel.key(start, end, layer))
    best = max(find_repeats(keys, widest=1), key=lambda one: one.count, default=None)
    if best is None or best.count <= kept:
        return None
    first, last = best.start, best.stop
    return first, last, {k: parallel.ends[at] for k, at in enumerate(places) if at is not None}


def _without(graph: Graph, kept: Node, dropped: Node) -> tuple[Graph, Mapping[Node, Node]]:
    """The graph in which ``kept`` is read wherever ``dropped`` was; and where its nodes went, those still there."""
    k = Builder()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        made[node] = k.copy(node, tuple(made[x] for x in node.operands))
        if node is dropped:
            made[node] = made[kept]
    new = k.graph({name: made[node] for name, node in graph.outputs}, name=graph.name)
    there = set(new.nodes)
    return new, {node: copy for node, copy in made.items() if copy in there}


@dataclass
class Chain:
    """A program as a chain of values that everything behind them depends on alone (but for leaves and masks).

    ``ends`` are these values. Only what depends on both inputs and weights counts: masks, positions and gathered
    weights may be read anywhere.
    """

    graph: Graph
    mesh: Mesh

    @cached_property
    def shardings(self) -> Mapping[Node, Sharding]:
        """The state of every value."""
        return infer_shardings(self.graph, self.mesh)

    @cached_property
    def flow(self) -> list[Node]:
        """What depends on inputs and on weights, operands first; not what buffers alone are overwritten with."""
        reached = {node for _, node in self.graph.outputs}
        for node in reversed(self.graph.nodes):
            if node in reached:
                reached.update(node.operands)
        return [node for node in self.graph.nodes if node in reached and self._depends[node] == (True, True)]

    @cached_property
    def _depends(self) -> dict[Node, tuple[bool, bool]]:
        """Whether a node depends on an input, and whether on a weight."""
        found: dict[Node, tuple[bool, bool]] = {}
        for node in self.graph.nodes:
            on = [found[x] for x in node.operands]
            found[node] = (
                node.is_input or any(a for a, _ in on),
                node.is_param or any(b for _, b in on),
            )
        return found

    @cached_property
    def ends(self) -> list[Node]:
        """The bottlenecks, in order."""
        return [self.flow[at] for at in bottlenecks(self.flow, self.graph.users)]

    @cached_property
    def _place(self) -> dict[Node, int]:
        return {node: at for at, node in enumerate(self.flow)}

    def between(self, start: int, end: int) -> Sequence[Node]:
        """What flows behind the bottleneck ``start``, up to ``end``."""
        return self.flow[self._place[self.ends[start]] + 1 : self._place[self.ends[end]] + 1]

    @cached_property
    def _weights(self) -> dict[Node, tuple[str, ...]]:
        """Stored tensors that a node reads, itself or through what depends on weights alone."""
        found: dict[Node, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            read = list(sources_of(node)) if node.is_param else []
            for x in node.operands:
                if self._depends[x] == (False, True):
                    read += found[x]
            found[node] = tuple(dict.fromkeys(read))
        return found

    @cached_property
    def _outputs(self) -> dict[Node, list[str]]:
        found: dict[Node, list[str]] = {}
        for name, node in self.graph.outputs:
            found.setdefault(node, []).append(name)
        return found

    @cached_property
    def _readers(self) -> dict[str, tuple[int, int]]:
        """Stored tensor -> first and last place in ``flow`` where it is read."""
        found: dict[str, tuple[int, int]] = {}
        for at, node in enumerate(self.flow):
            for source in self._weights[node]:
                found[source] = (found.get(source, (at, at))[0], at)
        return found

    def own(self, start: int, end: int) -> tuple[str, ...]:
        """Stored tensors that are read between two bottlenecks and nowhere else, in order of first use."""
        low, high = self._place[self.ends[start]], self._place[self.ends[end]]
        read = dict.fromkeys(source for node in self.between(start, end) for source in self._weights[node])
        return tuple(s for s in read if low < self._readers[s][0] and self._readers[s][1] <= high)

    def read_before(self, of_run: set[str]) -> list[frozenset[str]]:
        """For each bottleneck, those of the stored tensors that have been read by then."""
        found: list[frozenset[str]] = []
        read: set[str] = set()
        bottlenecks = set(self.ends)
        for node in self.flow:
            read.update(source for source in self._weights[node] if source in of_run)
            if node in bottlenecks:
                found.append(frozenset(read))
        return found

    def key(self, start: int, end: int, own: Sequence[str]) -> str:
        """Equal for stretches that differ in the names of the stored tensors ``own`` alone, position by position."""
        local = {source: f"own {number}" for number, source in enumerate(own)}
        first = self.ends[start]
        named = {first: f"source {first.type} {self.shardings[first]}"}
        lines = []
        for number, node in enumerate(self.between(start, end)):
            operands = [named[x] if x in named else self._outside(x, local) for x in node.operands]
            lines.append(f"{_describe(node)} {operands} {self._outputs.get(node, '')}")
            named[node] = f"%{number}"
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _outside(self, node: Node, local: Mapping[str, str]) -> str:
        """An operand that does not flow: what is made of own weights by position, all else by content."""
        if not any(source in local for source in self._weights[node]):
            return node.digest
        if not node.is_param:
            return f"{_describe(node)}({', '.join(self._outside(x, local) for x in node.operands)})"
        attrs = [f"{key}={value!s}" for key, value in node.attrs.items() if key not in ("name", "source", "view")]
        parts = [(local.get(part.source, part.source), part.view, part.shape) for part in readings(node)]
        joined = [step if step[0] != "concat" else step[:2] for step in param_view(node)]
        return f"param {parts} {joined} {attrs} {node.type}"


def _describe(node: Node) -> str:
    return f"{node.op.name} {[f'{key}={value!s}' for key, value in node.attrs.items()]} {node.type} {node.needs_grad}"
