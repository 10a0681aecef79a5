"""Bayesian optimization over a few knobs (Snoek, Larochelle and Adams, "Practical Bayesian Optimization", NeurIPS'12).

The knobs are preferences: for each mesh axis, how much to favour cutting samples, another dim of the result, or a sum,
in operators that have weights and in those that have none. A greedy pass in program order makes a plan of them: each
operator takes what adds least, preferences counted, and then single choices are bettered. A Gaussian process models
the logarithm of a plan's cost over the knobs; those of greatest expected improvement are tried next.
"""

from __future__ import annotations

import math

import numpy as np

from ir.operator import Split
from ir.sharding import Partial, Shard
from pdv.search.solver.tables import Table
from pdv.search.strategies.decode import Decoder
from pdv.search.strategies.network import Flat, Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

FIRST = 16  # random knobs before the model is asked
TRIALS = 80
CANDIDATES = 512
LENGTH = 0.4  # of the kernel, per square root of the number of knobs
NOISE = 1e-4  # variance, where costs have variance one
STRENGTH = 8.0  # a full preference, in mean costs of an operator
KINDS = 3


def minimize(task: NetworkTask) -> Minimized:
    """The best plan that any knobs gave; no bound is known."""
    flat = task.flat
    knobs = _Knobs(flat)
    best: Values | None = None if task.start is None else dict(task.start)
    least = float("inf") if best is None else flat.value(best)
    tried = np.zeros((0, knobs.count))
    seen: list[float] = []
    for trial in range(task.steps(TRIALS)):
        if trial and task.clock.left_s <= 0:
            break
        if trial == 0:
            point = np.full(knobs.count, 0.5)  # no preferences
        elif trial < FIRST or knobs.count == 0:
            point = task.rng.random(knobs.count)
        else:
            candidates = task.rng.random((CANDIDATES, knobs.count))
            near = np.clip(tried[int(np.argmin(seen))] + task.rng.normal(0, 0.1, candidates.shape), 0, 1)
            point = _most_promising(tried, np.log(seen), np.concatenate([candidates, near]))
        values = knobs.plan(point)
        value = flat.value(values)
        tried = np.vstack([tried, point])
        seen.append(max(value, 1e-12))
        if value < least:
            best, least = values, value
            task.offer(best, least)
    assert best is not None
    best = flat.polish(best)
    return Minimized(best if flat.value(best) < flat.illegal else None)


class _Knobs:
    """Turns knobs in [0, 1] (a half is no preference) into plans."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._decoder = Decoder(flat)
        nodes = {variable: node for node, variable in flat.network.variables.items()}
        axes = max((len(c.splits) for options in flat.network.options.values() for c in options), default=0)
        self.count = axes * 2 * KINDS
        self._counts: list[Table] = []  # of each choice: [its values, knobs] which preferences apply
        for variable in flat.choices:
            counts = np.zeros((flat.sizes[variable], self.count))
            options = flat.network.options.get(nodes[variable], ())
            weighted = any(x.is_param for x in nodes[variable].operands)
            for row, config in enumerate(options):
                for axis, split in enumerate(config.splits):
                    kind = _kind(split)
                    if kind is not None:
                        counts[row, (axis * 2 + weighted) * KINDS + kind] = 1.0
            self._counts.append(counts)
        taken, costs = self._decoder.run(lambda number, added: added.argmin(axis=1), 1)
        self._unit = STRENGTH * float(costs[0]) / max(1, taken.shape[1])

    def plan(self, point: Table) -> Values:
        """Greedy under preferences, then bettered choice by choice."""
        shifts = [counts @ (0.5 - point) * 2 * self._unit for counts in self._counts]
        taken, _ = self._decoder.run(lambda number, added: (added + shifts[number]).argmin(axis=1), 1)
        return self._flat.polish(self._decoder.values(taken[0]), rounds=1)


def _kind(split: Split) -> int | None:
    """Samples cut, another dim of the result cut, a sum cut; None for what every device does alike."""
    if isinstance(split.result, Partial):
        return 2
    if isinstance(split.result, Shard):
        return 0 if split.result.dim == 0 else 1
    return None


def _most_promising(tried: Table, seen: Table, candidates: Table) -> Table:
    """The candidate of greatest expected improvement under a Gaussian process."""
    mean, spread = float(seen.mean()), float(seen.std()) or 1.0
    targets = (seen - mean) / spread
    factor = np.linalg.cholesky(_kernel(tried, tried) + NOISE * np.eye(len(tried)))
    across = np.linalg.solve(factor, _kernel(tried, candidates))
    expected = across.T @ np.linalg.solve(factor, targets)
    deviation = np.sqrt(np.maximum(1.0 - (across**2).sum(axis=0), 1e-12))
    z = (targets.min() - expected) / deviation
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    improvement = deviation * (z * below + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    chosen: Table = candidates[int(improvement.argmax())]
    return chosen


def _kernel(a: Table, b: Table) -> Table:
    """[a, b] squared exponential."""
    distance = ((a[:, None] - b[None]) ** 2).sum(axis=-1)
    kernel: Table = np.exp(-distance / (2 * LENGTH**2 * a.shape[1]))
    return kernel


bayes = strategy(minimize)
