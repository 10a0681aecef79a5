"""What each piece of a plan takes: seconds and bytes of one micro-batch, and what is there or due once a step.

Pieces are what a pipeline may be cut between (`pdv.schedule.pieces`). Entry points: ``piece_of_pcg`` and ``profile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ir.graph import Graph, Node, unmoved
from ir.memory.kept import light_values, made_of
from ir.sharding import local_bytes
from ir.verify import infer_shardings
from pdv.cost.breakdown import PlanCost
from pdv.pcg.plan_cost import copied_bytes, plan_cost, saved_values
from pdv.pcg.spread import spread_to_pcg
from pdv.pcg.units import gathered_once
from pdv.problem import Derived, Problem

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Profile:
    """One device's share of each piece; all arrays are [pieces].

    Attributes:
        forward_s, backward_s: of one micro-batch.
        sums_s: sums of gradients that are due once a step; ``optimizer_s``: the optimizer, and gathering what it has
            updated, where that is done once a step.
        resting_bytes: parameters, copies of them that a step keeps, and what training keeps of them.
        kept_bytes: of one micro-batch between its forward and its backward.
        light_bytes: the same where light values are made again, which takes ``light_s``.
        sent_bytes: what passes from the piece to those behind it.
    """

    forward_s: Numbers
    backward_s: Numbers
    sums_s: Numbers
    optimizer_s: Numbers
    resting_bytes: Numbers
    kept_bytes: Numbers
    light_bytes: Numbers
    light_s: Numbers
    sent_bytes: Numbers

    def map(self, change: Callable[[Numbers], Numbers]) -> Profile:
        """The same of other pieces."""
        return Profile(*(change(getattr(self, entry.name)) for entry in fields(self)))

    @cached_property
    def runs(self) -> Profile:
        """[start, stop] the same of runs of pieces."""
        return self.map(run_sums)

    @cached_property
    def entering_runs(self) -> Numbers:
        """[start, stop] bytes of the inputs of a run's pieces."""
        return run_sums(self.entering_bytes)

    @cached_property
    def largest_kept(self) -> Numbers:
        """[start, stop] bytes that the piece of a run keeps that keeps most."""
        kept = self.kept_bytes
        found = np.zeros((len(kept) + 1, len(kept) + 1))
        for start in range(len(kept)):
            found[start, start + 1 :] = np.maximum.accumulate(kept[start:])
        return found

    @property
    def entering_bytes(self) -> Numbers:
        """[pieces] of a piece's inputs, all that recomputation keeps of it."""
        found: Numbers = np.minimum(np.append(0.0, self.sent_bytes[:-1]), self.kept_bytes)
        return found

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return len(self.forward_s)


@dataclass(frozen=True)
class ByStage:
    """Profiles of stages: of each kind of stage one, and the kind of each stage."""

    kinds: tuple[Profile, ...]
    kind_of: tuple[int, ...]

    def __getitem__(self, stage: int) -> Profile:
        return self.kinds[self.kind_of[stage]]

    def map(self, change: Callable[[Profile], Profile]) -> ByStage:
        """The same of other profiles."""
        return ByStage(tuple(map(change, self.kinds)), self.kind_of)

    def first(self, count: int) -> ByStage:
        """Of the first stages."""
        return ByStage(self.kinds, self.kind_of[:count])


def run_sums(each: Numbers) -> Numbers:
    """[start, stop] sums over runs."""
    sums = np.append(0.0, np.cumsum(each))
    return np.asarray(sums[None, :] - sums[:, None])


def piece_of_pcg(derived: Derived, of: Mapping[Node, int], count: int) -> dict[Node, int]:
    """The piece of each node of the PCG, given those of serial operators; leaves belong to their first reader."""
    last = count - 1
    found = spread_to_pcg(derived, of)
    for node in reversed(derived.pcg.nodes):
        if node not in found:
            found[node] = min((found[reader] for reader in derived.pcg.users[node] if reader in found), default=last)
    return found


def profile(
    problem: Problem, pcg: Graph, piece_of: Mapping[Node, int], count: int, *, update_s: float = 0.0
) -> Profile:
    """By piece; ``problem`` is on the rewritten graph, with the links and the devices of the stage that runs it.

    update_s: of the host, for each parameter that the optimizer updates.
    """
    cost = plan_cost(problem, pcg)
    seconds = np.zeros((5, count))
    for node, one in cost.nodes.items():
        piece, once = piece_of[node], gathered_once(node, several=problem.several)
        seconds[3 if once else 0, piece] += one.forward_s
        seconds[2 if once or _is_sum(node) else 1, piece] += one.backward_s
    light = light_values(pcg) if problem.train else {}
    for node in light:
        seconds[4, piece_of[node]] += cost.nodes[node].forward_s
    resting, kept, left, sent = _bytes(problem, pcg, piece_of, count, light)
    forward_s, backward_s, sums_s, gathers_s, light_s = seconds
    gathers_s = np.maximum(0.0, gathers_s - np.append(0.0, forward_s[:-1]))  # beside the piece before
    optimizer_s = _optimizer(cost, pcg, piece_of, update_s, count) + gathers_s
    return Profile(forward_s, backward_s, sums_s, optimizer_s, resting, kept, left, light_s, sent)


def _is_sum(node: Node) -> bool:
    """True of the move of a whole parameter whose backward sums its gradient."""
    return node.op.transition.only_names and unmoved(node).is_param


def _optimizer(cost: PlanCost, pcg: Graph, piece_of: Mapping[Node, int], update_s: float, count: int) -> Numbers:
    """Of the device, or of its host where that takes longer."""
    found, hosts = np.zeros(count), np.zeros(count)
    trained = [node for node in pcg.params if node.needs_grad]
    for node, estimate in zip(trained, cost.optimizer, strict=False):  # none in inference
        found[piece_of[node]] += estimate.mean_s
        hosts[piece_of[node]] += update_s
    return np.maximum(found, hosts)


def _bytes(
    problem: Problem,
    pcg: Graph,
    piece_of: Mapping[Node, int],
    count: int,
    light: Mapping[Node, Sequence[Node]],
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """[pieces] at rest, kept by a micro-batch, kept with ``light`` values made again, and passed on behind each."""
    shardings = infer_shardings(pcg, problem.mesh)
    resting, kept, left, passed = np.zeros((4, count))
    for node in pcg.nodes:
        if node.is_leaf and pcg.users[node]:
            held = local_bytes(node.type, shardings[node], problem.mesh)
            resting[piece_of[node]] += problem.held_bytes(node.type, held) if node.needs_grad else held
        elif gathered_once(node, several=problem.several):
            whole, rests = (local_bytes(x.type, shardings[x], problem.mesh) for x in (node, node.operands[0]))
            resting[piece_of[node]] += sum(copied_bytes(problem, node.type, whole, rests))
        elif not node.is_leaf and not unmoved(node).is_leaf:
            last = max((piece_of[reader] for reader in pcg.users[node]), default=0)
            passed[piece_of[node] : last] += local_bytes(node.type, shardings[node], problem.mesh)
    saved = saved_values(pcg, several=problem.several) if problem.train else []
    for found, values in (kept, saved), (left, made_of(saved, light)):
        for node in values:
            found[piece_of[node]] += local_bytes(node.type, shardings[node], problem.mesh)
    return resting, kept, left, passed
