"""Every plan of a tiny program, priced: what the search is compared with. Nothing here is taken from the search.

Several outputs leave alike, so that their plans are those of each way to leave (``oracles``).

One big table over all choices (a split per operator and axis, a storage per parameter), of seconds and of bytes; an
entry is what ``plan_cost`` says of the derived graph, put together from the same formulas (``test_oracle`` compares).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ir.cost_model import backward_work, forward_work
from ir.graph import Node
from ir.operator import Split
from ir.sharding import Invariant, Partial, Shard, Sharding, State, fits, invariant, local_bytes
from ir.types import TensorType
from ir.verify import divides, node_local_loops
from pdv.cost.compute import ComputeModel
from pdv.pcg.derive import exit_sharding
from pdv.pcg.redistribute import Chain, Redistribution
from pdv.pcg.states import MoveStep
from pdv.problem import Assignment, Problem, Storage

Array = np.ndarray[Any, np.dtype[np.float64]]
INFINITE = float("inf")


@dataclass(frozen=True)
class Factor:
    """Seconds and bytes as tables over the choices of ``keys``, one axis each."""

    keys: tuple[Node, ...]
    seconds: Array
    bytes: Array


def decided(problem: Problem) -> list[Problem]:
    """The problem, or one for each way in which its outputs may leave."""
    return [replace(problem, leaving=way) for way in problem.exits] if problem.undecided else [problem]


class TooManyPlansError(Exception):
    """More plans than the oracle is asked to enumerate."""


def chains_from(
    moves: Redistribution, tensor: TensorType, before: Sharding, *, gradient: bool
) -> dict[Sharding, Chain]:
    """Cheapest chains from ``before`` to every sharding that can be reached."""
    shardings = moves.routes(tensor, gradient=gradient).states.shardings
    chains = {after: moves.chain(tensor, before, after, gradient=gradient) for after in shardings}
    return {after: chain for after, chain in chains.items() if chain is not None}


class Oracle:
    """All plans of ``problem`` on its mesh, without algebraic rewrites (of several ways to leave: the first)."""

    def __init__(self, problem: Problem, limit: int = 2_000_000) -> None:
        self.problem = problem = decided(problem)[0]
        self.graph = problem.graph
        self.moves = Redistribution(problem.mesh, problem.axes)
        self.operators = [node for node in self.graph.nodes if not node.is_leaf]
        self.splits = {node: self._splits(node) for node in self.operators}
        self.storages = {param: self._storages(param) for param in self.graph.params}
        self.sizes = {node: len(found) for node, found in self.splits.items()}
        self.sizes |= {param: len(found) for param, found in self.storages.items()}
        self.limit = limit
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    @cached_property
    def values(self) -> list[Node]:
        """What is moved: everything that operators make or parameters hold, and someone wants."""
        moved = (*self.operators, *self.graph.params)
        return [node for node in moved if self._readers(node) or self._roots(node)]

    @cached_property
    def keys(self) -> dict[Node, set[Node]]:
        """The choices that the price of moving a value depends on."""
        return {value: {value, *(reader for reader, _ in self._readers(value))} for value in self.values}

    @cached_property
    def factors(self) -> list[Factor]:
        unary = [Factor((node,), self._compute(node), np.zeros(self.sizes[node])) for node in self.operators]
        return unary + [self._value(value) for value in self.values]

    def fastest(self) -> float:
        """Least seconds of any plan, whatever it needs of memory."""
        return float(self.joint(self._without_single_storages())[0].min())

    def fastest_within(self, limit: float) -> float:
        """Least seconds of the plans that fit; infinite if none does."""
        seconds, memory = self.joint(self.factors)
        return float(np.where(memory + self.whole_bytes <= limit, seconds, INFINITE).min())

    @property
    def whole_bytes(self) -> float:
        """What every device holds in any plan."""
        return float(sum(node.type.num_bytes for node in self.graph.nodes if node.is_leaf and not node.needs_grad))

    def joint(self, factors: Sequence[Factor]) -> tuple[Array, Array]:
        """Seconds and bytes of every plan, one axis per choice."""
        keys = list(dict.fromkeys(key for factor in factors for key in factor.keys))
        shape = tuple(self.sizes[key] for key in keys)
        if math.prod(shape) > self.limit:
            raise TooManyPlansError(f"{math.prod(shape)} plans")
        seconds, memory = np.zeros(shape), np.zeros(shape)
        for factor in factors:
            order = sorted(range(len(factor.keys)), key=lambda i: keys.index(factor.keys[i]))
            index = tuple(slice(None) if key in factor.keys else None for key in keys)
            seconds += factor.seconds.transpose(order)[index]
            memory += factor.bytes.transpose(order)[index]
        return seconds, memory

    def assignment(self, chosen: Mapping[Node, int]) -> Assignment:
        """The plan of one entry."""
        return Assignment(
            {node: self.splits[node][chosen[node]] for node in self.operators},
            {param: self.storages[param][chosen[param]] for param in self.graph.params},
            self.problem.leaving,
        )

    def price(self, chosen: Mapping[Node, int]) -> tuple[float, float]:
        """(seconds, bytes) of one plan."""
        prices = [self._entry(value, chosen) for value in self.values]
        compute = sum(self._seconds(node, self.splits[node][chosen[node]]) for node in self.operators)
        return compute + sum(s for s, _ in prices), self.whole_bytes + sum(m for _, m in prices)

    def legal(self, rng: np.random.Generator, tries: int = 300) -> dict[Node, int] | None:
        """A plan drawn at random, operator after operator, each legal after those before; None if none was found."""
        for _ in range(tries):
            chosen: dict[Node, int] = {}
            for node in self.graph.nodes:
                if node not in self.sizes:
                    continue
                chosen[node] = int(rng.integers(self.sizes[node]))
                done = [value for value in self.values if node in self.keys[value] and self.keys[value] <= set(chosen)]
                if any(math.isinf(self._entry(value, chosen)[0]) for value in done):
                    break
            else:
                return chosen
        return None

    def _without_single_storages(self) -> list[Factor]:
        """A storage that one factor alone asks about is settled there."""
        found = []
        for factor in self.factors:
            alone = [p for p in factor.keys if p in self.storages and sum(p in f.keys for f in self.factors) == 1]
            axes = tuple(factor.keys.index(param) for param in alone)
            keys = tuple(key for key in factor.keys if key not in alone)
            best = factor.seconds.min(axis=axes) if axes else factor.seconds
            found.append(Factor(keys, best, np.zeros(best.shape)))
        return found

    def _splits(self, node: Node) -> list[tuple[Split, ...]]:
        mesh = self.problem.mesh
        found = []
        for chosen in itertools.product(node.op.splits(node.loops), repeat=len(mesh.axes)):
            shardings = [tuple(split.operands[i] for split in chosen) for i in range(len(node.operands))]
            ends = [*zip(node.operands, shardings, strict=True), (node, tuple(split.result for split in chosen))]
            pending = any(x.is_leaf and Partial() in sharding for x, sharding in ends)  # no leaf is a sum of terms
            if not pending and divides(node.loops, chosen, mesh) and all(fits(x.type, s, mesh) for x, s in ends):
                found.append(chosen)
        return found

    def _storages(self, param: Node) -> list[Storage]:
        states: list[State] = [Invariant(), *(Shard(dim) for dim in range(param.type.rank))]
        found = []
        for sharding in itertools.product(states, repeat=len(self.problem.mesh.axes)):
            if fits(param.type, sharding, self.problem.mesh) and (param.needs_grad or sharding == self._whole):
                found.append(Storage(sharding))
                if sharding != self._whole and self.problem.train:
                    found.append(Storage(sharding, regather=True))
        return found

    @property
    def _whole(self) -> Sharding:
        return invariant(self.problem.mesh)

    def _compute(self, node: Node) -> Array:
        return np.array([self._seconds(node, splits) for splits in self.splits[node]])

    def _seconds(self, node: Node, splits: tuple[Split, ...]) -> float:
        if not self.problem.train and self._is_bias(node):
            return 0.0  # one call with its product
        loops = node_local_loops(node, splits, self.problem.mesh)
        types = [operand.type for operand in node.operands]
        compute = self.problem.compute
        assert isinstance(compute, ComputeModel)
        seconds = compute.seconds(forward_work(node.op, loops, types, node.type), node.type.dtype)
        if self._backward(node):
            numbers = range(len(types)) if node.op.differentiable is None else node.op.differentiable
            wanted = [i in numbers and operand.needs_grad for i, operand in enumerate(node.operands)]
            seconds += compute.seconds(backward_work(node.op, loops, types, node.type, wanted), node.type.dtype)
        return seconds

    def _is_bias(self, node: Node) -> bool:
        """A parameter added to the last dim of a linear."""
        if node.op.name != "add":
            return False
        product, bias = node.operands
        return product.op.name == "linear" and bias.is_param and bias.type.shape == node.type.shape[-1:]

    def _backward(self, node: Node) -> bool:
        return self.problem.train and node.needs_grad

    def _readers(self, value: Node) -> list[tuple[Node, int]]:
        return [(node, i) for node in self.operators for i, operand in enumerate(node.operands) if operand is value]

    def _roots(self, value: Node) -> list[Sequence[Sharding]]:
        """For each time that the program returns the value: the shardings in which it may leave."""
        return [self.problem.exits for _, node in self.graph.outputs if node is value] + [
            [self._whole] for _, node in self.graph.updates if node is value
        ]

    def _value(self, value: Node) -> Factor:
        """The price of moving a value, over the choices that it depends on."""
        keys = (value, *dict.fromkeys(reader for reader, _ in self._readers(value)))
        shape = tuple(self.sizes[key] for key in keys)
        if math.prod(shape) > self.limit:
            raise TooManyPlansError(f"{math.prod(shape)} plans")
        seconds, memory = np.empty(shape), np.empty(shape)
        for index in np.ndindex(*shape):
            seconds[index], memory[index] = self._entry(value, dict(zip(keys, index, strict=True)))
        return Factor(keys, seconds, memory)

    def _entry(self, value: Node, chosen: Mapping[Node, int]) -> tuple[float, float]:
        """What moving a value to all who want it costs, and what is kept of it for backward: (seconds, bytes)."""
        readers = self._readers(value)
        needs = tuple(tuple(split.operands[i] for split in self.splits[node][chosen[node]]) for node, i in readers)
        if value in self.storages:
            storage = self.storages[value][chosen[value]]
            key: tuple[object, ...] = (value, storage, needs)
            if key not in self._known:
                self._known[key] = self._stored(value, storage, needs, readers)
        else:
            made = tuple(split.result for split in self.splits[value][chosen[value]])
            key = (value, made, needs)
            if key not in self._known:
                self._known[key] = self._moved(value, made, needs, readers)
        return self._known[key]

    def _tree(
        self, value: Node, before: Sharding, targets: Sequence[Sharding]
    ) -> dict[tuple[MoveStep, ...], float] | None:
        """Seconds of every step that some chain takes; chains share their first steps."""
        tree: dict[tuple[MoveStep, ...], float] = {}
        gradient = self._backward(value)
        for target in targets:
            chain = self.moves.chain(value.type, before, target, gradient=gradient)
            if chain is None:
                return None
            spent = 0.0
            for number in range(1, len(chain.steps) + 1):
                prefix = chain.steps[:number]
                part = self._prefix_seconds(value, before, prefix)
                tree[prefix] = part - spent
                spent = part
        return tree

    def _prefix_seconds(self, value: Node, before: Sharding, prefix: tuple[MoveStep, ...]) -> float:
        gradient = self._backward(value)
        found = [
            c for c in chains_from(self.moves, value.type, before, gradient=gradient).values() if c.steps == prefix
        ]
        return found[0].seconds  # what a shortest way passes by, it reaches by a shortest way

    def _moved(
        self, value: Node, made: Sharding, needs: Sequence[Sharding], readers: Sequence[tuple[Node, int]]
    ) -> tuple[float, float]:
        targets = list(needs)
        for allowed in self._roots(value):
            leaving = exit_sharding(self.moves, [(value, made)], allowed, train=self.problem.train)
            if leaving is None:
                return INFINITE, 0.0
            targets.append(leaving)
        tree = self._tree(value, made, targets)
        if tree is None:
            return INFINITE, 0.0
        kept = {
            self._copy(value, made, need)
            for need, (reader, i) in zip(needs, readers, strict=True)
            if self._keeps(reader, i)
        }
        if self._backward(value) and "out" in value.op.saved:
            kept.add(())
        return sum(tree.values()), sum(self._held(value, made, steps) for steps in kept)

    def _copy(self, value: Node, made: Sharding, need: Sharding) -> tuple[MoveStep, ...]:
        """The steps that lead to the copy which is read; replicate makes none."""
        chain = self.moves.chain(value.type, made, need, gradient=self._backward(value))
        assert chain is not None
        steps = chain.steps
        while steps and steps[-1].name == "replicate":
            steps = steps[:-1]
        return steps

    def _held(self, value: Node, made: Sharding, steps: tuple[MoveStep, ...]) -> float:
        chains = chains_from(self.moves, value.type, made, gradient=self._backward(value))
        sharding = next(after for after, chain in chains.items() if chain.steps == steps)
        return float(local_bytes(value.type, sharding, self.problem.mesh))

    def _keeps(self, reader: Node, operand: int) -> bool:
        return self._backward(reader) and operand in reader.op.saved

    def _stored(
        self, param: Node, storage: Storage, needs: Sequence[Sharding], readers: Sequence[tuple[Node, int]]
    ) -> tuple[float, float]:
        held = float(local_bytes(param.type, storage.sharding, self.problem.mesh))
        if not param.needs_grad:
            return 0.0, 0.0  # whole on every device
        gradient = self.problem.train
        tree = self._tree(param, storage.sharding, needs)
        if tree is None:
            return INFINITE, 0.0
        seconds = sum(tree.values())
        if storage.regather:
            seconds += sum(self._again(param, storage.sharding, prefix) for prefix in tree)
        memory = held * (4 if gradient else 1)  # weight, gradient and two moments
        seconds += self.problem.compute.optimizer(held).mean_s if gradient else 0.0
        gathered = {
            self._copy(param, storage.sharding, need)
            for need, (reader, i) in zip(needs, readers, strict=True)
            if self._keeps(reader, i)
        }
        if not storage.regather:
            memory += sum(
                self._held(param, storage.sharding, steps)
                for steps in gathered
                if any(step.name in ("combine", "all_gather", "all_to_all") for step in steps)
            )
        return seconds, memory

    def _again(self, param: Node, before: Sharding, prefix: tuple[MoveStep, ...]) -> float:
        """Forward seconds of the last step of a prefix."""
        chains = chains_from(self.moves, param.type, before, gradient=self.problem.train).values()
        spent = {chain.steps: chain.forward_s for chain in chains}
        return spent[prefix] - spent[prefix[:-1]]
