"""What a node may do and what that costs: one split per mesh axis, with its parameters' storage settled.

A parameter read once belongs to its reader, so its storage is chosen here, with the reader's split; tied parameters are
variables of their own (``tied``); what is whole on every device (inputs, constants, buffers) costs all plans alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ir.graph import Node
from ir.memory.kept import is_light
from ir.mesh import JOINT, Axis
from ir.operator import Split
from ir.ops.parallel import transition_of
from ir.sharding import Invariant, Shard, Sharding, State, local_bytes
from ir.types import TensorType
from pdv.pcg.norms import is_within_norm
from pdv.pcg.plan_cost import copied_bytes, local_costs, surely_kept
from pdv.pcg.redistribute import Chain, Redistribution, Routes, all_shardings
from pdv.pcg.states import Seconds
from pdv.problem import Pins, Problem, Storage
from pdv.search.solver.elimination import BucketCache
from pdv.search.solver.exposed import Exposed
from pdv.search.solver.tables import Factor
from pdv.search.solver.ways import Cut, Ways, ways_of


class Use(NamedTuple):
    """One way to keep a leaf that is read in a given sharding: what it costs, and the storage that it means."""

    seconds: float
    memory_bytes: float
    storage: Storage


@dataclass(frozen=True)
class AtRest:
    """One way in which a parameter may rest, whoever reads it.

    ``before``: where its chains begin; ``once``: whether it is gathered once a step; seconds and bytes of what rests.
    """

    storage: Storage
    routes: Routes
    before: int
    once: bool
    seconds: float
    num_bytes: float


@dataclass(frozen=True)
class Config:
    """One way to run a node on the mesh.

    ``seconds`` and ``memory_bytes`` are its compute and its saved result; ``leaves`` holds, by operand number, the
    uses among which the price of memory decides. ``working_bytes`` are what a device reads and makes meanwhile.
    """

    splits: tuple[Split, ...]
    needs: tuple[Sharding, ...]
    result: Sharding
    seconds: float
    memory_bytes: float
    leaves: tuple[tuple[int, tuple[Use, ...]], ...]
    working_bytes: float

    def storage(self, price: float) -> tuple[tuple[int, Storage], ...]:
        """The chosen storage of each leaf that has one."""
        return tuple((number, _cheapest(uses, price).storage) for number, uses in self.leaves)

    def totals(self, price: float) -> tuple[float, float]:
        """(seconds, bytes) with the leaves that ``price`` chooses."""
        seconds, memory = self.seconds, self.memory_bytes
        for _, uses in self.leaves:
            use = _cheapest(uses, price)
            seconds += use.seconds
            memory += use.memory_bytes
        return seconds, memory


def _cheapest(uses: tuple[Use, ...], price: float) -> Use:
    return min(uses, key=lambda use: use.seconds + price * use.memory_bytes)


@dataclass(frozen=True)
class KnownConfigs:
    """What is known of a problem's nodes whatever its limits are, and of the same along single axes of its mesh."""

    moves: Redistribution
    configs: dict[Hashable, tuple[Config, ...]] = field(default_factory=dict)
    uses: dict[tuple[Node | TensorType, Sharding, bool, bool], tuple[Use, ...]] = field(default_factory=dict)
    at_rest: dict[Node | TensorType, list[AtRest]] = field(default_factory=dict)
    resident: dict[tuple[TensorType, Sharding], tuple[float, float]] = field(default_factory=dict)
    pieces: dict[TensorType, Seconds] = field(default_factory=dict)
    storages: dict[Node, list[Storage]] = field(default_factory=dict)
    param_routes: dict[tuple[TensorType, bool], Routes] = field(default_factory=dict)
    axes: dict[str, KnownConfigs] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> KnownConfigs:
        """Nothing yet."""
        return cls(Redistribution(problem.mesh, problem.axes, problem.bucket_bytes))


class ConfigTable:
    """Configurations of nodes, remembered per node."""

    def __init__(self, problem: Problem, tied: Collection[Node] = (), known: KnownConfigs | None = None) -> None:
        """``known``: of the problem, or of one that differs in its limits alone."""
        self._all = known or KnownConfigs.of(problem)
        self.problem = problem
        self.moves = self._all.moves
        self.exposed = Exposed(problem)
        self.states = 0
        self.moved: dict[Hashable, Any] = {}  # Any: ``network.MoveCost``, what moving alike values costs
        # tables that blocks share, by the keys of what they are made of
        self.known = BucketCache()
        self.free: dict[tuple[Hashable, int], Factor] = {}
        self.own: dict[tuple[Hashable, float], Factor] = {}  # by kind and price: seconds of each configuration
        self._tied = frozenset(tied)
        self._plain = problem.pins == Pins()
        self._configs: dict[Node, tuple[Config, ...]] = {}
        self._kinds: dict[Hashable, int] = {}
        self._kind_of: dict[Node, int] = {}
        self._alike: dict[Hashable, tuple[Config, ...]] = {}

    def of(self, node: Node) -> tuple[Config, ...]:
        """Every legal configuration, in a fixed order; empty where pins leave none."""
        if node not in self._configs:
            alike, limit = self._kind(node), self.problem.working_limit
            if alike not in self._alike:
                self.ask([node])
                every = self._all.configs[alike]
                self._alike[alike] = tuple(config for config in every if config.working_bytes <= limit)
                self.states += len(self._alike[alike])
            self._configs[node] = self._alike[alike]
        return self._configs[node]

    def ask(self, nodes: Iterable[Node]) -> None:
        """Know what nodes may do, whatever the limits are; a cost model is asked once about all that are new."""
        new: dict[Hashable, tuple[Node, Ways, dict[Cut, tuple[Split, ...]]]] = {}
        for node in nodes:
            alike = None if node in self._configs else self._kind(node)
            if not (alike is None or alike in self._alike or alike in self._all.configs or alike in new):
                ways = self._ways(node)
                new[alike] = node, ways, _even(node, ways)
        asked = [(node, chosen) for node, _, even in new.values() for chosen in even.values()]
        costs = iter(local_costs(self.problem, asked))
        for alike, (node, ways, even) in new.items():
            seconds = {cut: next(costs).seconds for cut in even}
            self._all.configs[alike] = tuple(self._enumerate(node, ways, seconds))

    def kind(self, node: Node) -> int:
        """A number that nodes share whose configurations are equal."""
        if node not in self._kind_of:
            self._kind_of[node] = self._kinds.setdefault(self._kind(node), len(self._kinds))
        return self._kind_of[node]

    def _kind(self, node: Node) -> Hashable:
        """Equal for nodes whose configurations are equal: where nothing is pinned, those alike in what is priced."""
        if not self._plain:
            return node
        read = tuple((x.type, x.needs_grad, x.is_leaf, x in self._tied, self._lies(x)) for x in node.operands)
        last = node is self.problem.last
        here = node.type, node.needs_grad, self._lies(node), last, self.problem.hides and is_within_norm(node)
        return node.op.name, tuple(node.attrs.items()), *here, read

    def _lies(self, value: Node) -> Hashable:
        """Equal for views alike of values alike, where a bound asks what lies in memory of its own, and stays there."""
        if not self.problem.hides or value.op.kernel or not value.operands:
            return self.lets_go(value)
        return value.op.name, tuple(value.attrs.items()), value.type, self._lies(value.operands[0])

    def lets_go(self, value: Node) -> bool:
        """True of a value that is made again in backward, of what is kept anyway."""
        return self.problem.lean and is_light(value)

    def keeps(self, reader: Node, operand: int) -> bool:
        """True if a reader holds what it reads until backward."""
        return self.problem.train and reader.needs_grad and operand in self._saved(reader)

    def _saved(self, node: Node) -> Collection[int | str]:
        """What a node may keep; for a bound what it keeps for sure."""
        return surely_kept(node) if self.problem.hides else node.op.saved

    def _ways(self, node: Node) -> Ways:
        """What pins leave."""
        mesh, pins, splits = self.problem.mesh, self.problem.pins, node.op.splits(node.loops)
        options = [
            _that_differ(axis, [split for split in splits if pins.split(node, axis.name, split)]) for axis in mesh.axes
        ]
        return ways_of(tuple(map(tuple, options)), mesh, tuple(value.type.rank for value in (*node.operands, node)))

    def _enumerate(self, node: Node, ways: Ways, seconds: Mapping[Cut, float]) -> Iterator[Config]:
        """``seconds``: by how loops are cut, of local work."""
        values = (*node.operands, node)
        *read, made = (self._held_bytes(value.type)[ways.vertices[at]] for at, value in enumerate(values))
        working = sum(read, start=made)
        leaves = [at for at, leaf in enumerate(node.operands) if leaf.is_leaf]  # none is a sum of terms
        possible = np.isfinite(working) & ~ways.partial[leaves].any(axis=0)
        saved = made if self.problem.train and "out" in self._saved(node) and node.needs_grad else np.zeros_like(made)
        stored = [at for at in leaves if node.operands[at].needs_grad and node.operands[at] not in self._tied]
        kept = [(at, node.operands[at], self.keeps(node, at)) for at in stored]
        for number in np.flatnonzero(possible).tolist():
            way = ways.ways[number]
            if way.cut in seconds:
                uses = tuple([(at, self._leaf(node, leaf, way.needs[at], keep=keep)) for at, leaf, keep in kept])
                if all(each for _, each in uses):
                    own_s, held = seconds[way.cut], float(saved[number])
                    yield Config(way.splits, way.needs, way.result, own_s, held, uses, float(working[number]))

    def _held_bytes(self, tensor: TensorType) -> Seconds:
        """[states] bytes of one device's piece; infinite where the cut is not even."""
        if tensor not in self._all.pieces:
            self._all.pieces[tensor] = self.moves.held_bytes(tensor)
        return self._all.pieces[tensor]

    def _leaf(self, reader: Node, param: Node, need: Sharding, *, keep: bool) -> tuple[Use, ...]:
        """Ways to keep a parameter that one node reads as ``need``, none dominated; empty if pins leave none."""
        last = reader is self.problem.last
        key = (param.type if self._plain else param, need, keep, last)
        if key not in self._all.uses:
            uses = [self._store(param, need, one, keep=keep, last=last) for one in self._at_rest(param)]
            self._all.uses[key] = tuple(_drop_dominated([use for use in uses if use is not None]))
        return self._all.uses[key]

    def _at_rest(self, param: Node) -> list[AtRest]:
        """The ways in which a parameter may rest, whatever is read of it."""
        key = param.type if self._plain else param
        if key not in self._all.at_rest:
            found = []
            for storage in self.storages(param):
                routes = self.param_routes(param.type, storage)
                before, once = routes.states.index[storage.sharding], self.gathers_once(storage)
                found.append(AtRest(storage, routes, before, once, *self.resident(param, storage)))
            self._all.at_rest[key] = found
        return self._all.at_rest[key]

    def param_routes(self, tensor: TensorType, storage: Storage) -> Routes:
        """The chains of a parameter, with what is summed and gathered once a step counted so."""
        problem, key = self.problem, (tensor, self.gathers_once(storage))
        if key not in self._all.param_routes:
            routes = self.moves.routes(tensor, gradient=problem.train and not problem.hides, copied=False)
            seconds = routes.seconds
            if problem.once != 1.0 or problem.bucket_bytes:
                seconds = seconds - routes.named_s + problem.once * routes.summed_s
            if key[1] and problem.hides:  # beside what the first micro-batch does
                seconds = seconds - routes.unit_s + problem.once * problem.slowed * routes.unit_s
            elif key[1]:  # gathers count twice where sums are counted that may hide (``plan_cost``)
                seconds = seconds - routes.unit_s + problem.once * (routes.unit_s + routes.unit_forward_s)
            routes = replace(routes, seconds=seconds)
            self._all.param_routes[key] = routes
        return self._all.param_routes[key]

    def gathers_once(self, storage: Storage) -> bool:
        """Whether what rests so, and is gathered a unit at a time, is gathered once a step."""
        return self.problem.train and self.problem.several and not storage.regather

    def kept(self, tensor: TensorType, routes: Routes, before: int, unit: int) -> tuple[float, float]:
        """(seconds, bytes) that a copy for a whole step takes beyond what rests: its gradients are added up whole."""
        whole, rests = float(routes.bytes[unit]), float(routes.bytes[before])
        copied = sum(copied_bytes(self.problem, tensor, whole, rests))
        return (whole - rests) * self.problem.adding_s, copied * self.problem.resting

    def storages(self, param: Node) -> list[Storage]:
        """Where a parameter may rest: Invariant first, then cut; cut ones with and without regathering."""
        if param not in self._all.storages:
            self._all.storages[param] = self._is_allowed(param)
        return self._all.storages[param]

    def _is_allowed(self, param: Node) -> list[Storage]:
        mesh, pins = self.problem.mesh, self.problem.pins
        states: tuple[State, ...] = (Invariant(), *(Shard(dim) for dim in range(param.type.rank)))
        found = []
        for sharding in all_shardings(param.type, mesh, states):
            if not all(pins.storage(param, axis.name, s) for axis, s in zip(mesh.axes, sharding, strict=True)):
                continue
            cut = any(isinstance(state, Shard) for state in sharding)
            if pins.regather != "always" or not cut:
                found.append(Storage(sharding))
            if cut and self.problem.train and pins.regather != "never":
                found.append(Storage(sharding, regather=True))
        return [storage for storage in found if pins.rests(param, storage)]

    def resident(self, param: Node, storage: Storage) -> tuple[float, float]:
        """(seconds of the optimizer, bytes of weight, gradient and moments) of a parameter at rest."""
        key = param.type, storage.sharding
        if key not in self._all.resident:
            held = local_bytes(param.type, storage.sharding, self.problem.mesh)
            problem = self.problem
            seconds = 0.0
            if problem.train:
                seconds = problem.optimizer(param.type, held).mean_s * problem.once + held * problem.adding_s
            self._all.resident[key] = seconds, problem.held_bytes(param.type, held) * problem.resting
        return self._all.resident[key]

    def may_gather(self, param: Node, storage: Storage, chain: Chain | None) -> bool:
        """Whether the pins allow what a chain from where a parameter rests gathers."""
        gathers = self.problem.pins.gathers
        if chain is None or gathers is Pins().gathers:
            return True
        fetched = [step for step in chain.steps if transition_of(step.name).fetches]
        axes = [axis for step in fetched for axis in step.axis.split(JOINT)]
        return all(gathers(param, axis, storage.regather) for axis in axes)

    def _store(self, param: Node, need: Sharding, one: AtRest, *, keep: bool, last: bool) -> Use | None:
        """A parameter that rests in one way and is read once, as ``need``; ``last``: by the last to run backward."""
        storage, routes, before = one.storage, one.routes, one.before
        after = routes.states.index[need]
        gathered = bool(routes.gathered[before, after])
        if routes.length[before, after] < 0 or (storage.regather and not gathered):
            return None  # there is no way, or nothing to gather again: the plain storage says the same
        if gathered and not (self._plain or self.may_gather(param, storage, routes.chain(before, after))):
            return None
        seconds, memory = one.seconds + float(routes.seconds[before, after]), one.num_bytes
        if storage.regather:
            seconds += float(routes.forward_s[before, after])
        unit = int(routes.unit[before, after]) if one.once else -1
        if unit >= 0:
            added_s, copied = self.kept(param.type, routes, before, unit)
            seconds, memory = seconds + added_s, memory + copied
        if self.problem.hides:
            seconds += self.exposed.seconds(param.type, storage.sharding, need, last=last)
        if not storage.regather and gathered and keep and routes.copy[before, after] != unit:
            memory += float(routes.bytes[after])
        return Use(seconds, memory, storage)


def _drop_dominated(uses: list[Use]) -> list[Use]:
    """Uses that no other one beats in both seconds and bytes; the first of equals stays."""
    kept: list[Use] = []
    for use in sorted(uses, key=lambda u: (u.seconds, u.memory_bytes)):
        if not kept or use.memory_bytes < kept[-1].memory_bytes:
            kept.append(use)
    return kept


def _even(node: Node, ways: Ways) -> dict[Cut, tuple[Split, ...]]:
    """The ways that local work depends on: how loops are cut, each into equal parts."""
    extents = node.loops.extents
    return {
        cut: chosen for cut, chosen in ways.cuts.items() if all(extents[loop] % degree == 0 for loop, degree in cut)
    }


def _that_differ(axis: Axis, splits: list[Split]) -> list[Split]:
    """The splits along an axis; where it has one device all are alike, and that which cuts nothing stands for them."""
    return splits if axis.size > 1 else [split for split in splits if split.label == "none"] or splits
