"""Markov chain Monte Carlo: FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism for DNNs", SysML'19).

Metropolis-Hastings over strategies: one operator, drawn at random, gets a random configuration, and the change is
accepted with probability min(1, exp(-β x what it adds)). FlexFlow's delta simulation is here the network: only terms
that the operator touches are evaluated again. β grows over each run (simulated annealing), and each run starts from
the best strategy met; the first from a greedy one, where FlexFlow takes data parallelism.
"""

from __future__ import annotations

import math

from pdv.search.strategies.decode import greedy
from pdv.search.strategies.network import Flat, Values
from pdv.search.strategies.pricing import Minimized, Task, strategy

RUNS = 4
PROPOSALS = 400  # of each run, per choice
COLDEST = 1e-5  # of the starting value: what the last proposals may still lose
HOTTEST = 1e-2


def minimize(task: Task) -> Minimized:
    """The best of several annealed chains; no bound is known."""
    flat = task.flat
    best = dict(task.start) if task.start is not None else greedy(flat)
    least = flat.value(best)
    task.offer(best, least)
    for _ in range(RUNS):
        best, least = _anneal(task, best, least)
    best = flat.polished(best)
    return Minimized(best if flat.value(best) < flat.illegal else None)


def _anneal(task: Task, best: Values, least: float) -> tuple[Values, float]:
    """One chain from the best plan known; (best, least) after it."""
    flat, rng = task.flat, task.rng
    free = [variable for variable in flat.choices if flat.sizes[variable] > 1]
    if not free:
        return best, least
    steps = task.steps(PROPOSALS * len(free))
    values, value = dict(best), least
    scale = least
    drawn = rng.integers(0, len(free), steps)
    rolls = rng.random((steps, 2))
    for step in range(steps):
        if step % 256 == 0 and task.clock.left_s <= 0:
            break
        temperature = scale * HOTTEST * (COLDEST / HOTTEST) ** (step / steps)
        variable = free[drawn[step]]
        old, new = values[variable], int(rolls[step, 0] * flat.sizes[variable])
        added = _added(flat, values, variable, new)
        if added > 0 and rolls[step, 1] >= math.exp(-added / temperature):
            values[variable] = old
            continue
        value += added
        if value < least * (1 - 1e-9):
            best, least = dict(values), value
            task.offer(best, least)
    return best, least


def _added(flat: Flat, values: Values, variable: int, new: int) -> float:
    """What a proposal adds, from the terms that it touches; ``values`` are changed."""
    before = [flat.terms[number].at(values) for number, _ in flat.touching[variable]]
    values[variable] = new
    after = [flat.terms[number].at(values) for number, _ in flat.touching[variable]]
    return sum(after) - sum(before)


mcmc = strategy(minimize)
