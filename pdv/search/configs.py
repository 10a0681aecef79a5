"""What a node may do and what that costs: one split per mesh axis, with its parameters' storage settled.

A parameter read once belongs to its reader, so its storage is chosen here, with the reader's split; only tied
parameters need the caller to fix theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ir.graph import Node
from ir.operator import Split, backward_work, forward_work
from ir.sharding import Invariant, Partial, Shard, Sharding, fits, invariant, local_bytes
from ir.verify import divides, node_local_loops
from pdv.problem import INFER_COPIES, TRAIN_COPIES, Problem, Storage
from pdv.rewrite.redistribute import Redistribution, all_shardings


class Use(NamedTuple):
    """One way to keep a leaf that is read in a given sharding: what it costs, and the storage that it means."""

    seconds: float
    memory_bytes: float
    storage: Storage | None


@dataclass(frozen=True)
class Config:
    """One way to run a node on the mesh.

    ``seconds`` and ``memory_bytes`` are its compute and its saved result; ``leaves`` holds, by operand number, the
    uses among which the price of memory decides.
    """

    splits: tuple[Split, ...]
    needs: tuple[Sharding, ...]
    result: Sharding
    seconds: float
    memory_bytes: float
    leaves: tuple[tuple[int, tuple[Use, ...]], ...]

    def storage(self, price: float) -> tuple[tuple[int, Storage], ...]:
        """The chosen storage of each leaf that has one."""
        chosen = ((number, _cheapest(uses, price).storage) for number, uses in self.leaves)
        return tuple((number, storage) for number, storage in chosen if storage is not None)

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


@dataclass
class ConfigTable:
    """Configurations of nodes, remembered per node and per storage of the tied parameters that it reads."""

    problem: Problem
    moves: Redistribution
    tied: Mapping[Node, Storage] = field(default_factory=dict)
    states: int = 0
    _configs: dict[tuple[Node, tuple[Storage | None, ...]], tuple[Config, ...]] = field(default_factory=dict)
    _uses: dict[tuple[Node, Sharding, Storage | None], tuple[Use, ...]] = field(default_factory=dict)

    def of(self, node: Node) -> tuple[Config, ...]:
        """Every legal configuration, in a fixed order; empty where pins leave none."""
        key = (node, tuple(self.tied.get(operand) for operand in node.operands))
        if key not in self._configs:
            self._configs[key] = tuple(self._enumerate(node))
            self.states += len(self._configs[key])
        return self._configs[key]

    def _enumerate(self, node: Node) -> Iterator[Config]:
        mesh, pins = self.problem.mesh, self.problem.pins
        splits = node.op.splits(node.loops)
        options = [[split for split in splits if pins.split(node, axis.name, split)] for axis in mesh.axes]
        for chosen in itertools.product(*options):
            if divides(node.loops, chosen, mesh):
                config = self._config(node, chosen)
                if config is not None:
                    yield config

    def _config(self, node: Node, splits: tuple[Split, ...]) -> Config | None:
        mesh = self.problem.mesh
        result = tuple(split.result for split in splits)
        needs = tuple(tuple(split.operands[i] for split in splits) for i in range(len(node.operands)))
        operands_fit = all(fits(x.type, need, mesh) for x, need in zip(node.operands, needs, strict=True))
        if not operands_fit or not fits(node.type, result, mesh):
            return None
        memory = 0.0
        if self.problem.train and "out" in node.op.saved and node.needs_grad:
            memory += local_bytes(node.type, result, mesh)
        leaves = []
        for number, (leaf, need) in enumerate(zip(node.operands, needs, strict=True)):
            if leaf.is_leaf:
                uses = self._leaf(leaf, need)
                if not uses:
                    return None
                leaves.append((number, uses))
        return Config(splits, needs, result, self._compute(node, splits), memory, tuple(leaves))

    def _compute(self, node: Node, splits: tuple[Split, ...]) -> float:
        loops = node_local_loops(node, splits, self.problem.mesh)
        types = [operand.type for operand in node.operands]
        compute = self.problem.compute
        seconds = compute.seconds(forward_work(node.op, loops, types, node.type), node.type.dtype)
        if self.problem.train and node.needs_grad:
            indices = range(len(types)) if node.op.differentiable is None else node.op.differentiable
            wanted = [i in indices and operand.needs_grad for i, operand in enumerate(node.operands)]
            seconds += compute.seconds(backward_work(node.op, loops, types, node.type, wanted), node.type.dtype)
        return seconds

    def _leaf(self, leaf: Node, need: Sharding) -> tuple[Use, ...]:
        """Ways to read a leaf as ``need``, none dominated; empty if it cannot be.

        Inputs and constants are whole on every device and carry no gradient: any slice of them is free.
        """
        key = (leaf, need, self.tied.get(leaf))
        if key not in self._uses:
            self._uses[key] = tuple(self._leaf_uses(leaf, need))
        return self._uses[key]

    def _leaf_uses(self, leaf: Node, need: Sharding) -> list[Use]:
        mesh = self.problem.mesh
        if any(isinstance(state, Partial) for state in need):
            return []
        if not leaf.needs_grad:
            if leaf.op.name == "param":
                return [Use(0.0, float(leaf.type.num_bytes), Storage(invariant(mesh)))]
            kept = local_bytes(leaf.type, need, mesh) if leaf.op.name == "const" else 0
            return [Use(0.0, float(kept), None)]
        fixed = self.tied.get(leaf)
        storages = [fixed] if fixed is not None else self.storages(leaf)
        uses = [self._stored(leaf, need, storage, shared=fixed is not None) for storage in storages]
        return _undominated([use for use in uses if use is not None])

    def storages(self, param: Node) -> list[Storage]:
        """Where a parameter may rest: Invariant first, then cut; cut ones with and without regathering."""
        mesh, pins = self.problem.mesh, self.problem.pins
        states = (Invariant(), *(Shard(dim) for dim in range(param.type.rank)))
        found = []
        for sharding in all_shardings(param.type, mesh, states):
            if not all(pins.storage(param, axis.name, s) for axis, s in zip(mesh.axes, sharding, strict=True)):
                continue
            cut = any(isinstance(state, Shard) for state in sharding)
            if pins.regather != "always" or not cut:
                found.append(Storage(sharding))
            if cut and self.problem.train and pins.regather != "never":
                found.append(Storage(sharding, regather=True))
        return found

    def resident(self, param: Node, storage: Storage) -> tuple[float, float]:
        """(seconds of the optimizer, bytes of weight, gradient and moments) of a parameter at rest."""
        held = local_bytes(param.type, storage.sharding, self.problem.mesh)
        if not self.problem.train:
            return 0.0, float(held * INFER_COPIES)
        return self.problem.compute.optimizer_seconds(held), float(held * TRAIN_COPIES)

    def _stored(self, param: Node, need: Sharding, storage: Storage, *, shared: bool) -> Use | None:
        """One use of a parameter that rests as ``storage``; what it costs at rest counts unless it is shared."""
        chain = self.moves.chain(param.type, storage.sharding, need, gradient=self.problem.train)
        if chain is None:
            return None
        seconds, memory = (0.0, 0.0) if shared else self.resident(param, storage)
        gathered = any(step.name in ("combine", "all_gather") for step in chain.steps)
        if storage.regather and not gathered and not shared:
            return None  # nothing to gather again: the plain storage says the same
        seconds += chain.seconds
        if gathered and storage.regather:
            seconds += chain.forward_s
        elif gathered:
            memory += local_bytes(param.type, need, self.problem.mesh)
        return Use(seconds, memory, storage)


def _undominated(uses: list[Use]) -> list[Use]:
    """Uses that no other one beats in both seconds and bytes; the first of equals stays."""
    kept: list[Use] = []
    for use in sorted(uses, key=lambda u: (u.seconds, u.memory_bytes)):
        if not kept or use.memory_bytes < kept[-1].memory_bytes:
            kept.append(use)
    return kept
