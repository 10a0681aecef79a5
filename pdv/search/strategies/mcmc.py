"""Markov chain Monte Carlo: FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism for DNNs", SysML'19).

Metropolis-Hastings over strategies: one operator, drawn at random, gets a random configuration, and the change is
accepted with probability min(1, exp(-β x what it adds)). In place of FlexFlow's delta simulation only the terms of
the network that the operator touches are evaluated again (docs/decisions/0016). β grows over each run (simulated
annealing), and each run starts from the best strategy met; the first from data parallelism, as FlexFlow's, or a greedy
one if that is better.
"""

from __future__ import annotations

import math

from pdv.search.strategies.budget import Clock
from pdv.search.strategies.decode import find_start
from pdv.search.strategies.network import Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

RUNS = 4
PROPOSALS = 400  # of each run, per choice
COLDEST = 1e-6  # temperature of the last proposals, in costs of the first plan
HOTTEST = 1e-4


def minimize(task: NetworkTask) -> Minimized:
    """The best of several annealed chains; no bound is known."""
    flat = task.flat
    best = dict(task.start) if task.start is not None else find_start(flat)
    least = flat.value(best)
    task.offer(best, least)
    for run in range(RUNS):
        best, least = _anneal(task, task.clock.share(1 / (RUNS - run)), best, least)
    best = flat.polish(best)
    return Minimized(best if flat.value(best) < flat.illegal else None)


def _anneal(task: NetworkTask, clock: Clock, best: Values, least: float) -> tuple[Values, float]:
    """One chain from the best plan known; (best, least) after it."""
    flat, rng, scale = task.flat, task.rng, least
    free = [variable for variable in flat.choices if flat.sizes[variable] > 1]
    steps = task.steps(PROPOSALS * len(free)) if free else 0
    values, value = dict(best), least
    costs = [term.at(values) for term in flat.terms]
    over = 0.0
    for step in range(steps):
        if step % 256 == 0:
            over = max(step / steps, clock.spent)
            if over >= 1.0:
                break
        temperature = scale * HOTTEST * (COLDEST / HOTTEST) ** over
        variable = free[int(rng.random() * len(free))]
        old, values[variable] = values[variable], int(rng.random() * flat.sizes[variable])
        touched = flat.touching[variable]
        after = [flat.terms[number].at(values) for number, _ in touched]
        added = sum(after) - sum([costs[number] for number, _ in touched])
        if added > 0 and rng.random() >= math.exp(-added / temperature):
            values[variable] = old
            continue
        value += added
        for (number, _), cost in zip(touched, after, strict=True):
            costs[number] = cost
        if value < least * (1 - 1e-9):
            best, least = dict(values), value
            task.offer(best, least)
    return best, least


mcmc = strategy(minimize)
